"""`fit` under ParameterServerStrategy, with two workers in one process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cluster import environment

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]

SCRIPT = Path(__file__).parents[1] / "workers" / "serving.py"
STEPS, BATCH = 40, 16

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("serving")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=460,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    told: Found = json.loads((folder / "found.json").read_text())
    return told


def test_counts(found: Found) -> None:
    """No step and no sample is lost if two workers count concurrently: with Keras' `assign_add`,
    with metrics that assign sums, and in the optimizer."""
    counts = found["counts"]
    assert counts.pop("steps") == 3 * STEPS
    assert counts.pop("precision") <= STEPS * BATCH
    assert counts == {name: STEPS * BATCH for name in ("loss", "accuracy", "auc")}


def test_steps_per_execution(found: Found) -> None:
    """With `steps_per_execution`, counts are the same."""
    assert found["executions"] == {"steps": STEPS, "loss": STEPS * BATCH}


def test_messages(found: Found) -> None:
    """In addition to gradients and changes of metrics, a worker sends one message that says if all
    values are finite."""
    messages = found["messages"]
    assert messages["gradients"] == 4
    assert messages["sent"] == messages["gradients"] + messages["sums"] + 1


def test_learns(found: Found) -> None:
    """History has every epoch with its validation, and both improve; the saved model computes the
    same in a single process."""
    learned = found["learned"]
    history = learned["history"]
    assert {len(values) for values in history.values()} == {4}
    assert history["loss"][-1] < history["loss"][0] / 1.5
    assert history["val_binary_accuracy"][-1] > 0.85
    assert learned["evaluate"] == pytest.approx(learned["alone"], rel=1e-5)
    assert learned["predict"] < 1e-5


def test_validation(found: Found) -> None:
    """The chief validates on data of every kind in every epoch, as in one process; `evaluate` after
    `fit` gives the same."""
    for name, each in found["validated"].items():
        assert len(each["losses"]) == (2 if name == "every second" else 4), name
        assert each["losses"] == pytest.approx(each["expected"], rel=1e-4), name
        assert each["again"] == pytest.approx(each["losses"][-1], rel=1e-4), name
    assert len(found["validated"]) == 5


def test_statistics(found: Found) -> None:
    """The moving means of BatchNormalization correlate with its inputs' means, which change during
    the 160 steps because the previous layer learns."""
    learned = found["learned"]
    assert np.corrcoef(learned["moving_mean"], learned["mean"])[0, 1] > 0.9


def test_model_from_outside(found: Found) -> None:
    """A model created outside the scope gets the trained state; a plain `fit` with `resumable` data
    runs one step per batch."""
    assert found["own_model"] == {"steps": STEPS, "plain": 20}


def test_own_fit(found: Found) -> None:
    """Workers read the arguments that a model's own `fit` passes to Keras', and count every step
    and sample."""
    assert found["own_fit"] == {"wraps": [40, 320.0], "doubles": [40, 320.0]}


def test_function_of_a_context(found: Found) -> None:
    """Both workers read, and both read the data created for them."""
    seen = found["of_context"]["seen"]
    assert sum(seen) == STEPS * BATCH
    assert min(seen) > 0


def test_not_finite(found: Found) -> None:
    """A batch with NaN, which every worker gets once in ten steps, changes no weight, statistic or
    metric, and is counted and reported."""
    not_finite = found["not_finite"]
    left_out = STEPS - not_finite["steps"]
    assert left_out > 0
    assert not_finite["told"] == left_out
    assert not_finite["loss"] == (STEPS - left_out) * BATCH
    assert not_finite["finite"]


def test_nothing_finite(found: Found) -> None:
    """If all batches are NaN, training ends with the error for that."""
    assert found["only_nan"] == {"error": "NonFiniteError"}


def test_resume(found: Found) -> None:
    """After an error in mid-epoch, training resumes with the step after the last checkpoint, which
    includes all steps scheduled before it, and the epoch's metrics continue."""
    assert found["resumed_fit"] == {
        "began": STEPS + 20,
        "first": 20,
        "steps": 2 * STEPS,
        "loss": STEPS * BATCH,
        "epochs": [0, 1],
    }


