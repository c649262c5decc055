"""Upstream bugs. When one of these tests fails, upstream is fixed: remove the override.

The summary of the run lists which overrides the installed versions still need. A test that fails,
or skips itself, has found its bug fixed; one that ends with an error other than a failed assertion
is inconclusive.
"""

from __future__ import annotations

import json
import signal
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cluster import run_workers

from keras_distplug.backend.tensorflow.runtime import versions

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[1] / "workers" / "upstream.py"


def findings(case: str, workers: int) -> dict[str, Any]:
    ended = run_workers(
        [str(SCRIPT), case], workers, env={"KERAS_DISTPLUG_AUTO_INIT": "0"}, timeout_s=240
    )
    outputs = "\n".join(f"{each.returncode}:\n{each.output}" for each in ended)
    if any(each.returncode for each in ended):
        raise RuntimeError(outputs)  # inconclusive
    found: dict[str, Any] = {}
    for line in ended[0].output.splitlines():
        if line.startswith("FOUND "):
            found |= json.loads(line.removeprefix("FOUND "))
    return found


def is_keras_at_least(*version: int) -> bool:
    installed = versions.find("keras")
    assert installed is not None
    return versions._release(installed.version) >= version


@pytest.fixture(scope="module")
def multi_worker() -> dict[str, Any]:
    return findings("multi_worker", workers=2)


@pytest.fixture(scope="module")
def mirrored() -> dict[str, Any]:
    return findings("mirrored", workers=1)


@pytest.fixture(scope="module")
def losses() -> dict[str, Any]:
    """Returns a pair per finding: [one process, two replicas]."""
    return findings("mirrored_losses", workers=1)


@pytest.fixture(scope="module")
def empty() -> dict[str, Any]:
    return findings("mirrored_empty", workers=1)


@pytest.fixture(scope="module")
def central() -> dict[str, Any]:
    return findings("central", workers=1)


def test_fit(multi_worker: dict[str, Any]) -> None:
    """keras-team/keras#20585: `_maybe_symbolic_build` fails under MultiWorkerMirroredStrategy."""
    assert multi_worker["fit"][0] == "ValueError"
    assert "_maybe_symbolic_build" in multi_worker["fit"]


def test_logs(multi_worker: dict[str, Any]) -> None:
    """The same issue, later on: `reduce_per_replica` fails on a step's scalar logs."""
    assert "reduce_per_replica" in multi_worker["logs"]


def test_statistics(multi_worker: dict[str, Any]) -> None:
    """BatchNormalization's moving statistics are not aggregated over replicas."""
    assert multi_worker["statistics"] == "NONE"


def test_predict_from_files(multi_worker: dict[str, Any]) -> None:
    """`predict` on a dataset read from files is out of order, or repeats one worker's part."""
    assert multi_worker["predict"] != [2.0 * number for number in range(8)]


def test_late_strategy() -> None:
    """tensorflow/tensorflow#35297: the strategy cannot be created once a tensor exists."""
    assert findings("late", workers=2)["late"][0] == "RuntimeError"


def test_wait_for_a_lost_worker() -> None:
    """The coordination service does not interrupt a wait for the value of a lost worker."""
    assert findings("lost_message", workers=2)["lost"] == "DeadlineExceededError"


def test_uneven_batch(mirrored: dict[str, Any]) -> None:
    """Replicas have equal weights in the loss, regardless of their numbers of samples."""
    assert np.allclose(*mirrored["even"], rtol=1e-5)
    assert not np.allclose(*mirrored["uneven"], rtol=1e-3)


def test_clipping(mirrored: dict[str, Any]) -> None:
    """Gradients are clipped on every replica before they are summed."""
    assert not np.allclose(*mirrored["clipped"], rtol=1e-3)


@pytest.mark.parametrize(
    "finding", ["weighted mean", "masked mean", "ignored class", "scalar", "outputs", "added"]
)
def test_losses(finding: str, losses: dict[str, Any]) -> None:
    """Replicas divide by their own weights, valid steps or samples; a scalar counts R times."""
    alone, together = losses[finding]
    name = "a_loss" if finding == "outputs" else "loss"
    assert not np.allclose(alone[name], together[name], rtol=1e-2)


def test_activity_regularizer(losses: dict[str, Any]) -> None:
    """Keras 3.10 divides a sum over samples by the number of replicas."""
    alone, together = losses["activity"]
    if np.allclose(alone["loss"], together["loss"], rtol=1e-5):
        pytest.skip("this Keras divides it by the number of samples, which is correct")
    assert not np.allclose(alone["loss"], together["loss"], rtol=1e-2)


def test_steps_per_execution(mirrored: dict[str, Any]) -> None:
    """A `while_loop` cannot contain a collective."""
    assert mirrored["steps_per_execution"][:1] == ["InvalidArgumentError"]


