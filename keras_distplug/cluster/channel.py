"""Messages and agreements between the workers of one run.

All communication between workers outside the training step uses a `Channel`, over one key-value
store. A channel never uses a collective, and is safe in any thread.
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
    """A small store shared by all workers."""

    def put_first(self, key: str, value: str) -> bool:
        """Stores `value`. Returns False, without effect, if `key` exists."""
        ...

    def get(self, key: str, timeout_s: float | None) -> str:
        """Waits for `key`. Raises TimeoutError, or ConnectionError if a worker is lost."""
        ...

    def delete(self, key: str) -> None:
        """Deletes `key` and all keys below it."""
        ...

    def barrier(self, key: str, timeout_s: float) -> None:
        """Waits until every worker has called this with `key`. Raises the errors of `get`."""
        ...


class Channel:
    """Messages between the workers of one run.

    All workers must call `broadcast`, `gather_on_chief`, `gather`, `first_error`, `barrier` and
    `session` for the same topics in the same order. `send`, `receive` and `forget` have no order:
    their topics belong to this channel, and a topic is used once.

    Every method raises AgreementError if the other workers cannot be reached. Its cause is a
    TimeoutError after the timeout, and a ConnectionError if a worker is lost.

    Args:
        role: This worker's role.
        store: The store shared by all workers.
        scope: The prefix of topics. Defaults to `""`.
        timeout_s: Seconds to wait for another worker, which may be busy in a callback that only it
            has. Defaults to two hours: lost or hanging workers are detected elsewhere, and sooner.
    """

    def __init__(
        self, role: Role, store: KeyValues, scope: str = "", timeout_s: float = 7200.0
    ) -> None:
        self.role = role
        self._store = store
        self._scope = scope
        self._timeout_s = timeout_s
        self._answers: list[str] = []  # keys of messages from the chief to all workers

    def session(self, topic: str) -> Channel:
        """Returns a channel whose messages no other session sees, such as an earlier `fit`."""
        name = uuid.uuid4().hex if self.role.is_chief else None
        return self.below(self.broadcast(topic, name))

    def below(self, topic: str) -> Channel:
        """Returns a channel for the topics below `topic`."""
        return Channel(self.role, self._store, f"{self._scope}{topic}/", self._timeout_s)

    def broadcast(self, topic: str, value: str | None) -> str:
        """Returns the chief's `value` on all workers. Other workers pass None, and wait."""
        return self._from_chief(self._next_key(topic), topic, value)

    def gather_on_chief(self, topic: str, value: str) -> list[str] | None:
        """Returns the values of all workers on the chief, by rank, and None elsewhere, immediately.

        Cheaper than `gather`, which sends all values to every worker.
        """
        key = self._next_key(topic)
        if not self.role.is_chief:
            self._put(f"{key}/{self.role.rank}", topic, value)
            return None
        said = [
            value
            if rank == self.role.rank
            else self._get(f"{key}/{rank}", f"the message of worker {rank} on {topic!r}")
            for rank in range(self.role.world_size)
        ]
        self._delete(key)  # the store lives as long as the job
        # A worker that has sent this message has received all earlier ones.
        while self._answers:
            self._delete(self._answers.pop())
        return said

    def gather(self, topic: str, value: str) -> list[str]:
        """Returns the values of all workers, by rank, on all workers."""
        values: list[str] = json.loads(self._answered(topic, value, json.dumps))
        return values

    def first_error(self, topic: str, complaint: str | None) -> str | None:
        """Returns the complaint of the first worker that has one, on all workers.

        Returns None once all workers have passed None.
        """

        def first_of(said: list[str]) -> str:
            return next((each for each in said if each != "null"), "null")

        first: str | None = json.loads(self._answered(topic, json.dumps(complaint), first_of))
        return first

    def barrier(self, topic: str, within_s: float | None = None) -> None:
        """Returns once all workers have called this."""
        timeout_s = self._timeout_s if within_s is None else within_s
        with self._explained(f"all workers to reach {topic!r}", timeout_s):
            self._store.barrier(self._next_key(topic), timeout_s)

    def send(self, topic: str, text: str) -> None:
        """Sends `text` to all other workers. A topic is used once."""
        self._put(self._told(topic), self._scope + topic, text)

    def send_once(self, topic: str, text: str) -> bool:
        """Sends `text`, unless a worker has used `topic` before: then it returns False."""
        return self._put_first(self._told(topic), self._scope + topic, text)

    def receive(self, topic: str, timeout_s: float | None) -> str:
        """Waits for a message. With None, waits without limit, even if a worker is lost."""
        awaited = f"{self._scope + topic!r} from another worker"
        with self._explained(awaited, timeout_s):
            return self._store.get(self._told(topic), timeout_s)

    def forget(self, topic: str) -> None:
        """Deletes the messages of `topic` and of all topics below it, to free memory."""
        self._delete(self._told(topic))

    def _answered(self, topic: str, value: str, answer: Callable[[list[str]], str]) -> str:
        # Only the chief reads all values. Otherwise, traffic would grow with the square of workers.
        said = self.gather_on_chief(topic, value)
        key = self._next_key(topic)
        return self._from_chief(key, topic, None if said is None else answer(said))

    def _from_chief(self, key: str, topic: str, value: str | None) -> str:
        if not self.role.is_chief:
            return self._get(key, f"the chief's message on {topic!r}")
        if value is None:
            who = "chief" if self.role.world_size > 1 else "only worker"
            raise AgreementError(
                f"Expected a value for {topic!r} from the {who}. Received: none. This is a bug in "
                "keras_distplug: please report it with this message."
            )
        self._put(key, topic, value)
        self._answers.append(key)
        return value

    def _put(self, key: str, topic: str, text: str) -> None:
        if not self._put_first(key, topic, text):
            raise AgreementError(
                f"Expected one message on {topic!r}. Received: a second one, from this process, "
                f"{self.role.name}. Start all workers again, and report this message if it appears "
                "again."
            )

    def _put_first(self, key: str, topic: str, text: str) -> bool:
        with self._explained(f"the store to accept {topic!r}", self._timeout_s):
            return self._store.put_first(key, text)

    def _get(self, key: str, awaited: str) -> str:
        with self._explained(awaited, self._timeout_s):
            return self._store.get(key, self._timeout_s)

    def _delete(self, key: str) -> None:
        with self._explained(f"the store to delete {key!r}", self._timeout_s):
            self._store.delete(key)

    @contextmanager
    def _explained(self, awaited: str, timeout_s: float | None) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise AgreementError(
                f"{self.role.name} waited {timeout_s or 0:.0f} s for {awaited}. Look at the "
                f"other workers' output to see what is delaying them. Cause: {error}"
            ) from error
        except ConnectionError as error:
            raise AgreementError(
                f"{self.role.name} lost another worker while waiting for {awaited}. Look at the "
                f"other workers' output to see how it ended. Cause: {error}"
            ) from error

    def _told(self, topic: str) -> str:
        return f"keras_distplug/told/{self._scope}{topic}"

    def _next_key(self, topic: str) -> str:
        # The store accepts a key once, and a barrier stays open after its first use. Several
        # channels share one store, so the counter belongs to the process.
        return f"keras_distplug/{next(_questions)}/{topic}"


_questions = itertools.count(1)
