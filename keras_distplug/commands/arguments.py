"""The arguments of the commands. Imports little, because `keras-distplug run` loads it, too."""

from __future__ import annotations

import argparse
import json
import reprlib
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_distplug.commands import completion
from keras_distplug.storage.retention import Retention

NOTHING_THERE = 3
_WIDTH = 80
_CODES = "0 done; 1 failed; 2 wrong usage; 3 nothing found."
_LOG_CODES = "0 done; 1 failed; 2 wrong usage; 3 no log found."
_DIRECTORY = (
    "directory of a training job, or any path in it that is printed: a run, a checkpoint, a log. A "
    "path or a URL (s3://bucket/runs/mnist, gs://, az://, sftp://)"
)
Subcommands = Any  # argparse's own type for it is private


def add(subcommands: Subcommands) -> None:
    """Adds the parsers of all commands."""
    _add_ls(subcommands)
    _add_show(subcommands)
    _add_verify(subcommands)
    _add_prune(subcommands)
    _add_export(subcommands)
    _add_replay(subcommands)
    _add_goodput(subcommands)
    _add_report(subcommands)
    _add_watch(subcommands)
    _add_completion(subcommands)


def _add_ls(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "ls",
        "list training jobs, runs and checkpoints",
        "Lists the runs in DIRECTORY and their checkpoints, with step, time, size and state. Marks "
        "the checkpoint that the next start resumes from. If DIRECTORY holds several training "
        "jobs, lists these instead. Reads manifests and logs only. Does not load "
        "TensorFlow.\n\nStates: `committed` is complete. `damaged` has changed since. `unreadable` "
        "is from another release, or the storage fails. `cut off` is the rest of an interrupted "
        "save. `unfinished` may be a save in progress.",
        ("keras-distplug ls runs/mnist", "keras-distplug ls runs"),
    )
    _add_run_and_json(parser, "all")


def _add_show(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "show",
        "show one checkpoint",
        "Shows the contents of a checkpoint: its position in training, metrics, History, versions, "
        "files and variables. Reads only its manifest. Does not load TensorFlow.",
        ("keras-distplug show runs/mnist --step 42",),
    )
    completion.attach(
        parser.add_argument(
            "name",
            nargs="?",
            metavar="NAME",
            help="name of the checkpoint, such as step-00000042 (default: the newest)",
        ),
        completion.checkpoints,
    )
    _add_step(parser, "step of the checkpoint, instead of NAME")
    _add_run_and_json(parser, "the run that training resumes")


def _add_verify(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "verify",
        "check that checkpoints are intact",
        "Checks the manifest and the file sizes of every checkpoint. With --deep, it also checks "
        "the checksum of every byte. Changes nothing, and can run during training. Does not load "
        "TensorFlow.",
        ("keras-distplug verify runs/mnist --deep",),
        "0 all checkpoints are intact; 1 a checkpoint is damaged or unreadable; 2 wrong usage; 3 "
        "nothing found. The rest of an interrupted save is not damage.",
    )
    parser.add_argument("--deep", action="store_true", help="read and check every byte")
    _add_step(parser, "step or name of one checkpoint (default: all)")
    _add_run_and_json(parser, "all")


