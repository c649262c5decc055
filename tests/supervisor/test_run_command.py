from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from supervision import Supervision, await_until, environment, is_dead

Start = Callable[..., Supervision]


def cli(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "keras_distplug", *arguments],
        env=environment(**environ),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_all_complete(start: Start) -> None:
    """The job succeeds once all workers have completed training, and leaves nothing behind."""
    job = start("train(); print('hello [bold]'); mark(name); complete()")
    code, printed = job.finish()
    assert code == 0, printed
    assert sorted(job.marks()) == ["worker-0", "worker-1"]
    assert "[worker-0] hello [bold]\n" in printed
    assert "[worker-1] hello [bold]\n" in printed
    assert "2 workers completed training" in printed
    assert not list(job.folder.glob("keras-distplug-*"))


def test_single_worker(start: Start) -> None:
    """A single worker has no TF_CONFIG and is worker-0."""
    job = start("mark('TF_CONFIG' in os.environ); train(); complete()", workers=1, TF_CONFIG="")
    code, printed = job.finish()
    assert code == 0, printed
    assert job.marks() == ["False"]


def test_killed_worker(start: Start) -> None:
    """A killed worker ends the group, which restarts on new ports and completes."""
    job = start(
        """
mark(f"{attempt} {index} {contract.job} {' '.join(tf_config['cluster']['worker'])}")
if attempt == 0:
    if index == 1:
        await_training("worker-0")
        mark("fault")
        os.kill(os.getpid(), signal.SIGKILL)
    train()
    sleep()
train()
complete()
"""
    )
    code, printed = job.finish()
    assert code == 0, printed
    marks = job.marks()
    assert marks.count("fault") == 1
    seen = {(int(line[0]), int(line[2])): line.split()[2:] for line in marks if line != "fault"}
    assert seen.keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert len({job_and_ports[0] for job_and_ports in seen.values()}) == 1
    assert seen[0, 0] == seen[0, 1]
    assert len({*seen[0, 0][1:], *seen[1, 0][1:]}) == 4
    assert "worker-1 was killed by SIGKILL" in printed
    assert "restart 1 of 10" in printed
    assert "2 workers completed training" in printed
    recovery = [line for line in printed.splitlines() if "training again" in line]
    assert len(recovery) == 1
    for part in ("stop", "import and join", "build and restore", "first step"):
        assert f"{part} " in recovery[0]


def test_early_exit_is_a_failure(start: Start) -> None:
    """Exit code 0 before training is complete is a failure, and the group restarts."""
    job = start("train(); mark(attempt); attempt == 0 and index == 0 and sys.exit(0); complete()")
    code, printed = job.finish()
    assert code == 0, printed
    assert job.marks().count("1") == 2
    assert "worker-0 exited without completing training" in printed


@pytest.mark.parametrize(
    "script", ["mark(index)", "contract.report(name, Phase.JOINED); mark(index)"]
)
def test_script_without_training(start: Start, script: str) -> None:
    """Workers that exit with code 0 without a `fit` of this package are not restarted."""
    job = start(script)
    code, printed = job.finish()
    assert code == 0, printed
    assert sorted(job.marks()) == ["0", "1"]
    assert "2 workers exited with code 0" in printed
    assert "without a `fit` with keras_distplug's callbacks" in printed


def test_worker_that_does_not_train(start: Start) -> None:
    """If another worker trains, that is a failure."""
    job = start(
        """
if index == 0 and attempt == 0:
    mark("fault")
    sys.exit(0)
train()
await_training("worker-1") if attempt == 0 else complete()
sleep() if attempt == 0 else None
"""
    )
    code, printed = job.finish()
    assert code == 0, printed
    assert job.marks().count("fault") == 1
    assert "worker-0 exited without completing training" in printed


