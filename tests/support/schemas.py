"""The schemas of Kubernetes' resources, as strict as `kubectl --validate=strict`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.cluster import ROOT

FOLDER = Path(os.environ.get("CRDS", ROOT.parent / "shared" / "crds"))


def schema_of(kind: str, version: str) -> dict[str, Any]:
    """Returns a schema. Skips the test if the schemas are missing."""
    path = FOLDER / f"{kind.lower()}.{version}.json"
    if not path.exists():
        pytest.skip(f"no {path}: set CRDS to a folder with the schemas of the resources")
    return strict(json.loads(path.read_text()))


def strict(schema: Any) -> Any:
    """Converts a schema to a JSON Schema that forbids unnamed properties."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {
        name: {key: strict(each) for key, each in value.items()}
        if name == "properties"
        else strict(value)
        for name, value in schema.items()
        if name != "format" and not name.startswith("x-kubernetes-")
    }
    keeps_more = schema.get("x-kubernetes-preserve-unknown-fields") or (
        "additionalProperties" in schema
    )
    if "properties" in found and not keeps_more:
        found["additionalProperties"] = False
    if "properties" in found and "metadata" in found["properties"]:
        found["properties"]["metadata"] = {"type": "object"}
    return found
