"""Errors of Keras and TensorFlow themselves, one finding per line, as JSON.

python upstream.py multi_worker | lost_message | late | alone | mirrored | mirrored_losses |
    mirrored_overflow | mirrored_empty | second_strategy | central | parameter_server
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from support.cluster import free_ports


def say(finding: str, seen: object) -> None:
    print("FOUND", json.dumps({finding: seen}))


def failing_in(call: Callable[[], object]) -> list[str]:
    """Returns the error's type, and the functions it passed through."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (any error is the finding)
        return [type(error).__name__, *(f.name for f in traceback.extract_tb(error.__traceback__))]
    return []


def model(**optimizer: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.1, **optimizer), "mse")
    return made


def data(samples: int = 4) -> tf.data.Dataset:
    x = np.arange(2 * samples, dtype="float32").reshape(samples, 2)
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1] ** 2)).batch(4)


def multi_worker() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        stock, built = model(), model()
        normalization = keras.layers.BatchNormalization()
        normalization.build((None, 2))
    say("fit", failing_in(lambda: stock.fit(data(), verbose=0)))
    # As if the first error were fixed.
    object.__setattr__(built, "_maybe_symbolic_build", lambda **_: None)
    say("logs", failing_in(lambda: built.fit(data(), verbose=0)))
    say("statistics", normalization.moving_mean.value._aggregation.name)
    say("predict", predict_from_files(strategy))


def late() -> None:
    tf.constant(0)
    say("late", failing_in(tf.distribute.MultiWorkerMirroredStrategy))


def predict_from_files(strategy: tf.distribute.Strategy) -> list[float]:
    import keras_distplug as kd

    with strategy.scope():
        double = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(2.0)])
        double.compile()
    kd.adapt(double)
    object.__delattr__(double, "predict")
    folder = Path(tempfile.mkdtemp())
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"{2 * number}\n{2 * number + 1}\n")
    names = sorted(str(path) for path in folder.iterdir())
    dataset = (
        tf.data.Dataset.from_tensor_slices(names)
        .interleave(tf.data.TextLineDataset, cycle_length=1)
        .map(lambda line: tf.strings.to_number(line)[None])
        .batch(2)
    )
    return double.predict(dataset, verbose=0)[:, 0].tolist()


def two_devices() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def two_mirrored() -> tf.distribute.Strategy:
    two_devices()
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def alone() -> None:
    plain = model()
    plain.fit(data(8).filter(lambda *_: True), verbose=0)
    say("steps for 2 batches of unknown number", int(plain.optimizer.iterations))


def split_batch() -> None:
    """Splits batches of a generator, like strategies, before another operation subtracts 3."""

    @tf.function  # type: ignore[untyped-decorator]
    def subtract(parts: tf.data.Iterator) -> tf.Tensor:
        return parts.get_next() - 3.0

    whole = np.ones(8 * 64, "uint8")
    given = whole[-whole.ctypes.data % 64 :][: 4 * 64].view("float32").reshape(4, 16)
    given[...] = 1
    spec = tf.TensorSpec((None, 16), tf.float32)
    for _ in range(30):  # two of three times
        dataset = tf.data.Dataset.from_generator(lambda: iter([given]), output_signature=spec)
        parts = iter(dataset.rebatch([2, 2]))
        for _ in range(2):
            subtract(parts)
    say("version", tf.version.VERSION)
    say("changed", bool((given != 1).any()))


def mirrored() -> None:
    strategy = two_mirrored()

    def weights(samples: int, distributed: bool, **optimizer: float) -> list[float]:
        scope = strategy.scope() if distributed else tf.distribute.get_strategy().scope()
        with scope:
            made = model(**optimizer)
        made.fit(data(samples), verbose=0)
        return made.layers[-1].kernel.numpy()[:, 0].tolist()

    say("even", [weights(4, False), weights(4, True)])
    say("uneven", [weights(7, False), weights(7, True)])
    say("clipped", [weights(4, False, clipnorm=0.1), weights(4, True, clipnorm=0.1)])

    def failing(data: tf.data.Dataset, **compiled: Any) -> list[str]:
        optimizer = {k: compiled.pop(k) for k in list(compiled) if k != "steps_per_execution"}
        with strategy.scope():
            made = model(**optimizer)
            made.compile(made.optimizer, "mse", **compiled)
        return failing_in(lambda: made.fit(data, verbose=0))

    say("steps_per_execution", failing(data(8), steps_per_execution=2))
    say("accumulation", failing(data(8), gradient_accumulation_steps=2))
    say("overwriting", failing(data(8), use_ema=True, ema_overwrite_frequency=2))

    with strategy.scope():
        dropout = keras.layers.Dropout(0.5, seed=1)
        made = model()
    drawn = strategy.run(lambda: dropout(tf.ones((8, 8)), training=True))
    say("masks", [v.numpy().tolist() for v in strategy.experimental_local_results(drawn)])
    say("predicted of 4", len(made.predict_on_batch(np.ones((4, 2)))))

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number in range(3):
            yield np.ones((4, 2)), np.full((4, 1), 10.0**number)

    generated = []
    for scope in (tf.distribute.get_strategy().scope(), strategy.scope()):
        with scope:
            made = model()
        generated.append(made.fit(batches(), steps_per_epoch=3, verbose=0).history["loss"])
    say("generated", generated)


