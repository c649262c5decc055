"""Whether a person is at this Python, which then does not end by itself."""

from __future__ import annotations

import sys


def is_interactive() -> bool:
    ipython = sys.modules.get("IPython")
    in_notebook = ipython is not None and ipython.get_ipython() is not None
    return in_notebook or hasattr(sys, "ps1") or bool(sys.flags.interactive)