def test_averages(found: Found) -> None:
    """Moving averages of weights that do not change equal the weights."""
    assert found["averages"]["apart"] < 1e-6


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_split_table(found: Found, optimizer: str) -> None:
    """Sequential steps with a split table change weights and optimizer like a single process with a
    whole table, also for a model from outside the scope."""
    compared = dict(found["tables"][optimizer])
    assert compared.pop("learned") > 0.01
    assert max(compared.values()) < 1e-5


def test_servers_of_a_split_table(found: Found) -> None:
    """No server has more than half of the rows, and every server has the slots of its rows."""
    (first, one), (second, other) = found["tables"]["weights"]
    assert (first, second, {one, other}) == (51, 50, {0, 1})
    assert found["tables"]["slots"] == [[51, one], [51, one], [50, other], [50, other]]


def test_rows_of_tables(found: Found) -> None:
    """A gradient has the rows that were looked up, by their number in their part; negative indices
    count from the end. No table, split or not, is read as a whole."""
    dense = [[1], [4, 1]]
    split, whole = [[[0, 1, 50], [0, 49]], dense], [[[0, 1, 50, 51, 100]], dense]
    assert found["tables"]["read"] == split
    assert found["tables_of_workers"]["read"] == [split, whole, split]


@pytest.mark.parametrize("how", ["saved", "exported", "set", "loaded", "shared"])
def test_files_of_a_split_table(found: Found, how: str) -> None:
    """Saved and exported files, set and loaded weights, and other users of the embeddings contain
    the whole table."""
    assert found["tables"][how] < 1e-6


def test_split_table_of_workers(found: Found) -> None:
    """Two workers count correctly, skip a NaN, and learn; a checkpoint of a split table, including
    its optimizer slots, is restored bit for bit into a whole one, and vice versa."""
    told = found["tables_of_workers"]
    assert told["parts"] == [2, 1, 2]
    assert told["apart"] == [0, 0]
    left_out = np.cumsum(told["left_out"])
    assert (left_out > 0).all()
    assert told["steps"] == [STEPS * (n + 1) - left_out[n] for n in range(3)]
    # By how much depends on how stale the weights are, and so on how busy the machine is.
    assert told["loss"][-1] < told["loss"][0]


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("clipnorm", "ModelError: .* clips gradients by clipnorm.* global_clipnorm"),
        ("adafactor", "ModelError: .* has Adafactor"),
        ("lora", "ModelError: .* has LoRA"),
        ("regularizer", "ModelError: .* has OrthogonalRegularizer"),
        ("constraint", "ModelError: .* constraint on "),
        ("size", "ConfigurationError: Expected `min_shard_bytes`"),
        ("made", "ModelError: .* Pass a function"),
        ("partitioner", "ModelError: .* variable_partitioner.* min_shard_bytes"),
    ],
)
def test_split_table_refused(found: Found, case: str, error: str) -> None:
    """Features that a split table does not support are refused with a remedy."""
    assert re.match(error, found["tables_refused"][case])


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("accumulation", "ModelError: .* accumulates gradients"),
        ("overwriting", "ModelError: .* overwrites weights"),
        ("scale", "ModelError: .* LossScaleOptimizer"),
        ("eager", "ModelError: .* run_eagerly"),
        ("xla", "ModelError: .* jit_compile"),
        ("constraint", "ModelError: .* constraint on "),
        ("stateful", "ModelError: .* stateful layer"),
        ("generator", "DataError: .* the Python generator is in this process"),
        ("endless", "DataError: .* Pass `steps_per_epoch`"),
        ("plain", "DataError: .*distributed_fit"),
        ("on_batch", "DataError: .* a call of `train_on_batch`"),
    ],
)
def test_refused(found: Found, case: str, error: str) -> None:
    """Features that would give wrong results are refused with a remedy."""
    assert re.match(error, found["refused"][case])
