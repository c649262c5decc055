"""Replacement of errors of `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import tensorflow as tf  # noqa: E402
from keras.src.utils.traceback_utils import filter_traceback  # noqa: E402
from support import small  # noqa: E402

from keras_distplug.backend.tensorflow.runtime import failures, private_names  # noqa: E402

METHODS = ("fit", "evaluate", "predict")


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns Keras' class, with methods that fail."""

    def failing(self: Any, error: Exception, **_: Any) -> None:
        """Trains."""
        raise error

    for name in METHODS:
        monkeypatch.setattr(private_names.Trainer, name, failing)
    return private_names.Trainer


@pytest.mark.parametrize("method", METHODS)
def test_method_looked_up_earlier(
    method: str, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors are replaced even if the method was looked up before, as in `model.fit(...,
    callbacks=defaults())`, also if another library has wrapped it."""
    stock = getattr(trainer, method)
    filtered = filter_traceback(lambda *given, **named: stock(*given, **named))
    monkeypatch.setattr(trainer, method, functools.wraps(filtered)(lambda *given: filtered(*given)))
    call = getattr(small.model(), method)
    followed: list[Any] = []
    failures.explain_with(lambda error, strategy: RuntimeError("explained"))
    failures.when_fit_ends(followed.append)
    with pytest.raises(RuntimeError, match="explained"):
        call(ValueError("x"))
    assert len(followed) == (method == "fit")


@pytest.mark.parametrize("method", METHODS)
def test_explained(method: str, trainer: Any) -> None:
    """The replacement is raised from the original error, and the function gets the model's
    strategy; other errors are unchanged. The methods keep their metadata."""
    asked: list[Any] = []

    def explain(error: Exception, strategy: Any) -> Exception | None:
        asked.append(strategy)
        return RuntimeError("explained") if isinstance(error, ValueError) else None

    failures.explain_with(explain)
    failures.explain_with(lambda error, strategy: pytest.fail("there is one already"))
    model = small.model()
    with pytest.raises(RuntimeError, match="explained") as raised:
        getattr(model, method)(error := ValueError("x"))
    assert raised.value.__cause__ is error
    with pytest.raises(KeyError) as passed:
        getattr(model, method)(other := KeyError("x"))
    assert passed.value is other
    assert asked == [tf.distribute.get_strategy()] * 2
    assert getattr(trainer, method).__doc__ == "Trains."