def mirrored_losses() -> None:
    strategy = two_mirrored()

    def losses(build: Callable[[], keras.Model], *arrays: np.ndarray) -> list[Any]:
        found = []
        for scope in (tf.distribute.get_strategy().scope(), strategy.scope()):
            with scope:
                made = build()
            dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(4)
            found.append(made.fit(dataset, verbose=0).history)
        return found

    x, y, w = np.eye(4, 2), np.arange(4.0)[:, None], np.array([1.0, 9, 1, 1])
    tagged = np.array([[1, 0], [1, 2], [1, 2], [1, 2]])

    def compiled(**arguments: Any) -> keras.Model:
        made = model()
        made.compile(made.optimizer, **arguments)
        return made

    def masked() -> keras.Model:
        keras.utils.set_random_seed(1)
        layers = keras.layers
        made = keras.Sequential([layers.Embedding(3, 2, mask_zero=True), layers.Dense(1)])
        made.compile("sgd", "mse")
        return made

    def two_outputs() -> keras.Model:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((2,))
        dense = keras.layers.Dense
        made = keras.Model(inputs, [dense(1, name="a")(inputs), dense(1, name="b")(inputs)])
        made.compile("sgd", ["mse", "mse"])
        return made

    def active() -> keras.Model:
        keras.utils.set_random_seed(1)
        layer = keras.layers.Dense(1, activity_regularizer=keras.regularizers.L2(1.0))
        made = keras.Sequential([keras.Input((2,)), layer])
        made.compile("sgd", "mse")
        return made

    def ignoring() -> keras.Model:
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)
        made.compile("sgd", loss)
        return made

    def adding() -> keras.Model:
        class Adds(keras.layers.Layer):
            def call(self, inputs: tf.Tensor) -> tf.Tensor:
                self.add_loss(tf.reduce_mean(inputs))
                return inputs

        keras.utils.set_random_seed(1)
        layers = [Adds(), keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1)]
        made = keras.Sequential([keras.Input((2,)), *layers])
        made.compile("sgd", "mse")
        return made

    mean = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    say("weighted mean", losses(lambda: compiled(loss=mean), x, y, w))
    say("masked mean", losses(masked, tagged, np.arange(8.0).reshape(4, 2, 1)))
    say("scalar", losses(lambda: compiled(loss=lambda a, b: tf.reduce_mean((a - b) ** 2)), x, y))
    say("activity", losses(active, x, y))
    say("ignored class", losses(ignoring, x, np.array([0, 0, 0, 1])))
    say("added", losses(adding, x * np.arange(1.0, 5)[:, None], y))
    uneven = np.arange(14.0).reshape(7, 2)
    targets = (uneven[:, :1] ** 2, uneven[:, 1:] ** 2)
    found = []
    for scope in (tf.distribute.get_strategy().scope(), strategy.scope()):
        with scope:
            made = two_outputs()
        dataset = tf.data.Dataset.from_tensor_slices((uneven, targets)).batch(4)
        found.append(made.fit(dataset, verbose=0).history)
    say("outputs", found)


def mirrored_overflow() -> None:
    """One replica's gradients are not finite, so none may be applied."""
    strategy = two_mirrored()
    with strategy.scope():
        made = model()
        scaled = keras.optimizers.LossScaleOptimizer(made.optimizer)
        made.compile(scaled, "mse")
    x = np.ones((4, 2), "float32")
    x[3] = 3e38
    dataset = tf.data.Dataset.from_tensor_slices((x, np.ones((4, 1)))).batch(4)
    made.fit(dataset, verbose=0)
    say("finite", bool(np.isfinite(made.layers[-1].kernel.numpy()).all()))


def mirrored_empty() -> None:
    strategy = two_mirrored()
    empty = tf.nn.conv2d(tf.zeros([0, 3, 3, 1]), tf.ones([2, 2, 1, 3]), 1, "VALID")
    say("shape", list(empty.shape))
    with strategy.scope():
        made = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()])
        made.compile("sgd", "mse")
    x = tf.data.Dataset.from_tensor_slices((np.ones((5, 2)), np.ones((5, 2)))).batch(4)
    made.fit(x, verbose=0)
    means = strategy.experimental_local_results(made.layers[-1].moving_mean.value)
    say("finite", [bool(np.isfinite(mean.numpy()).all()) for mean in means])


