"""The scripts of the gallery, and the page of the documentation that lists them.

    python tests/gallery/table.py

writes the page.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "gallery.md"
_INPUTS, _MODELS = FOLDER / "inputs", FOLDER / "models"


@dataclass(frozen=True)
class Script:
    """A script of the gallery.

    Args:
        path: Its file, whose docstring names the kind of input or of model.
        needs: Modules that it imports in addition to Keras' own dependencies.
        warning: A part of the warning before the first step; None if there is none.
        is_plain: True if our line changes nothing. It changes the result if the number of batches
            is unknown: plain Keras then runs a step without data at the end of every epoch.
        batches: Number of calls of `on_train_batch_end`, in all its fits, before it is killed. With
            seven, the checkpoint is from the first epoch; with fifteen, from the second.
    """

    path: Path
    needs: tuple[str, ...] = ()
    warning: str | None = None
    is_plain: bool = True
    batches: int = 7

    @property
    def title(self) -> str:
        title = ast.get_docstring(ast.parse(self.path.read_text()))
        assert title is not None, self.path
        return title


def _model(name: str, batches: int = 15) -> Script:
    return Script(_MODELS / f"{name}.py", batches=batches)


INPUTS = [
    Script(_INPUTS / "weights.py"),
    Script(_INPUTS / "memory_mapped.py"),
    Script(_INPUTS / "h5_file.py", needs=("h5py",)),
    Script(_INPUTS / "pandas_columns.py", needs=("pandas",)),
    Script(_INPUTS / "feature_space.py"),
    Script(_INPUTS / "time_series.py"),
    Script(_INPUTS / "image_folder.py"),
    Script(_INPUTS / "text_folder.py"),
    Script(_INPUTS / "ragged_text.py"),
    Script(_INPUTS / "tfrecords.py"),
    Script(_INPUTS / "py_function.py", warning="it calls Python"),
    Script(_INPUTS / "from_generator.py", warning="the generator is run again"),
    Script(_INPUTS / "generator.py", warning="a Python generator: to resume"),
    Script(_INPUTS / "py_dataset.py"),
    Script(_INPUTS / "image_data_generator.py"),
    Script(_INPUTS / "torch_loader.py", needs=("torch",)),
    Script(_INPUTS / "web_dataset.py", needs=("torch", "webdataset"), is_plain=False),
    Script(_INPUTS / "hugging_face.py", needs=("datasets",), warning="it calls Python"),
    Script(
        _INPUTS / "tfds_builder.py",
        needs=("tensorflow_datasets", "importlib_resources"),
        warning="deterministic=False",
    ),
    Script(_INPUTS / "grain_dataset.py", needs=("grain",), is_plain=False),
]
MODELS = [
    _model("vit"),
    _model("segmentation"),
    _model("mixup"),
    _model("video"),
    _model("denoising_autoencoder"),
    _model("vae"),
    _model("kl_annealing"),
    _model("vector_quantization"),
    _model("masked_autoencoder"),
    _model("wgan_gp"),
    _model("conditional_gan"),
    _model("cycle_gan"),
    _model("diffusion"),
    _model("simclr"),
    _model("byol"),
    _model("siamese_triplets"),
    _model("distillation"),
    _model("ctc_speech"),
    _model("ocr"),
    _model("seq2seq"),
    _model("bidirectional_rnn"),
    _model("stateful_rnn"),
    _model("masked_language_model"),
    _model("text_generation"),
    _model("wide_and_deep"),
    _model("tab_transformer"),
    _model("two_towers"),
    _model("graph_network"),
    _model("several_losses"),
    _model("custom_metric"),
    _model("shared_encoder"),
    _model("transfer_learning"),
    _model("unfreezing"),
    _model("lora"),
    _model("int8_lora"),
    _model("quantization_aware"),
    _model("mixed_precision"),
    _model("ema"),
    _model("gradient_accumulation", batches=7),  # of two steps each
    _model("curriculum"),
    _model("learning_rate_finder"),
]


def page() -> str:
    return _PAGE.format(inputs=_rows(INPUTS), models=_rows(MODELS))


def _rows(scripts: Sequence[Script]) -> str:
    return "\n".join(
        f"| {script.title} | {_changes(script)} | yes | {_warns(script)} | "
        f"`{script.path.relative_to(PAGE.parents[1])}` |"
        for script in scripts
    )


def _changes(script: Script) -> str:
    return "yes" if script.is_plain else "yes, except for a step without data"


def _warns(script: Script) -> str:
    return "" if script.warning is None else f'"{script.warning} ..."'


_PAGE = """\
# Inputs and models

Every row is a short script, written the way such scripts usually are. A test runs it in plain
Keras, with `callbacks=kd.defaults(...)` added, and again with these callbacks, killed by SIGKILL
mid-epoch and restarted. The weights and the `History` are compared bit for bit.

This page is written by `python tests/gallery/table.py`.

## Inputs

Another test kills and restarts these scripts on two replicas, under `MirroredStrategy`.

Where the number of batches is unknown, plain Keras takes one optimizer step without data at the end
of every epoch. `keras_distplug` does not, so its weights differ from plain Keras' there.

| input | same as plain Keras | same after a kill | warns | script |
|---|---|---|---|---|
{inputs}

## Models

| model | same as plain Keras | same after a kill | warns | script |
|---|---|---|---|---|
{models}
"""


if __name__ == "__main__":
    PAGE.write_text(page())
