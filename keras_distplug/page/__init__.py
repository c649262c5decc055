"""A page that shows runs: one file, that needs nothing from anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<main id="distplug"></main>
<script type="application/json" id="runs">{runs}</script>
<script>
{script}
</script>
</body>
</html>
"""


def html(title: str, runs: Sequence[Mapping[str, Any]], now: float) -> str:
    """The page.

    Args:
        title: Of it.
        runs: Each as from `runlog.summary.summary`, with `notes` about what was skipped; or, of
            one that cannot be shown, its `name` and the `error`.
        now: Seconds since 1970, of which ages are told.
    """
    # Nothing in a string may end the element that it stands in.
    text = json.dumps({"now": now, "runs": runs}, allow_nan=False).replace("<", "\\u003c")
    escaped = title.replace("&", "&amp;").replace("<", "&lt;")
    script = "\n".join((_read("page.js"), _read("report.js")))
    return _PAGE.format(title=escaped, style=_read("page.css"), runs=text, script=script)


def module() -> str:
    """As a module for TensorBoard, which calls `render()` in a frame of its own."""
    style = json.dumps(_read("page.css"))
    return "\n".join((_read("page.js"), f"const STYLE = {style};", _read("tensorboard.js")))


def _read(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
