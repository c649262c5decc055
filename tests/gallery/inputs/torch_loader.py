"""A shuffling torch `DataLoader` with random augmentation"""

import sys
from pathlib import Path

import keras
import torch

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
torch.manual_seed(2)


class Noisy(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(32, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return x + 0.1 * torch.randn(4), x.sum(0, keepdim=True)


train = torch.utils.data.DataLoader(Noisy(), batch_size=8, shuffle=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=2))
