"""`keras-distplug run --ps`: deaths of a chief, workers and parameter servers."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from supervision import Supervision, await_until, is_dead, is_stopped

from keras_distplug.core.event_lines import from_line
from keras_distplug.runlog.summary import summary

Start = Callable[..., Supervision]

SERVE = """
mark(f"{attempt} {name} {os.getpid()} {json.dumps(tf_config['cluster'])}")
"""


def started(job: Supervision) -> list[tuple[int, str, int, dict[str, list[str]]]]:
    """Returns attempt, name, PID and cluster of all processes, in the order of their starts."""
    lines = [mark.split(" ", 3) for mark in job.marks() if mark.count(" ") >= 3]
    return [(int(one[0]), one[1], int(one[2]), json.loads(one[3])) for one in lines]


def logged(job: Supervision) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.folder / "events").read_text().splitlines()]


def test_roles(start: Start) -> None:
    """All processes have the same cluster and their own place in it.

    The job is complete, and all processes are stopped, once the chief has completed training.
    """
    job = start(
        SERVE
        + """
print("hello")
if task != "chief":
    serve()
await_training("worker-0", "worker-1", "ps-0", "ps-1")
train()
complete()
""",
        "--ps=2",
        "--chief",
        "--log=events",
    )
    code, printed = job.finish()
    assert code == 0, printed
    processes = started(job)
    names = ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1"]
    assert sorted(name for _, name, _, _ in processes) == names
    cluster = processes[0][3]
    assert all(each[3] == cluster for each in processes)
    assert {task: len(of) for task, of in cluster.items()} == {"chief": 1, "worker": 2, "ps": 2}
    assert len({address for of in cluster.values() for address in of}) == 5
    assert all(is_dead(pid) for _, _, pid, _ in processes)
    assert all(f"[{name}] hello\n" in printed for name in names)
    assert "starting a chief, 2 workers and 2 parameter servers: " in printed
    assert "chief-0 completed training in " in printed
    assert "0 restarts\n" in printed
    assert not any("woke up" in mark for mark in job.marks())
    events = logged(job)
    assert [each["event"] for each in events] == ["started", "training", "ended"]
    assert events[0]["workers"] == ["chief-0", "worker-0", "worker-1", "ps-0", "ps-1"]
    assert events[0]["slots"] == [0, 1]


def test_devices(start: Start) -> None:
    """Only workers get the GPUs of `--devices-per-worker`."""
    job = start(
        """
mark(f"{name} {contract.devices_per_worker} {os.environ['CUDA_VISIBLE_DEVICES']}")
if task != "chief":
    serve()
await_marks("-", 4)
train()
complete()
""",
        "--ps=1",
        "--devices-per-worker=2",
        CUDA_VISIBLE_DEVICES="4,5,6,7",
    )
    code, printed = job.finish()
    assert code == 0, printed
    assert sorted(job.marks()) == [
        *("chief-0 None ", "ps-0 None ", "worker-0 2 4,5", "worker-1 2 6,7"),
    ]


DEATHS = {
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL", 137),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", "was killed by SIGTERM", 143),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV", 139),
    "an error": ("raise ValueError('no')", "exited with code 1", 1),
    "a lost chief": ("os._exit(201)", "exited because it lost another worker (exit code 201)", 201),
    "code 0": ("sys.exit(0)", "exited while the chief needed it (exit code 0)", 1),
    "completed": ("complete(); sys.exit(0)", "exited while the chief needed it (exit code 0)", 1),
}


@pytest.mark.parametrize("death", DEATHS)
def test_worker_that_dies(start: Start, death: str) -> None:
    """A worker that dies is restarted on its own, with the same role, and the others continue."""
    action, reported, exit_code = DEATHS[death]
    job = start(
        SERVE
        + f"""
if name == "worker-1" and not Path(__file__).with_name("dead").exists():
    contract.report(name, Phase.JOINED)
    await_training("chief-0", "worker-0", "ps-0")
    Path(__file__).with_name("dead").touch()
    mark("fault")
    {action}
if task != "chief":
    serve()
