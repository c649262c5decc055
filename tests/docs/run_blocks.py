"""Runs the Python blocks of pages and docstrings in their order, all in one process.

    python run_blocks.py PAGES.json RESULTS.json

PAGES.json lists `{"name", "blocks": [{"line", "code"}]}`. The examples of public docstrings are
found here, since that takes TensorFlow. RESULTS.json has the error of every name, or null.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

_EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# Definitions that examples assume: a compiled model, data, and the like.
GIVEN = """
import keras
import numpy as np
import tensorflow as tf
import keras_distplug as kd
import keras_distplug

def build_model():
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    made.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    return made

def make_dataset():
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)

x, y = np.ones((16, 4), "float32"), np.ones((16, 2), "float32")
model, ds = build_model(), make_dataset()
"""
# Additional definitions for a single example.
GIVEN_TO = {
    "BackupAndRestore": "_fit = model.fit\n"
    "model.fit = lambda *args, **kw: _fit(*args, validation_split=0.5, **kw)\n",
    "BackupAndRestore.export": """
callback = keras_distplug.BackupAndRestore(
    "runs/export", delete_checkpoint=False, keep_best=("loss", "min", 1)
)
model.fit(x, y, callbacks=[callback], verbose=0)
""",
    "adapt": 'strategy = tf.distribute.MirroredStrategy()\nmodel.save("model.keras")\n',
    "defaults": "MyCallback = keras.callbacks.Callback\n",
    "global_batch": "ds = ds.unbatch()\n",
    "MlflowTracker": 'import os\nos.environ["MLFLOW_TRACKING_URI"] = "sqlite:///mlflow.db"\n',
    "WandbTracker": 'import os\nos.environ["WANDB_MODE"] = "offline"\n',
}


def examples() -> Iterator[tuple[str, str]]:
    """Returns the names and docstrings of all public objects."""
    yield "keras_distplug", kd.__doc__ or ""
    for name in kd.__all__:
        found = getattr(kd, name)
        if not callable(found):
            continue
        yield name, inspect.getdoc(found) or ""
        for method, value in vars(found).items() if inspect.isclass(found) else ():
            is_public = inspect.isfunction(value) and not method.startswith("_")
            if is_public and not hasattr(keras.callbacks.Callback, method):
                yield f"{name}.{method}", inspect.getdoc(value) or ""


def run(name: str, blocks: Sequence[dict[str, Any]]) -> str | None:
    """Returns the traceback of an error, if any; runs in a separate folder, with its own names and
    random numbers."""
    environment = dict(os.environ)
    here: dict[str, Any] = {"__name__": "__main__"}
    # A tracker that was slow to start may still write there.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        before = os.getcwd()
        os.chdir(folder)
        try:
            for block in blocks:
                # Tracebacks show the line of the page.
                code = "\n" * (block["line"] - 1) + block["code"]
                exec(compile(code, name, "exec"), here)
        except BaseException:  # noqa: BLE001 (any error is reported)
            return traceback.format_exc()
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environment)
            keras.mixed_precision.set_global_policy("float32")
            keras.utils.clear_session()
            tf.random.set_seed(None)
    return None


def main(given: Path, told: Path) -> None:
    # For pages that show several replicas; only possible before the first tensor.
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    np.set_printoptions(threshold=20)
    jobs = [(page["name"], page["blocks"]) for page in json.loads(given.read_text())]
    for name, text in examples():
        code = _EXAMPLE.findall(text)
        given_to = GIVEN + GIVEN_TO.get(name, "")
        blocks = [{"line": 1, "code": each} for each in (given_to, *code)]
        jobs.append((f"kd.{name}", blocks if code else []))
    results = {}
    for name, blocks in jobs:
        started_s = time.monotonic()
        results[name] = {"blocks": len(blocks), "error": run(name, blocks) if blocks else None}
        print(f"{name}: {time.monotonic() - started_s:.1f} s", flush=True)
    told.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
