"""A forked worker behaves like an ordinary process; without a server, it is one."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from keras_distplug.core.supervised import JOB, Supervised
from keras_distplug.supervisor import fork_server, guard
from keras_distplug.supervisor.attempt import Outcome
from keras_distplug.supervisor.event_log import EventLog
from keras_distplug.supervisor.exits import Cause, Exit
from keras_distplug.supervisor.fork_server import ForkServer, PythonCommand
from keras_distplug.supervisor.launch import Handle, common_environment
from keras_distplug.supervisor.output import Output
from keras_distplug.supervisor.run import Job, _Reporter

LIMIT_SECS = 60.0

# A substitute for TensorFlow that records the process that has imported it.
HEAVY = """
import os
server = os.getpid()
read = os.environ.get("TF_READ")
os.environ.setdefault("KMP_SET", "by heavy")
def _start_process():
    if os.getpid() != server:
        print("heavy starts", flush=True)
"""


@dataclass
class Script:
    """A script and the server that forks it."""

    folder: Path
    server: ForkServer
    environ: Mapping[str, str]
    mark: str = ""
    notes: list[str] = field(default_factory=list)

    def start(self, script: str, **environ: str) -> tuple[Handle, bool]:
        (self.folder / "train.py").write_text(textwrap.dedent(script))
        started, is_forked = self.server.start({**self.environ, **environ})
        self.mark = started.mark
        return started.handle, is_forked

    def run(self, script: str, **environ: str) -> tuple[int, str, bool]:
        """Returns the exit code, the output, and True if the script was forked."""
        handle, is_forked = self.start(script, **environ)
        return handle.wait(), read(handle), is_forked


Make = Callable[..., Script]


def read(handle: Handle) -> str:
    assert handle.stdout is not None
    with handle.stdout as pipe:
        return pipe.read().decode()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Creates a script and its server, which imports `heavy` early."""
    made: list[Script] = []

    def make(*command: str, settings: Mapping[str, str] | None = None, **options: Any) -> Script:
        (tmp_path / "heavy.py").write_text(HEAVY)
        job = uuid.uuid4().hex
        base = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
        environ = common_environment({**base, "PYTHONPATH": str(tmp_path)})
        ours = {"KERAS_DISTPLUG_ATTEMPT": "0", "KERAS_DISTPLUG_STATUS_DIR": str(tmp_path)}
        command = command or (sys.executable, str(tmp_path / "train.py"), "a", "b c")
        server = ForkServer(command, environ, job, tmp_path, **{"modules": ["heavy"], **options})
        made.append(Script(tmp_path, server, {**environ, JOB: job, **ours}))
        server.prepare(settings)
        if server._server is not None:
            # Waits until the next worker will be forked, or the reason why it will not is known.
            select.select([server._server._connection], [], [], LIMIT_SECS)
            server._look()
        return made[-1]

    yield make
    for each in made:
        each.server.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py -x", (("python",), ("train.py", "-x"))),
        ("python3.11 -u -X dev train.py", (("python3.11", "-u", "-X", "dev"), ("train.py",))),
        ("python3 -m package.train 3", (("python3",), ("-m", "package.train", "3"))),
        ("python -c pass", (("python",), ("-c", "pass"))),
        ("bash train.sh", None),
        ("./train.py", None),
        ("python", None),
        ("python -", None),
        ("python -i train.py", None),
        ("python folder", None),
        ("python -m", None),
        ("python -mpackage.train conf.py", None),
        ("python -cpass train.py", None),
        ("python -ui train.py", None),
        ("python -x train.py", None),
    ],
)  # fmt: skip
def test_python_commands(command: str, expected: Any) -> None:
    """Only commands that run a script, a module or code can be forked."""
    found = PythonCommand.of(command.split())
    assert (found and (found.interpreter, found.arguments)) == expected


