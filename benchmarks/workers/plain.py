"""A script that `recovery.py` runs in a shell loop: FOLDER WORKER EVERY FAULT [FAULT ...]"""

from __future__ import annotations

import sys
from pathlib import Path

from events import SAVE_EVERY, Events

folder, hit, every, faults = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
events = Events(folder)

import keras  # noqa: E402
from recovering import Batches, Harm, build  # noqa: E402

harm = Harm(events, hit, every, faults)
build().fit(
    Batches(harm),
    epochs=every * len(faults) + 1,
    shuffle=False,
    verbose=0,
    callbacks=[harm, keras.callbacks.BackupAndRestore(str(folder / "run"), save_freq=SAVE_EVERY)],
)
