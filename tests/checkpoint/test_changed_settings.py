"""Settings that a script has changed since the checkpoint: which value applies; messages.

`docs/changed_scripts.md` holds `TABLE`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.checkpoint import changed_settings  # noqa: E402
from keras_distplug.checkpoint.layer_settings import get_layer_settings  # noqa: E402
from keras_distplug.core.errors import OtherRunError  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "changed_scripts.md"
EPOCHS = 3
Schedule = keras.optimizers.schedules.ExponentialDecay
Trained = Callable[[keras.Model, keras.callbacks.History], bool]
OTHER_Y = small.Y + 1


@dataclass(frozen=True)
class Script:
    """A script, with the settings that differ between its two starts."""

    optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.001)
    compiled: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 1
    seed: int = 5
    trains_all: bool = True
    activation: str | None = None
    made: Callable[[list[Any]], keras.Model] = keras.Sequential
    ours: Mapping[str, Any] = field(default_factory=dict)

    def run(self, folder: Path, *more: keras.callbacks.Callback) -> Any:
        keras.utils.set_random_seed(self.seed)
        hidden = [keras.layers.Dense(8, self.activation) for _ in range(self.layers)]
        model = self.made([keras.Input((4,)), *hidden, keras.layers.Dense(1)])
        model.layers[0].trainable = self.trains_all
        model.compile(**{"optimizer": self.optimizer(), "loss": "mse", **self.compiled})
        given = {
            "x": small.X,
            "y": small.Y,
            "batch_size": 8,
            "epochs": EPOCHS,
            "verbose": 0,
            **self.given,
        }
        ours = kd.defaults(folder, **{"save_freq": 1, "on_busy": "wait", **self.ours})
        return model, model.fit(**given, callbacks=[*ours, *more])


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        counts: The source that applies, in words.
        second: The script when it is started again.
        said: The report, or the error, as a pattern.
        holds: Checks that the source applies.
        first: The script when it was started first.
        at: The epoch and the batch at which it was interrupted.
        refused: True if the change is refused.
    """

    counts: str
    second: Script
    said: str
    holds: Trained = lambda model, history: True
    first: Script = field(default_factory=Script)
    at: tuple[int, int] = (1, 1)
    refused: bool = False


def sgd(**given: Any) -> Script:
    return Script(lambda: keras.optimizers.SGD(**given))


def rate_is(value: float) -> Trained:
    return lambda model, _: np.isclose(float(model.optimizer.learning_rate), value)


def epochs_are(number: int) -> Trained:
    return lambda _, history: len(history.epoch) == number


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(8 * index, 8 * index + 8)
        return small.X[rows], CLASSES["y"][rows]


