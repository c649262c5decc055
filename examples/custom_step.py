"""A custom `train_step` that learns the same on two replicas as on one.

    python examples/custom_step.py

trains a network on handwritten digits whose outputs change little when a picture changes little: in
addition to the loss, it minimizes the gradient of the loss with respect to the pictures (Drucker
and Le Cun, 1992, "Improving generalization performance using double backpropagation"), which
requires a custom `train_step`. It trains twice, on one device and on two, and compares the weights:
they differ by at most 1e-5. Without the division by the number of replicas, they differ by 0.5.

The two devices are halves of this machine's CPU, or its GPUs if it has several. Batches do not
divide evenly: the last one of an epoch is smaller, and the replicas' parts of it differ.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import digits
import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

EPOCHS, BATCH = 6, 64
SAMPLES = 3000  # of MNIST, if installed; the other data set is smaller
WEIGHT = 0.5  # of the penalty


class Smooth(keras.Model):
    """A model that is trained with a penalty on the gradient of its loss by its inputs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.penalty = keras.metrics.Mean(name="penalty")

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred, slopes = self.with_slopes(x, y, training=True)
            # The result of `compute_loss`, or of an object of `keras.losses`, is already a mean
            # over the global batch. A loss that you compute yourself is a mean over this replica's
            # samples, and the gradients of all replicas are summed: divide it by their number.
            loss = self.compute_loss(x, y, y_pred, sample_weight)
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            whole = loss + WEIGHT * keras.ops.mean(slopes) / replicas
            scaled = self.optimizer.scale_loss(whole)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)

        return self.logs(y, y_pred, sample_weight, loss, slopes)

    def test_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred, slopes = self.with_slopes(x, y, training=False)
        loss = self.compute_loss(x, y, y_pred, sample_weight, training=False)
        return self.logs(y, y_pred, sample_weight, loss, slopes)

    def with_slopes(self, x, y, training):
        """Returns the outputs and, per sample, the squared norm of its loss's gradient."""
        with tf.GradientTape() as tape:
            tape.watch(x)
            y_pred = self(x, training=training)
            of_samples = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        gradient = tape.gradient(of_samples, x)
        return y_pred, keras.ops.sum(keras.ops.square(gradient), axis=(1, 2, 3))

    def logs(self, y, y_pred, sample_weight, loss, slopes):
        # Pass a metric either per-sample values or an unmodified loss: then it is correct on any
        # number of replicas. It would not be for a sum of losses.
        self.penalty.update_state(slopes)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            elif metric is not self.penalty:
                metric.update_state(y, y_pred, sample_weight)
        return self.get_metrics_result()


def build(shape: tuple[int, ...]) -> Smooth:
    keras.utils.set_random_seed(7)
    inputs = keras.Input(shape)
    x = keras.layers.Conv2D(16, 3, activation="gelu")(inputs)
    x = keras.layers.Flatten()(x)
    model = Smooth(inputs, keras.layers.Dense(10)(x))
    model.compile(
        optimizer=keras.optimizers.Adam(0.005),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main(directory: Path) -> None:
    if len(tf.config.list_physical_devices("GPU")) < 2:
        cpu = tf.config.list_physical_devices("CPU")[0]
        halves = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, halves)

    train, test = (tuple(array[:SAMPLES] for array in part) for part in digits.load())
    weights = {}
    for strategy in ("one_device", "mirrored"):
        history = kd.distributed_fit(
            lambda: build(train[0].shape[1:]),
            *train,
            batch_size=BATCH,
            epochs=EPOCHS,
            shuffle=False,  # otherwise every run would use a different order
            validation_data=test,
            strategy=strategy,
            directory=directory / strategy,
            verbose=2,
        )
        weights[strategy] = history.model.get_weights()
        last = {name: values[-1] for name, values in history.history.items()}
        print(
            f"{strategy}: {history.model.distribute_strategy.num_replicas_in_sync} replica(s), "
            f"validation accuracy {last['val_accuracy']:.4f}, penalty {last['val_penalty']:.4f}",
            flush=True,
        )
    pairs = zip(weights["one_device"], weights["mirrored"], strict=True)
    difference = max(np.abs(one - two).max() / np.abs(one).max() for one, two in pairs)
    print(f"largest difference of weights: {difference:.1e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("runs/custom_step"))
    main(parser.parse_args().directory)
