"""Assignments that a step makes are recorded, so that it can be reverted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import keras
import pytest

from keras_distplug.backend.tensorflow.replicas import gates

pytestmark = pytest.mark.tf


def test_threads() -> None:
    """Steps may be traced in several threads, in any order: all record their own assignments."""
    ours, theirs = (keras.Variable(1.0, trainable=False) for _ in range(2))
    recording = gates.recorded_assignments()
    with ThreadPoolExecutor(1) as thread:
        their_record = thread.submit(recording.__enter__).result()
        with gates.recorded_assignments() as record:
            thread.submit(theirs.assign, 2.0).result()
            thread.submit(recording.__exit__, None, None, None).result()
            ours.assign(3.0)
            theirs.assign(4.0)
    ours.assign(5.0)
    assert [float(value) for _, value in record.list_previous()] == [2.0, 1.0]
    assert [float(value) for _, value in their_record.list_previous()] == [1.0]


def test_variables_that_are_never_recorded() -> None:
    seed, other = (keras.Variable(1.0, trainable=False) for _ in range(2))
    gates.never_record_assignments([seed])
    with gates.recorded_assignments() as record:
        seed.assign(2.0)
        other.assign(2.0)
    [(native, _)] = record.list_previous()
    assert native is other.value
