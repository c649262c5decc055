"""Three minutes of random faults of all kinds, with checkpoints in a real store. For an hour, run
`python benchmarks/chaos.py`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from stores.conftest import Started
from support import chaos, harmed

pytest.importorskip("tensorflow")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.stores,
    pytest.mark.timeout(900),
]

SECS = 180.0
SEED = 12


def test_soak(stores: Started, tmp_path: Path) -> None:
    """Three workers end bit-identical with three undisturbed ones; every fault is named."""
    place = stores["ceph"]
    soaked = chaos.soak(
        tmp_path,
        seed=SEED,
        workers=3,
        secs=SECS,
        store_port=urlsplit(place.options["endpoint_url"]).port or 0,
        directory=place.url,
        storage_options=lambda port: {
            **place.options,
            "endpoint_url": f"http://127.0.0.1:{port}",
        },
    )
    came = [each.fault.kind for each in soaked.ended.results if each.came]
    assert any(harmed.KINDS[kind].restarts for kind in came), soaked.ended.printed
    assert list(chaos.unnamed(soaked)) == []
    assert soaked.differences == []
