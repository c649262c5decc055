"""Tar shards of WebDataset, through a torch `DataLoader`"""

import io
import sys
import tarfile
from pathlib import Path

import keras
import numpy as np
import torch
import webdataset as wds

import keras_distplug as kd

folder = Path(sys.argv[1])
rng = np.random.default_rng(0)
for shard in range(4):
    with tarfile.open(folder / f"shard-{shard}.tar", "w") as tar:
        for number in range(8):
            stored = io.BytesIO()
            np.save(stored, rng.normal(size=4).astype("float32"))
            member = tarfile.TarInfo(f"{shard}{number}.npy")
            member.size = stored.tell()
            stored.seek(0)
            tar.addfile(member, stored)

keras.utils.set_random_seed(1)
torch.manual_seed(2)
shards = wds.WebDataset(
    [str(folder / f"shard-{n}.tar") for n in range(4)], shardshuffle=4, seed=5, empty_check=False
)
samples = (
    shards.shuffle(16, seed=3)
    .decode()
    .to_tuple("npy")
    .map(lambda x: (x[0], x[0].sum(keepdims=True)))
)
train = torch.utils.data.DataLoader(samples, batch_size=8)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=2))