def test_budget(start: Start) -> None:
    """Once the restarts are used up, the first failure determines the exit code and the report."""
    job = start(
        """
train()
if index == 1:
    await_training("worker-0")
    mark("fault")
    sys.exit(3)
sleep()
""",
        "--max-restarts=1",
    )
    code, printed = job.finish()
    assert code == 3, printed
    assert job.marks() == ["fault", "fault"]
    assert "gave up after 1 restart; exit code 3" in printed
    assert "first failure: worker-1 exited with code 3 at " in printed
    assert "then: worker-0 was stopped by the supervisor (SIGTERM)" in printed


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        ("sys.exit(93)", ""),
        (
            "from keras_distplug.core import errors; raise errors.DataError('no samples')",
            ": DataError: no samples",
        ),
    ],
    ids=["the script's own", "unusable"],
)
def test_worker_that_asks_not_to_be_restarted(start: Start, failure: str, why: str) -> None:
    """Exit code 93 of a worker ends the job with 93, without a restart, and is explained.

    An uncaught `ConfigurationError` gives this code.
    """
    job = start(
        f"""
train()
if index == 0:
    mark(os.getpid())
    sleep()
await_training("worker-0")
mark("fault")
{failure}
"""
    )
    code, printed = job.finish()
    assert code == 93, printed
    assert job.marks().count("fault") == 1
    assert "not restarted: it would fail in the same way; exit code 93" in printed
    asked = f"first failure: worker-1 asked not to be restarted (exit code 93){why} at "
    assert asked in printed
    [peer] = [int(mark) for mark in job.marks() if mark != "fault"]
    assert is_dead(peer)


def test_death_by_signal(start: Start) -> None:
    """A death by signal n gives exit code 128 + n."""
    job = start("train(); os.kill(os.getpid(), signal.SIGKILL)", "--max-restarts=0", workers=1)
    code, printed = job.finish()
    assert code == 137, printed
    assert "first failure: worker-0 was killed by SIGKILL" in printed


def test_failure_after_another_completed(start: Start) -> None:
    """A failure counts even if other workers have completed training, and all restart."""
    job = start(
        """
mark(f"{attempt} {name}")
train()
if index == 1 and attempt == 0:
    deadline = time.monotonic() + 20
    while "completed" not in str(contract.read("worker-0")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    sys.exit(5)
await_training("worker-1")
complete()
"""
    )
    code, printed = job.finish()
    assert code == 0, printed
    assert sorted(job.marks()) == ["0 worker-0", "0 worker-1", "1 worker-0", "1 worker-1"]
    assert "worker-1 exited with code 5" in printed


def test_worker_that_ignores_sigterm(start: Start) -> None:
    """A worker that ignores SIGTERM is killed soon after its peer has died."""
    job = start(
        """
if index == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark(os.getpid())
    train()
    sleep()
train()
await_training("worker-0")
sys.exit(4)
""",
        "--max-restarts=0",
    )
    started_s = time.monotonic()
    code, printed = job.finish()
    assert code == 4, printed
    assert time.monotonic() - started_s < 20
    assert is_dead(int(job.marks()[0]))
    assert "worker-0 was stopped by the supervisor (SIGKILL)" in printed


def test_missing_worker(start: Start) -> None:
    """A worker that does not join in time is named as the failure."""
    job = start("index == 1 or train(); sleep()", "--startup-timeout=3", "--max-restarts=0")
    code, printed = job.finish()
    assert code == 124, printed
    assert "worker-1 has not joined the cluster within 3 s" in printed
    assert "worker-0 has not joined" not in printed


def test_joined_in_time(start: Start) -> None:
    """The startup timeout does not stop workers that have joined."""
    job = start("train(); time.sleep(4); complete()", "--startup-timeout=3")
    code, printed = job.finish()
    assert code == 0, printed


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_to_the_supervisor(start: Start, number: signal.Signals, code: int) -> None:
    """A signal to the supervisor reaches the workers, which may shut down in their own way."""
    job = start(
        """
def save(number, frame):
    time.sleep(1.5)
    mark(f"saved on {number}")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
train()
mark(os.getpid())
sleep()
"""
    )
    pids = job.pids(2)
    job.process.send_signal(number)
    returned, printed = job.finish()
    assert returned == code, printed
    assert job.marks()[2:] == [f"saved on {number.value}"] * 2
    assert all(is_dead(pid) for pid in pids)
    assert "restart" not in printed


def test_grace_period(start: Start) -> None:
    """A worker that is still running after the grace period is killed."""
    job = start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); train(); mark(os.getpid()); sleep()",
        "--grace=0.5",
    )
    pids = job.pids(2)
    job.process.terminate()
    code, printed = job.finish()
    assert code == 143, printed
    assert all(is_dead(pid) for pid in pids)
    assert "worker-1 was stopped by the supervisor (SIGKILL)" in printed


