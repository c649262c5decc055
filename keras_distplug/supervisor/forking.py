"""The process of the fork server: imports TensorFlow and Keras once, and forks workers.

It starts neither TensorFlow's runtime nor a Python thread, so that forking is safe. Every worker
runs the command from its first line, and finds `tensorflow`, `keras` and `keras_distplug` already
loaded. A worker is not a child of this process but of the supervisor (a "subreaper"), which
receives its exit code even if this process is gone.

Importing early must not change the result. Some settings are read on import; so if a worker, at its
first import of one of these modules, has different settings or an import hook, it starts over as an
ordinary process and reports the reason.

Standard library only, and run as a file by the interpreter of the command, which may have another
version of this package, or none.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import re
import runpy
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

MARKS = ("KERAS_DISTPLUG_JOB", "KERAS_DISTPLUG_MEMBER")
# Variables that TensorFlow, Keras and their dependencies read when they are imported.
_READ_ON_IMPORT = (
    *("TF_", "KERAS_", "XLA_", "CUDA_", "NVIDIA_", "ROCM_", "HIP_", "OMP_", "KMP_", "GOMP_"),
    *("MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NPY_", "NUMPY_", "HDF5_", "PROTOCOL_BUFFERS_"),
)
# Variables that the interpreter and the loader read only when a process starts.
_READ_ON_START = ("PYTHON", "LD_")
_FORK_SERVER = "KERAS_DISTPLUG_FORK_SERVER"  # variables that the script sets, as JSON
_NOT_ON_IMPORT = ("KERAS_DISTPLUG_", "TF_CONFIG")
_START = "_start_process"  # a module's function to call in every process that imports it
_HEADER = struct.Struct("!I")
_STANDARD = 3  # descriptors: input, output, errors


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that TensorFlow, Keras or NumPy may read on import."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_ON_IMPORT) and not name.startswith(_NOT_ON_IMPORT)
    }


def start_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that are read when a process starts."""
    return {n: value for n, value in environ.items() if n.startswith(_READ_ON_START)}


@dataclass(frozen=True)
class Request:
    """A request to fork a worker.

    Args:
        arguments: Arguments of the interpreter: a script and its arguments, `-m` and a module, or
            `-c` and code.
        environ: Environment of the worker.
        cwd: Working directory of the worker.
        refusals: File for the reason if the worker must start over.
    """

    arguments: Sequence[str]
    environ: dict[str, str]
    cwd: str
    refusals: str


