"""How the workers of one run send each other messages and agree.

Everything that workers tell each other outside the training step goes through a `Channel`, over one
key-value store. It is never a collective, and safe in any thread.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import AgreementError


class KeyValues(Protocol):
    """A small store that all workers see."""

    def put_first(self, key: str, value: str) -> bool:
        """Store `value`. Return False, without effect, if `key` exists."""
        ...

    def get(self, key: str, timeout_s: float | None) -> str:
        """Wait for `key`. Raise TimeoutError, or ConnectionError if a worker is gone."""
        ...

    def delete(self, key: str) -> None:
        """Delete `key` and all keys below it."""
        ...

    def barrier(self, key: str, timeout_s: float) -> None:
        """Wait until every worker has called this with `key`. Raise like `get`."""
        ...


class Channel:
    """Messages between the workers of one run.

    All workers must call `from_chief`, `to_chief`, `gather`, `first_complaint`, `barrier` and
    `session` for the same topics in the same order. `tell`, `hear` and `forget` have no order:
    their topics are this channel's own, each told once.

    Every method raises AgreementError if the others cannot be heard. Its cause is a TimeoutError if
    only the time is over, and a ConnectionError if a worker is gone.

    Args:
        role: This worker's place.
        store: The store that all workers see.
        scope: The prefix of topics.
        timeout_s: How long a worker waits for another one, which may be in a callback that only
            it has. A worker that is lost, or hangs, is found by others, and sooner.
    """

    def __init__(
        self, role: Role, store: KeyValues, scope: str = "", timeout_s: float = 7200.0
    ) -> None:
        self.role = role
        self._store = store
        self._scope = scope
        self._timeout_s = timeout_s
        self._answers: list[str] = []  # keys of what the chief has told all

    def session(self, topic: str) -> Channel:
        """Return a channel whose messages no other session sees, be it of an earlier `fit`."""
        name = uuid.uuid4().hex if self.role.is_chief else None
        return self.below(self.from_chief(topic, name))

    def below(self, topic: str) -> Channel:
        """Return a channel for the topics below `topic`."""
        return Channel(self.role, self._store, f"{self._scope}{topic}/", self._timeout_s)

    def from_chief(self, topic: str, value: str | None) -> str:
        """The chief gives `value`; everyone returns it. Other workers give None and wait."""
        return self._from_chief(self._next_key(topic), topic, value)

    def to_chief(self, topic: str, value: str) -> list[str] | None:
        """Everyone gives a value; the chief returns all of them, in the workers' order, and others
        None, at once. For what the others have no use for: it would be sent to each of them."""
        key = self._next_key(topic)
        if not self.role.is_chief:
            self._put(f"{key}/{self.role.rank}", topic, value)
            return None
        said = [
            value
            if rank == self.role.rank
            else self._get(f"{key}/{rank}", f"the word of worker {rank} on {topic!r}")
            for rank in range(self.role.world_size)
        ]
        self._delete(key)  # the store lives as long as the job
        # Who has spoken now has heard all of the time before.
        while self._answers:
            self._delete(self._answers.pop())
        return said

    def gather(self, topic: str, value: str) -> list[str]:
        """Everyone gives a value; everyone returns all of them, in the workers' order."""
        told: list[str] = json.loads(self._answered(topic, value, json.dumps))
        return told

    def first_complaint(self, topic: str, complaint: str | None) -> str | None:
        """Everyone says what is wrong, or None; everyone returns the complaint of the first worker
        that has one, or None once all have said that nothing is."""

        def first_of(said: list[str]) -> str:
            return next((each for each in said if each != "null"), "null")

        first: str | None = json.loads(self._answered(topic, json.dumps(complaint), first_of))
        return first

    def barrier(self, topic: str, within_s: float | None = None) -> None:
        """Return on all workers once all workers have called this."""
        timeout_s = self._timeout_s if within_s is None else within_s
        with self._explained(f"all workers at {topic!r}", timeout_s):
            self._store.barrier(self._next_key(topic), timeout_s)

    def tell(self, topic: str, text: str) -> None:
        """Say `text` to all other workers, once for each `topic`."""
        self._put(self._told(topic), self._scope + topic, text)

    def tell_first(self, topic: str, text: str) -> bool:
        """Say `text` unless a worker has told `topic` before; return False then."""
        return self._put_first(self._told(topic), self._scope + topic, text)

    def hear(self, topic: str, timeout_s: float | None) -> str:
        """Wait for what a worker tells; with None, without a limit, even if a worker is lost."""
        awaited = f"{self._scope + topic!r} from another worker"
        with self._explained(awaited, timeout_s):
            return self._store.get(self._told(topic), timeout_s)

    def forget(self, topic: str) -> None:
        """Make room: delete what was told of `topic`, and of all topics below it."""
        self._delete(self._told(topic))

    def _answered(self, topic: str, value: str, answer: Callable[[list[str]], str]) -> str:
        # The chief alone reads what each says: if all did, messages grew with the workers' square.
        said = self.to_chief(topic, value)
        key = self._next_key(topic)
        return self._from_chief(key, topic, None if said is None else answer(said))

    def _from_chief(self, key: str, topic: str, value: str | None) -> str:
        if not self.role.is_chief:
            return self._get(key, f"the chief's word on {topic!r}")
        if value is None:
            who = "chief" if self.role.world_size > 1 else "only worker"
            raise AgreementError(f"Agreement on {topic!r}: the {who} gave no value.")
        self._put(key, topic, value)
        self._answers.append(key)
        return value

    def _put(self, key: str, topic: str, text: str) -> None:
        if not self._put_first(key, topic, text):
            raise AgreementError(f"{self.role.name}: {topic!r} has been told before.")

    def _put_first(self, key: str, topic: str, text: str) -> bool:
        with self._explained(f"telling {topic!r}", self._timeout_s):
            return self._store.put_first(key, text)

    def _get(self, key: str, awaited: str) -> str:
        with self._explained(awaited, self._timeout_s):
            return self._store.get(key, self._timeout_s)

    def _delete(self, key: str) -> None:
        with self._explained(f"the store to forget {key!r}", self._timeout_s):
            self._store.delete(key)

    @contextmanager
    def _explained(self, awaited: str, timeout_s: float | None) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise AgreementError(
                f"{self.role.name} waited {timeout_s or 0:.0f} s for {awaited}. Look at the "
                f"other workers' output for what keeps them. Cause: {error}"
            ) from error
        except ConnectionError as error:
            raise AgreementError(
                f"{self.role.name} waited for {awaited} and lost another worker. Look at the "
                f"other workers' output for how it ended. Cause: {error}"
            ) from error

    def _told(self, topic: str) -> str:
        return f"keras_distplug/told/{self._scope}{topic}"

    def _next_key(self, topic: str) -> str:
        # The store refuses a key twice, and a barrier met once stays open. Several objects share
        # one store, so the count belongs to the process.
        return f"keras_distplug/{next(_questions)}/{topic}"


_questions = itertools.count(1)