def test_same_process(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script sees the same process properties, forked or not."""
    script = """
        import heavy, os, sys
        import heavy as once_more
        print(sys.argv, sys.path[0], __name__, __file__, __builtins__ is not None, os.getcwd())
        print(sys.modules["__main__"].__dict__ is globals(), heavy is once_more)
        print(heavy.__spec__.origin, heavy.__loader__.__class__.__name__, heavy.read)
        print(sorted(set(os.environ) - {"KERAS_DISTPLUG_MEMBER", "LC_CTYPE"}))
        print(os.getsid(0) == os.getpid(), os.read(0, 1), sys.stdout.write_through)
        print("error", file=sys.stderr)
        """
    made = make()
    monkeypatch.chdir(made.folder)
    code, forked, is_forked = made.run(script)
    assert (code, is_forked) == (0, True)
    made.server.__exit__(None, None, None)
    code, ordinary, is_forked = made.run(script)
    assert (code, is_forked) == (0, False)
    assert forked == f"heavy starts\n{ordinary}"
    assert "['a', 'b c']" not in forked
    assert str(made.folder) in forked
    assert "KMP_SET" in forked
    assert made.server.notes() == []


# A native thread, as TensorFlow's and OpenBLAS' are: Python does not know of it.
NATIVE_THREAD = """
import ctypes
libc = ctypes.CDLL(None)
assert libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.pause, None) == 0
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="this Python does not warn about forks")
def test_no_warning_of_threads(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 warns about a fork in a process with threads, native ones included. The server
    forks without that warning; a fork in a script still causes it."""
    monkeypatch.setattr(f"{__name__}.HEAVY", HEAVY + NATIVE_THREAD)
    monkeypatch.setenv("PYTHONWARNINGS", "always::DeprecationWarning")
    made = make()
    assert made.run("import heavy") == (0, "heavy starts\n", True)
    assert made.server._server is not None
    file = made.server._server._output
    assert os.pread(file.fileno(), 1000, 0) == b""
    code, printed, is_forked = made.run(f"{NATIVE_THREAD}\nimport os\nos.fork() or os._exit(0)")
    assert (code, is_forked) == (0, True)
    assert "DeprecationWarning: This process" in printed


TRACEBACK = """Traceback (most recent call last):
  File "TRAIN", line 1, in <module>
    1 / 0
    ~~^~~
ZeroDivisionError: division by zero
"""


@pytest.mark.parametrize(
    ("script", "code", "printed"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
        ("import os; os._exit(7)", 7, ""),
        ("import atexit; atexit.register(print, 'bye')", 0, "bye\n"),
        ("import threading; threading.Timer(0.1, print, ['late']).start()", 0, "late\n"),
        ("1 / 0", 1, TRACEBACK),
    ],
)  # fmt: skip
def test_ends(make: Make, script: str, code: int, printed: str) -> None:
    """A forked script ends in the same way: same exit code, last output and traceback."""
    made = make()
    found = made.run(script)
    path = str(made.folder / "train.py")
    assert found == (code, printed.replace("TRAIN", path), True)


def test_syntax_error_and_missing_script(make: Make) -> None:
    made = make()
    code, printed, is_forked = made.run("def")
    assert (code, is_forked) == (1, True)
    assert "SyntaxError" in printed
    assert "forking.py" not in printed
    (made.folder / "train.py").unlink()
    started, is_forked = made.server.start(made.environ)
    assert started.handle.wait() == 2
    assert is_forked
    assert "can't open file" in read(started.handle)


@pytest.mark.parametrize("how", ["-m", "-c"])
def test_modules_and_code(make: Make, tmp_path: Path, how: str) -> None:
    code = "import heavy, os, sys; print(sys.argv[1:], __name__, heavy.server != os.getpid())"
    (tmp_path / "job.py").write_text(code)
    made = make(sys.executable, how, "job" if how == "-m" else code, "x")
    code_, printed, is_forked = made.run("")
    assert (code_, is_forked) == (0, True)
    assert printed.splitlines()[1] == "['x'] __main__ True"


def test_marks(make: Make) -> None:
    """The guard finds a forked worker and its child processes by the worker's mark."""
    made = make()
    handle, is_forked = made.start(
        """
        import signal, subprocess, sys
        waits = [sys.executable, "-c", "import signal; signal.pause()"]
        child = subprocess.Popen(waits, start_new_session=True)
        print(child.pid, flush=True)
        signal.pause()  # not `child.wait()`, which the child's death would end
        """
    )
    assert is_forked
    assert handle.stdout is not None
    child = int(handle.stdout.readline())
    others, _ = made.server.start(made.environ)
    assert {handle.pid, child} == set(guard.find_pids([made.mark]))
    assert {handle.pid, child, others.handle.pid} < set(
        guard.find_pids([guard.get_mark(made.environ[JOB])])
    )
    guard.signal_all([made.mark], signal.SIGKILL)
    assert handle.wait() == -signal.SIGKILL
    # The grandchild has become a child of this process, unless its own parent could still reap it.
    with contextlib.suppress(ChildProcessError):
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not guard.living([made.mark])
    assert guard.living([others.mark])
    guard.kill_all([others.mark], LIMIT_SECS)


def test_orphans_are_reaped(make: Make) -> None:
    """Exited orphans of a worker do not remain zombies of the supervisor."""
    made = make()
    handle, _ = made.start(
        """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "pass"])
        child.stdin, child._child_created = None, False
        import os
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        print(child.pid, flush=True)
        """
    )
    assert handle.wait() == 0
    child = int(read(handle))
    assert Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    guard.reap_orphans()
    assert not Path(f"/proc/{child}").exists()


def test_children_of_other_code(make: Make) -> None:
    """Children started by other parts of the program are not reaped."""
    make()
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    guard.reap_orphans()
    assert child.wait(LIMIT_SECS) == 3


def test_pickling_from_a_thread_of_a_module(make: Make, tmp_path: Path) -> None:
    """Under `-m`, too, `__main__` is the script, even for a thread that outlives the script's main
    thread."""
    (tmp_path / "job.py").write_text(
        textwrap.dedent(
            """
            import heavy, os, pickle, threading
            class Batch: pass
            def send():
                threading.main_thread().join()
                print(type(pickle.loads(pickle.dumps(Batch()))) is Batch, __name__, flush=True)
            threading.Thread(target=send).start()
            """
        )
    )
    made = make(sys.executable, "-m", "job")
    assert made.run("") == (0, "heavy starts\nTrue __main__\n", True)


def test_random_numbers(make: Make) -> None:
    """Unseeded workers draw different random numbers."""
    made = make(modules=["numpy", "random"])
    script = "import random, numpy; print(random.random(), numpy.random.random())"
    [(_, first, _), (_, second, _)] = made.run(script), made.run(script)
    assert all(a != b for a, b in zip(first.split(), second.split(), strict=True))


SETS_ENVIRONMENT = """
    import os, tempfile
    os.chdir(tempfile.gettempdir())
    os.environ["TF_READ"] = "late"
    import heavy
    print(heavy.read, heavy.server == os.getpid())
    """
INSTALLS_HOOK = """
    import sys, os
    class Hook:
        def find_spec(self, *args): return None
    sys.meta_path.insert(0, Hook())
    import heavy
    print(heavy.read, heavy.server == os.getpid())
    """


ANOTHER_HEAVY = """
    import os, pathlib, sys
    pathlib.Path("other").mkdir(exist_ok=True)
    pathlib.Path("other/heavy.py").write_text("import os; read, server = 'other', os.getpid()")
    sys.path.insert(0, "other")
    import heavy
    print(heavy.read, heavy.server == os.getpid())
    """


@pytest.mark.parametrize(
    ("script", "read", "why"),
    [
        (SETS_ENVIRONMENT, "late", "it sets TF_READ before it imports TensorFlow"),
        (INSTALLS_HOOK, "None", "it installs an import hook (<__main__.Hook object at "),
        (ANOTHER_HEAVY, "other", "it imports heavy from "),
    ],
    ids=["environment", "hook", "another module"],
)
def test_starts_over(
    make: Make, script: str, read: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A script whose imports would behave differently gets its own process.

    So do later ones; this is reported once.
    """
    monkeypatch.chdir(tmp_path)
    made = make()
    assert made.run(script) == (0, f"{read} True\n", True)
    [note] = made.server.notes()
    assert f"the script needs its own process: {why}" in note
    assert made.run(script) == (0, f"{read} True\n", False)
    assert made.server.notes() == []


def test_settings_of_the_script(make: Make) -> None:
    """The server starts with the settings that an ordinary worker reported for its script.

    Variables set by the imports themselves are not among them.
    """
    made = make(settings={"TF_READ": "late", "KMP_SET": "by heavy", "OTHER": "1"})
    code, printed, is_forked = made.run(SETS_ENVIRONMENT)
    assert (code, printed, is_forked) == (0, "heavy starts\nlate False\n", True)
    assert made.server.notes() == []


@pytest.mark.parametrize(
    ("name", "read"), [("TF_READ", "3"), ("PYTHONHASHSEED", "None"), ("LD_BIND_NOW", "None")]
)
def test_worker_with_another_environment(make: Make, name: str, read: str) -> None:
    """A worker whose settings for TensorFlow, Python or the loader differ starts over first."""
    made = make()
    script = "import heavy, os\nprint(heavy.read, heavy.server == os.getpid())"
    assert made.run(script, **{name: "3"}) == (0, f"{read} True\n", True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
@pytest.mark.parametrize("forks", [0, 1])
def test_lost_server(
    make: Make, number: signal.Signals, forks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead or hanging server is replaced by ordinary starts, which is reported once.

    The workers that it has forked keep running, and their exit codes are received.
    """
    monkeypatch.setattr(fork_server, "_REPLY_SECS", 0.5)
    made = make()
    waits = (
        "import sys; sys.stdin = open(0); import signal; print('waits', flush=True); signal.pause()"
    )
    living = [made.start(waits)[0] for _ in range(forks)]
    for handle in living:
        assert handle.stdout is not None
        assert handle.stdout.readline() == b"waits\n"
    assert made.server._server is not None
    os.kill(made.server._server._process.pid, number)
    if number == signal.SIGKILL:
        os.waitid(os.P_PID, made.server._server._process.pid, os.WEXITED | os.WNOWAIT)
    assert made.run("print('trained')") == (0, "trained\n", False)
    assert made.run("print('trained')") == (0, "trained\n", False)
    [note] = made.server.notes()
    why = "it has exited" if number == signal.SIGKILL else "it has not answered for 0.5 s"
    assert note.startswith(f"workers start without the fork server: {why}")
    for handle in living:
        os.kill(handle.pid, signal.SIGUSR1)
        assert handle.wait() == -signal.SIGUSR1


BREAKS = {
    "raise MemoryError('no room')": "MemoryError: no room",
    "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()": (
        "RuntimeError: importing breaks starts threads, which a fork would lose: Thread-1"
    ),
    "print('last words', flush=True); import os; os._exit(4)": (
        "it has exited; its last output: last words"
    ),
}


@pytest.mark.parametrize("module", BREAKS, ids=["no memory", "thread", "exit"])
def test_server_that_cannot_start(make: Make, tmp_path: Path, module: str) -> None:
    (tmp_path / "breaks.py").write_text(module)
    made = make(modules=["breaks"])
    assert made.run("print('trained')") == (0, "trained\n", False)
    [note] = made.server.notes()
    assert BREAKS[module] in note
    made.server.prepare()
    assert made.server._server is None


def test_imports_that_print_much(make: Make, tmp_path: Path) -> None:
    """The output of the server is not read, so it must not block on it."""
    (tmp_path / "prints.py").write_text("print('x' * 10**6, flush=True)")
    assert make(modules=["prints"]).run("print('trained')") == (0, "trained\n", True)


def test_submodule_first(make: Make, tmp_path: Path) -> None:
    """A script that imports a submodule also imports the package."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(HEAVY + "import package.part")
    (tmp_path / "package" / "part.py").write_text("value = 3")
    script = "import os\nfrom package.part import value\nimport package\n"
    script += "print(value, package.part.value, package.server != os.getpid())"
    assert make(modules=["package"]).run(script) == (0, "heavy starts\n3 3 True\n", True)


def test_its_own_command(make: Make) -> None:
    """A script that restarts itself does so with its own command."""
    made = make()
    script = """
        import os, sys
        print(sys.orig_argv[1:], flush=True)
        if "again" not in os.environ:
            os.environ["again"] = "1"
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        """
    command = f"{[str(made.folder / 'train.py'), 'a', 'b c']}\n"
    assert made.run(script) == (0, 2 * command, True)


def test_late_answer(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server answers too late, the worker is killed before another one takes its place."""
    made = make()
    assert made.server._server is not None
    receive = made.server._server._receive
    pids = []

    def late() -> None:
        pids.append(receive()["pid"])
        raise fork_server.ServerError("it has not answered for 10 s")

    monkeypatch.setattr(made.server._server, "_receive", late)
    script = """
        import os, signal
        if "forking.py" in open("/proc/self/cmdline").read():
            signal.pause()
        print(os.getpid(), flush=True)
        """
    code, printed, is_forked = made.run(script)
    assert (code, is_forked) == (0, False)
    [pid] = pids
    assert int(printed) != pid
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len(made.server.notes()) == 1


def test_fork_that_fails(make: Make) -> None:
    """A worker that cannot be forked is started as an ordinary process."""
    made = make()
    code, printed, is_forked = made.run("print('trained')", KERAS_DISTPLUG_JOB="too short")
    assert (code, printed, is_forked) == (0, "trained\n", False)
    [note] = made.server.notes()
    assert "KERAS_DISTPLUG_JOB could not be replaced in the environment" in note


def test_disabled(make: Make) -> None:
    """The user can disable the server; if it is not possible, the reason is reported."""
    made = make(is_on=False)
    assert made.run("print(1)") == (0, "1\n", False)
    assert made.server.notes() == []
    made = make(why_not="the workers use GPUs")
    assert made.run("print(1)") == (0, "1\n", False)
    assert made.server.notes() == ["workers start without the fork server: the workers use GPUs"]
    made = make("bash", "-c", "echo 2")
    assert made.run("") == (0, "2\n", False)
    assert made.server.notes() == [
        "workers start without the fork server: bash is not a Python interpreter that runs a script"
    ]


def test_server_ends_with_the_supervisor(make: Make) -> None:
    made = make()
    server = made.server._server
    assert server is not None
    server._connection.close()
    assert server._process.wait(LIMIT_SECS) == 0


@pytest.mark.parametrize(
    ("forked", "trains", "cause", "is_on"),
    [
        (["worker-0"], False, Cause.FAILED, False),
        (["worker-0"], True, Cause.FAILED, True),
        ([], False, Cause.FAILED, True),
        (["worker-0"], False, Cause.COMPLETED, True),
    ],
)
def test_forked_workers_that_never_train(
    make: Make, tmp_path: Path, forked: list[str], trains: bool, cause: Cause, is_on: bool
) -> None:
    """If forked workers fail before their first step, later ones are ordinary processes.

    A problem that only affects forked workers must not end a job.
    """
    made = make()
    server = made.server
    log, output = EventLog(None, "job"), Output(["worker-0"], io.StringIO())
    contract = Supervised("job", 1, tmp_path)
    with log:
        reporter = _Reporter(Job(("python", "train.py"), 1), output, log, server, contract, [])
        reporter.started(["worker-0"], [0], forked, 0.0)
        if trains:
            reporter.training({})
        reporter.ended(Outcome((Exit("worker-0", cause, 1, 0.0),), None, 0.0))
    notes = server.notes()
    started, is_forked = server.start(made.environ)
    os.kill(started.handle.pid, signal.SIGKILL)
    assert is_forked is is_on
    expected = "forked workers did not reach their first step"
    assert [expected in note for note in notes] == ([] if is_on else [True])