def test_second_signal(start: Start) -> None:
    """A second signal to the supervisor kills immediately."""
    job = start(
        """
signal.signal(signal.SIGINT, lambda *_: mark("heard"))
train()
mark(os.getpid())
while True:
    time.sleep(1)
""",
        "--grace=1000",
    )
    pids = job.pids(2)
    job.process.send_signal(signal.SIGINT)
    await_until(lambda: job.marks().count("heard") == 2, "the workers have heard of it")
    assert not any(is_dead(pid) for pid in pids)
    job.process.send_signal(signal.SIGINT)
    code, printed = job.finish()
    assert code == 130, printed
    assert all(is_dead(pid) for pid in pids)


def test_last_output(start: Start) -> None:
    """A worker's last output, including stderr, is printed before the report of its exit."""
    job = start(
        """
train()
print("\\n".join(f"{number} {'x' * 200}" for number in range(3_000)))
sys.exit("no newline at the end: [x]")
""",
        "--max-restarts=0",
        workers=1,
    )
    code, printed = job.finish()
    assert code == 1
    lines = printed.splitlines()
    at = lines.index("[worker-0] no newline at the end: [x]")
    assert "worker-0 exited with code 1" in lines[at + 1]


def test_reader_that_exits(start: Start) -> None:
    """Training continues when the reader of the output exits."""
    job = start(
        """
train()
for _ in range(100):
    print("x" * 9999)
mark("done")
complete()
""",
        workers=1,
    )
    assert job.process.stdout is not None
    job.process.stdout.close()
    assert job.process.stderr is not None
    errors = job.process.stderr.read()
    assert job.process.wait(30) == 0, errors
    assert job.marks() == ["done"]
    assert errors.count("the output cannot be written: [Errno 32]") == 1


def test_readers_that_exit(tmp_path: Path) -> None:
    """Training also continues when standard error is closed as well, as under `2>&1 | head`."""
    worker = (
        "import os, pathlib\nfor _ in range(100): print('x' * 9999)\npathlib.Path('done').touch()"
    )
    command = ["run", "--workers", "1", "--max-restarts", "0", "--", sys.executable, "-c", worker]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "keras_distplug", *command],
        env=environment(),
        cwd=tmp_path,
        stdout=write,
        stderr=write,
        timeout=60,
    )
    os.close(write)
    assert done.returncode == 0
    assert (tmp_path / "done").exists()


def test_reader_that_stalls(start: Start) -> None:
    """A supervisor whose output is blocked can still be stopped."""
    job = start(
        "train(); mark(os.getpid())\nwhile True: print('x' * 9999)", "--grace=0.5", workers=1
    )
    [pid] = job.pids(1)
    job.process.terminate()
    assert job.process.wait(30) == 143
    assert is_dead(pid)


def test_separate_reports_per_attempt(start: Start) -> None:
    """Completion in an earlier attempt does not count in this one."""
    job = start(
        """
mark(f"{attempt} {name}")
train()
if attempt == 0 and index == 0:
    complete()
    sleep()
await_training("worker-1") if index == 0 else await_training("worker-0")
if attempt == 0:
    while "completed" not in str(contract.read("worker-0")): time.sleep(0.01)
    sys.exit(5)
if index == 1:
    complete()
""",
        "--max-restarts=1",
    )
    code, printed = job.finish()
    assert code == 1, printed
    assert len(job.marks()) == 4
    assert "first failure: worker-0 exited without completing training" in printed


def test_devices_per_worker(start: Start) -> None:
    """`--devices-per-worker` reaches the workers."""
    job = start("mark(contract.devices_per_worker); train(); complete()", "--devices-per-worker=3")
    code, printed = job.finish()
    assert code == 0, printed
    assert job.marks() == ["3", "3"]


def test_timeouts(start: Start) -> None:
    """`--heartbeat-timeout` and `--collective-timeout` reach the workers.

    Without these options, the environment remains unchanged.
    """
    names = "KERAS_DISTPLUG_HEARTBEAT_TIMEOUT", "KERAS_DISTPLUG_COLLECTIVE_TIMEOUT"
    look = f"mark(' '.join(os.environ.get(name, '-') for name in {names})); train(); complete()"
    for options, expected in [
        (("--heartbeat-timeout=3", "--collective-timeout=60"), "3.0 60.0"),
        (("--heartbeat-timeout=3",), "3.0 -"),
        ((), "- -"),
    ]:
        job = start(look, *options)
        code, printed = job.finish()
        assert code == 0, printed
        assert job.marks()[-2:] == [expected] * 2


