"""The command line: `keras-distplug`.

cli -> {supervisor for `run`, commands for the rest}.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from keras_distplug import __version__
from keras_distplug.commands import arguments
from keras_distplug.core.errors import ConfigurationError, DistplugError, NoCheckpointError
from keras_distplug.core.operating_system import require_supervision
from keras_distplug.supervisor.attempt import Limits
from keras_distplug.supervisor.launch import CommandNotFoundError
from keras_distplug.supervisor.restarts import Budgets

_COMMAND_NOT_FOUND = 127  # as shells say it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: The arguments, by default those of this process.

    Returns:
        The exit code.
    """
    # argparse has treated `--` differently from one Python to the next.
    options, dashes, command = _split(list(sys.argv[1:] if argv is None else argv))
    parser = _parser()
    parsed, unknown = parser.parse_known_args(options)
    if unknown:
        hint = ". The command to run goes after `--`" if not dashes else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if dashes and parsed.subcommand != "run":
        parser.error(f"`{parsed.subcommand}` takes no command after `--`")
    try:
        if parsed.subcommand == "run":
            return _run(parsed, command)
        # Only the one that is asked for: each loads what it needs.
        module = importlib.import_module(f"keras_distplug.commands.{parsed.subcommand}")
        code: int = module.run(parsed)
        return code
    except DistplugError as error:
        print(f"keras-distplug {parsed.subcommand}: error: {error}", file=sys.stderr)
        return _exit_code(error)


def _split(words: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in words:
        return words, False, []
    place = words.index("--")
    return words[:place], True, words[place + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-distplug",
        description="Fault-tolerant distributed training for Keras: runs workers, and looks after "
        "the checkpoints in a directory.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=arguments.epilog(
            (
                "keras-distplug run --workers 2 -- python train.py",
                "keras-distplug ls runs/mnist",
                "keras-distplug export runs/mnist model.keras",
                "keras-distplug verify --help",
            ),
            "0 done; 1 failed, or a checkpoint is damaged; 2 wrong usage; 3 nothing there. `run` "
            "has more, which its help names.",
        ),
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    _add_run(subcommands)
    arguments.add(subcommands)
    return parser


def _add_run(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "run",
        help="run a training script on several local processes until it is done",
        description="Starts local workers, each with its TF_CONFIG, and starts all of them again "
        "when one fails. With --ps they serve a chief, and one that fails is started again alone.",
        usage="%(prog)s --workers N [options] -- COMMAND [ARGUMENT ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=arguments.epilog(
            (
                "keras-distplug run --workers 4 -- python train.py --epochs 10",
                "keras-distplug run --workers 4 --ps 1 -- python train.py",
            ),
            "0 all workers, or the chief that they serve, completed training; 2 wrong usage; 124 "
            "a worker did not start in time; 127 the command was not found; 128 + n ended by "
            "signal n, such as ctrl-C; 93 it makes no progress, or a worker has ended with 93, "
            "for something that would come each time; otherwise that of the first worker that "
            "failed. 130, of ctrl-C to a worker, is never started again; 143, of workers that "
            "were told to go and have saved, is no failure.",
        ),
    )
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="how many")
    parser.add_argument(
        "--ps",
        type=int,
        default=0,
        metavar="N",
        help="how many parameter servers: for asynchronous training, in which they keep the "
        "variables, the workers compute, and a chief, started besides, trains (default: none)",
    )
    parser.add_argument(
        "--chief", action="store_true", help="goes with --ps, which starts a chief with or without"
    )
    parser.add_argument(
        "--devices-per-worker",
        type=int,
        metavar="D",
        help="devices for each worker (default: an equal share of the GPUs, or the CPU)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=Budgets.failures,
        metavar="R",
        help="how often a failed group is started again (default: %(default)s)",
    )
    parser.add_argument(
        "--max-worker-restarts",
        type=int,
        metavar="R",
        help="with --ps, how often workers are started again, each alone while the others go on, "
        f"until there is a newer checkpoint (default: {Budgets.replacements}); one that ends ten "
        "times in a row before it has joined, and that nobody has killed, is the end, with code "
        "93; behind each but the first of these there is a pause",
    )
    parser.add_argument(
        "--max-preemptions",
        type=int,
        default=Budgets.preemptions,
        metavar="R",
        help="how often one that was told to go, and has saved (default: %(default)s)",
    )
    parser.add_argument(
        "--max-without-progress",
        type=int,
        default=Budgets.without_progress,
        metavar="A",
        help="so many attempts in a row that made no newer checkpoint are the end, with code 93 "
        "(default: %(default)s); before each but the first two there is a pause",
    )
    parser.add_argument(
        "--min-workers",
        type=int,
        metavar="N",
        help="when the same worker fails twice in a row, the others go on without it, as long as "
        "there are so many (default: as many as --workers)",
    )
    parser.add_argument(
        "--no-fork-server",
        action="store_false",
        dest="fork_server",
        help="start every worker as a new process; by default, restarted workers are forked from "
        "one process that has already imported TensorFlow and Keras, which saves seconds",
    )
    parser.add_argument(
        "--unresponsive-timeout",
        type=float,
        default=Limits.silence_secs,
        metavar="SECS",
        help="how long a worker may give no sign of life, which it does each second while it can "
        "run Python (default: %(default)g)",
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="append a line of JSON for each event to this file",
    )
    parser.add_argument(
        "--startup-timeout",
        type=float,
        default=Limits.startup_secs,
        metavar="SECS",
        help="how long a worker may take to join the cluster (default: %(default)g)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=Limits.grace_secs,
        metavar="SECS",
        help="time from your own SIGTERM or ctrl-C to SIGKILL (default: %(default)g)",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        type=float,
        metavar="SECS",
        help="after how long without a heartbeat the workers count one as lost (default: "
        "TensorFlow's 10)",
    )
    parser.add_argument(
        "--collective-timeout",
        type=float,
        metavar="SECS",
        help="after how long a step fails in which workers wait for each other; longer than the "
        "slowest (default: never)",
    )


