"""`keras-distplug` in a forked process. Its fork server is a fork of itself, ready immediately."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Self

from keras_distplug.supervisor import fork_server, forking

if __name__ == "__main__":
    fork_server.guard.become_subreaper()
    ours, theirs = socket.socketpair()
    loaded = forking.load(fork_server.MODULES)
    server_pid = os.fork()
    if server_pid == 0:
        ours.close()
        os.setsid()
        request = forking.serve(theirs)
        if request is None:
            os._exit(0)
        forking.work(request, loaded)
        raise SystemExit(0)
    theirs.close()

    class _Ready(fork_server.Server):
        def __init__(
            self,
            interpreter: Sequence[str],
            environ: Mapping[str, str],
            modules: Sequence[str],
            shown: Sequence[str],
        ) -> None:
            self._marks = []
            self._connection = ours
            self._process = fork_server.Forked(server_pid)
            self.is_ready = True
            fork_server.guard.note_child(server_pid)

        def close(self) -> str:
            self._connection.close()  # where the server ends
            self._process.wait()
            return ""

    class _Prepared(fork_server.ForkServer):
        def __enter__(self) -> Self:
            self.prepare()
            return super().__enter__()

    from keras_distplug.supervisor import run

    fork_server.Server = _Ready  # type: ignore[misc]
    run.ForkServer = _Prepared  # type: ignore[misc]
    from keras_distplug.cli import main

    raise SystemExit(main())
