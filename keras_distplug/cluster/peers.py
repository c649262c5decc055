"""Finds the lost worker if training fails because of it.

TensorFlow's errors come at different times with different contents. The worker that was about to
read from the dead one notices the closed socket immediately, the others when heartbeats are missing
or in their next step. So the first worker to notice asks the coordination service, checks which
addresses still accept connections, and notifies all others, whose steps then end, too.
"""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any

from keras_distplug.backend.tensorflow.runtime import failures, workers
from keras_distplug.backend.tensorflow.runtime.context import ServiceKeyValues, in_cluster
from keras_distplug.cluster import agreement, leaving
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import AgreementError, PeerLostError
from keras_distplug.core.events import PeerLost
from keras_distplug.core.exit_codes import ExitCode
from keras_distplug.core.reporting import report

_CONNECT_S = 1.0
_PAUSE_S = 0.1
_MARGIN_S = 2.0  # after the heartbeat timeout, until the service has checked
_HEARD_S = 0.5  # for the chief's message to arrive before its service ends

_CAUSE_CHARS = 200

_PLAIN = str.maketrans("<>\n", "() ")
_WORD = re.compile(r"keras_distplug lost <(.*?)> by <(.*?)>", re.DOTALL)


def watch() -> None:
    """Makes `fit`, `evaluate` and `predict` raise `PeerLostError` if a worker is lost, and the
    process end with the code for that. Call it before the cluster is formed."""
    leaving.prepare()
    failures.explain_with(_explain)


def _explain(error: Exception, strategy: Any) -> PeerLostError | None:
    if isinstance(error, PeerLostError):
        return None
    role = agreement.get_role(strategy)
    if workers.is_scheduled(strategy):
        # Training waits for a lost worker. The variables of a lost parameter server are gone.
        who = lost_server(error, role)
        remedy = "start the chief, the workers and the parameter servers again"
        return None if who is None else _peer_lost(role, who, remedy, error)
    if role.world_size == 1:
        return None
    service = ServiceKeyValues()
    if (who := lost(error, role, service)) is None:
        return None
    with contextlib.suppress(ConnectionError, TimeoutError):  # then every worker notices on its own
        service.report(f"keras_distplug lost <{who}> by <{list(_workers(role))[role.rank]}>")
    if role.is_chief:
        time.sleep(_HEARD_S)
    return _peer_lost(role, who, "start all workers again", error)


def has_joined() -> bool:
    """Returns whether this process has joined other workers."""
    return in_cluster()


def code_after(error: Exception, role: Role) -> int:
    """Returns the exit code after an error outside `fit`, `evaluate` and `predict`, for example
    while a model is built. If the error is this worker's own, the other workers are notified."""
    service = ServiceKeyValues()
    if (who := lost(error, role, service)) is not None:
        told = _peer_lost(role, who, "start all workers again", error)
        print(f"{type(told).__module__}.{type(told).__name__}: {told}", file=sys.stderr)
        return ExitCode.PEER_LOST
    own = list(_workers(role))[role.rank]
    why = f"{type(error).__name__}: {error}".translate(_PLAIN)[:_CAUSE_CHARS]
    with contextlib.suppress(ConnectionError, TimeoutError):
        service.report(f"keras_distplug lost <{own}, which failed: {why}> by <{own}>")
    if role.is_chief:
        time.sleep(_HEARD_S)
    return 1


def _peer_lost(role: Role, who: str, remedy: str, cause: Exception) -> PeerLostError:
    leaving.note_lost_peer()
    report(PeerLost(who))
    first_line = str(cause).partition("\n")[0]
    return PeerLostError(
        f"{role.name} lost {who}. Training cannot continue without it: {remedy} (`keras-distplug "
        "run` does this itself). With `BackupAndRestore` among the callbacks, training then "
        f"resumes from the newest checkpoint. This process exits with code {ExitCode.PEER_LOST:d} "
        f"unless the error is caught. Original error: {type(cause).__name__}: "
        f"{first_line[:_CAUSE_CHARS]}"
    )


