"""The scripts of the gallery, and the page of the documentation that lists them.

    python tests/gallery/table.py

writes the page.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).with_name("scripts")
PAGE = Path(__file__).parents[2] / "docs" / "inputs.md"


@dataclass(frozen=True)
class Script:
    """A script, and what it shows.

    Args:
        path: Its file, whose docstring names the kind of input.
        needs: Modules that it imports beside Keras' own dependencies.
        warning: A part of the warning before the first step; None if there is none.
        is_plain: Whether our line changes nothing. It does where the number of batches is unknown:
            Keras takes a step without data at the end of every epoch.
    """

    path: Path
    needs: tuple[str, ...] = ()
    warning: str | None = None
    is_plain: bool = True

    @property
    def title(self) -> str:
        title = ast.get_docstring(ast.parse(self.path.read_text()))
        assert title is not None, self.path
        return title


GALLERY = [
    Script(SCRIPTS / "weights.py"),
    Script(SCRIPTS / "memory_mapped.py"),
    Script(SCRIPTS / "h5_file.py", needs=("h5py",)),
    Script(SCRIPTS / "pandas_columns.py", needs=("pandas",)),
    Script(SCRIPTS / "feature_space.py"),
    Script(SCRIPTS / "time_series.py"),
    Script(SCRIPTS / "image_folder.py"),
    Script(SCRIPTS / "text_folder.py"),
    Script(SCRIPTS / "ragged_text.py"),
    Script(SCRIPTS / "tfrecords.py"),
    Script(SCRIPTS / "py_function.py", warning="it calls Python"),
    Script(SCRIPTS / "from_generator.py", warning="the generator is run again"),
    Script(SCRIPTS / "generator.py", warning="a Python generator: to resume"),
    Script(SCRIPTS / "py_dataset.py"),
    Script(SCRIPTS / "image_data_generator.py"),
    Script(SCRIPTS / "torch_loader.py", needs=("torch",)),
    Script(SCRIPTS / "web_dataset.py", needs=("torch", "webdataset"), is_plain=False),
    Script(SCRIPTS / "hugging_face.py", needs=("datasets",), warning="it calls Python"),
    Script(
        SCRIPTS / "tfds_builder.py",
        needs=("tensorflow_datasets", "importlib_resources"),
        warning="deterministic=False",
    ),
    Script(SCRIPTS / "grain_dataset.py", needs=("grain",), is_plain=False),
]


def page() -> str:
    rows = "\n".join(
        f"| {script.title} | {_changes(script)} | yes | {_warns(script)} | "
        f"`{script.path.relative_to(PAGE.parents[1])}` |"
        for script in GALLERY
    )
    return f"{_HEAD}{rows}\n"


def _changes(script: Script) -> str:
    return "yes" if script.is_plain else "yes, except for a step without data"


def _warns(script: Script) -> str:
    return "" if script.warning is None else f'"{script.warning} ..."'


_HEAD = """\
# Inputs

Every row is a short script, written the way such scripts usually are. A test runs it in plain
Keras, with `callbacks=kd.defaults(...)` added, and again with these callbacks, killed by SIGKILL
mid-epoch and restarted. The weights and the `History` are compared bit for bit. Another test kills
and restarts every script on two replicas, under `MirroredStrategy`.

Where the number of batches is unknown, plain Keras takes one optimizer step without data at the end
of every epoch. `keras_distplug` does not, so its weights differ from plain Keras' there.

This page is written by `python tests/gallery/table.py`.

| input | same as plain Keras | same after a kill | warns | script |
|---|---|---|---|---|
"""


if __name__ == "__main__":
    PAGE.write_text(page())
