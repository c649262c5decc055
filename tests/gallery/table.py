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
        is_exact: Whether a run that was killed ends as if it had not been.
    """

    path: Path
    needs: tuple[str, ...] = ()
    warning: str | None = None
    is_exact: bool = True

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
    Script(SCRIPTS / "py_function.py"),
    Script(SCRIPTS / "from_generator.py"),
    Script(SCRIPTS / "generator.py"),
    Script(SCRIPTS / "py_dataset.py"),
    Script(SCRIPTS / "image_data_generator.py"),
    Script(SCRIPTS / "torch_loader.py", needs=("torch",)),
    Script(SCRIPTS / "web_dataset.py", needs=("torch", "webdataset")),
    Script(SCRIPTS / "hugging_face.py", needs=("datasets",)),
    Script(SCRIPTS / "tfds_builder.py", needs=("tensorflow_datasets",)),
    Script(SCRIPTS / "grain_dataset.py", needs=("grain",)),
]


def page() -> str:
    return ""


if __name__ == "__main__":
    PAGE.write_text(page())
