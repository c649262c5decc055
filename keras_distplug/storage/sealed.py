"""JSON objects that include a SHA-256 of themselves."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

_SEAL = "sha256"


class ChangedError(ValueError):
    """It is a complete object, but not the one that was sealed."""


def seal(body: Mapping[str, Any]) -> str:
    # JSON changes some values, such as numeric keys. The digest is of the values as read back.
    read = json.loads(json.dumps(body))
    return json.dumps({**read, _SEAL: compute_digest(read)}, indent=1) + "\n"


def unseal(text: str | bytes) -> dict[str, Any]:
    """Parses and verifies a sealed object, the inverse of `seal`.

    Raises:
        ChangedError: If the digest does not match.
        ValueError: If it is not a sealed object.
    """
    try:
        body = json.loads(text)
        if not isinstance(body, dict) or _SEAL not in body:
            raise ValueError("it is not a JSON object with a checksum")
        digest = body.pop(_SEAL)
        if digest != compute_digest(body):
            raise ChangedError("it was changed after it was written")
    except RecursionError as error:
        raise ValueError(f"it is nested too deeply ({error})") from None
    return body


def compute_digest(body: Mapping[str, Any]) -> str:
    """Returns a SHA-256 of a JSON object's values, independent of its formatting."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def find_unserializable(value: Any, path: str = "") -> str | None:
    """Returns the path of the first value that JSON cannot hold, such as `callbacks/0/state`, or
    None."""
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)  # type: ignore[assignment]
    else:
        try:
            json.dumps(value, default=dataclasses.asdict)
        except (TypeError, ValueError, RecursionError):
            return f"`{path}`"
        return None
    found = (
        find_unserializable(each, f"{path}/{name}" if path else str(name)) for name, each in parts
    )
    return next((each for each in found if each is not None), None)
