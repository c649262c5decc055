"""The command line: `keras-distplug`.

cli -> {supervisor for `run`, commands for the others}.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from keras_distplug import __version__
from keras_distplug.commands import arguments, completion
from keras_distplug.core.errors import ConfigurationError, DistplugError, NoCheckpointError
from keras_distplug.core.operating_system import require_supervision
from keras_distplug.supervisor.attempt import Limits
from keras_distplug.supervisor.launch import CommandNotFoundError
from keras_distplug.supervisor.restarts import Budgets

_COMMAND_NOT_FOUND = 127  # the code of shells


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments. Defaults to those of this process.

    Returns:
        The exit code.
    """
    # Versions of argparse differ in how they treat `--`.
    options, dashes, command = _split(list(sys.argv[1:] if argv is None else argv))
    parser = _parser()
    completion.answer(parser)
    _suggest(parser, options)
    parsed, unknown = parser.parse_known_args(options)
    if unknown:
        hint = ". The command to run goes after `--`" if not dashes else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if dashes and parsed.subcommand != "run":
        parser.error(f"`{parsed.subcommand}` takes no command after `--`")
    try:
        if parsed.subcommand == "run":
            return _run(parsed, command)
        # Only this command's module, because some load more than others.
        module = importlib.import_module(f"keras_distplug.commands.{parsed.subcommand}")
        code: int = module.run(parsed)
        return code
    except DistplugError as error:
        print(f"keras-distplug {parsed.subcommand}: error: {error}", file=sys.stderr)
        return _exit_code(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _split(words: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in words:
        return words, False, []
    place = words.index("--")
    return words[:place], True, words[place + 1 :]


def _suggest(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Exits with "Did you mean" if a command or an option looks mistyped.

    argparse would first report other arguments that are missing.
    """
    name = next(iter(words), "")
    if not name or name.startswith("-"):
        return
    commands = _parsers_of_commands(parser)
    if name not in commands:
        near = _nearest(name, commands)
        meant = f" Did you mean `{near}`?" if near else ""
        parser.error(f"there is no command {name!r}.{meant} Commands: {', '.join(commands)}")
    known = [
        option
        for action in commands[name]._actions
        for option in action.option_strings
        if option.startswith("--")
    ]
    for word in words[1:]:
        option = word.partition("=")[0]
        is_known = any(each.startswith(option) for each in known)  # also abbreviated
        if option.startswith("--") and not is_known and (near := _nearest(option, known)):
            commands[name].error(f"unrecognized arguments: {option}. Did you mean {near}?")


def _nearest(word: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def _parsers_of_commands(
    parser: argparse.ArgumentParser,
) -> Mapping[str, argparse.ArgumentParser]:
    actions = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    commands: Mapping[str, argparse.ArgumentParser] = next(actions).choices
    return commands


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-distplug",
        description="Fault-tolerant distributed training for Keras. Runs workers, and inspects and "
        "manages\nthe checkpoints and logs of training jobs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=arguments.epilog(
            (
                "keras-distplug run --workers 2 -- python train.py",
                "keras-distplug ls runs/mnist",
                "keras-distplug export runs/mnist model.keras",
                "keras-distplug verify --help",
            ),
            "0 done; 1 failed, or a checkpoint is damaged; 2 wrong usage; 3 nothing found. `run` "
            "and `watch` have more: see their help.",
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
        description="Starts local workers with a TF_CONFIG each. If a worker fails, restarts all "
        "of them.\nWith --ps, the workers serve a chief, and a worker that fails is restarted "
        "alone.",
        usage="%(prog)s --workers N [options] -- COMMAND [ARGUMENT ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=arguments.epilog(
            (
                "keras-distplug run --workers 4 -- python train.py --epochs 10",
                "keras-distplug run --workers 4 --ps 1 -- python train.py",
            ),
            "0 training is complete; 2 wrong usage; 93 no attempt makes progress, or a worker "
            "exited with 93 for an error that a restart cannot fix; 124 a worker did not start in "
            "time; 127 the command was not found; 128 + n ended by signal n, such as Ctrl-C; "
            "otherwise the code of the first worker that failed. After 130 (a worker received "
            "Ctrl-C), nothing is restarted. 143 (preempted workers that saved) is not a failure.",
        ),
    )
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="number of workers")
    parser.add_argument(
        "--ps",
        type=int,
        default=0,
        metavar="N",
        help="number of parameter servers, for asynchronous training: they hold the variables, the "
        "workers compute, and an additional chief runs the training loop (default: none)",
    )
    parser.add_argument(
        "--chief", action="store_true", help="allowed with --ps, which always starts a chief"
    )
    parser.add_argument(
        "--devices-per-worker",
        type=int,
        metavar="D",
        help="devices of every worker (default: an equal share of the GPUs, or the CPU)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=Budgets.failures,
        metavar="R",
        help="restarts after failures (default: %(default)s)",
    )
    parser.add_argument(
        "--max-worker-restarts",
        type=int,
        metavar="R",
        help="with --ps: restarts of single workers until there is a newer checkpoint (default: "
        f"{Budgets.replacements}). Pauses before all but the first of them. A worker that fails "
        "ten times in succession before it has joined, without being killed, ends the job with "
        "code 93",
    )
    parser.add_argument(
        "--max-preemptions",
        type=int,
        default=Budgets.preemptions,
        metavar="R",
        help="restarts after preemptions with a checkpoint (default: %(default)s)",
    )
    parser.add_argument(
        "--max-without-progress",
        type=int,
        default=Budgets.without_progress,
        metavar="A",
        help="consecutive attempts without a newer checkpoint that end the job with code 93 "
        "(default: %(default)s). Pauses before the third of them, and longer before later ones",
    )
    parser.add_argument(
        "--min-workers",
        type=int,
        metavar="N",
        help="if the same worker fails twice in succession, continue without it, with at least N "
        "workers (default: the number of --workers)",
    )
    parser.add_argument(
        "--no-fork-server",
        action="store_false",
        dest="fork_server",
        help="start every worker as a new process. By default, restarted workers are forked from a "
        "process that has already imported TensorFlow and Keras, which saves seconds",
    )
    parser.add_argument(
        "--unresponsive-timeout",
        type=float,
        default=Limits.silence_secs,
        metavar="SECS",
        help="time without a sign of life after which a worker counts as failed; a worker gives "
        "one every second while it can run Python (default: %(default)g)",
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="append every event to this file, as one line of JSON",
    )
    parser.add_argument(
        "--startup-timeout",
        type=float,
        default=Limits.startup_secs,
        metavar="SECS",
        help="time for a worker to join the cluster (default: %(default)g)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=Limits.grace_secs,
        metavar="SECS",
        help="time from your SIGTERM or Ctrl-C to SIGKILL (default: %(default)g)",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        type=float,
        metavar="SECS",
        help="time without a heartbeat after which the other workers count a worker as lost "
        "(default: TensorFlow's 10)",
    )
    parser.add_argument(
        "--collective-timeout",
        type=float,
        metavar="SECS",
        help="time after which a step fails in which workers wait for each other; must exceed the "
        "slowest step (default: never)",
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
                    f"{option} requires parameter servers. Give their number with --ps, or omit "
                    f"{option}."
                )
    replacements = parsed.max_worker_restarts
    job = Job(
        command=tuple(command),
        workers=parsed.workers,
        ps=parsed.ps,
        devices_per_worker=parsed.devices_per_worker,
        budgets=Budgets(
            failures=parsed.max_restarts,
            preemptions=parsed.max_preemptions,
            without_progress=parsed.max_without_progress,
            replacements=Budgets.replacements if replacements is None else replacements,
            min_workers=parsed.min_workers,
        ),
        fork_server=parsed.fork_server,
        limits=Limits(parsed.startup_timeout, parsed.grace, parsed.unresponsive_timeout),
        timeouts=Timeouts(parsed.heartbeat_timeout, parsed.collective_timeout),
        log=parsed.log,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A worker may print characters that this terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    with guard.adopting_orphans():
        return run(job, os.environ, log_files.open_beside)


def _exit_code(error: DistplugError) -> int:
    if isinstance(error, CommandNotFoundError):
        return _COMMAND_NOT_FOUND
    if isinstance(error, NoCheckpointError):
        return arguments.NOTHING_THERE
    return 2 if isinstance(error, ConfigurationError) else 1
