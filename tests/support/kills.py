"""The random times at which `workers/exact.py` is killed."""

from __future__ import annotations

import random

from support import fault

EPOCHS, BATCHES, VALIDATION_BATCHES = 5, 7, 3
WAYS = (fault.kill, fault.vanish, fault.error)


def drawn(seed: int, kills: int, workers: int) -> list[fault.Fault]:
    """Draws kills in the order in which they can occur."""
    draw = random.Random(seed)
    moments: list[tuple[fault.Moment, int, int]] = [
        *(("step", e, b) for e in range(EPOCHS) for b in range(BATCHES)),
        *(("saving", e, b) for e in range(EPOCHS) for b in range(BATCHES)),
        *(("validation", e, BATCHES - 1) for e in range(EPOCHS) for _ in range(VALIDATION_BATCHES)),
        *(("epoch", e, BATCHES - 1) for e in range(EPOCHS)),
        # First and last batches are drawn more often.
        *(("step", e, b) for e in range(EPOCHS) for b in (0, BATCHES - 1)),
    ]
    order = {"step": 0, "saving": 1, "validation": 2, "epoch": 3}
    chosen = sorted(draw.sample(moments, kills), key=lambda m: (m[1], m[2], order[m[0]]))
    return [
        draw.choice(WAYS)(draw.randrange(workers), epoch * BATCHES + batch, moment)
        for moment, epoch, batch in chosen
    ]
