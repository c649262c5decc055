"""Is somebody sitting before this process?"""

from __future__ import annotations

import sys


def is_interactive() -> bool:
    """True in a notebook, and where Python takes commands: ending the process ends more than a
    script there."""
    ipython = sys.modules.get("IPython")
    in_notebook = ipython is not None and ipython.get_ipython() is not None
    return in_notebook or hasattr(sys, "ps1") or bool(sys.flags.interactive)