train()
await_marks("reported")
complete()
""",
        "--ps=1",
        "--log=events",
    )
    before = job.read_until("worker-1 rejoined after ")
    with (job.folder / "marks").open("a") as marks:
        marks.write("reported\n")
    code, printed = job.finish()
    printed = before + printed
    assert code == 0, printed
    assert job.marks().count("fault") == 1
    processes = started(job)
    starts = Counter((attempt, name) for attempt, name, _, _ in processes)
    assert starts == {(0, "chief-0"): 1, (0, "worker-0"): 1, (0, "worker-1"): 2, (0, "ps-0"): 1}
    assert len({json.dumps(cluster) for _, _, _, cluster in processes}) == 1
    assert all(is_dead(pid) for _, _, pid, _ in processes)
    assert f"worker-1 {reported}; the others continue; worker restart 1\n" in printed
    assert "0 restarts, 1 worker restart\n" in printed
    assert "stopping all" not in printed
    events = logged(job)
    names = [each["event"] for each in events]
    # The last worker may only be seen training after this one has died.
    assert [names[0], names[-1]] == ["started", "ended"]
    assert sorted(names[1:-1]) == ["started_again", "training"]
    again = events[names.index("started_again")]
    assert (again["worker"], again["exit_code"], again["times"]) == ("worker-1", exit_code, 1)
    assert again["what"].startswith(f"worker-1 {reported}; worker restart 1")


def test_repeated_deaths(start: Start) -> None:
    """Workers may die more often than `--max-restarts`, as long as there are new checkpoints."""
    job = start(
        """
if task == "ps":
    serve()
if task == "worker":
    contract.report(name, Phase.JOINED)
    await_training("chief-0")
    mark(f"death of {name}")
    os.kill(os.getpid(), signal.SIGKILL)
train()
for step in range(1, 10):
    await_marks("death", 2 * step)
    contract.saved("run-0001", step)
complete()
""",
        "--ps=1",
        "--max-restarts=0",
        "--max-worker-restarts=6",
    )
    code, printed = job.finish()
    assert code == 0, printed
    assert sum("death of" in mark for mark in job.marks()) >= 18
    assert "worker restart 16" in printed, "the last two may not be reported"
    assert "pause" not in printed


def test_max_worker_restarts(start: Start) -> None:
    """If workers die too often without a newer checkpoint, the job ends.

    The report names the worker and the limit.
    """
    job = start(
        """
if task == "worker" and index == 1:
    contract.report(name, Phase.JOINED)
    await_training("chief-0", "worker-0", "ps-0")
    mark("fault")
    sys.exit(7)
mark(os.getpid())
if task != "chief":
    serve()
train()
sleep()
""",
        "--ps=1",
        "--max-worker-restarts=2",
        "--log=events",
    )
    code, printed = job.finish()
    assert code == 7, printed
    assert job.marks().count("fault") == 3
    pids = [int(mark) for mark in job.marks() if mark != "fault"]
    assert len(pids) == 3
    assert all(is_dead(pid) for pid in pids)
    why = "gave up: workers were restarted 2 times without a newer checkpoint "
    assert f"{why}(--max-worker-restarts); exit code 7" in printed
    assert "first failure: worker-1 exited with code 7 at " in printed
    assert "then: chief-0 was stopped by the supervisor (SIGTERM)" in printed
    assert "restart 1 of 10" not in printed
    assert [each["event"] for each in logged(job)] == [
        *("started", "training", "started_again", "started_again", "failed", "ended"),
    ]


def test_worker_that_never_joins(start: Start) -> None:
    """A worker that exits before joining is restarted after growing pauses.

    A signal to the supervisor interrupts a pause.
    """
    job = start(
        """
if name == "worker-0":
    mark("fault")
    sys.exit("no such file")
if task != "chief":
    serve()
