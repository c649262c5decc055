"""A page that shows runs, in one file without any external resources."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

_SCRIPTS = ("page.js", "screen.js", "charts.js")
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
    """Returns the page.

    Args:
        title: The page's title.
        runs: Runs as from `runlog.summary.summary`, with `notes` about skipped lines; or, for a run
            that cannot be shown, its `name` and the `error`.
        now: Seconds since 1970; ages are as of then.
    """
    # No text of a run may end the element that contains it.
    text = json.dumps({"now": now, "runs": runs}, allow_nan=False).replace("<", "\\u003c")
    escaped = title.replace("&", "&amp;").replace("<", "&lt;")
    script = "\n".join(map(_read, (*_SCRIPTS, "report.js")))
    return _PAGE.format(title=escaped, style=_read("page.css"), runs=text, script=script)


def module() -> str:
    """Returns a module for TensorBoard, which calls `render()` in a frame."""
    style = json.dumps(_read("page.css"))
    scripts = "\n".join(map(_read, _SCRIPTS))
    return "\n".join((scripts, f"const STYLE = {style};", _read("tensorboard.js")))


def _read(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