def empty_pool() -> None:
    """Prints nothing if the gradient of a maximum pool of no samples aborts the process."""
    layers = [keras.layers.Conv2D(2, 1), keras.layers.MaxPooling2D(2), keras.layers.Flatten()]
    made = keras.Sequential([keras.Input((4, 4, 1)), *layers])

    @tf.function  # type: ignore[untyped-decorator]
    def gradients(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(made(x))
        return tape.gradient(loss, [v.value for v in made.trainable_variables])

    print("before", flush=True)
    gradients(tf.zeros((0, 4, 4, 1)))
    print("behind", flush=True)


def own_tracker() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.last = keras.layers.Dense(1)
            self.tracker = keras.metrics.Mean(name="mean_loss")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.last(x)

        def test_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
            x, y = data
            self.tracker.update_state(self.compute_loss(x, y, self(x)))
            return {"mean_loss": self.tracker.result()}

    with two_mirrored().scope():
        made = Own()
        made.compile("sgd", "mse")
    made.last.build((None, 2))
    found = made.evaluate(data(4), verbose=0, return_dict=True)["mean_loss"]
    x, y = next(iter(data(4)))
    say(
        "tracked",
        [float(found), float(tf.reduce_mean((made.last(x) - tf.cast(y, "float32")) ** 2))],
    )


def second_strategy() -> None:
    with two_mirrored().scope():
        model().fit(data(), verbose=0)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.Dense(1)])
        made.compile("adam", "mse", metrics=["mae"])
    say("second", failing_in(lambda: made.fit(data(), verbose=0)))


def central() -> None:
    two_devices()
    storage = tf.distribute.experimental.CentralStorageStrategy
    strategy = storage(["CPU:0", "CPU:1"], "CPU:0")
    with strategy.scope():
        made = model()
        made.compile(made.optimizer, "mse", metrics=[keras.metrics.AUC()])
        normalization = keras.layers.BatchNormalization()
        normalization.build((None, 2))
    dataset = data(8).map(lambda x, y: (x, tf.cast(y > 20.0, tf.float32)))
    logs = made.evaluate(dataset, verbose=0)
    plain = model()
    plain.compile(plain.optimizer, "mse", metrics=[keras.metrics.AUC()])
    say("metrics", [logs, plain.evaluate(dataset, verbose=0)])
    say(
        "statistics",
        failing_in(lambda: strategy.run(lambda: normalization(tf.ones((2, 2)), training=True))),
    )


def lost_message() -> None:
    from tensorflow.python.eager import context

    from keras_distplug.backend.tensorflow.runtime import context as compat_context

    with compat_context.heartbeat_timeout(1.0):
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    service = compat_context.ServiceKeyValues()
    service.barrier("all are there", 60)
    if strategy.cluster_resolver.task_id:
        os._exit(0)
    while service.task_errors() == [None, None]:
        time.sleep(0.1)
    service.put("folder/word", "")
    service.delete("folder")
    say("deletes what is below", service.put_first("folder/word", ""))
    say("lost", failing_in(lambda: context.context().get_config_key_value("never told", 2000))[0])
    sys.stdout.flush()
    os._exit(0)  # a normal exit may take forever


def forgetful() -> None:
    for name in ("EarlyStopping", "ReduceLROnPlateau"):
        callback = getattr(keras.callbacks, name)(monitor="loss", patience=5)
        callback.set_model(model())
        callback.on_train_begin()
        for epoch, loss in enumerate((1.0, 2.0)):
            callback.on_epoch_end(epoch, {"loss": loss})
        waited = callback.wait
        callback.on_train_begin()
        say(name, [waited, callback.wait])


def parameter_server() -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    cluster = {"chief": addresses[:1], "worker": addresses[1:2], "ps": addresses[2:]}
    # They share the threads of this process, and every waiting one occupies a thread.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=6)
    servers = [
        tf.distribute.Server(tf.train.ClusterSpec(cluster), kind, 0, "grpc", config)
        for kind in ("worker", "ps")
    ]
    task = {"type": "chief", "index": 0}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    strategy = tf.distribute.ParameterServerStrategy(resolver, partitioner)
    with strategy.scope():
        stock = model()
        iterations = stock.optimizer.iterations
        table = keras.layers.Embedding(4, 2)
        table.build()
    say("fit", failing_in(lambda: stock.fit(data(), verbose=0))[0])

    @tf.function
    def count() -> None:
        iterations.assign_add(1)

    operations = count.get_concrete_function().graph.get_operations()
    say("assigned by", sorted({each.type for each in operations if "Assign" in each.type}))

    whole = keras.layers.Embedding(4, 2)
    whole.build()

    @tf.function
    def look_up() -> tf.Tensor:
        return whole(np.array([[1, 2]]))

    operations = look_up.get_concrete_function().graph.get_operations()
    ways = {each.type for each in operations} & {"ReadVariableOp", "ResourceGather"}
    say("looked up by", sorted(ways))

    def slope() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table(np.array([[1, 2]])))
        tape.gradient(loss, table.embeddings)

    say("tables in parts", failing_in(slope)[0])
    say("servers", len(servers))
    sys.stdout.flush()
    os._exit(0)  # the servers themselves never exit


keras.config.disable_traceback_filtering()
CASES = (
    multi_worker,
    lost_message,
    late,
    alone,
    split_batch,
    mirrored,
    mirrored_losses,
    mirrored_overflow,
    mirrored_empty,
    empty_pool,
    own_tracker,
    second_strategy,
    central,
    forgetful,
    parameter_server,
)
{case.__name__: case for case in CASES}[sys.argv[1]]()
