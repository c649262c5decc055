"""What the commands take. Light, for `keras-distplug run` passes by here, too."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_distplug.storage.retention import Retention

NOTHING_THERE = 3
_WIDTH = 80
_CODES = "0 done; 1 failed; 2 wrong usage; 3 nothing there."
_DIRECTORY = (
    "what training was given: a path, or a URL (s3://bucket/runs/mnist, gs://, az://, sftp://)"
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


def _add_ls(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "ls",
        "list runs and their checkpoints",
        "Lists every run in DIRECTORY and every checkpoint in it: where training stood, when it "
        "was made, how large it is, and its state: committed; damaged; cut off, which is what is "
        "left of a save; or unfinished, which may be a save under way. Marks what a training that "
        "is started again takes up, and with which `epochs`. Reads manifests only; loads no "
        "TensorFlow.",
        "keras-distplug ls runs/mnist",
    )
    _add_run_and_json(parser, "all")


def _add_show(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "show",
        "tell everything about one checkpoint",
        "Tells what a checkpoint holds: where training stood, its metrics and History, versions, "
        "files and variables. Reads its manifest only; loads no TensorFlow.",
        "keras-distplug show runs/mnist --step 42",
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="its name, such as step-00000042 (default: newest)"
    )
    parser.add_argument("--step", type=_step, metavar="N", help="its step, instead of NAME")
    _add_run_and_json(parser, "the one that training goes on with")


def _add_verify(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "verify",
        "check that checkpoints are whole",
        "Checks manifests and the sizes of all files, with --deep the checksum of every byte. Says "
        "one line for each checkpoint. Changes nothing, and sets nothing aside; loads no "
        "TensorFlow.",
        "keras-distplug verify runs/mnist --deep",
        "0 all are whole; 1 one is damaged, missing a file or unreadable; 2 wrong "
        "usage; 3 nothing there. What is left of saves that were cut off is no damage.",
    )
    parser.add_argument("--deep", action="store_true", help="read every byte")
    parser.add_argument("--step", type=_step, metavar="N", help="a step or a name (default: all)")
    _add_run_and_json(parser, "all")


def _add_prune(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "prune",
        "delete checkpoints that need not stay",
        "Deletes checkpoints that none of the --keep options keeps, and what saves that were cut "
        "off have left. Of checkpoints under way (step-) and of ends (final-) the options keep "
        "each so many. What stays is verified before: the newest checkpoint, and all that is newer "
        "than it, is never touched, so that a training may write meanwhile. Loads no TensorFlow.",
        "keras-distplug prune runs/mnist --keep-last 1 --keep-best val_loss min 3 --dry-run",
    )
    parser.add_argument(
        "--keep-last",
        type=int,
        default=Retention.keep_last,
        metavar="N",
        help="keep the N newest (default: %(default)s)",
    )
    parser.add_argument(
        "--keep-every-steps",
        type=int,
        metavar="N",
        help="keep the first one behind each multiple of N steps, too",
    )
    parser.add_argument(
        "--keep-best",
        nargs=3,
        metavar=("METRIC", "MODE", "N"),
        help="keep the N best by a metric, where MODE is min or max, too",
    )
    parser.add_argument(
        "--damaged",
        action="store_true",
        help="delete damaged ones, too, where a newer one is whole",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    _add_run_and_json(parser, "all")


def _add_export(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "export",
        "write a checkpoint as one file that Keras or others load",
        "Writes a checkpoint as one file: .safetensors, the model's variables by name, made "
        "without TensorFlow; .weights.h5, for `model.load_weights`; or .keras, the whole model "
        "with its optimizer. The last two make the model anew, from what training has kept of it. "
        "Every value is verified; OUT gets its name when it is complete.",
        "keras-distplug export runs/mnist best.keras --step best --metric val_loss --mode min",
    )
    parser.add_argument("out", metavar="OUT", help="the file: a path, or a URL of a store")
    parser.add_argument(
        "--step",
        type=_step,
        metavar="N",
        help="a step, a name, or `best`, by --metric and --mode (default: the newest)",
    )
    parser.add_argument("--metric", metavar="METRIC", help="for --step best, such as val_loss")
    parser.add_argument("--mode", choices=("min", "max"), help="for --step best")
    parser.add_argument(
        "--format",
        choices=("keras", "weights.h5", "safetensors"),
        help="default: what OUT ends with",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    _add_import(parser)
    _add_run_and_json(parser, "the one that training goes on with")


def _add_replay(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "replay",
        "compute a batch once more whose update was left out",
        "Makes the model anew, gives it the values of the newest checkpoint from before the "
        "incident, computes a step of the batch that a NaNWatchdog has kept, operation by "
        "operation, and tells what is not finite first: an array of the batch, a variable, what a "
        "layer makes of finite inputs, the loss, or a gradient. Changes nothing.",
        "keras-distplug replay runs/mnist",
        "0 all is finite; 1 it is not, or that failed; 2 wrong usage; 3 nothing there.",
    )
    parser.add_argument(
        "incident",
        nargs="?",
        metavar="INCIDENT",
        help="the name of a file in DIRECTORY/incidents (default: the newest)",
    )
    parser.add_argument(
        "--step",
        type=_step,
        metavar="N",
        help="a checkpoint's step or name (default: the newest from before the incident, or the "
        "oldest there is)",
    )
    _add_import(parser)
    _add_run_and_json(parser, "that of the incident")


def _add_goodput(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "goodput",
        "tell what share of the time trained, and where the rest went",
        "Puts down every second since the first attempt of a run to one of ten categories, such as "
        "steps, waiting for data, saves, start-up and recovery, from the log that the callback "
        "RunLog keeps; and tells what became of each attempt. A run that is under way is told of "
        "as far as its log goes. Loads no TensorFlow.",
        "keras-distplug goodput runs/mnist",
        "0 done; 1 failed; 2 wrong usage; 3 there is no log.",
    )
    _add_run_and_json(parser, "all")


def _add_report(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "report",
        "write a page that shows what happened to runs",
        "Writes one HTML file without external resources: the state of every run, incidents and "
        "what to do about them, goodput and where the time went, attempts, the times of every "
        "replica, stragglers and checkpoints, from the log of the callback RunLog. Loads no "
        "TensorFlow.",
        "keras-distplug report runs/mnist",
        "0 done; 1 failed; 2 wrong usage; 3 there is no log.",
    )
    parser.add_argument(
        "-o",
        dest="out",
        metavar="OUT",
        help="the file, or - for standard output (default: named after DIRECTORY: mnist.html)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    _add_run(parser, "all")


def _add_watch(subcommands: Subcommands) -> None:
    parser = _command(
        subcommands,
        "watch",
        "show the state of a run in the terminal until it has ended",
        "Shows whether the newest run is alive and healthy, its progress, its incidents and what "
        "to do about them, and refreshes that until the run has ended. Where the output is no "
        "terminal, prints every change of the state. Loads no TensorFlow.",
        "keras-distplug watch runs/mnist --until finished --timeout 86400",
        "0 finished, or the state of --until was reached; otherwise the last state: 10 starting or "
        "training, 11 slow, 12 silent or stalled, 13 restarting, 14 dead or failed, 15 stopped by "
        "a preemption or ctrl-C. 1 failed; 2 wrong usage; 3 there is no log.",
    )
    parser.add_argument(
        "--until",
        metavar="STATE",
        choices=(
            *("ended", "trouble", "starting", "training", "slow", "silent", "stalled"),
            *("restarting", "dead", "failed", "stopped", "finished"),
        ),
        help="exit with 0 once the run is in this state: finished, training, stalled, dead, ..., "
        "or ended (any end), or trouble (any state but starting, training and finished)",
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


def epilog(examples: Sequence[str], codes: str) -> str:
    """What stands below the options, for `RawDescriptionHelpFormatter`."""
    lines = "".join(f"  {example}\n" for example in examples)
    return f"{'Example' if len(examples) == 1 else 'Examples'}:\n{lines}\n" + textwrap.fill(
        f"Exit codes: {codes}", _WIDTH
    )


def _command(
    subcommands: Subcommands,
    name: str,
    help: str,
    description: str,
    example: str,
    codes: str = _CODES,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subcommands.add_parser(
        name,
        help=help,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.fill(description, _WIDTH),
        epilog=epilog((example,), codes),
    )
    parser.add_argument("directory", metavar="DIRECTORY", help=_DIRECTORY)
    parser.add_argument(
        "--storage-options",
        type=_json_object,
        default={},
        metavar="JSON",
        help="what the store's fsspec file system takes, such as "
        '\'{"endpoint_url": "https://..."}\', or @FILE that holds it',
    )
    return parser


def _add_run(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--run", metavar="RUN", help=f"such as run-0001 (default: {default})")


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
        help="import this module, which registers classes of the model "
        "(@keras.saving.register_keras_serializable()); may be given several times",
    )


def _step(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(text[1:]).read_text("utf-8") if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, or @FILE: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            f"expected a JSON object. Received: a {type(found).__name__}"
        )
    return found
