"""`fit` on a torch DataLoader: random states are restored, wherever they are."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
torch = pytest.importorskip("torch", reason="pip install torch")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402

data = torch.utils.data
EPOCHS, SAMPLES, BATCH = 3, 30, 8
X = torch.from_numpy(np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype("float32"))


def labelled(x: Any) -> tuple[Any, Any]:
    return x, x.sum(-1, keepdim=True)


def seeded(seed: int = 5) -> Any:
    return torch.Generator().manual_seed(seed)


class Rows(data.Dataset):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.generator = seeded(7)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return labelled(X[index] + self.noise())

    def noise(self) -> Any:
        return 0.0


class NoisyFromGlobals(Rows):
    def noise(self) -> Any:
        return torch.randn(4) * random.random() * np.float32(np.random.normal())


class NoisyByItself(Rows):
    def noise(self) -> Any:
        return torch.randn(4, generator=self.generator) * np.float32(self.rng.normal())


class Augment:
    def __init__(self) -> None:
        self.rng, self.calls = np.random.default_rng(1), 0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return x + np.float32(self.rng.normal() * self.calls)


class Augmented(Rows):
    """Draws in its own object."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = Augment()

    def noise(self) -> Any:
        return self.transform(torch.zeros(4))


def mixing() -> Callable[[Any], Any]:
    """Returns a `collate_fn` that draws, as for mixup."""
    rng = np.random.default_rng(2)

    def collate(samples: Any) -> Any:
        x, _ = data.default_collate(samples)
        mixed = rng.permutation(len(x))
        share = np.float32(rng.beta(0.4, 0.4))
        return labelled(share * x + (1 - share) * x[mixed])

    return collate


class Stream(data.IterableDataset):
    def __init__(self, length: int | None = None) -> None:
        self.length = length
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for index in range(SAMPLES):
            yield labelled(X[index] + torch.randn(4) * self.passes)


class SizedStream(Stream):
    def __len__(self) -> int:
        return SAMPLES


class Shuffler(data.Sampler):
    """A typical custom sampler: shuffles its own indices in place, and counts passes."""

    def __init__(self) -> None:
        self.indices = torch.arange(SAMPLES)
        self.order = list(range(SAMPLES))
        self.passes = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        random.shuffle(self.order)
        self.indices.copy_(self.indices[torch.randperm(SAMPLES)])
        yield from ((int(self.indices[n]) + self.passes) % SAMPLES for n in self.order)


def weighted() -> Any:
    return data.WeightedRandomSampler([1.0 + n % 3 for n in range(SAMPLES)], SAMPLES)


def batches_of_buckets() -> Any:
    return data.BatchSampler(Shuffler(), BATCH, drop_last=True)


def subset() -> Any:
    return data.Subset(data.ConcatDataset([NoisyByItself(), Rows()]), range(5, 37))


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: data.DataLoader(Rows(), BATCH),
    "own generator": lambda: data.DataLoader(Rows(), BATCH, shuffle=True, generator=seeded()),
    "global generator": lambda: data.DataLoader(Rows(), BATCH, shuffle=True, drop_last=True),
    "draws from globals": lambda: data.DataLoader(NoisyFromGlobals(), BATCH, shuffle=True),
    "draws itself": lambda: data.DataLoader(subset(), BATCH, shuffle=True),
    "draws in an object": lambda: data.DataLoader(Augmented(), BATCH, shuffle=True),
    "draws in collate_fn": lambda: data.DataLoader(Rows(), BATCH, collate_fn=mixing()),
    "weighted": lambda: data.DataLoader(Rows(), BATCH, sampler=weighted()),
    "own sampler": lambda: data.DataLoader(Rows(), BATCH, sampler=Shuffler()),
    "batch sampler": lambda: data.DataLoader(Rows(), batch_sampler=batches_of_buckets()),
    "stream": lambda: data.DataLoader(Stream(), BATCH),
    "sized stream": lambda: data.DataLoader(SizedStream(), BATCH),
    "workers": lambda: data.DataLoader(NoisyFromGlobals(), BATCH, shuffle=True, num_workers=2),
}
VALIDATED = {
    "validated": ("in order", "draws from globals"),
    "both draw": ("own generator", "draws itself"),
}
STEPS = {"fewer steps": ("own generator", 2)}


class StopAtEnd(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise small.Interrupted


class Draws(keras.callbacks.Callback):
    """Also draws from the global generator between epochs."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        torch.randn(1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["drawn"] = float(torch.randn(1)) + random.random()


def fit(name: str, *callbacks: keras.callbacks.Callback) -> tuple[list[bytes], object]:
    torch.manual_seed(11)
    name, steps = STEPS.get(name, (name, None))
    name, validation = VALIDATED.get(name, (name, None))
    model = small.model()
    history = model.fit(
        LOADERS[name](),
        epochs=EPOCHS,
        steps_per_epoch=steps,
        validation_data=validation and LOADERS[validation](),
        verbose=0,
        callbacks=[Draws(), *callbacks],
    )
    return small.state(model), history.history


def backup(folder: Path) -> keras.callbacks.Callback:
    return kd.BackupAndRestore(folder, save_freq=1, on_busy="wait", delete_checkpoint=False)


@pytest.mark.parametrize("name", [*LOADERS, *VALIDATED, *STEPS])
def test_interrupted(name: str, tmp_path: Path) -> None:
    """Uninterrupted, it trains like plain Keras; also if interrupted in an epoch, after its last
    batch or between epochs, and resumed. No warnings appear."""
    plain = fit(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot", category=UserWarning)
        whole = fit(name, backup(tmp_path / "whole"))
    if name == "stream":  # of unknown length: see `empty_batches`
        plain = whole
    assert whole == plain
    stops = {"in": small.Stop(1, 1), "behind": StopAtEnd(), "between": small.Stop(2, 0)}
    for place, stop in stops.items():
        with pytest.raises(small.Interrupted):
            fit(name, backup(tmp_path / place), stop)
        assert fit(name, backup(tmp_path / place)) == plain, place


def test_distributed_fit(tmp_path: Path) -> None:
    """The same on two replicas, which read ahead."""

    def train(folder: str, *callbacks: keras.callbacks.Callback) -> list[bytes]:
        torch.manual_seed(11)
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            model = small.model()
        callbacks = (backup(tmp_path / folder), *callbacks)
        loader = LOADERS["draws from globals"]()
        kd.distributed_fit(model, loader, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        return small.state(model)

    whole = train("whole")
    for place, stop in {"in": small.Stop(1, 1), "between": small.Stop(2, 0)}.items():
        with pytest.raises(small.Interrupted):
            train(place, stop)
        assert train(place) == whole, place
