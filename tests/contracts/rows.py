"""The cases whose results must not depend on the number of replicas: one row per line."""

from __future__ import annotations

from typing import Any

from contracts import cases, references, uses
from contracts.cases import (
    CLASSES,
    IMAGES,
    WEIGHTS,
    WORDS,
    X,
    Y,
    batches,
    classifier,
    images,
    mlp,
    two_inputs,
    two_outputs,
    words,
)
from contracts.row import Row
from contracts.uses import fit, fit_and_evaluate, fit_arrays, predict, steps
from support.lazily import Lazily

keras: Any = Lazily("keras")
opt: Any = Lazily("keras.optimizers")
lay: Any = Lazily("keras.layers")
los: Any = Lazily("keras.losses")

MIXED = 5e-3
BFLOAT16 = 2**-7  # its last bit, which processors round differently


def weighted() -> Any:
    return batches(X, Y, WEIGHTS)


def classes() -> Any:
    return batches(X, CLASSES)


def sequences() -> Any:
    return batches(WORDS, Y)


def tagged_words() -> Any:
    return batches(WORDS, IMAGES[:, :5, 0, :], IMAGES[:, :5, 1, 0] ** 2)


def pictures() -> Any:
    return batches(IMAGES, Y)


def scaled(optimizer: Any = None, **scale: Any) -> Any:
    return opt.LossScaleOptimizer(optimizer or opt.SGD(0.1), **{"initial_scale": 2.0**10, **scale})


def one_picture_step(model: Any) -> uses.Outcome:
    model.train_on_batch(IMAGES[: cases.GLOBAL_BATCH], Y[: cases.GLOBAL_BATCH])
    return uses.outcome(model)


def without_momentum() -> Any:
    return mlp(opt.SGD(0.1))