def _add_prune(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "prune",
        "delete checkpoints that are no longer needed",
        "Deletes checkpoints that no --keep option keeps, and the rest of interrupted saves. The "
        "options apply separately to checkpoints during training (step-) and after it (final-). "
        "Verifies the newest checkpoints that stay before it deletes anything. Never deletes the "
        "newest intact checkpoint or anything newer, so it can run during training. Does not load "
        "TensorFlow.",
        ("keras-distplug prune runs/mnist --keep-last 1 --keep-best val_loss min 3 --dry-run",),
    )
    parser.add_argument(
        "--keep-last",
        type=int,
        default=Retention.keep_last,
        metavar="N",
        help="keep the newest N (default: %(default)s)",
    )
    parser.add_argument(
        "--keep-every-steps",
        type=int,
        metavar="N",
        help="also keep the first one after every multiple of N steps",
    )
    parser.add_argument(
        "--keep-best",
        nargs=3,
        metavar=("METRIC", "MODE", "N"),
        help="also keep the best N by a metric; MODE is min or max",
    )
    parser.add_argument(
        "--damaged",
        action="store_true",
        help="also delete damaged checkpoints if a newer one is intact",
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    _add_run_and_json(parser, "all")


def _add_export(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "export",
        "write a checkpoint as one file for Keras or other tools",
        "Writes a checkpoint as one file. `.safetensors` holds the model's variables by name, and "
        "needs no TensorFlow. `.weights.h5` is for `model.load_weights`. `.keras` holds the whole "
        "model with its optimizer. Every value is verified, and OUT appears only when it is "
        "complete.",
        ("keras-distplug export runs/mnist best.keras --step best --metric val_loss --mode min",),
    )
    parser.add_argument("out", metavar="OUT", help="file to write: a path or a URL")
    _add_step(parser, "step or name, or `best` with --metric and --mode (default: the newest)")
    parser.add_argument("--metric", metavar="METRIC", help="metric for `best`, such as val_loss")
    parser.add_argument("--mode", choices=("min", "max"), help="which value of the metric is best")
    parser.add_argument(
        "--format",
        choices=("keras", "weights.h5", "safetensors"),
        help="format of the file (default: by the ending of OUT)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    _add_import(parser)
    _add_run_and_json(parser, "the run that training resumes")


def _add_replay(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "replay",
        "recompute a batch whose update was skipped",
        "Recomputes a batch that NaNWatchdog saved, operation by operation, with the values of the "
        "newest checkpoint before the incident. Names the first non-finite value: in the batch, in "
        "a variable, in the output of a layer, in the loss or in a gradient. Changes nothing. "
        "Loads TensorFlow.",
        ("keras-distplug replay runs/mnist",),
        "0 all values are finite; 1 some are not, or it failed; 2 wrong usage; 3 nothing found.",
    )
    parser.add_argument(
        "incident",
        nargs="?",
        metavar="INCIDENT",
        help="name of a file in DIRECTORY/incidents (default: the newest)",
    )
    _add_step(
        parser,
        "step or name of a checkpoint (default: the newest before the incident, or the oldest)",
    )
    _add_import(parser)
    _add_run_and_json(parser, "the run of the incident")


def _add_goodput(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "goodput",
        "print the share of time spent training, and where the rest went",
        "Divides the time since the first attempt of a run into ten categories, such as steps, "
        "waiting for data, saves, start-up and recovery. Lists every attempt with the reason it "
        "ended. Reads the log that the callback RunLog writes. During training, it covers the "
        "time up to the last line of the log. Does not load TensorFlow.",
        ("keras-distplug goodput runs/mnist",),
        _LOG_CODES,
    )
    _add_run_and_json(parser, "all")


def _add_report(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "report",
        "write a page that shows what happened to runs",
        "Writes one HTML file that needs no network: the state of every run, incidents and what to "
        "do about them, goodput and where the time went, attempts, the times of every replica, "
        "stragglers and checkpoints. Reads the log that the callback RunLog writes. Does not load "
        "TensorFlow.",
        ("keras-distplug report runs/mnist", "keras-distplug report runs/mnist -o -"),
        _LOG_CODES,
    )
    parser.add_argument(
        "-o",
        dest="out",
        metavar="OUT",
        help="file to write, or - for standard output (default: named after DIRECTORY: mnist.html)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    _add_run(parser, "all")


def _add_watch(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "watch",
        "show the state of a run in the terminal until it has ended",
        "Shows whether the newest run is alive and healthy, its progress, its incidents and what "
        "to do about them, and refreshes that until the run has ended. If the output is not a "
        "terminal, prints every change of the state. Does not load TensorFlow.",
        ("keras-distplug watch runs/mnist --until finished --timeout 86400",),
        "0 finished, or the state of --until was reached; otherwise the last state: 10 starting or "
        "training, 11 slow, 12 silent or stalled, 13 restarting, 14 dead or failed, 15 stopped by "
        "a preemption or Ctrl-C. 1 failed; 2 wrong usage; 3 there is no log.",
    )
    parser.add_argument(
        "--until",
        metavar="STATE",
        choices=(
            *("ended", "trouble", "starting", "training", "slow", "silent", "stalled"),
            *("restarting", "dead", "failed", "stopped", "finished"),
        ),
        help="exit with 0 once the run is in this state: starting, training, slow, silent, "
        "stalled, restarting, dead, failed, stopped or finished; ended stands for any end, trouble "
        "for any state other than starting, training and finished",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECS",
        help="exit after this time; also wait for the first log (default: wait without limit, and "
        "exit with 3 if there is no log)",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="SECS",
        help="time between refreshes; at least 5 in a remote store (default: %(default)g)",
    )
    parser.add_argument("--once", action="store_true", help="show the state once, and exit")
    _add_run(parser, "the newest")
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end")


def _add_completion(subcommands: Subcommands) -> None:
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "completion",
        help="print a script that completes commands and options with the Tab key",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_filled(
            "Prints a script for your shell. With it, the Tab key completes commands, options, "
            "paths, and the names of runs and checkpoints. Needs the package argcomplete (pip "
            "install argcomplete)."
        ),
        epilog=epilog(
            (
                'eval "$(keras-distplug completion bash)"         # in ~/.bashrc',
                'eval "$(keras-distplug completion zsh)"          # in ~/.zshrc, after compinit',
                "keras-distplug completion fish | source          # in ~/.config/fish/config.fish",
            ),
            "0 done; 2 wrong usage, or argcomplete is missing.",
        ),
    )
    parser.add_argument("shell", choices=completion.SHELLS, help="your shell")


def epilog(examples: Sequence[str], codes: str) -> str:
    """Returns the text below the options, for `RawDescriptionHelpFormatter`."""
    lines = "".join(f"  {example}\n" for example in examples)
    return f"{'Example' if len(examples) == 1 else 'Examples'}:\n{lines}\n" + _filled(
        f"Exit codes: {codes}"
    )


def _filled(text: str) -> str:
    return "\n\n".join(textwrap.fill(paragraph, _WIDTH) for paragraph in text.split("\n\n"))


def _command(
    subcommands: Subcommands,
    name: str,
    help: str,
    description: str,
    examples: Sequence[str],
    codes: str = _CODES,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subcommands.add_parser(
        name,
        help=help,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_filled(description),
        epilog=epilog(examples, codes),
    )
    parser.add_argument("directory", metavar="DIRECTORY", help=_DIRECTORY)
    parser.add_argument(
        "--storage-options",
        type=_json_object,
        default={},
        metavar="JSON",
        help="options of the store's fsspec file system, such as "
        '\'{"endpoint_url": "https://..."}\', or @FILE that contains them',
    )
    return parser


def _add_run(parser: argparse.ArgumentParser, default: str) -> None:
    completion.attach(
        parser.add_argument(
            "--run", metavar="RUN", help=f"name of a run, such as run-0001 (default: {default})"
        ),
        completion.runs,
    )


def _add_step(parser: argparse.ArgumentParser, help: str) -> None:
    completion.attach(
        parser.add_argument("--step", type=_step, metavar="N", help=help), completion.checkpoints
    )


def _add_run_and_json(parser: argparse.ArgumentParser, default_run: str) -> None:
    _add_run(parser, default_run)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this module, which registers classes of the model with "
        "@keras.saving.register_keras_serializable(); can be given several times",
    )


def _step(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(text[1:]).read_text("utf-8") if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            "expected a JSON object, or @FILE to read one from a file. Received a value that "
            f"cannot be read: {error}"
        ) from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            f"expected a JSON object. Received: the JSON value {reprlib.repr(found)}"
        )
    return found