@pytest.mark.parametrize("finding", ["accumulation", "overwriting"])
def test_conditional_updates(finding: str, mirrored: dict[str, Any]) -> None:
    """Variables are updated inside one replica's `tf.cond`."""
    if finding == "overwriting" and not mirrored[finding] and is_keras_at_least(3, 16):
        pytest.skip("this Keras overwrites weights with their averages outside of it")
    assert mirrored[finding][0] == "RuntimeError"
    assert "_backend_apply_gradients" in mirrored[finding]


def test_overflow() -> None:
    """Only the first replica's gradients are checked for non-finite values."""
    assert findings("mirrored_overflow", workers=1)["finite"] is False


def test_second_strategy() -> None:
    """The collectives of two MirroredStrategy objects have equal numbers, but different shapes."""
    assert findings("second_strategy", workers=1)["second"][0] == "InvalidArgumentError"


def test_masks(mirrored: dict[str, Any]) -> None:
    """All replicas drop the same units."""
    first, second = mirrored["masks"]
    assert first == second


def test_predict_on_batch(mirrored: dict[str, Any]) -> None:
    """Every replica predicts the whole batch."""
    assert mirrored["predicted of 4"] == 8


def test_generator(mirrored: dict[str, Any]) -> None:
    """The first batch of a generator is consumed to determine shapes, and not trained on."""
    alone, together = mirrored["generated"]
    assert not np.allclose(alone, together, rtol=1e-2)


def test_split_batch() -> None:
    """TensorFlow 2.21 computes in the memory of the user's array."""
    found = findings("split_batch", workers=1)
    if found["version"].startswith("2.18."):
        pytest.skip("this TensorFlow does not do this yet")
    assert found["changed"]


def test_unknown_cardinality() -> None:
    """With unknown cardinality, there is a step without data, even on a single device."""
    steps = findings("alone", workers=1)["steps for 2 batches of unknown number"]
    if steps == 2 and is_keras_at_least(3, 16):
        pytest.skip("this Keras checks that there is a batch before a step")
    assert steps == 3


def test_empty_convolution(empty: dict[str, Any]) -> None:
    """oneDNN gives the result of a convolution of no samples the shape of its input."""
    assert empty["shape"] == [0, 3, 3, 1]


def test_gradient_of_an_empty_pool() -> None:
    """oneDNN aborts the process in the gradient of max pooling of no samples."""
    [ended] = run_workers([str(SCRIPT), "empty_pool"], 1, timeout_s=240)
    assert ended.returncode == -signal.SIGABRT
    assert "before" in ended.output
    assert "behind" not in ended.output


def test_own_tracker() -> None:
    """A metric that a custom step updates with the loss sees it divided by the replicas."""
    tracked, loss = findings("own_tracker", workers=1)["tracked"]
    assert np.isclose(tracked * 2, loss, rtol=1e-3)


def test_empty_statistics(empty: dict[str, Any]) -> None:
    """Moving statistics of a replica without samples become NaN."""
    assert empty["finite"] == [True, False]


def test_central_storage(central: dict[str, Any]) -> None:
    """Metrics count their previous state once per replica; statistics cannot be assigned."""
    alone, together = central["metrics"]
    assert not np.allclose(alone[0], together[0], rtol=1e-2)
    assert central["statistics"][0] == "ValueError"
    assert central["statistics"][-1] == "_assign_func"


@pytest.mark.parametrize("callback", ["EarlyStopping", "ReduceLROnPlateau"])
def test_callbacks_forget(callback: str) -> None:
    """keras-team/keras#14862: the start of a `fit` resets the state of callbacks."""
    assert findings("forgetful", workers=1)[callback] == [1, 0]


def test_frame_locals() -> None:
    """Python before 3.13 keeps the dictionary returned by a frame's `f_locals` (PEP 667)."""

    class Thing:
        pass

    kept: list[bool] = []

    def looks() -> None:
        thing = Thing()
        there = weakref.ref(thing)
        kept.append("thing" in sys._getframe().f_locals)
        del thing
        kept.append(there() is not None)

    looks()
    if kept == [True, False] and sys.version_info >= (3, 13):
        pytest.skip("this Python does not keep it")
    assert kept == [True, True]


def test_parameter_server() -> None:
    """`fit` reads data on the chief, which fails; `assign_add` of Keras' variables reads, adds and
    assigns; a lookup reads the whole table; gradients of a table split by a partitioner fail."""
    found = findings("parameter_server", workers=1)
    assert found["fit"] == "ValueError"
    assert found["assigned by"] == ["AssignVariableOp"]
    assert found["looked up by"] == ["ReadVariableOp"]
    assert found["tables in parts"] == "AttributeError"
