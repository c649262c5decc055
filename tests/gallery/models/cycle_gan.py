"""A CycleGAN: four networks and four optimizers, a persistent tape, two zipped datasets"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


def generator(name):
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3, padding="same", use_bias=False),
            keras.layers.GroupNormalization(groups=-1),
            keras.layers.ReLU(),
            keras.layers.Conv2D(3, 3, padding="same", activation="tanh"),
        ],
        name=name,
    )


def discriminator(name):
    layers = [keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 4, strides=2, activation="relu")]
    return keras.Sequential([*layers, keras.layers.Conv2D(1, 2)], name=name)


class CycleGAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.gen_G, self.gen_F = generator("gen_G"), generator("gen_F")
        self.disc_X, self.disc_Y = discriminator("disc_X"), discriminator("disc_Y")

    def call(self, inputs):
        return self.disc_X(inputs), self.disc_Y(inputs), self.gen_G(inputs), self.gen_F(inputs)

    def compile(self, gen_G_optimizer, gen_F_optimizer, disc_X_optimizer, disc_Y_optimizer):
        super().compile()
        self.gen_G_optimizer, self.gen_F_optimizer = gen_G_optimizer, gen_F_optimizer
        self.disc_X_optimizer, self.disc_Y_optimizer = disc_X_optimizer, disc_Y_optimizer
        self.distance = keras.losses.MeanAbsoluteError()
        self.adversarial = keras.losses.MeanSquaredError()

    def real_or_not(self, real, fake):
        is_real = self.adversarial(tf.ones_like(real), real)
        return 0.5 * (is_real + self.adversarial(tf.zeros_like(fake), fake))

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.gen_G(x, training=True), self.gen_F(y, training=True)
            cycle_x, cycle_y = self.gen_F(fake_y), self.gen_G(fake_x)
            judged_x, judged_y = self.disc_X(fake_x), self.disc_Y(fake_y)
            cycles = 10.0 * (self.distance(x, cycle_x) + self.distance(y, cycle_y))
            losses = {
                "G": self.adversarial(tf.ones_like(judged_y), judged_y) + cycles,
                "F": self.adversarial(tf.ones_like(judged_x), judged_x) + cycles,
                "D_X": self.real_or_not(self.disc_X(x), judged_x),
                "D_Y": self.real_or_not(self.disc_Y(y), judged_y),
            }
        networks = (self.gen_G, self.gen_F, self.disc_X, self.disc_Y)
        optimizers = (self.gen_G_optimizer, self.gen_F_optimizer)
        optimizers += (self.disc_X_optimizer, self.disc_Y_optimizer)
        for loss, network, optimizer in zip(losses.values(), networks, optimizers, strict=True):
            weights = network.trainable_variables
            gradients = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return losses


rng = np.random.default_rng(0)
horses, zebras = (rng.uniform(-1, 1, (32, 8, 8, 3)).astype("float32") for _ in range(2))
horses = tf.data.Dataset.from_tensor_slices(horses).cache().shuffle(32).batch(4)
zebras = tf.data.Dataset.from_tensor_slices(zebras).cache().shuffle(32).batch(4)
model = CycleGAN()
model.compile(*(keras.optimizers.Adam(2e-3, beta_1=0.5) for _ in range(4)))
history = model.fit(
    tf.data.Dataset.zip((horses, zebras)),
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
