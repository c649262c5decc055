"""Common reports of all benchmarks: medians with their spread, the machine, JSON."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import keras_distplug

WIDTH = 170  # even if the output is a file
LOAD_BEFORE = os.getloadavg()[0]  # this is imported before anything is measured
VERSIONS = ("python", "tensorflow", "keras", "numpy", "keras_distplug")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns an argument parser with the options that all benchmarks have.

    Args:
        description: The docstring of the script, whose first paragraph is shown.
    """
    made = argparse.ArgumentParser(description=(description or "").partition("\n\n")[0])
    made.add_argument("--json", type=Path, help="a file for all numbers and the machine")
    return made


def spread(values: Iterable[float]) -> dict[str, Any]:
    """Returns the JSON representation of repeated measurements."""
    taken = list(values)
    low, _, high = (
        statistics.quantiles(taken, n=4, method="inclusive") if len(taken) > 1 else 3 * taken
    )
    return {
        "median": statistics.median(taken),
        "least": min(taken),
        "most": max(taken),
        "first_quartile": low,
        "third_quartile": high,
        "values": taken,
    }


def format_spread(
    found: dict[str, Any],
    form: str = ".2f",
    scale: float = 1,
    unit: str = "",
    *,
    quartiles: bool = False,
) -> str:
    """Formats a `spread` for a table: the median, with the minimum and maximum in parentheses.

    With many rounds, quartiles can be shown instead. A value without spread is shown alone.
    """
    ends = ("first_quartile", "third_quartile") if quartiles else ("least", "most")
    is_spread = found["least"] < found["most"]
    median, low, high = (format(scale * found[each], form) for each in ("median", *ends))
    return f"{median}{unit} ({low} to {high})" if is_spread else f"{median}{unit}"


def machine() -> dict[str, Any]:
    """Returns a description of the machine and the software versions."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "system": f"{_system()}, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("keras", "numpy")},
        "tensorflow": _tensorflow(),
        "keras_distplug": keras_distplug.__version__,
        "load_before": LOAD_BEFORE,
        "load_after": os.getloadavg()[0],
    }


def show(*tables: Table) -> None:
    Console(width=WIDTH).print(*tables)


def report(arguments: argparse.Namespace, found: Any, *notes: str) -> None:
    """Prints notes and the machine after the tables of a benchmark; saves JSON if requested."""
    about = machine()
    print(*notes, sentence(about), sep="\n")
    if arguments.json:
        # The results may be shared, so they must not contain the keys of the store.
        settings = {
            k: v for k, v in vars(arguments).items() if k not in ("json", "storage_options")
        }
        whole = {
            "benchmark": Path(sys.argv[0]).name,
            "settings": settings,
            "machine": about,
            "found": found,
        }
        arguments.json.write_text(json.dumps(whole, indent=1, default=str) + "\n")


def sentence(about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {about[name]}" for name in VERSIONS)
    return (
        f"Machine: {about['cores']} cores, {about['processor']}, {about['memory_gb']:.0f} GB, "
        f"{about['system']}; {versions}; load {about['load_before']:.1f} before, "
        f"{about['load_after']:.1f} after"
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.platform()


def _tensorflow() -> str:
    """Returns TensorFlow's version, which is published under several distribution names."""
    [name, *_] = importlib.metadata.packages_distributions()["tensorflow"]
    return importlib.metadata.version(name)
