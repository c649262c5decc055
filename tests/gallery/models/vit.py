"""A vision transformer: custom layers, augmentation in the model, `ModelCheckpoint`"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class PatchEncoder(keras.layers.Layer):
    def __init__(self, num_patches, projection_dim):
        super().__init__()
        self.num_patches = num_patches
        self.projection = keras.layers.Dense(projection_dim)
        self.position = keras.layers.Embedding(num_patches, projection_dim)

    def call(self, images):
        patches = keras.ops.image.extract_patches(images, 4)
        patches = keras.ops.reshape(patches, (-1, self.num_patches, 4 * 4 * 3))
        return self.projection(patches) + self.position(keras.ops.arange(self.num_patches))


rng = np.random.default_rng(0)
x, y = rng.random((80, 16, 16, 3), "float32"), rng.integers(0, 4, (80, 1))
augmentation = keras.Sequential(
    [
        keras.layers.Normalization(),
        keras.layers.RandomFlip("horizontal"),
        keras.layers.RandomRotation(0.02),
        keras.layers.RandomZoom(0.2, 0.2),
    ]
)
augmentation.layers[0].adapt(x)
inputs = keras.Input((16, 16, 3))
encoded = PatchEncoder(16, 8)(augmentation(inputs))
for _ in range(2):
    h = keras.layers.LayerNormalization(epsilon=1e-6)(encoded)
    h = keras.layers.MultiHeadAttention(num_heads=2, key_dim=8, dropout=0.1)(h, h)
    encoded = keras.layers.Add()([h, encoded])
    h = keras.layers.LayerNormalization(epsilon=1e-6)(encoded)
    h = keras.layers.Dropout(0.1)(keras.layers.Dense(8, activation=keras.activations.gelu)(h))
    encoded = keras.layers.Add()([h, encoded])
h = keras.layers.Flatten()(keras.layers.LayerNormalization(epsilon=1e-6)(encoded))
model = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Dropout(0.5)(h)))
model.compile(
    optimizer=keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-4),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[
        keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
        keras.metrics.SparseTopKCategoricalAccuracy(2, name="top-2-accuracy"),
    ],
)
best = keras.callbacks.ModelCheckpoint(
    folder / "best.weights.h5", monitor="val_accuracy", save_best_only=True, save_weights_only=True
)
history = model.fit(
    x,
    y,
    batch_size=8,
    epochs=3,
    validation_split=0.2,
    verbose=0,
    callbacks=[best, *kd.defaults(folder / "run", save_freq=4)],
)