# fmt: off
ROWS: dict[str, dict[str, Row]] = {
    "Optimizers": {
        "SGD": Row(lambda: mlp(opt.SGD(0.1))),
        "SGD, Nesterov momentum, weight decay": Row(lambda: mlp(opt.SGD(0.1, 0.9, nesterov=True, weight_decay=0.01))),
        "Adam": Row(lambda: mlp(opt.Adam(0.01)), fit(epochs=2), lowest=True),
        "Adam, AMSGrad": Row(lambda: mlp(opt.Adam(0.01, amsgrad=True))),
        "AdamW": Row(lambda: mlp(opt.AdamW(0.01, weight_decay=0.1))),
        "Nadam": Row(lambda: mlp(opt.Nadam(0.01))),
        "Adamax": Row(lambda: mlp(opt.Adamax(0.01))),
        "Adagrad": Row(lambda: mlp(opt.Adagrad(0.1))),
        "Adadelta": Row(lambda: mlp(opt.Adadelta(1.0))),
        "Adafactor": Row(lambda: mlp(opt.Adafactor(0.01))),
        "RMSprop, centered": Row(lambda: mlp(opt.RMSprop(0.01, momentum=0.9, centered=True))),
        "Ftrl": Row(lambda: mlp(opt.Ftrl(0.1))),
        "Lion": Row(lambda: mlp(opt.Lion(0.01))),
        "Lamb": Row(lambda: mlp(opt.Lamb(0.01))),
        "Muon": Row(lambda: mlp(opt.Muon(0.01)), needs="optimizers.Muon"),
        "ScheduleFreeAdamW": Row(lambda: cases.built(mlp(opt.ScheduleFreeAdamW(0.01))), needs="optimizers.ScheduleFreeAdamW"),
        "learning-rate schedule": Row(lambda: mlp(opt.Adam(keras.optimizers.schedules.CosineDecay(0.0, 5, warmup_target=0.1, warmup_steps=2)))),
    },
    "Gradients": {
        "clipnorm": Row(lambda: mlp(opt.SGD(0.1, clipnorm=0.05))),
        "global_clipnorm": Row(lambda: mlp(opt.SGD(0.1, global_clipnorm=0.05)), fit()),
        "clipvalue": Row(lambda: mlp(opt.SGD(0.1, clipvalue=0.02))),
        "EMA": Row(lambda: mlp(opt.SGD(0.1, use_ema=True, ema_momentum=0.8)), fit()),
        "EMA, overwriting": Row(lambda: mlp(opt.Adam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2)), fit(), lowest=True),
        "gradient accumulation": Row(lambda: mlp(opt.Adam(0.01, gradient_accumulation_steps=2)), fit(), lowest=True),
        "accumulation, clipping, decay, EMA": Row(lambda: mlp(opt.AdamW(0.01, gradient_accumulation_steps=2, global_clipnorm=0.05, use_ema=True, ema_overwrite_frequency=3)), fit()),
        "loss_scale_factor": Row(lambda: mlp(opt.SGD(0.1, loss_scale_factor=64.0))),
        "LossScaleOptimizer": Row(lambda: mlp(scaled(opt.Adam(0.01), dynamic_growth_steps=2))),
        "LossScaleOptimizer, clipping, accumulation": Row(lambda: mlp(scaled(opt.Adam(0.01, clipnorm=0.05, gradient_accumulation_steps=2)))),
        "LossScaleOptimizer, overflow": Row(lambda: mlp(scaled(initial_scale=3e38, dynamic_growth_steps=2), hidden=[lay.Dense(5)]), uses.overflow, lowest=True),
        "frozen layers": Row(lambda: mlp(opt.Adam(0.01), hidden=[lay.Dense(5, trainable=False)])),
        "two optimizers": Row(cases.two_optimizers, uses.steps_of_weights),
        "two optimizers, one scales": Row(lambda: cases.two_optimizers(scales=True), uses.steps_of_weights),
    },
    "Precision": {
        "mixed_bfloat16": Row(without_momentum, fit(), policy="mixed_bfloat16", error=BFLOAT16),
        "mixed_float16": Row(without_momentum, fit(), policy="mixed_float16", error=MIXED),
        "mixed_float16, BatchNormalization": Row(lambda: cases.normalized(True), fit(pictures), policy="mixed_float16", error=MIXED),
    },
    "Losses": {
        'reduction="sum"': Row(lambda: classifier(reduction="sum"), fit_and_evaluate(classes), lowest=True),
        'reduction="sum", weights': Row(lambda: mlp(loss=los.MeanSquaredError(reduction="sum")), fit_and_evaluate(weighted)),
        'reduction="mean"': Row(lambda: classifier(reduction="mean"), fit(classes)),
        'reduction="mean_with_sample_weight"': Row(lambda: mlp(loss=los.MeanSquaredError(reduction="mean_with_sample_weight")), fit_and_evaluate(weighted)),
        '"mean_with_sample_weight", no weights': Row(lambda: mlp(loss=los.MeanSquaredError(reduction="mean_with_sample_weight")), fit()),
        "reduction=None": Row(lambda: mlp(loss=los.MeanSquaredError(reduction=None)), fit(), refused="has reduction=None"),
        "sample weights": Row(lambda: mlp(weighted_metrics=["mae"]), fit_and_evaluate(weighted)),
        "class weights": Row(classifier, fit_arrays(X, CLASSES, class_weight={0: 0.3, 1: 2.0, 2: 1.0})),
        "class weights, mean_with_sample_weight": Row(lambda: classifier(reduction="mean_with_sample_weight"), fit_arrays(X, CLASSES, class_weight={0: 0.3, 1: 2.0, 2: 1.0})),
        "ignore_class": Row(lambda: cases.segmentation(los.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)), fit_and_evaluate(cases.segments)),
        "ignore_class, masked outputs": Row(lambda: words(lay.Dense(3), loss=los.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1), mask_zero=True), fit(lambda: batches(WORDS, WORDS % 3))),
        "Dice per sample": Row(lambda: mlp(loss=los.Dice(axis=1)), fit_and_evaluate()),
        "Dice of the batch": Row(lambda: mlp(loss=los.Dice()), fit(), refused="combines all samples"),
        "Tversky of the batch": Row(lambda: mlp(loss="tversky"), fit(), refused="combines all samples"),
        "Circle": Row(lambda: mlp(loss=los.Circle()), fit(), refused="combines all samples"),
        "a function of samples": Row(lambda: mlp(loss=cases.of_samples), fit_and_evaluate()),
        "a function that returns a scalar": Row(lambda: mlp(loss=cases.of_a_batch), fit_and_evaluate()),
        "masked outputs": Row(lambda: words(lay.Dense(2), mask_zero=True), fit_and_evaluate(tagged_words)),
        "masked outputs, mean_with_sample_weight": Row(lambda: words(lay.Dense(2), loss=los.MeanSquaredError(reduction="mean_with_sample_weight"), mask_zero=True), fit_and_evaluate(tagged_words)),
        "masked outputs, sum": Row(lambda: words(lay.Dense(2), loss=los.MeanSquaredError(reduction="sum"), mask_zero=True), fit(tagged_words)),
        "regularizers": Row(lambda: mlp(opt.SGD(0.1), dense={"kernel_regularizer": "l1l2", "bias_regularizer": "l2"}), fit_and_evaluate()),
        "activity regularizer": Row(lambda: mlp(opt.SGD(0.1), dense={"activity_regularizer": "l2"}), fit_and_evaluate(), lowest=True),
        "add_loss, synchronized BatchNormalization": Row(lambda: cases.adds_loss(lay.BatchNormalization(synchronized=True)), fit_and_evaluate()),
        "add_loss": Row(cases.adds_loss, fit_and_evaluate()),
        "several outputs, loss_weights": Row(two_outputs, fit_and_evaluate(two_inputs)),
        "several outputs, one summed": Row(lambda: two_outputs(p=los.MeanSquaredError(reduction="sum"), q="mae"), fit_and_evaluate(two_inputs)),
    },
    "Layers": {
        "constraints": Row(lambda: mlp(opt.SGD(0.5), dense={"kernel_constraint": "unit_norm", "bias_constraint": "non_neg"})),
        "BatchNormalization, synchronized": Row(lambda: cases.normalized(True), fit_and_evaluate(pictures), lowest=True),
        "BatchNormalization, per replica": Row(lambda: cases.normalized(False), one_picture_step, references.replica_by_replica),
        "LayerNormalization, GroupNormalization": Row(lambda: images(lay.LayerNormalization(), lay.ReLU(), lay.GroupNormalization(1)), fit(pictures)),
        "SpectralNormalization": Row(lambda: mlp(opt.SGD(0.1), hidden=[lay.SpectralNormalization(lay.Dense(4))])),
        "every seeded layer": Row(cases.seeded, uses.random_numbers, references.different_everywhere, lowest=True),
        "Embedding, sparse gradients": Row(lambda: words(lay.Flatten(), lay.Dense(2), optimizer=opt.SGD(0.1, 0.9)), fit(sequences), lowest=True),
        "Embedding, Adam, clipnorm": Row(lambda: words(lay.Flatten(), lay.Dense(2), optimizer=opt.Adam(0.01, clipnorm=0.05)), fit(sequences)),
        "LSTM over masked steps": Row(lambda: words(lay.LSTM(3), lay.Dense(2), mask_zero=True), fit(sequences)),
        "MultiHeadAttention": Row(lambda: mlp(opt.SGD(0.1), hidden=[lay.Reshape((5, 1)), cases.attention(), lay.Flatten()])),
        "stateful RNN": Row(lambda: words(lay.LSTM(3, stateful=True), lay.Dense(2), batch_size=9), fit(sequences), refused="is stateful"),
    },
    "Inputs": {
        "several inputs and outputs": Row(two_outputs, predict(lambda: two_inputs().map(lambda x, y: (x,)))),
        "dicts": Row(lambda: two_outputs(as_dict=True), fit_and_evaluate(lambda: two_inputs(as_dict=True))),
        "ragged": Row(cases.of_ragged_words, fit(cases.ragged)),
        "sparse": Row(cases.mlp, fit(cases.sparse)),
        "arrays": Row(mlp, fit_arrays(validation_split=0.3)),
        "PyDataset": Row(mlp, uses.of_own_arrays(fit(cases.py_dataset, shuffle=False))),
        "generator": Row(mlp, uses.of_own_arrays(fit(cases.from_generator, steps_per_epoch=3))),
    },
    "Batches": {
        "a tail smaller than the replicas": Row(lambda: cases.normalized(True), fit_and_evaluate(lambda: batches(IMAGES, Y, samples=21)), lowest=True),
        "such a tail, add_loss": Row(cases.adds_loss, fit_and_evaluate(lambda: batches(samples=21))),
        "such a tail, a function that returns a scalar": Row(lambda: mlp(loss=cases.of_a_batch), fit_and_evaluate(lambda: batches(samples=21))),
        "such a tail, DepthwiseConv, SeparableConv": Row(lambda: images(lay.DepthwiseConv2D(2, depth_multiplier=2), lay.SeparableConv2D(3, 2)), fit_and_evaluate(lambda: batches(IMAGES, Y, samples=21))),
        "such a tail, Conv2DTranspose, pools": Row(lambda: images(lay.Conv2DTranspose(3, 3), lay.MaxPooling2D(2), lay.AveragePooling2D(2)), fit_and_evaluate(lambda: batches(IMAGES, Y, samples=21))),
        "such a tail, Conv1D, Conv1DTranspose, pool": Row(lambda: images(lay.Reshape((16, 3)), lay.Conv1D(2, 3, padding="causal"), lay.Conv1DTranspose(2, 3), lay.MaxPooling1D(2)), fit_and_evaluate(lambda: batches(IMAGES, Y, samples=21))),
        "such a tail, Conv3D, pool": Row(lambda: images(lay.Reshape((4, 4, 3, 1)), lay.Conv3D(2, 2), lay.MaxPooling3D(2)), fit_and_evaluate(lambda: batches(IMAGES, Y, samples=21))),
        "such a tail, ConvLSTM2D": Row(lambda: images(lay.Reshape((2, 4, 2, 3)), lay.ConvLSTM2D(2, 2)), fit_and_evaluate(lambda: batches(IMAGES, Y, samples=21))),
        "such a tail, custom layer": Row(lambda: images(cases.own_convolution()), fit_and_evaluate(lambda: batches(IMAGES, Y, samples=21))),
        "such a tail, own statistics": Row(lambda: cases.normalized(False), uses.stays_finite),
        "unknown cardinality": Row(lambda: mlp(opt.AdamW(0.01, weight_decay=0.1)), fit(cases.of_unknown_length), references.of_known_length, lowest=True),
        "steps_per_epoch": Row(mlp, fit(cases.repeated, steps_per_epoch=4)),
        "steps_per_execution": Row(lambda: mlp(opt.Adam(0.01), steps_per_execution=2, metrics=["mae"]), fit_and_evaluate(), lowest=True),
        "steps_per_execution, larger than the epoch": Row(lambda: mlp(opt.Adam(0.01), steps_per_execution=5), fit()),
        "steps_per_execution, unknown cardinality": Row(lambda: mlp(steps_per_execution=2), fit(cases.of_unknown_length)),
        "validation_data": Row(lambda: mlp(metrics=["mae"]), fit(validation_data=batches, validation_freq=2, epochs=4)),
    },
    "Metrics": {
        "AUC, Precision, Recall, counts": Row(lambda: mlp(loss="binary_crossentropy", metrics=[keras.metrics.AUC(num_thresholds=20), keras.metrics.Precision(), keras.metrics.Recall(), keras.metrics.TruePositives()]), fit_and_evaluate(lambda: batches(X, (Y > 0.5).astype("float32")))),
        "F1, R2, RMSE": Row(lambda: mlp(metrics=[keras.metrics.F1Score(threshold=0.5), keras.metrics.R2Score(), keras.metrics.RootMeanSquaredError()]), fit_and_evaluate()),
        "MeanIoU, accuracy": Row(lambda: classifier(metrics=["accuracy", keras.metrics.MeanIoU(3, sparse_y_pred=False)]), fit_and_evaluate(classes)),
    },
    "Ways of training": {
        "run_eagerly": Row(lambda: mlp(opt.Adam(0.01, global_clipnorm=0.1), run_eagerly=True), fit()),
        "jit_compile": Row(lambda: mlp(jit_compile=True), fit(), refused="jit_compile=True"),
        "subclassed model": Row(cases.subclassed, fit_and_evaluate()),
        "custom train_step": Row(cases.own_train_step, fit_and_evaluate()),
        "custom train_step, loss not scaled": Row(lambda: cases.own_train_step(scales=False), steps),
        "custom train_step and test_step": Row(cases.own_loss_object, fit_and_evaluate()),
        "custom train_step, custom logs": Row(cases.own_logs, fit()),
        "custom train_step, trackers and losses logged": Row(cases.own_trackers, fit_and_evaluate(), lowest=True),
        "custom compute_loss": Row(cases.own_compute_loss, fit_and_evaluate()),
        "fit, evaluate, fit": Row(mlp, uses.fit_evaluate_fit),
        "compiled again": Row(mlp, uses.compiled_twice),
        "train_on_batch, test_on_batch, predict_on_batch": Row(lambda: mlp(metrics=["mae", keras.metrics.TruePositives(thresholds=0.1)]), uses.on_batches, lowest=True),
        "predict": Row(lambda: cases.normalized(False), predict(lambda: batches(IMAGES, samples=21))),
        "predict with a short tail, after training on even batches": Row(lambda: images(lay.MaxPooling2D(2)), uses.fit_evenly_and_predict),
        "predict, steps_per_execution": Row(lambda: mlp(steps_per_execution=2), predict(lambda: X, batch_size=10)),
    },
}
# fmt: on
