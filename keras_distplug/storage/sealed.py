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
    """Returns the text of `body`, whose dataclasses become objects, with a SHA-256 of itself."""
    # JSON changes some values, such as numeric keys. The digest is of the values as read back.
    read = json.loads(json.dumps(body, default=_fields))
    return _format({**read, _SEAL: compute_digest(read)})


def _fields(value: Any) -> Mapping[str, Any]:
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return vars(value)


def _format(body: Mapping[str, Any]) -> str:
    """Formats an object with one line per entry, and per element of a list.

    `json.dumps(indent=1)` is implemented in Python, and would delay the training thread.
    """
    entries = (f" {json.dumps(name)}: {_format_entry(value)}" for name, value in body.items())
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _format_entry(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
    return json.dumps(value)


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