await_training("worker-1", "ps-0")
train()
sleep()
""",
        "--ps=1",
    )
    await_until(lambda: job.marks().count("fault") == 3, "three starts")
    before = job.read_until("pause of 2 s")
    assert before.count("[worker-0] no such file\n") == 3, "the last output precedes"
    job.process.terminate()
    code, printed = job.finish()
    assert code == 143, printed
    assert "worker restart 2, after a pause of 1 s" in before
    assert "stopped by SIGTERM to the supervisor: " in printed
    assert job.marks().count("fault") == 3


@pytest.mark.parametrize(
    ("failure", "code", "why"),
    [("sys.exit(93)", 93, "it would fail in the same way"), ("os._exit(130)", 130, "Ctrl-C")],
)
def test_worker_that_must_not_restart(start: Start, failure: str, code: int, why: str) -> None:
    """A worker that asks not to be restarted ends the job."""
    job = start(
        f"""
if name == "worker-1":
    mark("fault")
    {failure}
serve() if task != "chief" else sleep()
""",
        "--ps=1",
    )
    returned, printed = job.finish()
    assert returned == code, printed
    assert job.marks() == ["fault"]
    assert f"not restarted: {why}" in printed.replace("the user pressed ", "")
    assert "first failure: worker-1 " in printed


def test_leftovers_of_a_worker(start: Start, tmp_path: Path) -> None:
    """Before a worker is restarted, all of its leftover processes, even hidden ones, are killed.

    They would still hold its port.
    """
    job = start(
        """
import socket
if task == "worker":
    host, port = tf_config["cluster"]["worker"][index].split(":")
    listener = socket.socket()
    try:
        listener.bind((host, int(port)))
        listener.listen()
    except OSError as error:
        mark(f"no port: {error}")
        sys.exit(3)
    mark(f"{name} listens {os.getpid()} {os.getppid()}")
    if name == "worker-1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
if task != "chief":
    serve()
await_marks("listens", 2)
train()
[line] = [each for each in Path(__file__).with_name("marks").read_text().splitlines()
          if each.startswith("worker-1 listens")]
mark("fault")
os.kill(int(line.split()[3]), signal.SIGKILL)  # the shell, whose child lives on
await_marks("worker-1 listens", 2)
complete()
""",
        "--ps=1",
        command=("bash", "-c", f"{sys.executable} {tmp_path / 'train.py'}; exit $?"),
    )
    code, printed = job.finish()
    assert code == 0, printed
    assert job.marks().count("fault") == 1
    assert not [mark for mark in job.marks() if "no port" in mark]
    first, second = (int(mark.split()[2]) for mark in job.marks() if "worker-1 listens" in mark)
    assert first != second
    assert is_dead(first)
    assert is_dead(second)
    assert "worker-1 was killed by SIGKILL; the others continue" in printed


def test_ps_that_dies(start: Start) -> None:
    """A parameter server that dies ends the attempt, and all processes restart on new ports."""
    job = start(
        SERVE
        + """
if attempt == 0 and task == "ps":
    contract.report(name, Phase.JOINED)
    await_training("chief-0")
    contract.saved("run-0001", 20)
    mark("fault")
    os.kill(os.getpid(), signal.SIGKILL)
if task != "chief":
    serve()
await_training("worker-0", "worker-1")
await_marks(f"{attempt} ps-0")
train()
if attempt == 0:
    sleep()
