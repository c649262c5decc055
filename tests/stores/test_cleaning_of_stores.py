"""In every store, an intact checkpoint is kept if its intended replacement is damaged."""

from __future__ import annotations

import numpy as np
import pytest
from storage.checkpoints import RUN, Checkpoints
from stores.servers import Place

from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.storage.files import open_files

pytestmark = [pytest.mark.stores, pytest.mark.timeout(300)]


def state(step: int) -> TrainState:
    return TrainState(Cursor(0, 0, step), {"a": np.full(9, step, np.float32)})


@pytest.mark.parametrize("restarted", [False, True])
def test_damaged_before_the_newest(place: Place, restarted: bool) -> None:
    """A checkpoint that lost a file is quarantined, and the previous one is kept and intact."""
    other, saving = (open_files(place.url, place.options) for _ in range(2))
    checkpoints = Checkpoints(saving)
    for step in (1, 2):
        checkpoints.save(state(step))
    [attempt] = [name for name in other.names(f"{RUN}/step-00000002") if "." not in name]
    other.delete(f"{RUN}/step-00000002/{attempt}")
    if restarted:
        checkpoints = Checkpoints(open_files(place.url, place.options))
    with pytest.warns(UserWarning, match="step-00000002 is quarantined"):
        checkpoints.save(state(3))
    assert other.names(f"{RUN}/step-00000002") == ["DAMAGED.json", "MANIFEST.json"]
    reader = Checkpoints(open_files(place.url, place.options))
    assert reader.committed("step") == ["step-00000001", "step-00000003"]
    for name in reader.committed("step"):
        reader.verify(name)


def test_marked_or_deleted_meanwhile(place: Place) -> None:
    """A checkpoint that another process marks as damaged, or deletes, does not count as one that is
    kept."""
    other = open_files(place.url, place.options)
    checkpoints = Checkpoints(open_files(place.url, place.options))
    for step in (1, 2, 3):
        checkpoints.save(state(step))
    other.create(f"{RUN}/step-00000003/DAMAGED.json", [b"{}"])
    checkpoints.save(state(4))
    other.delete(f"{RUN}/step-00000004")
    checkpoints.save(state(5))
    assert other.names(RUN) == ["step-00000002", "step-00000003", "step-00000005"]