def test_exit_for_a_lost_worker(start: Start) -> None:
    """The first failure is the lost worker's, even if another worker exits sooner."""
    job = start(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
train()
if index == 0:
    await_training("worker-1")
    mark("left")
    os._exit(201)
while not Path(__file__).with_name("marks").exists():
    time.sleep(0.01)
sys.exit(3)
""",
        "--max-restarts=0",
    )
    code, printed = job.finish()
    assert job.marks() == ["left"]
    assert code == 3, printed
    assert "first failure: worker-1 exited with code 3" in printed
    assert "then: worker-0 exited because it lost another worker (exit code 201)" in printed


def test_startup_of_a_single_worker(start: Start) -> None:
    """The startup timeout applies to joining a cluster, so not to a single worker."""
    job = start("time.sleep(1.5); train(); complete()", "--startup-timeout=1", workers=1)
    code, printed = job.finish()
    assert code == 0, printed


def test_no_tensorflow() -> None:
    """The supervisor loads neither TensorFlow nor Keras."""
    code = (
        "import sys; from keras_distplug import cli; "
        "assert cli.main(['run', '--workers', '1', '--max-restarts', '0', '--', 'true']) == 0; "
        "assert not {'tensorflow', 'keras'} & sys.modules.keys(), 'loaded'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "exited with code 0" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "required: COMMAND"),
        (("run", "--", "true"), "required: --workers"),
        (
            ("run", "--workers", "2"),
            "Expected a command to run. Received: none. Write it after `--`",
        ),
        (
            ("run", "--workers", "2", "--"),
            "Expected a command to run. Received: none. Write it after `--`",
        ),
        (("run", "--workers", "2", "python", "x.py"), "The command to run goes after `--`"),
        (("run", "--workers", "0", "--", "true"), "--workers must be >= 1. Received: 0"),
        (("run", "--workers", "two", "--", "true"), "invalid int value: 'two'"),
        (("run", "--workers", "1", "--max-restarts", "-1", "--", "true"), "must be >= 0"),
        (("run", "--workers", "1", "--devices-per-worker", "0", "--", "true"), "must be >= 1"),
        (("run", "--workers", "1", "--startup-timeout", "0", "--", "true"), "must be > 0 s"),
        (("run", "--workers", "1", "--grace", "nan", "--", "true"), "must be >= 0 s"),
        (("run", "--workers", "1", "--heartbeat-timeout", "0.5", "--", "true"), "at least 1 s"),
        (
            ("run", "--workers", "1", "--collective-timeout", "inf", "--", "true"),
            "finite and at least",
        ),
        (("run", "--workers", "1", "--unresponsive-timeout", "0", "--", "true"), "must be > 0 s"),
        (("run", "--workers", "1", "--max-preemptions", "-1", "--", "true"), "must be >= 0"),
        (("run", "--workers", "1", "--max-without-progress", "0", "--", "true"), "must be >= 1"),
        (("run", "--workers", "1", "--min-workers", "2", "--", "true"), "must be <= --workers (1)"),
        (("run", "--workers", "1", "--ps", "-1", "--", "true"), "--ps must be >= 0. Received: -1"),
        (("run", "--workers", "1", "--chief", "--", "true"), "Give their number with --ps"),
        (("run", "--workers", "1", "--max-worker-restarts", "1", "--", "true"), "number with --ps"),
        (
            (*("run", "--workers", "1", "--ps", "1"), "--max-worker-restarts", "-1", "--", "true"),
            "--max-worker-restarts must be >= 0. Received: -1",
        ),
        (
            ("run", "--workers", "2", "--ps", "1", "--min-workers", "1", "--", "true"),
            "omit --min-workers",
        ),
        (("run", "--workers", "1", "--log", "/no/such/folder/log", "--", "true"), "Give --log a"),
    ],
)
def test_bad_usage(arguments: tuple[str, ...], complaint: str) -> None:
    """Bad usage gives exit code 2 and a message with the correction."""
    done = cli(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_command() -> None:
    """A missing command gives exit code 127, as in a shell, and nothing is started."""
    done = cli("run", "--workers", "2", "--", "train.py")
    assert done.returncode == 127
    assert "Write `-- python train.py`" in done.stderr
    assert done.stdout == ""


def test_inside_a_cluster() -> None:
    """Under a scheduler that starts the workers, no second cluster is started."""
    tf_config = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    done = cli("run", "--workers", "2", "--", "true", TF_CONFIG=tf_config)
    assert done.returncode == 2
    assert "worker-0, one of 2 tasks, so the workers seem to be started" in done.stderr


def test_too_few_gpus() -> None:
    """Fewer GPUs than workers are an error before anything is started."""
    done = cli("run", "--workers", "2", "--", "true", CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 2
    assert "at least 2 GPUs (workers: 2, GPUs per worker: 1). Received: 1 (0)." in done.stderr


def test_version() -> None:
    """`--version` prints the version."""
    done = cli("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("keras-distplug ")


def test_command_with_dashes(start: Start) -> None:
    """Everything after the first `--`, including another `--`, belongs to the command."""
    script = "import sys; print('args', sys.argv[1:])"
    job = start(
        "", "--max-restarts=0", workers=1, command=(sys.executable, "-c", script, "--", "--workers")
    )
    code, printed = job.finish()
    assert code == 0
    assert "[worker-0] args ['--', '--workers']" in printed
    assert os.sep in printed


def test_crash_loop(start: Start) -> None:
    """A job without new checkpoints is given up with 93, and its first cause is reported.

    A signal interrupts the last pause.
    """
    body = """
train()
if index == 0:
    contract.saved("run-0001", 20)
    sleep()
await_training("worker-0")
mark("fault")
sys.exit(7)
"""
    job = start(body)
    code, printed = job.finish()
    assert code == 93, printed
    assert job.marks() == ["fault"] * 4
    assert "restart 3 of 10, after a pause of 1 s" in printed
    assert "gave up: 3 consecutive attempts without a newer checkpoint" in printed
    assert "first failure: worker-1 exited with code 7 at " in printed
    assert "earlier: worker-1 exited with code 7 at " in printed


def test_signal_in_a_pause(start: Start) -> None:
    """A signal to the supervisor ends the job even if no worker is running."""
    job = start("mark(attempt); sys.exit(3)", "--max-without-progress=99", workers=1)
    await_until(lambda: job.marks()[-1:] == ["4"], "the fifth attempt")
    assert job.process.stdout is not None
    while "pause of 8 s" not in job.process.stdout.readline():
        pass
    job.process.terminate()
    code, printed = job.finish()
    assert code == 143, printed
    assert "stopped by SIGTERM to the supervisor: worker-0 exited with code 3" in printed
    assert job.marks()[-1] == "4"


def test_worker_without_a_sign_of_life(start: Start) -> None:
    """A stopped worker is detected, even if it is the only one, and restarted."""
    job = start(
        """
from keras_distplug.cluster import pulse
pulse.begin()
train()
if attempt == 0:
    while not contract.pulse_file(name).exists():
        time.sleep(0.01)
    mark("fault")
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(5)
complete()
""",
        "--unresponsive-timeout=3",
        workers=1,
    )
    code, printed = job.finish()
    assert code == 0, printed
    assert job.marks() == ["fault"]
    assert "Warning" not in printed  # its reports have arrived
    assert "worker-0 has given no sign of life for 3 s; process state T (stopped)" in printed
    assert "1 restart\n" in printed


def test_fewer_workers(start: Start) -> None:
    """A worker that fails twice in succession is dropped; the last one has no TF_CONFIG."""
    job = start(
        """
mark(f"{attempt} {name} of {len(tf_config['cluster']['worker']) if tf_config else 1}")
train()
if attempt < 2:
    if index == 0:
        sleep()
    await_training("worker-0")
    sys.exit(3)
complete()
""",
        "--min-workers=1",
    )
    code, printed = job.finish()
    assert code == 0, printed
    assert sorted(job.marks()) == [
        *("0 worker-0 of 2", "0 worker-1 of 2", "1 worker-0 of 2", "1 worker-1 of 2"),
        "2 worker-0 of 1",
    ]
    assert "restart 2 of 10, with 1 worker, because the one in slot 1 keeps failing" in printed
    assert "1 worker completed training" in printed
