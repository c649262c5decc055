"""How the workers of one run come to one mind."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from keras_distplug.cluster.roles import Role, single_process
from keras_distplug.core.errors import AgreementError


def role_under(strategy: Any) -> Role:
    """This process's part under `strategy`, a `tf.distribute.Strategy`."""
    from keras_distplug.backend.tensorflow.runtime import workers  # loads TensorFlow

    if not workers.is_multi_worker(strategy) and not workers.is_scheduled(strategy):
        return single_process()
    resolver = workers.resolver_of(strategy)
    cluster = {job: tuple(tasks) for job, tasks in resolver.cluster_spec().as_dict().items()}
    return Role(resolver.task_type, resolver.task_id, cluster, source="the strategy")


def among(role: Role) -> Workers:
    """How the workers of `role`'s cluster agree."""
    if role.world_size == 1:
        return Alone()
    from keras_distplug.backend.tensorflow.runtime.context import (
        ServiceKeyValues,  # loads TensorFlow
    )

    return ThroughKeyValues(role, ServiceKeyValues())


class KeyValues(Protocol):
    """A small store that all workers see."""

    def put(self, key: str, value: str) -> None: ...

    def put_first(self, key: str, value: str) -> bool:
        """False, and without effect, if `key` is there."""
        ...

    def get(self, key: str, timeout_s: float | None) -> str:
        """Waits for `key`. Raises TimeoutError, or ConnectionError if a worker is gone."""
        ...

    def delete(self, key: str) -> None:
        """`key`, and all keys below it."""
        ...

    def barrier(self, key: str, timeout_s: float) -> None:
        """Waits until every worker has called with this `key`. Raises like `get`."""
        ...


class Alone:
    """Agreement of one process with itself."""

    def from_chief(self, topic: str, value: str | None) -> str:
        if value is None:
            raise AgreementError(f"Agreement on {topic!r}: the only worker gave no value.")
        return value

    def to_chief(self, topic: str, value: str) -> list[str] | None:
        return [value]

    def gather(self, topic: str, value: str) -> list[str]:
        return [value]

    def first_complaint(self, topic: str, complaint: str | None) -> str | None:
        return complaint

    def barrier(self, topic: str, within_s: float | None = None) -> None:
        return

    def tell(self, topic: str, text: str) -> None:
        return

    def tell_first(self, topic: str, text: str) -> bool:
        return True

    def hear(self, topic: str, timeout_s: float | None) -> str:
        raise AgreementError(f"{topic!r}: there is no other worker to hear it from.")

    def forget(self, topic: str) -> None:
        return


class ThroughKeyValues:
    """Agreement of several workers through a key-value store.

    All workers must ask for the same topics in the same order.

    Args:
        role: This worker's place.
        store: The store that all workers see.
        timeout_s: How long a worker waits for another one, which may be in a callback that only
            it has. A worker that is lost, or hangs, is found by others, and sooner.
    """

    def __init__(self, role: Role, store: KeyValues, timeout_s: float = 7200.0) -> None:
        self._role = role
        self._store = store
        self._timeout_s = timeout_s
        self._answer_before: str | None = None  # the key of what the chief said in `gather`

    def from_chief(self, topic: str, value: str | None) -> str:
        return self._from_chief(self._next_key(topic), topic, value)

    def _from_chief(self, key: str, topic: str, value: str | None) -> str:
        if self._role.is_chief:
            if value is None:
                raise AgreementError(f"Agreement on {topic!r}: the chief gave no value.")
            self._store.put(key, value)
            return value
        with self._explained(f"the chief's word on {topic!r}", self._timeout_s):
            return self._store.get(key, self._timeout_s)

    def to_chief(self, topic: str, value: str) -> list[str] | None:
        key = self._next_key(topic)
        if not self._role.is_chief:
            self._store.put(f"{key}/{self._role.rank}", value)
            return None
        said = []
        for rank in range(self._role.world_size):
            if rank == self._role.rank:
                said.append(value)
                continue
            with self._explained(f"the word of worker {rank} on {topic!r}", self._timeout_s):
                said.append(self._store.get(f"{key}/{rank}", self._timeout_s))
        self._forget_key(key)  # the store lives as long as the job
        # Who has spoken now has heard all of the time before.
        if self._answer_before is not None:
            self._forget_key(self._answer_before)
            self._answer_before = None
        return said

    def gather(self, topic: str, value: str) -> list[str]:
        # The chief alone reads what each says: if all did, messages grew with the workers' square.
        said = self.to_chief(topic, value)
        answer = None if said is None else json.dumps(said)
        told: list[str] = json.loads(self._answered(topic, answer))
        return told

    def first_complaint(self, topic: str, complaint: str | None) -> str | None:
        said = self.to_chief(topic, json.dumps(complaint))
        answer = None if said is None else next((each for each in said if each != "null"), "null")
        first: str | None = json.loads(self._answered(topic, answer))
        return first

    def _answered(self, topic: str, answer: str | None) -> str:
        key = self._next_key(topic)
        self._answer_before = key
        return self._from_chief(key, topic, answer)

    def barrier(self, topic: str, within_s: float | None = None) -> None:
        timeout_s = self._timeout_s if within_s is None else within_s
        with self._explained(f"all workers at {topic!r}", timeout_s):
            self._store.barrier(self._next_key(topic), timeout_s)

    def tell(self, topic: str, text: str) -> None:
        with self._explained(f"telling {topic!r}", self._timeout_s):
            self._store.put(f"keras_distplug/told/{topic}", text)

    def tell_first(self, topic: str, text: str) -> bool:
        with self._explained(f"telling {topic!r}", self._timeout_s):
            return self._store.put_first(f"keras_distplug/told/{topic}", text)

    def hear(self, topic: str, timeout_s: float | None) -> str:
        with self._explained(f"{topic!r} from another worker", timeout_s):
            return self._store.get(f"keras_distplug/told/{topic}", timeout_s)

    def forget(self, topic: str) -> None:
        self._forget_key(f"keras_distplug/told/{topic}")

    def _forget_key(self, key: str) -> None:
        with self._explained(f"the store to forget {key!r}", self._timeout_s):
            self._store.delete(key)

    @contextmanager
    def _explained(self, awaited: str, timeout_s: float | None) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise AgreementError(
                f"{self._role.name} waited {timeout_s or 0:.0f} s for {awaited}. Look at the "
                f"other workers' output for what keeps them. Cause: {error}"
            ) from error
        except ConnectionError as error:
            raise AgreementError(
                f"{self._role.name} waited for {awaited} and lost another worker. Look at the "
                f"other workers' output for how it ended. Cause: {error}"
            ) from error

    def _next_key(self, topic: str) -> str:
        # The store refuses a key twice, and a barrier met once stays open. Several objects share
        # one store, so the count belongs to the process.
        return f"keras_distplug/{next(_questions)}/{topic}"


Workers = Alone | ThroughKeyValues
_questions = itertools.count(1)