def _run(parsed: argparse.Namespace, command: Sequence[str]) -> int:
    require_supervision()
    from keras_distplug.core.timeouts import Timeouts
    from keras_distplug.runlog import log_files
    from keras_distplug.supervisor import guard
    from keras_distplug.supervisor.run import Job, run

    if parsed.ps == 0:
        for option, given in (
            ("--chief", parsed.chief),
            ("--max-worker-restarts", parsed.max_worker_restarts is not None),
        ):
            if given:
                raise ConfigurationError(
                    f"{option} is for workers that serve a chief, beside parameter servers. Give "
                    f"their number with --ps, or leave {option} out."
                )
    alone = parsed.max_worker_restarts
    job = Job(
        command=tuple(command),
        workers=parsed.workers,
        ps=parsed.ps,
        devices_per_worker=parsed.devices_per_worker,
        budgets=Budgets(
            failures=parsed.max_restarts,
            preemptions=parsed.max_preemptions,
            without_progress=parsed.max_without_progress,
            replacements=Budgets.replacements if alone is None else alone,
            min_workers=parsed.min_workers,
        ),
        fork_server=parsed.fork_server,
        limits=Limits(parsed.startup_timeout, parsed.grace, parsed.unresponsive_timeout),
        timeouts=Timeouts(parsed.heartbeat_timeout, parsed.collective_timeout),
        log=parsed.log,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A worker may print what this terminal's encoding does not have.
        sys.stdout.reconfigure(errors="backslashreplace")
    with guard.adopting_orphans():
        return run(job, os.environ, log_files.open_beside)


def _exit_code(error: DistplugError) -> int:
    if isinstance(error, CommandNotFoundError):
        return _COMMAND_NOT_FOUND
    if isinstance(error, NoCheckpointError):
        return arguments.NOTHING_THERE
    return 2 if isinstance(error, ConfigurationError) else 1
