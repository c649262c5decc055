"""A folder of texts, vectorized by a `TextVectorization` layer in the pipeline"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
rng = np.random.default_rng(0)
words = np.array([f"word{number}" for number in range(300)])
for label in ("good", "bad"):
    (folder / "texts" / label).mkdir(parents=True, exist_ok=True)
    for number in range(14):
        text = " ".join(rng.choice(words, 20))
        (folder / "texts" / label / f"review_{number:04d}.txt").write_text(text)

keras.utils.set_random_seed(1)
texts = keras.utils.text_dataset_from_directory(
    folder / "texts", batch_size=4, seed=3, verbose=False
)
vectorize = keras.layers.TextVectorization(max_tokens=200, output_sequence_length=16)
vectorize.adapt(texts.map(lambda text, label: text))
train = texts.map(lambda text, label: (vectorize(text), label))
model = keras.Sequential(
    [
        keras.layers.Embedding(200, 4),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=2))