complete()
""",
        "--ps=1",
        "--log=events",
    )
    code, printed = job.finish()
    assert code == 0, printed
    assert job.marks().count("fault") == 1
    processes = started(job)
    assert Counter(attempt for attempt, _, _, _ in processes) == {0: 4, 1: 4}
    ports = [{each for of in cluster.values() for each in of} for _, _, _, cluster in processes]
    assert not ports[0] & ports[-1]
    assert all(is_dead(pid) for _, _, pid, _ in processes)
    assert "ps-0 was killed by SIGKILL; stopping all processes\n" in printed
    assert "restart 1 of 10\n" in printed
    recovery = [line for line in printed.splitlines() if "training again" in line]
    assert len(recovery) == 1
    assert "after ps-0 was killed by SIGKILL: stop " in recovery[0]
    assert "first step " in recovery[0]
    assert "chief-0 completed training in " in printed
    assert [each["event"] for each in logged(job)] == [
        *("started", "training", "failed", "again", "started", "training", "ended"),
    ]


@pytest.mark.parametrize("first", ["ps", "chief"])
def test_chief_that_lost_a_ps(start: Start, first: str) -> None:
    """The parameter server is the cause, even if the chief's exit is noticed first."""
    job = start(
        f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
first = {first!r}
if task == "worker":
    serve()
if task == "ps":
    contract.report(name, Phase.JOINED)
    await_training("chief-0")
    if first == "chief":
        await_marks("chief left")
    mark("ps died")
    os._exit(3)
await_training("worker-0", "worker-1", "ps-0")
train()
if first == "ps":
    await_marks("ps died")
mark("chief left")
os._exit(201)
""",
        "--ps=1",
        "--max-restarts=0",
    )
    code, printed = job.finish()
    assert code == 3, printed
    assert "first failure: ps-0 exited with code 3 at " in printed
    assert "gave up after 0 restarts; exit code 3" in printed
    assert job.marks()[:1] == ["ps died" if first == "ps" else "chief left"]


@pytest.mark.parametrize("death", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(4)"])
def test_chief_that_dies(start: Start, death: str) -> None:
    """A chief that dies ends the attempt; all others are stopped, and all processes restart.

    So does a chief that exits without having completed training.
    """
    job = start(
        SERVE
        + f"""
if task != "chief":
    serve()
await_training("worker-0", "worker-1", "ps-0")
train()
if attempt == 0:
    mark("fault")
    {death}
if attempt == 1:
    mark("fault")
    sys.exit(0)
complete()
""",
        "--ps=1",
    )
    code, printed = job.finish()
    assert code == 0, printed
    assert job.marks().count("fault") == 2
    assert Counter(name for _, name, _, _ in started(job)) == dict.fromkeys(
        ("chief-0", "worker-0", "worker-1", "ps-0"), 3
    )
    assert "chief-0 exited without completing training (exit code 0); stopping" in printed
    assert "restart 2 of 10" in printed
    assert "worker restart" not in printed


@pytest.mark.parametrize(
    ("leaving", "code", "reported"),
    [
        ("sys.exit(93)", 93, "not restarted: it would fail in the same way"),
        ("os._exit(130)", 130, "not restarted: the user pressed Ctrl-C"),
        ("os._exit(8)", 8, "gave up after 0 restarts; exit code 8"),
    ],
)
def test_exit_code_of_the_chief(start: Start, leaving: str, code: int, reported: str) -> None:
    """The chief's exit code is the job's, and the exits of the others are not failures."""
    job = start(
        f"""
mark(os.getpid())
if task != "chief":
    serve()
await_training("worker-0", "worker-1", "ps-0")
train()
{leaving}
""",
        "--ps=1",
        "--max-restarts=0",
    )
    returned, printed = job.finish()
    assert returned == code, printed
    assert reported in printed
    assert "first failure: chief-0 " in printed
    assert all(is_dead(pid) for pid in job.pids(4))


def test_preempted_chief(start: Start) -> None:
    """The preemption of a chief, after saving, is not a failure; the others are then stopped.

    All processes restart.
    """
    job = start(
        """
def end(number, frame):
    mark(f"{name} ends")
    os._exit(0)

signal.signal(signal.SIGTERM, end)
if task != "chief":
    serve()
await_training("worker-0", "worker-1", "ps-0")
train()
if attempt == 0:
    contract.report(name, Phase.PREEMPTED)
    mark("saved")
    os._exit(143)
complete()
""",
        "--ps=1",
        "--max-restarts=0",
    )
    code, printed = job.finish()
    assert code == 0, printed
    marks = job.marks()
    assert marks[0] == "saved"
    assert sorted(marks[1:]) == sorted([*["ps-0 ends", "worker-0 ends", "worker-1 ends"] * 2])
    assert "chief-0 was preempted after saving a checkpoint\n" in printed
    assert "restarting\n" in printed
    assert "worker restart" not in printed


def test_signal_to_the_supervisor(start: Start) -> None:
    """A signal to the supervisor reaches the chief first, and the others once it has saved."""
    job = start(
        """
def end(number, frame):
    if task == "chief":
        time.sleep(0.5)
        for server in ("worker-0", "worker-1", "ps-0"):
            os.kill(int(contract.read(server).why), 0)
        mark("saved")
        contract.report(name, Phase.PREEMPTED)
        os._exit(143)
    mark(f"{name} ends")
    os._exit(0)

signal.signal(signal.SIGTERM, end)
if task != "chief":
    contract.report(name, Phase.JOINED, str(os.getpid()))
    sleep()
await_training("worker-0", "worker-1", "ps-0")
train()
mark("trains")
sleep()
""",
        "--ps=1",
    )
    await_until(lambda: job.marks() == ["trains"], "training")
    job.process.terminate()
    code, printed = job.finish()
    assert code == 143, printed
    assert job.marks()[1] == "saved"
    assert sorted(job.marks()[2:]) == ["ps-0 ends", "worker-0 ends", "worker-1 ends"]
    assert "stopped by SIGTERM to the supervisor: chief-0 exited with code 143; " in printed


def test_second_signal(start: Start) -> None:
    """A second signal to the supervisor kills all processes immediately."""
    job = start(
        """
signal.signal(signal.SIGINT, lambda *_: mark("heard"))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if task != "chief":
    serve()
await_training("worker-0", "worker-1", "ps-0")
train()
mark("trains")
while True:
    time.sleep(1)
""",
        "--ps=1",
        "--grace=1000",
    )
    await_until(lambda: job.marks() == ["trains"], "training")
    job.process.send_signal(signal.SIGINT)
    await_until(lambda: job.marks() == ["trains", "heard"], "only the chief has received it")
    job.process.send_signal(signal.SIGINT)
    code, printed = job.finish()
    assert code == 130, printed
    assert "ps-0 was stopped by the supervisor (SIGKILL)" in printed


def test_server_that_ignores_sigterm(start: Start) -> None:
    """A server that is still running after the chief has finished is killed without a failure.

    A worker that has just died, or that cannot be restarted any more, is not a failure either.
    """
    job = start(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
mark(os.getpid())
if task != "chief":
    contract.report(name, Phase.JOINED, str(os.getpid()))
    sleep()
await_training("worker-0", "worker-1", "ps-0")
train()
os.kill(int(contract.read("worker-1").why), signal.SIGKILL)
mark("fault")
complete()
""",
        "--ps=1",
    )
    code, printed = job.finish()
    assert code == 0, printed
    assert job.marks().count("fault") == 1
    assert all(is_dead(int(mark)) for mark in job.marks() if mark != "fault")
    assert "chief-0 completed training" in printed


