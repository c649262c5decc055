"""Where TensorBoard was told to look."""

from __future__ import annotations

import argparse


def folders_of(flags: argparse.Namespace) -> dict[str, str]:
    """Folders and URLs of `--logdir` and `--logdir_spec`, by the name that each was given."""
    if getattr(flags, "logdir", ""):
        return {"": flags.logdir}
    found = {}
    for number, spec in enumerate((getattr(flags, "logdir_spec", "") or "").split(",")):
        # As TensorBoard has it: `name:path`, but for paths, and URLs, that have a colon themselves.
        name, colon, path = spec.partition(":")
        is_named = colon and not spec.startswith("/") and not path.startswith("//")
        if spec:
            found[name if is_named else str(number)] = path if is_named else spec
    return found
