"""laptop.py SYSTEM FOLDER interrupted|resumed: trains as on another operating system.

Before the package is imported, it removes features that macOS or Windows lack. Features with
different behavior remain unchanged: paths, and the locking and flushing of files.
"""

from __future__ import annotations

import argparse
import builtins
import io
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

MACOS = {
    os: "pidfd_open memfd_create sched_getaffinity posix_fadvise",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo",
    select: "epoll",
    time: "CLOCK_BOOTTIME",
}
WINDOWS = {
    os: "O_DIRECTORY O_NONBLOCK O_CLOEXEC O_NOFOLLOW fork forkpty link sysconf getuid geteuid "
    "getgid getegid statvfs fstatvfs getpgid getpgrp setsid setpgid killpg waitid wait3 wait4 "
    "fchmod chown register_at_fork pread pwrite preadv pwritev getloadavg uname mkfifo "
    "posix_fallocate sendfile set_blocking WNOHANG",
    signal: "SIGUSR1 SIGUSR2 SIGHUP SIGALRM SIGKILL SIGSTOP SIGCONT SIGTSTP SIGCHLD SIGQUIT "
    "pthread_kill pthread_sigmask sigwait sigpending setitimer ITIMER_REAL alarm pause "
    "SIG_BLOCK SIG_SETMASK SIG_UNBLOCK",
    select: "poll",
    time: "clock_gettime CLOCK_MONOTONIC CLOCK_THREAD_CPUTIME_ID pthread_getcpuclockid",
}
FORBIDDEN = set('<>:"\\|?*')  # in file names on Windows


def become(system: str) -> None:
    """Hides names and /proc from this process."""
    for lost in (MACOS, WINDOWS) if system == "Windows" else (MACOS,):
        for module, names in lost.items():
            for name in names.split():
                if hasattr(module, name):
                    delattr(module, name)
    if system == "Windows":
        shutil._use_fd_functions = False  # type: ignore[attr-defined]  # decided on import
    usual = builtins.open

    def without_proc(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | os.PathLike) and str(file).startswith("/proc/"):
            raise FileNotFoundError(2, "no /proc", str(file))
        return usual(file, *args, **kwargs)

    builtins.open = io.open = without_proc  # type: ignore[assignment]

    def kill(pid: int, number: int) -> None:
        raise AssertionError("on Windows, os.kill ends the process, whatever the number")

    os.kill = kill


class Stop(keras.callbacks.Callback):
    """Interrupts a training in the middle of its second epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer.iterations.numpy() == 11:
            raise KeyboardInterrupt


def train(*callbacks: keras.callbacks.Callback) -> list[np.ndarray]:
    """Returns the weights and losses."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(64, seed=1).batch(8)
    history = model.fit(data, epochs=3, verbose=0, callbacks=list(callbacks))
    return [*model.get_weights(), np.array(history.history["loss"])]


def commands(folder: Path) -> None:
    """The commands and the tab handle the run; the supervisor explains why it cannot run here."""
    from keras_distplug.cli import main
    from keras_distplug.tensorboard_plugin.plugin import Plugin

    runs = str(folder / "runs")
    asked = [[name, runs] for name in ("ls", "show", "verify", "goodput", "prune")]
    asked += [["verify", "--deep", runs], ["prune", "--dry-run", runs]]
    asked += [["report", runs, "-o", str(folder / "report.html")]]
    asked += [["export", runs, str(folder / f"model.{end}")] for end in ("keras", "safetensors")]
    for words in asked:
        assert main(words) == 0, words
    assert main(["run", "--workers", "1", "--", sys.executable, "-c", ""]) == 2
    context = argparse.Namespace(flags=argparse.Namespace(logdir=runs))
    assert Plugin(context).is_active()


def main(system: str, folder: Path, what: str) -> None:
    become(system)
    import keras_distplug as kd

    ours = kd.defaults(folder / "runs", save_freq=3)
    if what == "interrupted":
        train(Stop(), *ours)
        raise AssertionError("it was not interrupted")
    resumed, plain = train(*ours), train()
    for ours_, theirs in zip(resumed, plain, strict=True):
        np.testing.assert_array_equal(ours_, theirs)
    commands(folder)
    names = [path.name for path in folder.rglob("*")]
    assert not [name for name in names if FORBIDDEN & set(name) or name.endswith((".", " "))], names


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
