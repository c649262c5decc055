"""TFRecord shards, read with `interleave` and a shuffled list of files"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
rng = np.random.default_rng(0)
for shard in range(30):
    name = folder / f"training-data-of-the-year-2026-{shard:05d}-of-00030.tfrecord"
    with tf.io.TFRecordWriter(str(name)) as writer:
        row = tf.io.serialize_tensor(rng.normal(size=4).astype("float32")).numpy()
        feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[row]))
        features = tf.train.Features(feature={"x": feature})
        writer.write(tf.train.Example(features=features).SerializeToString())


def parse(record):
    parsed = tf.io.parse_single_example(record, {"x": tf.io.FixedLenFeature([], tf.string)})
    x = tf.ensure_shape(tf.io.parse_tensor(parsed["x"], tf.float32), [4])
    return x, tf.reduce_sum(x, keepdims=True)


keras.utils.set_random_seed(1)
files = tf.data.Dataset.list_files(str(folder / "*.tfrecord"), seed=2)
train = files.interleave(tf.data.TFRecordDataset, cycle_length=3, num_parallel_calls=2)
train = train.map(parse, num_parallel_calls=2).shuffle(10, seed=4).batch(4)
train = train.apply(tf.data.experimental.assert_cardinality(8)).prefetch(2)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=2))