def test_ps_that_dies_with_the_completion(start: Start) -> None:
    """Only the chief must complete training: a parameter server found dead then is not a
    failure."""
    job = start(
        """
mark(f"{name} {os.getpid()}")
if task != "chief":
    contract.report(name, Phase.JOINED, str(os.getpid()))
    sleep()
await_training("worker-0", "worker-1", "ps-0")
train()
await_marks("reported")
os.kill(int(contract.read("ps-0").why), signal.SIGKILL)
mark("fault")
complete()
""",
        "--ps=1",
    )
    await_until(lambda: len(job.marks()) == 4, "all have started")
    pids = {name: int(pid) for name, pid in (mark.split() for mark in job.marks())}
    job.process.send_signal(signal.SIGSTOP)  # then both are noticed together
    await_until(lambda: is_stopped(job.process.pid), "the supervisor is stopped")
    with (job.folder / "marks").open("a") as marks:
        marks.write("reported\n")
    await_until(lambda: is_dead(pids["ps-0"]) and is_dead(pids["chief-0"]), "both are dead")
    job.process.send_signal(signal.SIGCONT)
    code, printed = job.finish()
    assert code == 0, printed
    assert job.marks().count("fault") == 1
    assert "chief-0 completed training in " in printed
    assert "0 restarts\n" in printed
    assert all(is_dead(pid) for pid in pids.values())


