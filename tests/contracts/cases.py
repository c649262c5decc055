"""Small models and data. Batches of 10, 10 and 7 samples do not divide evenly among replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from support.lazily import Lazily

keras: Any = Lazily("keras")
tf: Any = Lazily("tensorflow")

SAMPLES, GLOBAL_BATCH = 27, 10
_random = np.random.default_rng(0)


def _aligned(array: np.ndarray) -> np.ndarray:
    """Returns a copy in aligned memory, which TensorFlow uses without copying."""
    bytes_ = np.empty(array.nbytes + 64, "uint8")
    start = -bytes_.ctypes.data % 64
    copy = bytes_[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


X = _aligned(_random.normal(size=(SAMPLES, 4)).astype("float32"))
Y = _aligned(np.stack([X[:, 0] ** 2, X[:, 1] * X[:, 2]], axis=1).astype("float32"))
CLASSES = _random.integers(0, 3, SAMPLES)
WEIGHTS = _random.uniform(0.2, 3, SAMPLES).astype("float32")
IMAGES = _random.normal(size=(SAMPLES, 6, 6, 2)).astype("float32")
WORDS = _random.integers(1, 9, size=(SAMPLES, 5)) * (np.arange(5) < CLASSES[:, None] + 1)
Z = _random.normal(size=(SAMPLES, 3)).astype("float32")


def batches(*arrays: Any, samples: int = SAMPLES) -> Any:
    """Returns a dataset of global batches: (x, y) or (x, y, sample_weight)."""
    given = arrays or (X, Y)
    whole = tf.data.Dataset.from_tensor_slices(given)
    return whole.take(samples).batch(GLOBAL_BATCH)


def of_unknown_length() -> Any:
    return batches().filter(lambda *_: True)


def repeated() -> Any:
    return batches().repeat()


def from_generator() -> Any:
    def parts() -> Any:
        for start in range(0, SAMPLES, GLOBAL_BATCH):
            yield X[start : start + GLOBAL_BATCH], Y[start : start + GLOBAL_BATCH]

    return parts()


def py_dataset() -> Any:
    class Parts(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            part = slice(index * GLOBAL_BATCH, (index + 1) * GLOBAL_BATCH)
            return X[part], Y[part]

    return Parts()


def ragged() -> Any:
    rows = [row[: 1 + n % 5] for n, row in enumerate(WORDS + 1)]
    return batches(tf.ragged.constant(rows), Y)


def sparse() -> Any:
    kept = np.where(np.abs(X) > 0.5, X, 0)
    whole = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(kept), Y))
    return whole.batch(GLOBAL_BATCH)


def mlp(
    optimizer: Any = "adam",
    loss: Any = "mse",
    hidden: Sequence[Any] = (),
    outputs: int = 2,
    dense: Any = None,
    **compiled: Any,
) -> Any:
    """Returns a model with 4 inputs, and with the `hidden` layers after the first one."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, activation="tanh", **(dense or {})),
            *hidden,
            keras.layers.Dense(outputs),
        ]
    )
    model.compile(optimizer, loss, **compiled)
    return model


def built(model: Any) -> Any:
    """Builds the optimizer: ScheduleFreeAdamW loses the initial weights if the first step does."""
    model.optimizer.build(model.trainable_variables)
    return model


def classifier(**compiled: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=compiled.pop("reduction", "sum_over_batch_size")
    )
    return mlp(keras.optimizers.SGD(0.1), loss, outputs=3, **compiled)


def words(
    *layers: Any,
    loss: Any = "mse",
    optimizer: Any = None,
    batch_size: int | None = None,
    **embedding: Any,
) -> Any:
    """Returns a model of sequences of 5 words."""
    model = keras.Sequential(
        [
            keras.Input((5,), batch_size, dtype="int64"),
            keras.layers.Embedding(11, 4, **embedding),
            *layers,
        ]
    )
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss)
    return model


