"""Detects interactive sessions, which do not exit when a `fit` ends."""

from __future__ import annotations

import sys


def is_interactive() -> bool:
    """Returns True in a notebook, in IPython, and at a Python prompt."""
    ipython = sys.modules.get("IPython")
    in_notebook = ipython is not None and ipython.get_ipython() is not None
    return in_notebook or hasattr(sys, "ps1") or bool(sys.flags.interactive)