def test_missing_ps(start: Start) -> None:
    """A parameter server that does not join in time is named as the failure.

    The chief, which waits for it, is not.
    """
    job = start(
        """
if task == "worker":
    serve()
sleep()
""",
        "--ps=1",
        "--startup-timeout=2",
        "--max-restarts=0",
    )
    code, printed = job.finish()
    assert code == 124, printed
    assert (
        "first failure: ps-0 has not joined the cluster within 2 s (--startup-timeout)" in printed
    )
    assert "chief-0 has not joined" not in printed


def test_missing_worker(start: Start) -> None:
    """A worker that does not join in time is stopped and restarted on its own."""
    job = start(
        """
if name == "worker-1" and not Path(__file__).with_name("dead").exists():
    Path(__file__).with_name("dead").touch()
    mark(f"fault {os.getpid()}")
    sleep()
if task != "chief":
    serve()
await_training("worker-0", "worker-1", "ps-0")
train()
complete()
""",
        "--ps=1",
        "--startup-timeout=6",
        "--max-restarts=0",
    )
    code, printed = job.finish()
    assert code == 0, printed
    [fault] = job.marks()
    assert is_dead(int(fault.split()[1]))
    late = "worker-1 has not joined the cluster within 6 s (--startup-timeout)"
    assert f"{late}; the others continue; worker restart 1" in printed
    assert "has not joined" not in printed.replace(late, "", 1)


@pytest.mark.ci
def test_worker_without_a_sign_of_life(start: Start) -> None:
    """A frozen worker is killed and restarted on its own; a frozen parameter server ends the
    attempt."""
    job = start(
        """
from keras_distplug.cluster import pulse

def stop():
    # Only this process gives signs of life, so no other can miss one on a busy machine.
    pulse.begin()
    while not contract.pulse_file(name).exists():
        time.sleep(0.01)
    mark(f"{name} stops")
    os.kill(os.getpid(), signal.SIGSTOP)

if task == "ps":
    contract.report(name, Phase.JOINED)
    await_marks("worker-1 is back")
    if attempt == 0:
        stop()
    sleep()
if name == "worker-1":
    contract.report(name, Phase.JOINED)
    if not Path(__file__).with_name("dead").exists():
        Path(__file__).with_name("dead").touch()
        stop()
    mark("worker-1 is back")
    sleep()
if task == "worker":
    serve()
await_training("worker-0", "worker-1", "ps-0")
train()
if attempt == 0:
    sleep()
complete()
""",
        "--ps=1",
        "--unresponsive-timeout=4",
    )
    code, printed = job.finish()
    assert code == 0, printed
    stops = ["worker-1 stops", "worker-1 is back", "ps-0 stops"]
    assert job.marks()[:3] == stops, printed
    silent = "has given no sign of life for 4 s; process state T (stopped) (--unresponsive-timeout)"
    assert f"worker-1 {silent}; the others continue; worker restart 1" in printed
    assert f"ps-0 {silent}; stopping all processes" in printed


def test_log_is_read(start: Start) -> None:
    """Restarts of a worker are one group of incidents, which counts all of them."""
    job = start(
        """
Path(__file__).with_name("marks").touch()
if task != "chief":
    contract.report(name, Phase.JOINED)
    if name == "worker-0" and Path(__file__).with_name("marks").read_text().count("fault") < 2:
        await_training("chief-0")
        mark("fault")
        os.kill(os.getpid(), signal.SIGKILL)
    sleep()
train()
await_marks("reported")
complete()
""",
        "--ps=1",
        "--log=events",
    )
    job.read_until("worker restart 2")
    with (job.folder / "marks").open("a") as marks:
        marks.write("reported\n")
    code, printed = job.finish()
    assert code == 0, printed
    assert job.marks().count("fault") == 2
    entries = [from_line(line) for line in (job.folder / "events").read_bytes().splitlines()]
    supervised = [entry for entry in entries if entry is not None]
    assert len(supervised) == len(entries)
    shown = summary("run-0001", [], supervised, supervised[-1].at)
    [group] = shown["incidents"]
    assert (group["kind"], group["count"]) == ("started_again", 2)
    assert group["what"] == "worker-0 was killed by SIGKILL; worker restart 2"
