"""Reads files that offline wandb, and MLflow with a local database, have written, without loading
them."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK_BYTES, _HEADER_BYTES = 2**15, 7


@dataclass
class WandbFile:
    """One attempt's file of an offline run.

    Args:
        run_id: Its run.
        rows: History, in order; `_step` is W&B's step.
        alerts: Title, text and level.
        exit_code: None if the process did not end the run.
    """

    run_id: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[tuple[str, str, str]] = field(default_factory=list)
    exit_code: int | None = None

    @property
    def steps(self) -> list[int]:
        return [row["_step"] for row in self.rows]


def wandb_files(folder: Path) -> list[WandbFile]:
    """Returns the files of all attempts, the oldest first."""
    return [_read(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def _read(path: Path) -> WandbFile:
    from wandb.proto import wandb_internal_pb2

    found = WandbFile()
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.run_id = record.run.run_id
        elif kind == "history":
            items = record.history.item
            row = {"/".join(each.nested_key) or each.key: each.value_json for each in items}
            found.rows.append({key: json.loads(value) for key, value in row.items()})
        elif kind == "alert":
            found.alerts.append((record.alert.title, record.alert.text, record.alert.level))
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def _records(data: bytes) -> Iterator[bytes]:
    """Reads blocks of LevelDB's log format after W&B's own header; the last record may be
    truncated."""
    at, parts = _HEADER_BYTES, b""
    while at + _HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + _HEADER_BYTES])
        begin, at = at + _HEADER_BYTES, at + _HEADER_BYTES + length
        if at > len(data):
            return
        parts += data[begin:at]
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


class MlflowFile:
    """MLflow's database."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def steps(self, key: str) -> list[int]:
        """Returns the steps of a metric's points, in the order in which they were logged."""
        query = "select step from metrics where key = ? order by rowid"
        return [step for (step,) in self._rows(query, key)]

    def runs(self) -> list[tuple[str, str]]:
        """Returns ID and status of all runs."""
        return self._rows("select run_uuid, status from runs")

    def tags(self) -> dict[str, str]:
        return dict(self._rows("select key, value from tags"))

    def _rows(self, query: str, *values: str) -> list[Any]:
        if not self._path.exists():
            return []
        with closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=30)) as base:
            try:
                return base.execute(query, values).fetchall()
            except sqlite3.OperationalError:  # its tables do not exist yet
                return []
