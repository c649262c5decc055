"""Time limits of the stages of training."""

from __future__ import annotations

from keras_distplug.hang.patience import Patience, Stage


def test_floors() -> None:
    """Before anything was measured, and after fast stages, the limits are generous."""
    patience = Patience({})
    patience.record_duration(Stage.STEP, 0.01)
    assert patience.limits_s[Stage.FIRST_STEP] == 3600
    assert patience.limits_s[Stage.STEP] == 300
    assert patience.limits_s[Stage.BETWEEN] == 3600


def test_five_times_the_longest() -> None:
    """A stage may take five times as long as its longest so far."""
    patience = Patience({})
    patience.record_duration(Stage.STEP, 90)
    patience.record_duration(Stage.STEP, 70)
    assert patience.limits_s[Stage.STEP] == 450
    assert patience.limits_s[Stage.VALIDATION_STEP] == 300


def test_later_steps_may_be_traced_again() -> None:
    """A later step may be traced again."""
    patience = Patience({})
    patience.record_duration(Stage.FIRST_STEP, 100)
    patience.record_duration(Stage.FIRST_VALIDATION_STEP, 200)
    assert patience.limits_s[Stage.STEP] == 500
    assert patience.limits_s[Stage.VALIDATION_STEP] == 1000


def test_user_limits() -> None:
    """Limits set by the user apply."""
    patience = Patience({Stage.STEP: 7.0})
    patience.record_duration(Stage.FIRST_STEP, 100)
    assert patience.limits_s[Stage.STEP] == 7