def of_ragged_words() -> Any:
    """Returns a model that averages over the words of every sample."""
    inputs = keras.Input((None,), dtype="int64", ragged=True)
    model = keras.Model(inputs, keras.layers.Dense(2)(_mean_of_ragged()(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def _mean_of_ragged() -> Any:
    class Mean(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table = self.add_weight(shape=(12, 3), initializer="glorot_uniform")

        def call(self, x: Any) -> Any:
            return tf.reduce_mean(tf.gather(tf.convert_to_tensor(self.table), x), axis=1)

        def compute_output_shape(self, shape: Any) -> Any:
            return (shape[0], 3)

    return Mean()


def attention() -> Any:
    class Attention(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.heads = keras.layers.MultiHeadAttention(2, 3, use_bias=False)

        def build(self, shape: Any) -> None:
            self.heads.build(shape, shape)

        def call(self, x: Any) -> Any:
            return self.heads(x, x)

    return Attention()


def images(*layers: Any, loss: Any = "mse") -> Any:
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            keras.layers.Conv2D(3, 3, use_bias=False),
            *layers,
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def segmentation(loss: Any) -> Any:
    """Returns a model with three classes for every one of 16 positions in an image."""
    layers = [keras.Input((6, 6, 2)), keras.layers.Conv2D(3, 3)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def segments() -> Any:
    return batches(IMAGES, (IMAGES[:, :4, :4, 0] > 0).astype(int) + (IMAGES[:, :4, :4, 1] > 1))


def own_convolution() -> Any:
    class Own(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = self.add_weight(shape=(2, 2, 3, 2), initializer="glorot_uniform")
            self.bias = self.add_weight(shape=(2,))

        def call(self, x: Any) -> Any:
            return keras.ops.max_pool(keras.ops.conv(x, self.kernel) + self.bias, 2)

        def compute_output_shape(self, shape: Any) -> Any:
            return (shape[0], 1, 1, 2)

    return Own()


def two_outputs(as_dict: bool = False, **losses: Any) -> Any:
    """Returns a model with two inputs and two outputs."""
    first, second = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    both = keras.layers.Dense(5, activation="tanh")(keras.layers.Concatenate()([first, second]))
    out = {
        "p": keras.layers.Dense(2, name="p")(both),
        "q": keras.layers.Dense(3, name="q")(both),
    }
    model = keras.Model(
        {"a": first, "b": second} if as_dict else [first, second],
        out if as_dict else list(out.values()),
    )
    losses = losses or {"p": "mse", "q": "mae"}
    model.compile(
        keras.optimizers.SGD(0.1),
        losses if as_dict else list(losses.values()),
        loss_weights={"p": 0.3, "q": 2.0} if as_dict else [0.3, 2.0],
        metrics={"p": ["mae"], "q": ["mse"]} if as_dict else [["mae"], ["mse"]],
    )
    return model


def two_inputs(as_dict: bool = False) -> Any:
    if as_dict:
        return batches({"a": X, "b": Z}, {"p": Y, "q": Z})
    return batches((X, Z), (Y, Z))


def subclassed() -> Any:
    """Returns a subclassed model that builds its layers at the first batch."""

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.layers.Dense(5, activation="tanh")
            self.last = keras.layers.Dense(2)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.last(self.first(x))

    model = Own()
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.1), "mse", metrics=["mae"])
    return model


def adds_loss(*behind: Any) -> Any:
    class MeanSquare(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.3 * keras.ops.mean(keras.ops.square(x)))
            return x

    return mlp(keras.optimizers.SGD(0.1), hidden=[MeanSquare(), *behind])


def own_train_step(scales: bool = True) -> Any:
    """Returns a model with a `train_step` as in Keras' guide; optionally without loss scaling."""

    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
                scaled = self.optimizer.scale_loss(loss) if scales else loss
            gradients = tape.gradient(scaled, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}

    return _functional(Own, keras.optimizers.Adam(0.01, global_clipnorm=0.1))


def own_logs() -> Any:
    """Returns a model whose step logs one metric, and a loss that is not the tracker's result."""

    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            self.metrics[-1].update_state(y, self(x))
            return {"loss": keras.ops.convert_to_tensor(7.0), **self.metrics[-1].result()}

    return _functional(Own, keras.optimizers.SGD(0.1))


def own_loss_object() -> Any:
    """Returns a model whose step uses a custom loss object and a custom metric."""

    class Own(keras.Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.own_loss = keras.losses.Huber()
            self.tracker = keras.metrics.MeanAbsoluteError(name="own")

        @property
        def metrics(self) -> Any:
            return [self.tracker]

        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.own_loss(y, y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            self.tracker.update_state(y, y_pred)
            return {"own": self.tracker.result()}

        def test_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            self.tracker.update_state(y, self(x, training=False))
            return {"own": self.tracker.result()}

    return _functional(Own, keras.optimizers.SGD(0.1))


def own_trackers() -> Any:
    """Returns a model whose step logs the loss and a part of it, and the means of both."""

    class Own(keras.Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.part = keras.losses.Huber()
            self.mean_loss = keras.metrics.Mean(name="mean_loss")
            self.mean_part = keras.metrics.Mean(name="mean_part")
            self.by_samples = keras.metrics.Mean(name="by_samples")

        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
                part = self.part(y, y_pred)
                both = loss + part
            gradients = tape.gradient(both, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return self.tracked(y, loss, part)

        def test_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            y_pred = self(x, training=False)
            loss = self.compute_loss(y=y, y_pred=y_pred, training=False)
            return self.tracked(y, loss, self.part(y, y_pred))

        def tracked(self, y: Any, loss: Any, part: Any) -> Any:
            self.mean_loss.update_state(loss)
            self.mean_part.update_state(part)
            self.by_samples.update_state(part, tf.shape(y)[0])
            tracked = (self.mean_loss, self.mean_part, self.by_samples)
            return {"raw": loss, "raw_part": part, **{m.name: m.result() for m in tracked}}

    return _functional(Own, keras.optimizers.SGD(0.1), metrics=None)


def of_samples(y: Any, predicted: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y - predicted), axis=-1)


def of_a_batch(y: Any, predicted: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y - predicted))


def own_compute_loss() -> Any:
    class Own(keras.Model):
        def compute_loss(
            self,
            x: Any = None,
            y: Any = None,
            y_pred: Any = None,
            sample_weight: Any = None,
            training: bool = True,
        ) -> Any:
            stock = super().compute_loss(x, y, y_pred, sample_weight, training)
            return 2.0 * stock + keras.losses.MeanAbsoluteError()(y, y_pred)

    return _functional(Own, keras.optimizers.SGD(0.1))


def two_optimizers(scales: bool = False) -> Any:
    """Returns a model whose layers are trained in turns, like the halves of an adversarial network.

    `scales` makes the step scale the loss of the first optimizer.
    """

    class Own(keras.Model):
        def compile(self, first: Any, second: Any) -> None:
            super().compile(optimizer=first, loss="mse")
            self.second_optimizer = second

        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            layers = [layer for layer in self.layers if layer.trainable_variables]
            for optimizer, layer in zip(
                (self.optimizer, self.second_optimizer), layers, strict=True
            ):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(y=y, y_pred=self(x, training=True))
                    if scales and optimizer is self.optimizer:
                        loss = optimizer.scale_loss(loss)
                gradients = tape.gradient(loss, layer.trainable_variables)
                optimizer.apply(gradients, layer.trainable_variables)
            return {}

    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, activation="tanh")(inputs)
    model = Own(inputs, keras.layers.Dense(2)(hidden))
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.1), keras.optimizers.SGD(0.1))
    return model


def _functional(kind: Any, optimizer: Any, metrics: Any = ("mae",)) -> Any:
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, activation="tanh")(inputs)
    model = kind(inputs, keras.layers.Dense(2)(hidden))
    model.compile(optimizer, "mse", metrics=metrics and list(metrics))
    return model


def seeded() -> Any:
    """Returns a model with every layer that draws random numbers, not connected to each other."""

    class Holder(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            layers = keras.layers
            self.on_sequences = [
                layers.Dropout(0.5, seed=1),
                layers.SpatialDropout1D(0.5, seed=2),
                layers.GaussianDropout(0.5, seed=3),
                layers.GaussianNoise(0.5, seed=4),
                layers.AlphaDropout(0.5, seed=5),
                layers.LSTM(3, dropout=0.5, seed=6),
                layers.GRU(3, dropout=0.5, recurrent_dropout=0.5, seed=7),
            ]
            self.on_images = [
                layers.SpatialDropout2D(0.5, seed=1),
                layers.RandomFlip(seed=2),
                layers.RandomRotation(0.2, seed=3),
                layers.RandomTranslation(0.3, 0.3, seed=4),
                layers.RandomZoom(0.3, seed=5),
                layers.RandomContrast(0.5, seed=6),
                layers.RandomBrightness(0.5, value_range=(0, 1), seed=7),
                layers.RandomCrop(2, 2, seed=8),
            ]

    model = Holder()
    for layer in model.on_sequences[-2:]:
        layer.build((8, 5, 4))
    model.compile()
    return model


def normalized(synchronized: bool) -> Any:
    return images(keras.layers.BatchNormalization(momentum=0.7, synchronized=synchronized))


def switch_compiled(model: Any) -> Any:
    """Compiles the model again, after it was adapted and trained."""
    model.compile(keras.optimizers.SGD(0.1, clipnorm=0.05), "mae", metrics=["mse"])
    return model