def lost_server(error: BaseException, role: Role) -> str | None:
    """Returns the lost parameter server, for people; None if the error has another reason.

    Args:
        error: The error that ended training.
        role: The chief's role.
    """
    chain = list(leaving.chain(error))
    if not any(map(failures.may_be_of_a_connection, chain)):
        return None
    servers = {f"ps-{n} ({address})": address for n, address in enumerate(role.cluster["ps"])}
    end_s = time.monotonic() + _MARGIN_S
    while True:
        gone = [name for name, address in servers.items() if _refuses(address)]
        if gone:
            return " and ".join(f"{name}, where no process listens any longer" for name in gone)
        if time.monotonic() > end_s:
            break
        time.sleep(_PAUSE_S)
    # A new process may listen there now, or the machine may be gone.
    named = next((n for n in map(failures.server_in, chain) if n is not None), None)
    if named is None:
        return None
    return f"ps-{named} ({role.cluster['ps'][named]}), which does not answer, or has restarted"


def lost(error: BaseException, role: Role, service: ServiceKeyValues) -> str | None:
    """Returns the lost worker, for people; None if the error has another reason.

    Args:
        error: The error that ended training.
        role: This worker's role.
        service: The coordination service, which knows all workers while the chief lives.
    """
    chain = list(leaving.chain(error))
    if not any(map(_may_be_of_a_peer, chain)):
        return None
    if (who := _told_by_another(chain, role)) is not None:
        return who
    broken_to = _broken_to(chain, role)
    # If TensorFlow has waited for the service, that time has already passed.
    has_waited = any(failures.is_of_a_frozen_service(each) for each in chain)
    is_known = has_waited or (broken_to is not None and role.world_size == 2)
    patience_s = 0.0 if is_known else service.heartbeat_timeout_s
    end_s = time.monotonic() + patience_s + _MARGIN_S
    while True:
        try:
            answer = service.task_errors()
        except (ConnectionError, TimeoutError):
            answer = None
        if (who := _told_by_another(answer or (), role)) is not None:
            return who
        found = [
            f"{name}, {_in_words(told, service)}"
            for name, told in zip(_workers(role), answer or [], strict=False)
            if told is not None
        ] or [
            f"{name}, where no process listens any longer"
            for name, address in _workers(role).items()
            if not name.startswith(f"{role.name} ") and _refuses(address)
        ]
        if found:
            return " and ".join(found)
        if time.monotonic() > end_s:
            break
        time.sleep(_PAUSE_S)
    if answer is None and not role.is_chief:
        return f"{next(iter(_workers(role)))}, which no longer answers"
    return None if broken_to is None else f"{broken_to}, to which the connection broke"


def _broken_to(chain: Iterable[BaseException], role: Role) -> str | None:
    """Returns the worker to which a connection broke, for people, from TensorFlow's error.

    With more than two workers, that one may itself have lost another.
    """
    names = list(_workers(role))
    others = [name for place, name in enumerate(names) if place != role.rank]
    for task in map(failures.broken_connection_to, chain):
        if task in role.workers and task != role.name:
            return names[role.workers.index(task)]
        if task is not None:
            return others[0] if len(others) == 1 else "another worker"
    return None


def _may_be_of_a_peer(error: BaseException) -> bool:
    if isinstance(error, AgreementError):
        return isinstance(error.__cause__ or error.__context__, ConnectionError)
    return failures.may_be_of_a_connection(error)


def _told_by_another(said: Iterable[object], role: Role) -> str | None:
    """Returns the lost worker, if one of the messages is a report from another worker."""
    for word in filter(None, (_WORD.search(str(each)) for each in said)):
        lost, by = word.groups()
        is_this = lost.startswith(f"{role.name} ")
        return f"{by}, which has lost this one" if is_this else lost
    return None


def _in_words(told: str, service: ServiceKeyValues) -> str:
    if "heartbeat" in told:
        return f"which has sent no heartbeat for {service.heartbeat_timeout_s:g} s"
    return f"reported by TensorFlow: {told}"


def _workers(role: Role) -> dict[str, str]:
    """Returns the names of the workers, for people, with their addresses, the chief first."""
    addresses = (*role.cluster.get("chief", ()), *role.cluster.get("worker", ()))
    return {
        f"{name} ({'the chief, ' * (place == 0)}{address})": address
        for place, (name, address) in enumerate(zip(role.workers, addresses, strict=True))
    }


def _refuses(address: str) -> bool:
    """True if the machine refuses a connection. No answer proves nothing."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