def send(connection: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Sends a message and duplicates of file descriptors."""
    data = json.dumps(message).encode()
    head = _HEADER.pack(len(data))
    if descriptors:
        socket.send_fds(connection, [head], list(descriptors))
    else:
        connection.sendall(head)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Returns the next message and its file descriptors.

    Raises:
        EOFError: If the other end is closed.
    """
    head, ancillary, _, _ = connection.recvmsg(
        _HEADER.size, socket.CMSG_SPACE(_STANDARD * array.array("i").itemsize)
    )
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    head += _receive_exactly(connection, _HEADER.size - len(head))
    (size,) = _HEADER.unpack(head)
    return json.loads(_receive_exactly(connection, size)), list(descriptors)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise EOFError
        data += more
    return data


@dataclass(frozen=True)
class Loaded:
    """Imported modules, and the settings that applied to the imports.

    Args:
        modules: Names of the modules.
        settings: Environment variables that the modules may have read.
        start_environ: Environment variables that this process read when it started.
        set_by_modules: Environment variables that the modules have set themselves.
        hooks: Finders on `sys.meta_path`.
        path_hooks: Hooks on `sys.path_hooks`.
    """

    modules: tuple[str, ...]
    settings: Mapping[str, str]
    start_environ: Mapping[str, str]
    set_by_modules: Mapping[str, str]
    hooks: tuple[Any, ...]
    path_hooks: tuple[Any, ...]


def load(modules: Sequence[str]) -> Loaded:
    """Imports these modules.

    Raises:
        RuntimeError: If one of them has started a Python thread, which would be lost in a fork.
    """
    before = dict(os.environ)
    for name in modules:
        importlib.import_module(name)
    # Native thread pools, such as OpenBLAS', stop before a fork and restart automatically.
    here = threading.current_thread()
    if threads := [thread.name for thread in threading.enumerate() if thread is not here]:
        raise RuntimeError(
            f"importing {', '.join(modules)} starts threads, which a fork would lose: "
            f"{', '.join(threads)}"
        )
    gc.collect()
    gc.freeze()  # otherwise the first collection in a worker would copy all shared memory
    set_by_modules = {
        name: value for name, value in os.environ.items() if before.get(name) != value
    }
    hooks = tuple(sys.meta_path), tuple(sys.path_hooks)
    return Loaded(tuple(modules), settings(before), start_settings(before), set_by_modules, *hooks)


def _missing(wanted: Mapping[str, str], loaded: Loaded) -> dict[str, str]:
    """Returns the variables in `wanted` that were not in effect when the modules were loaded.

    A worker also reports variables that the modules have set themselves; these do not count.
    """
    there = {**loaded.settings, **loaded.set_by_modules}
    return {name: value for name, value in wanted.items() if there.get(name) != value}


def serve(connection: socket.socket) -> Request | None:
    """Forks a worker for every request.

    Returns:
        In a worker, its request; in the server None, once the supervisor has closed its end.
    """
    while True:
        try:
            message, descriptors = receive(connection)
        except EOFError:
            return None
        request = Request(**message)
        forked = _fork(request, connection, descriptors)
        if forked is None:
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        send(connection, forked)


def _fork(
    request: Request, connection: socket.socket, descriptors: Sequence[int]
) -> dict[str, Any] | None:
    """Forks a worker. Returns None in the worker, and the outcome in the server."""
    reading, writing = os.pipe()
    try:
        intermediate_pid = _fork_process()
    except OSError as error:
        os.close(reading)
        os.close(writing)
        return {"error": str(error)}
    if intermediate_pid == 0:
        # The intermediate process exits, which makes the worker the supervisor's child.
        try:
            worker = _fork_process()
        except OSError as error:
            os.write(writing, json.dumps({"error": str(error)}).encode())
            os._exit(1)
        if worker != 0:
            os._exit(0)
        try:
            os.close(reading)
            connection.close()
            _set_up_worker(request, descriptors)
            os.write(writing, json.dumps({"pid": os.getpid()}).encode())
            os.close(writing)
        except BaseException as error:  # noqa: BLE001 (the server reports it)
            os.write(writing, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
            os._exit(1)
        return None
    os.close(writing)
    with open(reading, "rb") as file:
        answer = file.read()
    os.waitpid(intermediate_pid, 0)
    found: dict[str, Any] = json.loads(answer) if answer else {"error": "it exited immediately"}
    return found


def _fork_process() -> int:
    with warnings.catch_warnings():
        # Python 3.12 also counts native threads, such as those of OpenBLAS: see `load`.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _set_name(name: str) -> None:
    """Sets the name that `top` shows, because the server and its workers share a command line."""
    Path("/proc/self/comm").write_text(name)


def _set_up_worker(request: Request, descriptors: Sequence[int]) -> None:
    """Turns this process into the one that `Popen` would have started."""
    _rewrite_marks(request.environ)
    _set_name(os.path.basename(sys.executable))
    os.setsid()
    os.chdir(request.cwd)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    for descriptor in descriptors:
        if descriptor >= _STANDARD:
            os.close(descriptor)
    os.environ.clear()
    os.environ.update(request.environ)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # otherwise unseeded workers would all draw the same numbers


def _rewrite_marks(environ: Mapping[str, str]) -> None:
    """Writes a worker's marks into the environment that the kernel shows, which the guard reads."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start, env_end: 50 and 51 of proc(5)
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        block = memory.read(end - start)
        for name in MARKS:
            if name not in environ:
                continue
            new = f"{name}={environ[name]}".encode()
            old = re.search(rb"(?<![^\0])%s=[^\0]*" % name.encode(), block)
            if old is None or len(old[0]) != len(new):
                raise RuntimeError(
                    f"{name} could not be replaced in the environment of the forked process: it is "
                    "missing there, or the old value does not have the length of the new one"
                )
            memory.seek(start + old.start())
            memory.write(new)
    shown = Path("/proc/self/environ").read_bytes().split(b"\0")
    for name in MARKS:
        if name in environ and f"{name}={environ[name]}".encode() not in shown:
            raise RuntimeError(f"{name} could not be set")


class _Preloaded(MetaPathFinder, Loader):
    """Provides the loaded modules when a script imports them."""

    def __init__(self, loaded: Loaded, request: Request) -> None:
        self._packages = {name: _pop_package(name) for name in loaded.modules}
        self._loaded, self._request = loaded, request

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._packages:
            return None
        if len(self._packages) == len(self._loaded.modules):  # the first of them
            if why := self._why_not():
                _start_over(self._request, why)
            os.environ.update(self._loaded.set_by_modules)
            # They may import each other; only those with a start function wait for their import.
            for other in set(self._packages) - {name}:
                if not hasattr(self._packages[other][other], _START):
                    sys.modules.update(self._packages.pop(other))
        spec = self._packages[name][name].__spec__
        assert spec is not None
        mine = ModuleSpec(name, self, origin=spec.origin, is_package=True)
        mine.submodule_search_locations = spec.submodule_search_locations
        mine.has_location = spec.has_location
        return mine

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        package = self._packages.pop(spec.name)
        module = package.pop(spec.name)
        sys.modules.update(package)
        # Saved because the import system overwrites them; `exec_module` restores them.
        spec.loader_state = module.__spec__, module.__loader__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__, module.__loader__ = module.__spec__.loader_state
        if (start := vars(module).get(_START)) is not None:
            start()  # required in every process that imports the module

    def _why_not(self) -> str:
        for name, package in self._packages.items():
            found, loaded = _origin(name, but=self), package[name].__spec__
            if found != (loaded and loaded.origin):
                return f"it imports {name} from {found}"
        if start_settings(self._request.environ) != self._loaded.start_environ:
            return "it starts with other variables for Python or the loader (PYTHON*, LD_*)"
        had, has = self._loaded.settings, settings(os.environ)
        if changed := sorted(name for name in {**had, **has} if had.get(name) != has.get(name)):
            return f"it sets {', '.join(changed)} before it imports TensorFlow"
        known = [self, *self._loaded.hooks]
        added = [hook for hook in sys.meta_path if hook not in known]
        if added or tuple(sys.path_hooks) != self._loaded.path_hooks:
            return f"it installs an import hook ({', '.join(map(repr, added)) or 'sys.path_hooks'})"
        return ""


def _pop_package(name: str) -> dict[str, ModuleType]:
    """Removes a package's modules from `sys.modules`, and returns them."""
    found = [each for each in sys.modules if each == name or each.startswith(f"{name}.")]
    return {each: sys.modules.pop(each) for each in found}


def _origin(name: str, but: MetaPathFinder) -> str | None:
    """Returns the location from which this name would be imported."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if finder is not but and find_spec and (spec := find_spec(name, None)) is not None:
            return str(spec.origin)
    return None


def _start_over(request: Request, why: str) -> None:
    """Replaces this process by an ordinary one, as started without a fork server."""
    try:
        Path(request.refusals).write_text(why)
    except OSError as error:
        warnings.warn(
            f"The script starts over without the fork server, because {why}. This may repeat at "
            f"every restart, because the supervisor could not be notified: {error}. To avoid "
            "this, pass --no-fork-server to `keras-distplug run`.",
            stacklevel=2,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(request.cwd)
    os.execve(sys.executable, sys.orig_argv, request.environ)


def run(request: Request) -> None:
    """Runs a script, a module or code, as the interpreter would."""
    what, *arguments = request.arguments
    main = ModuleType("__main__")
    vars(main).update(__builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = main
    first = {"-m": request.cwd, "-c": ""}.get(what, os.path.dirname(os.path.realpath(what)))
    if not sys.flags.safe_path:
        sys.path.insert(0, first)
    if what == "-m":
        sys.argv = arguments
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]  # as `python -m`
        return
    if what == "-c":
        name, sys.argv = "<string>", ["-c", *arguments[1:]]
        source: str | bytes = arguments[0]
    else:
        name, sys.argv = os.path.abspath(what), [what, *arguments]
        vars(main).update(__file__=name, __cached__=None)
        try:
            source = Path(what).read_bytes()
        except OSError as error:
            print(
                f"{sys.executable}: can't open file {name!r}: [Errno "
                f"{error.errno}] {error.strerror}",
                file=sys.stderr,
            )
            raise SystemExit(2) from None
    exec(compile(source, name, "exec", dont_inherit=True), vars(main))


def work(request: Request, loaded: Loaded) -> None:
    """Runs a worker. Errors end it like any script."""
    here = sys.orig_argv.index(__file__) if __file__ in sys.orig_argv else 1
    options = sys.orig_argv[1:here]
    sys.orig_argv[1:] = [*options, *request.arguments]
    sys.meta_path.insert(0, _Preloaded(loaded, request))
    try:
        run(request)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 (as the interpreter does)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # hides this file's frames from the user
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None


def main(descriptor: int, modules: Sequence[str]) -> None:
    """Runs the server until the supervisor closes its end of the connection."""
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    if not sys.flags.safe_path:
        sys.path.pop(0)  # this file's folder
    environ = dict(os.environ)
    try:
        loaded = load(modules)
    except BaseException as error:
        send(connection, {"error": f"{type(error).__name__}: {error}"})
        raise
    if missing := _missing(json.loads(os.environ[_FORK_SERVER]), loaded):
        # The script sets variables before its imports that the modules have not read here.
        os.set_inheritable(descriptor, True)
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**environ, **missing})
    _set_name("fork-server")
    send(connection, {"ready": True})
    request = serve(connection)
    if request is not None:
        work(request, loaded)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","))
