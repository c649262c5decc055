"""Ownership of a directory in a store."""

from __future__ import annotations

import pytest
from stores.conftest import STORES, Started
from support.owners import require_one_winner

from keras_distplug.storage.files import open_files

pytestmark = [pytest.mark.stores, pytest.mark.timeout(300)]

CREATES_TWICE = {"gcs"}  # Google's emulator ignores preconditions


@pytest.mark.parametrize("store", sorted(STORES.keys() - CREATES_TWICE))
def test_races(store: str, stores: Started) -> None:
    """If several jobs claim a directory at the same time, one wins."""
    for _ in range(5):
        place = stores[store]
        require_one_winner(open_files(place.url, place.options))
