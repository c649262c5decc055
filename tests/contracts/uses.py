"""Uses of a row's model. They return named arrays that must not depend on the replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from contracts import cases
from contracts.cases import GLOBAL_BATCH, SAMPLES, X, Y
from support.lazily import Lazily

keras: Any = Lazily("keras")
tf: Any = Lazily("tensorflow")

Outcome = Mapping[str, Any]
Use = Callable[[Any], Outcome]


def outcome(model: Any, **others: Any) -> Outcome:
    """Returns the state of a model and additional values as a flat mapping."""
    optimizers = [v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer)]
    parts = {
        "weight": [v.numpy() for v in model.weights],
        "optimizer": [v.numpy() for each in optimizers for v in each.variables],
        **others,
    }
    return {
        f"{name}/{place:02d}": np.asarray(value)
        for name, part in parts.items()
        for place, value in enumerate(keras.tree.flatten(part))
    }


def steps(model: Any) -> Outcome:
    """Calls `train_on_batch` for all batches: the train function, without a dataset."""
    logs = [
        model.train_on_batch(X[start : start + GLOBAL_BATCH], Y[start : start + GLOBAL_BATCH])
        for start in range(0, SAMPLES, GLOBAL_BATCH)
    ]
    return outcome(model, logs=logs)


def steps_of_weights(model: Any) -> Outcome:
    """Runs `steps` and returns only the weights: under a strategy, Keras builds an optimizer for
    all weights, otherwise for those that it gets."""
    return {name: value for name, value in steps(model).items() if name.startswith("weight")}


def fit(data: Callable[[], Any] = cases.batches, **arguments: Any) -> Use:
    """Returns a use that calls `fit`, by default for one epoch."""

    def use(model: Any) -> Outcome:
        given = {"epochs": 1, "verbose": 0, **arguments}
        given = {k: v() if callable(v) else v for k, v in given.items()}
        history = model.fit(data(), **given)
        return outcome(model, **{f"history {k}": v for k, v in history.history.items()})

    return use


def fit_arrays(*arrays: Any, **arguments: Any) -> Use:
    def use(model: Any) -> Outcome:
        history = model.fit(
            *(arrays or (X, Y)),
            batch_size=GLOBAL_BATCH,
            shuffle=False,
            verbose=0,
            **arguments,
        )
        return outcome(model, **{f"history {k}": v for k, v in history.history.items()})

    return use


def fit_and_evaluate(data: Callable[[], Any] = cases.batches) -> Use:
    def use(model: Any) -> Outcome:
        fitted = fit(data)(model)
        found = model.evaluate(data(), verbose=0, return_dict=True)
        return {**fitted, **{f"evaluate {k}": np.asarray(v) for k, v in found.items()}}

    return use


def of_own_arrays(use: Use) -> Use:
    """Returns a use that also checks that the arrays underlying the data stay unchanged."""
    return lambda model: {**use(model), "x": X.copy(), "y": Y.copy()}


def evaluate(data: Callable[[], Any] = cases.batches) -> Use:
    def use(model: Any) -> Outcome:
        found = model.evaluate(data(), verbose=0, return_dict=True)
        return {k: np.asarray(v) for k, v in found.items()}

    return use


def predict(data: Callable[[], Any], **arguments: Any) -> Use:
    def use(model: Any) -> Outcome:
        found = model.predict(data(), verbose=0, **arguments)
        return {str(n): value for n, value in enumerate(keras.tree.flatten(found))}

    return use


def fit_evenly_and_predict(model: Any) -> Outcome:
    """Trains with samples on every replica, and then uses data that leave a replica without any."""
    cases_of = (cases.IMAGES, cases.Y)
    fit(lambda: cases.batches(*cases_of, samples=20))(model)
    predicted = predict(lambda: cases.batches(cases.IMAGES, samples=21))(model)
    evaluated = evaluate(lambda: cases.batches(*cases_of, samples=21))(model)
    trained = fit(lambda: cases.batches(*cases_of, samples=21))(model)
    return {"predicted": predicted["0"], "loss": evaluated["loss"], **trained}


def on_batches(model: Any) -> Outcome:
    """Calls the three methods with an even batch, an uneven one and a single sample."""
    found: dict[str, Any] = {}
    for samples in (10, 7, 1):
        x, y = X[:samples], Y[:samples]
        found[f"train {samples}"] = model.train_on_batch(x, y)
        found[f"test {samples}"] = model.test_on_batch(x, y)
        found[f"predict {samples}"] = model.predict_on_batch(x)
    return outcome(model, **found)


def fit_evaluate_fit(model: Any) -> Outcome:
    """Calls `fit`, `evaluate` and again `fit`, which continues from the first."""
    first = fit()(model)
    evaluated = evaluate()(model)
    second = fit()(model)
    return {
        f"{n} {k}": v for n, part in enumerate((first, evaluated, second)) for k, v in part.items()
    }


def compiled_twice(model: Any) -> Outcome:
    fit()(model)
    with model.distribute_strategy.scope():
        cases.switch_compiled(model)
    return fit_and_evaluate()(model)


def stays_finite(model: Any) -> Outcome:
    """Checks that weights stay finite if a replica without samples has no statistics."""
    fit(lambda: cases.batches(cases.IMAGES, Y, samples=21))(model)
    return {"finite": np.array([np.isfinite(v.numpy()).all() for v in model.weights])}


def overflow(model: Any) -> Outcome:
    """Makes the loss scale overflow in the first steps, and on only one replica in the last."""
    steps(model)
    x = X[:GLOBAL_BATCH].copy()
    x[0] = 3e38
    logs = model.train_on_batch(x, Y[:GLOBAL_BATCH])
    return outcome(model, finite=[np.isfinite(logs).all()])


def random_numbers(model: Any) -> Outcome:
    """Returns, per layer, how many replicas draw different numbers, and if these are repeatable."""
    strategy = model.distribute_strategy
    found: dict[str, Any] = {}
    for layers, shape in ((model.on_sequences, (8, 5, 4)), (model.on_images, (8, 6, 6, 2))):
        x = tf.constant(np.random.default_rng(1).uniform(size=shape), "float32")
        for layer in layers:

            def draw(layer: Any = layer, x: Any = x) -> Any:
                drawn = strategy.run(lambda: layer(x, training=True))
                whole = strategy.gather(drawn, axis=0).numpy()
                return whole.reshape(strategy.num_replicas_in_sync, -1)

            state = [v for v in layer.variables if "seed" in v.path]
            before = [v.numpy() for v in state]
            first, second = draw(), draw()
            for variable, value in zip(state, before, strict=True):
                variable.assign(value)
            found[layer.name] = [
                len({row.tobytes() for row in first}),
                (draw() == first).all(),
                (first == second).all(),
            ]
    return {name: np.array(values) for name, values in found.items()}