EACH_EPOCH = {"ours": {"save_freq": "epoch"}}
SCRIPT, CHECKPOINT, REFUSED = "the script", "the checkpoint", "refused"
WEIGHTS = {"class_weight": {0: 1.0, 1: 2.0}}
CLASSES = {"y": (small.Y > 0.5).astype("int32")}
BATCHES = {"x": Batches(), "y": None, "batch_size": None}
ROWS: dict[str, Row] = {
    "learning rate": Row(
        CHECKPOINT,
        Script(lambda: keras.optimizers.Adam(0.1)),
        "learning rate 0.001 from the checkpoint, not 0.1 from the script",
        rate_is(0.001),
    ),
    "learning rate, with `restore_learning_rate=False`": Row(
        SCRIPT,
        Script(lambda: keras.optimizers.Adam(0.1), ours={"restore_learning_rate": False}),
        "`optimizer.learning_rate` 0.1 from the script, not 0.001 from the checkpoint",
        rate_is(0.1),
    ),
    "values of a schedule": Row(
        SCRIPT,
        sgd(learning_rate=Schedule(0.01, 10, 0.5)),
        "`optimizer.learning_rate` ExponentialDecay(initial_learning_rate=0.01",
        rate_is(0.01 * 0.5 ** (12 / 10)),
        sgd(learning_rate=Schedule(0.1, 10, 0.5)),
    ),
    "a schedule instead of a number": Row(
        SCRIPT,
        sgd(learning_rate=Schedule(0.01, 10, 0.5)),
        " from the script, not 0.01 from the checkpoint",
        rate_is(0.01 * 0.5 ** (12 / 10)),
        sgd(learning_rate=0.01),
    ),
    "a number instead of a schedule": Row(
        SCRIPT,
        sgd(learning_rate=0.01),
        "`optimizer.learning_rate` 0.01 from the script, not ExponentialDecay(",
        rate_is(0.01),
        sgd(learning_rate=Schedule(0.01, 10, 0.5)),
    ),
    "settings of the optimizer (`beta_1`)": Row(
        SCRIPT,
        Script(lambda: keras.optimizers.Adam(0.001, beta_1=0.5)),
        "`optimizer.beta_1` 0.5 from the script, not 0.9 from the checkpoint",
        lambda model, _: bool(model.optimizer.beta_1 == 0.5),
    ),
    "clipping of gradients (`clipnorm`)": Row(
        SCRIPT,
        Script(lambda: keras.optimizers.Adam(0.001, clipnorm=1.0)),
        "`optimizer.clipnorm` 1 from the script, not None from the checkpoint",
        lambda model, _: bool(model.optimizer.clipnorm == 1.0),
    ),
    "class of the optimizer": Row(
        REFUSED, sgd(learning_rate=0.001), "holds the run of another model", refused=True
    ),
    "loss, in mid-epoch": Row(
        REFUSED,
        Script(compiled={"loss": "mae"}),
        "epoch 2, which started with `loss` mean_squared_error. Received: mean_absolute_error",
        refused=True,
    ),
    "loss, in mid-epoch, with `allow_loss_change=True`": Row(
        SCRIPT,
        Script(compiled={"loss": "mae"}, ours={"allow_loss_change": True}),
        "`loss` mean_absolute_error from the script, not mean_squared_error from the checkpoint",
    ),
    "loss, between epochs": Row(
        SCRIPT,
        Script(compiled={"loss": "mae"}),
        "`loss` mean_absolute_error from the script, not mean_squared_error from the checkpoint",
        first=Script(**EACH_EPOCH),
        at=(2, 1),
    ),
    "weights of losses, in mid-epoch": Row(
        REFUSED,
        Script(compiled={"loss_weights": [2.0]}),
        "which started with `loss_weights` [1]. Received: [2]",
        first=Script(compiled={"loss_weights": [1.0]}),
        refused=True,
    ),
    "metrics": Row(
        SCRIPT,
        Script(compiled={"metrics": ["mae"]}),
        "`metrics` [mean_absolute_error] from the script, not None from the checkpoint",
        lambda _, history: "mae" in history.history,
    ),
    "fewer epochs than were trained": Row(
        CHECKPOINT,
        Script(given={"epochs": 1}),
        "nothing left to train: the checkpoint is in epoch 2, and epochs=1",
        epochs_are(1),
    ),
    "more epochs": Row(
        SCRIPT, Script(given={"epochs": 4}), "resuming at epoch 2/4, batch 2", epochs_are(4)
    ),
    "batch size": Row(
        REFUSED,
        Script(given={"batch_size": 10}),
        "`batch_size` was 8 at the checkpoint and is now 10",
        refused=True,
    ),
    "batch size, with `allow_batch_change=True`": Row(
        SCRIPT,
        Script(given={"batch_size": 10}, ours={"allow_batch_change": True}),
        "the global batch size has changed from 8 to 10",
        epochs_are(3),
    ),
    "`steps_per_epoch`": Row(
        SCRIPT,
        Script(given={"steps_per_epoch": 3}),
        "`steps_per_epoch` 3 from the script, not 2 from the checkpoint",
        first=Script(given={"steps_per_epoch": 2}),
        at=(1, 0),
    ),
    "validation data": Row(
        SCRIPT,
        Script(given={"validation_data": (small.X, OTHER_Y)}),
        "the validation data has changed since the checkpoint",
        first=Script(given={"validation_data": (small.X, small.Y)}),
    ),
    "labels, or the values of the samples": Row(
        REFUSED, Script(given={"y": OTHER_Y}), "the values of `y` have changed", refused=True
    ),
    "labels, with `allow_data_change=True`": Row(
        SCRIPT,
        Script(given={"y": OTHER_Y}, ours={"allow_data_change": True}),
        "the epoch starts again from its first batch, because the data has changed",
        epochs_are(3),
    ),
    "number of samples": Row(
        REFUSED,
        Script(given={"x": small.X[:28], "y": small.Y[:28]}),
        "`samples` was 30 at the checkpoint and is now 28",
        refused=True,
    ),
    "class weights": Row(
        REFUSED,
        Script(given={**CLASSES, "class_weight": {0: 1.0, 1: 3.0}}),
        "the values of `sample_weight` have changed",
        first=Script(given={**CLASSES, **WEIGHTS}),
        refused=True,
    ),
    "class weights, with a `PyDataset`": Row(
        REFUSED,
        Script(given={**BATCHES, "class_weight": {0: 1.0, 1: 3.0}}),
        "`class_weight` was '{0: 1.0, 1: 2.0}' at the checkpoint and is now '{0: 1.0, 1: 3.0}'",
        first=Script(given={**BATCHES, **WEIGHTS}),
        refused=True,
    ),
    "one more layer": Row(
        REFUSED, Script(layers=2), "holds the run of another model", refused=True
    ),
    "settings of a layer (`activation`)": Row(
        SCRIPT,
        Script(activation="relu"),
        "`layer 1 (Dense).activation` relu from the script, not linear from the checkpoint",
    ),
    "layers that are trained": Row(
        SCRIPT,
        Script(),
        "the set of trained variables has changed since the checkpoint",
        first=Script(trains_all=False),
    ),
    "`keras.utils.set_random_seed`": Row(
        CHECKPOINT,
        Script(seed=6),
        "the seeds of the data have changed since the checkpoint; the checkpoint's are used",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_changed(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = ROWS[name]
    with pytest.raises(small.Interrupted):
        row.first.run(tmp_path, small.Stop(*row.at))
    caplog.clear()
    if row.refused:
        with pytest.raises(OtherRunError, match=re.escape(row.said)):
            row.second.run(tmp_path)
        return
    model, history = row.second.run(tmp_path)
    assert row.said in caplog.text
    assert row.holds(model, history)


def table() -> str:
    lines = ["| changed | what counts | what is reported |", "|---|---|---|"]
    for name, row in ROWS.items():
        begin = "… " if row.said.startswith(" ") else ""
        end = "…)" if row.said.count("(") > row.said.count(")") else ""
        lines.append(f"| {name} | {row.counts} | {begin}{row.said.strip()}{end} |")
    return "\n".join(lines)


def test_page() -> None:
    """The page's table is the one above."""
    assert table() in PAGE.read_text()


def test_unchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same settings in another form are not a change: an object instead of a name, for
    example."""
    said = {"loss": "mse", "metrics": ["mae"]}
    with pytest.raises(small.Interrupted):
        Script(compiled=said).run(tmp_path, small.Stop(1, 1))
    caplog.clear()
    loss = keras.losses.MeanSquaredError()
    Script(compiled={"loss": loss, "metrics": [keras.metrics.MeanAbsoluteError("mae")]}).run(
        tmp_path
    )
    assert "from the script" not in caplog.text


def test_rate_changed_by_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A learning rate changed by training is kept; `restore_learning_rate=False` uses the script's
    only if the script has changed it."""

    class Halve(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                self.model.optimizer.learning_rate = 0.0005

    script = Script(ours={"restore_learning_rate": False})
    with pytest.raises(small.Interrupted):
        script.run(tmp_path, Halve(), small.Stop(2, 1))
    caplog.clear()
    model, _ = script.run(tmp_path, Halve())
    assert rate_is(0.0005)(model, None)
    assert "learning" not in caplog.text


def test_finished_after_a_retry(tmp_path: Path) -> None:
    """A change made by training before a failure does not count as a change of the script: the run
    that the same process finished afterwards is returned to a new process, and to a script that has
    loaded the model."""
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.001 / 2**epoch)
    data = {"x": small.X, "y": small.Y, "batch_size": 8, "epochs": EPOCHS, "verbose": 0}

    model = small.model()
    model.compile(keras.optimizers.Adam(0.001), "mse")
    with pytest.raises(small.Interrupted):
        model.fit(**data, callbacks=[*kd.defaults(tmp_path), schedule, small.Stop(2, 1)])
    model.fit(**data, callbacks=[*kd.defaults(tmp_path), schedule])
    for rate in (0.001, 0.00025):
        again = small.model()
        again.compile(keras.optimizers.Adam(rate), "mse")
        again.fit(**data, callbacks=[*kd.defaults(tmp_path), nothing := small.Stop()])
        assert nothing.batches == 0
        assert small.state(again)[:2] == small.state(model)[:2]


def test_layer_settings() -> None:
    """Building a model changes no settings. Lambdas are skipped."""

    def model(rate: float = 0.1, steps: int = 1, penalty: str = "l1") -> keras.Model:
        within = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        return keras.Sequential(
            [
                keras.layers.LayerNormalization(),
                keras.layers.GroupNormalization(-1),
                keras.layers.TimeDistributed(within),
                keras.layers.LSTM(4, dropout=rate),
                keras.layers.Dense(2, activation=lambda x: x),
                keras.layers.Dense(3, "tanh", kernel_initializer=lambda *a, **k: 0.0),
                keras.layers.Reshape((1, 3)),
                keras.layers.Conv1D(2, 1, strides=steps, kernel_regularizer=penalty),
            ]
        )

    def changes(there: keras.Model, here: keras.Model) -> list[str]:
        described = [{"layers": get_layer_settings(each)} for each in (there, here)]
        return [each.name for each in changed_settings.compare(*described)]

    built = model()
    built.build((None, 5, 3))
    assert changes(model(), built) == changes(built, model()) == []
    assert changes(model(), model(0.5)) == ["layer 7 (LSTMCell).dropout"]
    conv = "layer 11 (Conv1D)"
    other = changes(model(), model(steps=2, penalty="l2"))
    assert other == [f"{conv}.strides", f"{conv}.kernel_regularizer"]
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        other = model()
    finally:
        keras.config.set_dtype_policy("float32")
    assert "layer 1 (LayerNormalization).dtype" in changes(model(), other)


def test_rate_in_a_rollback(tmp_path: Path) -> None:
    """A rollback to the checkpoint of the earlier start keeps the script's learning rate."""
    first = Script(**EACH_EPOCH)
    with pytest.raises(small.Interrupted):
        first.run(tmp_path, small.Stop(1, 1))
    backup = kd.BackupAndRestore(
        tmp_path, delete_checkpoint=False, restore_learning_rate=False
    )  # the callbacks of `defaults` have their own
    rolled_back = []

    class RollBack(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not rolled_back:
                rolled_back.append(backup.roll_back())

    second = Script(lambda: keras.optimizers.Adam(0.1))
    keras.utils.set_random_seed(second.seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile(second.optimizer(), "mse")
    model.fit(
        small.X, small.Y, batch_size=8, epochs=EPOCHS, verbose=0, callbacks=[RollBack(), backup]
    )
    assert rolled_back == [4]
    assert rate_is(0.1)(model, None)


def test_mean_of_another_loss(tmp_path: Path) -> None:
    """The loss of the interrupted epoch is a mean of the new loss only, even if the first step
    creates the metrics."""

    class OwnStep(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    losses = []
    for metrics in ([], ["mae"]):
        compiled = {"metrics": metrics}
        folder = tmp_path / str(len(metrics))
        with pytest.raises(small.Interrupted):
            Script(compiled=compiled, made=OwnStep).run(folder, small.Stop(1, 2))
        other = {**compiled, "loss": "mae"}
        allowed = {"allow_loss_change": True}
        _, history = Script(compiled=other, ours=allowed, made=OwnStep).run(folder)
        losses.append(history.history["loss"])
        if metrics:
            assert history.history["mae"][1:] == pytest.approx(losses[-1][1:])
    assert losses[0] == losses[1]


def test_finished(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A finished run is returned, and settings that differ are reported. Other hyperparameters are
    refused, but apply if the run continues for more epochs."""
    Script().run(tmp_path)
    caplog.clear()
    Script(compiled={"metrics": ["mae"]}).run(tmp_path)
    assert "the finished run used `metrics` None, not [mean_absolute_error]" in caplog.text
    other_rate = Script(lambda: keras.optimizers.Adam(0.1))
    found = {}
    for name, script in {
        "rate": other_rate,
        "loss": Script(compiled={"loss": "mae"}),
        "layer": Script(activation="tanh"),
    }.items():
        with pytest.raises(OtherRunError) as refused:
            script.run(tmp_path)
        found[name] = str(refused.value)
    assert "`optimizer.learning_rate` 0.001. Received: 0.1. Give this training a" in found["rate"]
    assert "`loss` mean_squared_error. Received: mean_absolute_error." in found["loss"]
    assert "`layer 1 (Dense).activation` linear. Received: tanh." in found["layer"]
    Script(compiled={"loss": "mae"}, ours={"allow_loss_change": True}).run(tmp_path)
    assert "the finished run used `loss` mean_squared_error, not mean_abs" in caplog.text
    # A learning rate may be scaled to the global batch.
    dataclasses.replace(other_rate, given={"batch_size": 16}).run(tmp_path)
    assert "the finished run used `optimizer.learning_rate` 0.001, not 0.1" in caplog.text
    with pytest.raises(OtherRunError, match="`loss`"):
        Script(compiled={"loss": "mae"}, given={"batch_size": 16}).run(tmp_path)
    _, history = dataclasses.replace(other_rate, given={"epochs": EPOCHS + 1}).run(tmp_path)
    assert len(history.epoch) == EPOCHS + 1


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({}, {"compiled": {"loss": "mse"}}),
        ({"compiled": None}, {"compiled": {"loss": "mse"}}),
        ({"fit": {}}, {"fit": {"steps_per_epoch": 3}}),
        ({"compiled": 3, "fit": [1]}, {"compiled": {"loss": "mse"}, "fit": {}}),
        ({"compiled": {"jit_compile": True}}, {"compiled": {"jit_compile": False}}),
    ],
)
def test_unknown(there: dict[str, Any], here: dict[str, Any]) -> None:
    """Settings missing in a checkpoint of an earlier version, and settings that depend on the
    machine, are not reported as changes."""
    assert changed_settings.compare(there, here) == []


def test_loss_scaling_optimizer() -> None:
    """A loss-scaling optimizer is compared by its inner optimizer, as with `mixed_float16`."""

    def described(rate: float) -> dict[str, Any]:
        inner = keras.optimizers.SGD(rate)
        return {
            "compiled": {
                "optimizer": keras.saving.serialize_keras_object(
                    keras.optimizers.LossScaleOptimizer(inner)
                )
            }
        }

    [change] = changed_settings.compare(described(0.1), described(0.2))
    assert change.is_rate
    assert change.name == "optimizer.learning_rate"
