"""Models that use most of Keras' layers, losses, metrics, optimizers and the like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers

# The least share of every part's public classes that the models must contain.
SHARES = {
    "layers": 0.9,
    "losses": 1.0,
    "metrics": 1.0,
    "optimizers": 0.8,
    "optimizers.schedules": 0.85,
    "initializers": 0.9,
    "regularizers": 1.0,
    "constraints": 0.8,
}


def _made(first: Any, last: Any, **compiled: Any) -> keras.Model:
    model = keras.Model(first, last)
    return _compiled(model, **compiled)


def _compiled(model: keras.Model, **compiled: Any) -> keras.Model:
    model.compile(**{"optimizer": "adam", "loss": "mse", **compiled})
    model.optimizer.build(model.trainable_variables)
    return model


def _chain(shape: Sequence[int | None], *parts: Any, dtype: str | None = None) -> keras.Model:
    first = x = keras.Input(shape, dtype=dtype)
    for part in parts:
        x = part(x)
    return _made(first, x)


def _there(*names: str) -> list[type]:
    """Returns those of these layers that this version of Keras has."""
    return [getattr(layers, name) for name in names if hasattr(layers, name)]


def mixed() -> keras.Model:
    first = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, activation=keras.activations.gelu, kernel_regularizer="l2")(first)
    x = layers.BatchNormalization(dtype="float32")(keras.ops.relu(x) + 1.0)
    x = layers.Bidirectional(layers.LSTM(4))(layers.Reshape((6, 24))(x))
    x = layers.Dense(4, kernel_initializer=keras.initializers.Orthogonal(1), name="d")(x)
    x = keras.ops.concatenate([x, layers.Dense(4, kernel_constraint="max_norm")(x)])
    rate = keras.optimizers.schedules.CosineDecay(0.1, 10**12)
    return _made(
        first,
        layers.Activation(keras.ops.sigmoid)(x),
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.mean_squared_error,
        metrics=["mae", keras.metrics.AUC(), keras.metrics.mean_absolute_error],
    )


def sequential() -> keras.Model:
    parts = [layers.Dense(3, "relu"), layers.Dropout(0.5, seed=2**62), layers.Dense(1)]
    return _compiled(keras.Sequential([keras.Input((4,)), *parts]))


def deferred() -> keras.Model:
    model = keras.Sequential([layers.Dense(3), layers.Dense(1)])
    model.build((None, 4))
    return _compiled(model)


def activations() -> keras.Model:
    functions = [
        each
        for name, each in vars(keras.activations).items()
        if callable(each) and name not in ("get", "serialize", "deserialize", "glu")
    ]
    named = [layers.ELU(), layers.LeakyReLU(), layers.PReLU(), layers.ReLU(), layers.Softmax()]
    return _chain((4,), layers.Dense(4), *map(layers.Activation, functions), *named)


def convolutions_1d() -> keras.Model:
    return _chain(
        (32, 2),
        layers.Conv1D(4, 3, padding="causal"), layers.Conv1DTranspose(4, 3),
        layers.DepthwiseConv1D(3, depth_multiplier=2), layers.SeparableConv1D(4, 3),
        layers.ZeroPadding1D(2), layers.Cropping1D(1), layers.UpSampling1D(2),
        layers.MaxPooling1D(2), layers.AveragePooling1D(2),
        *(each(4) for each in _there("AdaptiveAveragePooling1D", "AdaptiveMaxPooling1D")),
        layers.GlobalAveragePooling1D(), layers.RepeatVector(1000), layers.GlobalMaxPooling1D(),
    )  # fmt: skip


def convolutions_2d() -> keras.Model:
    return _chain(
        (16, 16, 2),
        layers.Conv2D(4, (3, 2)), layers.Conv2DTranspose(4, 3, 2), layers.DepthwiseConv2D(3),
        layers.SeparableConv2D(4, 3), layers.ZeroPadding2D(((1, 2), (0, 1))),
        layers.Cropping2D(1), layers.UpSampling2D((2, 3), interpolation="bilinear"),
        layers.MaxPooling2D(2), layers.AveragePooling2D(2), layers.SpatialDropout2D(0.1),
        *(each(4) for each in _there("AdaptiveAveragePooling2D", "AdaptiveMaxPooling2D")),
        layers.GlobalMaxPooling2D(keepdims=True), layers.GlobalAveragePooling2D(),
    )  # fmt: skip


def convolutions_3d() -> keras.Model:
    return _chain(
        (8, 8, 8, 1),
        layers.Conv3D(2, 3), layers.Conv3DTranspose(2, 3), layers.ZeroPadding3D(1),
        layers.Cropping3D(1), layers.UpSampling3D(2), layers.MaxPooling3D(2),
        layers.AveragePooling3D(2), layers.SpatialDropout3D(0.1),
        *(each(2) for each in _there("AdaptiveAveragePooling3D", "AdaptiveMaxPooling3D")),
        layers.GlobalMaxPooling3D(keepdims=True), layers.GlobalAveragePooling3D(),
    )  # fmt: skip


def recurrent() -> keras.Model:
    cells = [layers.LSTMCell(3), layers.GRUCell(3), layers.SimpleRNNCell(3)]
    return _chain(
        (5, 3),
        layers.Masking(-1.0), layers.LSTM(3, return_sequences=True),
        layers.GRU(3, return_sequences=True, recurrent_dropout=0.1),
        layers.SimpleRNN(3, return_sequences=True, go_backwards=True),
        layers.RNN(layers.StackedRNNCells(cells), return_sequences=True),
        layers.Bidirectional(layers.GRU(2, return_sequences=True), merge_mode="sum"),
        layers.TimeDistributed(layers.Dense(2)), layers.SpatialDropout1D(0.1), layers.Flatten(),
    )  # fmt: skip


def convolutions_in_time() -> keras.Model:
    return _made(
        firsts := [keras.Input(shape) for shape in [(4, 8, 1), (4, 8, 8, 1), (3, 4, 4, 4, 1)]],
        [
            layers.ConvLSTM1D(2, 3)(firsts[0]),
            layers.ConvLSTM2D(2, 3)(firsts[1]),
            layers.ConvLSTM3D(2, 3)(firsts[2]),
        ],
    )


def attention() -> keras.Model:
    first = keras.Input((6,), dtype="int32")
    x = layers.Embedding(50, 8, mask_zero=True)(first)
    x = layers.MultiHeadAttention(2, 4, value_dim=3, output_shape=8)(x, x, use_causal_mask=True)
    x = layers.GroupQueryAttention(4, 4, 2)(x, x)
    x = layers.Attention(use_scale=True)([x, x]) + layers.AdditiveAttention()([x, x])
    x = layers.LayerNormalization()(x)
    x = layers.GroupNormalization(2)(layers.UnitNormalization()(x))
    for each in _there("RMSNormalization"):
        x = each()(x)
    x = layers.EinsumDense("abc,cd->abd", output_shape=(None, 5), bias_axes="d")(x)
    x = layers.SpectralNormalization(layers.Dense(4))(x)
    return _made(first, layers.Permute((2, 1))(x)[:, 1:, ...])


def embedded_and_back() -> keras.Model:
    first = keras.Input((6,), dtype="int32")
    table = (getattr(layers, "ReversibleEmbedding", None) or layers.Embedding)(50, 8)
    return _made(first, table(first))


def merged() -> keras.Model:
    one, other = keras.Input((4,), name="one"), keras.Input((4,), name="other")
    kinds = (layers.Add, layers.Average, layers.Maximum, layers.Minimum, layers.Multiply)
    x = [kind()([one, other]) for kind in (*kinds, layers.Subtract)]
    x = layers.Concatenate()([*x, layers.Dot(1)([one, other])])
    inner = keras.Sequential([keras.Input((25,)), layers.Dense(2)], name="inner")
    x = layers.Identity()(inner(x))
    return _made({"one": one, "other": other}, {"out": x, "norm": keras.ops.norm(x, axis=-1)})


def noisy() -> keras.Model:
    parts = [layers.GaussianNoise(0.1), layers.GaussianDropout(0.1), layers.AlphaDropout(0.1)]
    parts += [layers.ActivityRegularization(0.1, 0.1), layers.Rescaling(1e30, -(10**12))]
    return _chain((4,), layers.Dense(4), *parts)


def images() -> keras.Model:
    wide = {"value_range": (0, 255)}
    parts = [
        layers.Resizing(24, 24), layers.CenterCrop(20, 20), layers.RandomCrop(16, 16),
        layers.RandomFlip(seed=1), layers.RandomRotation(0.1), layers.RandomZoom(0.1),
        layers.RandomTranslation(0.1, 0.1), layers.RandomContrast(0.1, value_range=(0, 255)),
        layers.RandomBrightness(0.1), layers.RandomShear((0.0, 0.1), (0.0, 0.1)),
        layers.RandomHue(0.1, **wide),
        layers.RandomSaturation(0.1, **wide), layers.RandomGrayscale(0.1),
        layers.RandomPosterization(3), layers.RandomSharpness(0.1, **wide),
        layers.RandomColorJitter(**wide, brightness_factor=0.1),
        layers.RandomColorDegeneration(0.1, **wide), layers.RandomInvert(0.1, **wide),
        layers.RandomGaussianBlur(kernel_size=5, sigma=1.0), layers.RandomPerspective(),
        layers.RandomErasing(), layers.AutoContrast(**wide),
        layers.Solarization(**wide), *(each() for each in _there("RandomElasticTransform")),
        layers.AugMix(**wide), layers.RandAugment(**wide),
        layers.Equalization(**wide),
    ]  # fmt: skip
    # Some of them return their symbolic input unchanged, from which Keras cannot build a model.
    apart = [layers.Pipeline([part, layers.Rescaling(1.0)]) for part in parts]
    return _chain((32, 32, 3), *apart, layers.Flatten(), layers.Dense(1))


def tables() -> keras.Model:
    """Preprocessing of numbers and categories."""
    normal = layers.Normalization(mean=[0.0] * 3, variance=[1.0] * 3)
    first = keras.Input((3,))
    number = keras.Input((1,), dtype="int64")
    other = keras.Input((1,), dtype="int64")
    columns = [
        normal(first),
        layers.Discretization([0.0, 1.0, 2.0], output_mode="one_hot")(first[:, :1]),
        layers.Hashing(50, salt=2**40, output_mode="multi_hot")(number),
        layers.HashedCrossing(20, output_mode="one_hot")((number, other)),
        layers.CategoryEncoding(200, output_mode="multi_hot")(number),
        layers.IntegerLookup(
            vocabulary=[2**40, 7, 9], num_oov_indices=2, mask_token=-(2**50), output_mode="one_hot"
        )(number),
    ]
    return _made([first, number, other], layers.Dense(1)(layers.Concatenate()(columns)))


def texts() -> keras.Model:
    words = keras.Input((1,), dtype="string")
    text = layers.TextVectorization(
        500, vocabulary=["a", "/etc/passwd", "http://203.0.113.1/"], ngrams=(1, 2),
        output_sequence_length=1000, output_mode="int",
    )(words)  # fmt: skip
    known = layers.StringLookup(vocabulary=["x", "y"], num_oov_indices=1000)(words)
    x = layers.Embedding(1100, 2)(layers.Concatenate()([text, known]))
    return _made(words, layers.Dense(1)(layers.Flatten()(x)))


def sounds() -> keras.Model:
    first = keras.Input((4000,))
    seen = layers.MelSpectrogram(num_mel_bins=16, fft_length=512, sequence_stride=128)(first)
    parts = [layers.Flatten()(seen)]
    for each in _there("STFTSpectrogram"):
        parts.append(layers.Flatten()(each("log", 128, 64, fft_length=128)(first[:, :, None])))
    return _made(first, layers.Dense(1)(layers.Concatenate()(parts)))


def _with_all(
    part: Any, compile_with: str, given: dict[str, dict[str, Any]], **compiled: Any
) -> keras.Model:
    """Returns a model with one output per class in `part`; every class is used for one of them."""
    bases = (part.Loss,) if hasattr(part, "Loss") else (part.Metric,)
    kinds = {
        name: each
        for name, each in vars(part).items()
        if isinstance(each, type) and issubclass(each, bases) and name not in ("Loss", "Metric")
    }
    made = {name: kind(**given.get(name, {})) for name, kind in kinds.items()}
    first = keras.Input((4,))
    last = {name: layers.Dense(2, name=name)(first) for name in made}
    return _made(first, last, **{**compiled, compile_with: made})


def losses() -> keras.Model:
    return _with_all(keras.losses, "loss", {})


def metrics() -> keras.Model:
    share: dict[str, Any] = {"num_thresholds": 2000}
    given: dict[str, dict[str, Any]] = {
        "AUC": {**share, "multi_label": True, "num_labels": 2},
        "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
        "IoU": {"num_classes": 2, "target_class_ids": [0]},
        "OneHotIoU": {"num_classes": 2, "target_class_ids": [0]},
        "MeanIoU": {"num_classes": 1000},
        "OneHotMeanIoU": {"num_classes": 2},
        "MeanRelativeError": {"normalizer": [1.0, 2.0]},
        "PrecisionAtRecall": {"recall": 0.5, **share},
        "RecallAtPrecision": {"precision": 0.5, **share},
        "SensitivityAtSpecificity": {"specificity": 0.5, **share},
        "SpecificityAtSensitivity": {"sensitivity": 0.5, **share},
        "Precision": {"thresholds": [0.1, 0.5]},
    }
    return _with_all(keras.metrics, "metrics", given)


def functions() -> keras.Model:
    """Losses and metrics given as functions and by name."""
    named = ("kullback_leibler_divergence", "mean_absolute_percentage_error", "huber")
    return _compiled(
        keras.Sequential([keras.Input((4,)), layers.Dense(2)]),
        loss=keras.losses.log_cosh,
        metrics=[*named, keras.losses.poisson, keras.metrics.mean_squared_logarithmic_error],
    )


def regularized() -> keras.Model:
    initializers = [
        getattr(keras.initializers, name)(**given)
        for name, given in {
            "Constant": {"value": 3}, "GlorotNormal": {}, "GlorotUniform": {"seed": 2**40},
            "HeNormal": {}, "HeUniform": {}, "Identity": {}, "LecunNormal": {},
            "LecunUniform": {}, "Ones": {}, "Orthogonal": {}, "RandomNormal": {},
            "RandomUniform": {}, "TruncatedNormal": {}, "VarianceScaling": {}, "Zeros": {},
        }.items()
    ]  # fmt: skip
    regularizers = [
        keras.regularizers.L1(0.1), keras.regularizers.L2(0.1), keras.regularizers.L1L2(0.1, 0.1),
        keras.regularizers.OrthogonalRegularizer(),
    ]  # fmt: skip
    constraints = [
        keras.constraints.MaxNorm(), keras.constraints.MinMaxNorm(), keras.constraints.NonNeg(),
        keras.constraints.UnitNorm(),
    ]  # fmt: skip
    parts = [layers.Dense(4, kernel_initializer=each) for each in initializers]
    parts += [layers.Dense(4, kernel_regularizer=each) for each in regularizers]
    parts += [layers.Dense(4, kernel_constraint=each) for each in constraints]
    return _chain((4,), *parts)


def lower_precision() -> keras.Model:
    policies = keras.dtype_policies.DTypePolicyMap()
    policies["dense"] = keras.dtype_policies.DTypePolicy("mixed_bfloat16")
    model = _chain(
        (4,),
        layers.Dense(8, dtype="mixed_float16"),
        layers.Dense(8, dtype=keras.dtype_policies.DTypePolicy("bfloat16")),
        layers.Dense(8, dtype=policies, name="dense"),
        layers.Dense(8, dtype="float32"),
    )
    return _compiled(model, optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))


def quantized() -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.Dense(2)])
    model.quantize("int8")
    return _compiled(model)


def low_rank() -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.Dense(2)])
    model.layers[0].enable_lora(2)
    return _compiled(model)


def constants() -> keras.Model:
    """Operations with arrays and slices as arguments."""
    first = keras.Input((4, 2))
    x = first * np.ones((4, 2), "float32") + keras.ops.convert_to_tensor([1.0, 2.0])
    x = keras.ops.pad(x[:, ::2, None, :], [[0, 0], [1, 1], [0, 0], [0, 0]])
    x = keras.ops.repeat(keras.ops.squeeze(x, 2), 1000, axis=1)
    return _made(first, keras.ops.einsum("abc->ac", keras.ops.where(x > 0, x, 0.5 * x)))


def nested() -> keras.Model:
    inner = _chain((4,), layers.Dense(4, "swish"))
    wrapped = layers.TimeDistributed(keras.Sequential([keras.Input((4,)), inner]))
    return _chain((3, 4), wrapped, layers.Reshape((-1, 2)))


def _optimizer(name: str, **given: Any) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        kind = getattr(keras.optimizers, name)
        parts = [keras.Input((4,)), layers.Dense(2)]
        return _compiled(keras.Sequential(parts), optimizer=kind(**given))

    return make


def _schedules() -> dict[str, Any]:
    made = keras.optimizers.schedules
    return {
        "CosineDecay": made.CosineDecay(0.1, 10**12, warmup_target=0.2, warmup_steps=100),
        "CosineDecayRestarts": made.CosineDecayRestarts(0.1, 10**9),
        "ExponentialDecay": made.ExponentialDecay(0.1, 10**12, 0.5),
        "InverseTimeDecay": made.InverseTimeDecay(0.1, 10**12, 0.5),
        "PiecewiseConstantDecay": made.PiecewiseConstantDecay([10**6, 10**9], [0.1, 0.2, 0.3]),
        "PolynomialDecay": made.PolynomialDecay(0.1, 10**12),
    }


_OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion"),
    *("Muon", "Nadam", "RMSprop", "SGD"),
)

MODELS: dict[str, Callable[[], keras.Model]] = {
    **{
        each.__name__: each
        for each in (
            *(mixed, sequential, deferred, activations, convolutions_1d, convolutions_2d),
            *(convolutions_3d, recurrent, convolutions_in_time, attention, embedded_and_back),
            *(merged, noisy, images, tables, texts, sounds, losses, metrics, functions),
            *(regularized, lower_precision, quantized, low_rank, constants, nested),
        )
    },
    **{
        name: _optimizer(name, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=10**9)
        for name in _OPTIMIZERS
        if hasattr(keras.optimizers, name)
    },
    **{
        name: _optimizer("SGD", learning_rate=each, gradient_accumulation_steps=4)
        for name, each in _schedules().items()
    },
}
