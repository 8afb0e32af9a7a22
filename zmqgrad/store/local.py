"""``HashStore``: the same state machine in this process, shared by its threads."""

from __future__ import annotations

import threading
import weakref
from functools import partial

from zmqgrad.errors import ClosedError, StoreError, StoreTimeoutError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Outcome
from zmqgrad.store.base import DEFAULT_TIMEOUT, QueryStore, Timeout, WatchCallback, as_key
from zmqgrad.store.ending import Ending
from zmqgrad.store.state import Effect, Notice, State
from zmqgrad.store.watch import WatchBook
from zmqgrad.wire.messages import (
    KeyCallbackRegistered,
    Message,
    Refusal,
    StoreRefused,
    StoreUnwatchKey,
    StoreWatchKey,
)


class HashStore(QueryStore):
    """A store for the threads of one process.

    Args:
        timeout: how long ``get`` and its like wait.
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._state = State()
        self._lock = threading.Lock()  # guards _state and _closed
        self._closed = False
        self._watches = WatchBook("hash-store", partial(_register, weakref.ref(self)))
        self._ending = Ending(self, self._watches.close)

    def _ask(self, query: Message, seconds: float) -> Message:
        outcome: Outcome[Message] = Outcome()
        with self._lock:
            if self._closed:
                outcome.set(StoreRefused(Refusal.CLOSING, "the store is closed"))
            else:
                self._carry_out(self._state.apply(query, outcome, self._clock.now()))
        deadline = Deadline.after(seconds, self._clock)
        try:
            while not outcome.wait_done(deadline.left_or_none()):
                with self._lock:
                    self._carry_out(self._state.expire(self._clock.now()))
        except BaseException as e:  # a Ctrl-C; the reply will find nobody
            outcome.fail(e)
            raise
        answer = outcome.result()
        if type(answer) is StoreRefused:
            kind = StoreTimeoutError if answer.reason is Refusal.TIMEOUT else StoreError
            waited = f" after {seconds:g} s" if answer.reason is Refusal.TIMEOUT else ""
            raise kind(f"{self!r}{waited}: {answer.text}")
        return answer

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Notice):
                self._watches.noticed(effect.message)
            else:
                effect.asker.set(effect.message)

    def _register(self, key: str) -> KeyCallbackRegistered:
        answer = self._ask(StoreWatchKey(key, ""), self._timeout)
        if type(answer) is not KeyCallbackRegistered:
            raise self._expect(KeyCallbackRegistered, answer)
        return answer

    def watch_key(self, key: str, callback: WatchCallback) -> None:
        try:
            self._watches.add(as_key(key), callback)
        except ClosedError as e:
            raise StoreError(f"watch_key({key!r}): {e}") from e

    def unwatch_key(self, key: str, callback: WatchCallback | None = None) -> None:
        key = as_key(key)
        if self._watches.remove(key, callback):
            self._ask(StoreUnwatchKey(key), self._timeout)
            with self._lock:
                if not self._watches.watches(key):
                    self._state.unwatch(key)

    def close(self) -> None:
        """Refuse all who wait, and all who come. Idempotent."""
        with self._lock:
            self._closed = True
            self._carry_out(self._state.close())
        self._ending.now()

    def __repr__(self) -> str:
        statistics = self._state.statistics()
        return f"<HashStore of {statistics['keys']} keys{', closed' if self._closed else ''}>"


def _register(store: weakref.ref[HashStore], key: str) -> KeyCallbackRegistered:
    """Without keeping the store alive: callbacks run in threads that do."""
    alive = store()
    if alive is None:
        raise ClosedError("the store is gone")
    return alive._register(key)
