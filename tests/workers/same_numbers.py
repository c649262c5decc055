"""Trains, evaluates and predicts; the results must not depend on the number of workers.

    python same_numbers.py MODE OUT_FOLDER

MODE: reference (plain Keras), plain_fit (under a strategy created by the script), evaluate_first
(the same under that of `kd.init()`), outside_scope, builder, made_first, made_first_arrays.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

mode, folder = sys.argv[1], Path(sys.argv[2])

if mode == "reference":
    from support import digits_like as case

    model = case.build()
    history = model.fit(
        case.dataset(), epochs=case.EPOCHS, validation_data=case.dataset(70), verbose=0
    )
    evaluated = model.evaluate(case.dataset(), verbose=0, return_dict=True)
    predicted = model.predict(case.dataset(), verbose=0)
    worker = 0
else:
    import json

    import tensorflow as tf

    import keras_distplug as kd

    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    runs = folder / f"run-{mode}"
    if mode == "plain_fit":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    elif not mode.startswith("made_first"):
        strategy = kd.init()

    from support import digits_like as case

    if mode in ("plain_fit", "evaluate_first"):
        with strategy.scope():
            model = case.build()
        if mode == "evaluate_first":
            model.evaluate(case.dataset(), verbose=0)
        history = model.fit(
            case.dataset(),
            epochs=case.EPOCHS,
            validation_data=case.dataset(70),
            verbose=0,
            callbacks=kd.defaults(runs),
        )
    elif mode == "outside_scope":
        model = case.build()
        x, y, w = case.arrays()
        history = kd.distributed_fit(
            model,
            x,
            y,
            batch_size=case.GLOBAL_BATCH,
            sample_weight=w,
            shuffle=False,
            epochs=case.EPOCHS,
            validation_data=tuple(part[:70] for part in (x, y, w)),
            directory=runs,
        )
    elif mode == "builder":
        history = kd.distributed_fit(
            case.build,
            case.dataset,
            epochs=case.EPOCHS,
            validation_data=lambda: case.dataset(70),
            directory=runs,
        )
        model = history.model
    elif mode == "made_first":
        model = case.build()
        history = kd.distributed_fit(
            model,
            case.dataset(),
            epochs=case.EPOCHS,
            validation_data=case.dataset(70),
            directory=runs,
        )
    elif mode == "made_first_arrays":
        model = case.build()
        x, y, w = case.arrays()
        history = kd.distributed_fit(
            model,
            x,
            y,
            batch_size=case.GLOBAL_BATCH,
            sample_weight=w,
            shuffle=False,
            epochs=case.EPOCHS,
            validation_data=case.dataset(70),
            directory=runs,
        )
    evaluated = model.evaluate(case.dataset(), verbose=0, return_dict=True)
    predicted = model.predict(case.dataset(), verbose=0)
case.write_outcome(
    folder / f"{mode}-{worker}.npz", model, history, evaluated=evaluated, predicted=predicted
)
