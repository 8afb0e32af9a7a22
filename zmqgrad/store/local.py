"""``HashStore``: the same state machine in this process, shared by its threads."""

from __future__ import annotations

import threading
import weakref
from functools import partial

from zmqgrad.errors import ClosedError, QueueEmptyError, StoreError, StoreTimeoutError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise
from zmqgrad.store.arguments import DEFAULT_TIMEOUT, Timeout
from zmqgrad.store.effects import Effect, Notice
from zmqgrad.store.ending import Ending
from zmqgrad.store.followers import Registered
from zmqgrad.store.queries import QueryStore
from zmqgrad.store.state import State
from zmqgrad.store.takers import Taker
from zmqgrad.store.topics import Target
from zmqgrad.store.watch import WatchBook, as_registered, watch_query
from zmqgrad.wire.messages import (
    Message,
    Refusal,
    StoreRefused,
)


class Table:
    """A state machine, and the stores (clones of each other) that share it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards all of this
        self.state = State()
        self.books: set[WatchBook] = set()
        """Those of the stores that are open; the machine stops with the last."""

    def carry_out(self, effects: list[Effect]) -> None:
        """Reply and give notice. Called with the lock held."""
        for effect in effects:
            if isinstance(effect, Notice):
                for book in self.books:
                    book.noticed(effect.message)
            else:
                effect.asker.set_result(effect.message)

    def leave(self, book: WatchBook, waiting: set[Promise[Message]]) -> None:
        """The store of ``book`` closes: refuse those of it who wait."""
        with self.lock:
            self.books.discard(book)
            for outcome in waiting:
                outcome.set_result(StoreRefused(Refusal.CLOSING, "the store is closing"))
            if not self.books:
                self.state.close()


class HashStore(QueryStore):
    """A store for the threads of one process.

    Args:
        timeout: how long ``get`` and its like wait.
        table: what it shares with the store that it is a clone of; None: a new one.
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT, *, table: Table | None = None) -> None:
        super().__init__(timeout)
        self._table = Table() if table is None else table
        self._waiting: set[Promise[Message]] = set()  # guarded by the table's lock
        self._watches = WatchBook("hash-store", partial(_register, weakref.ref(self)))
        with self._table.lock:
            self._table.books.add(self._watches)
        self._ending = Ending(self, partial(_close, self._table, self._watches, self._waiting))

    def _ask(self, query: Message, seconds: float) -> Message:
        outcome: Promise[Message] = Promise()
        table = self._table
        with table.lock:
            if self._watches not in table.books:
                outcome.set_result(StoreRefused(Refusal.CLOSING, "the store is closed"))
            else:
                table.carry_out(table.state.apply(query, outcome, self._clock.now()))
                if not outcome.done():
                    self._waiting.add(outcome)
        if not outcome.done():
            self._wait_for(outcome, Deadline.after(seconds, self._clock))
        answer = outcome.result()
        if type(answer) is StoreRefused:
            raise self._refused(answer, seconds)
        return answer

    def _wait_for(self, outcome: Promise[Message], deadline: Deadline) -> None:
        table = self._table
        try:
            while not outcome.wait_done(deadline.timeout()):
                with table.lock:
                    table.carry_out(table.state.expire(self._clock.now()))
        except BaseException as e:  # a Ctrl-C; the reply will find nobody
            outcome.set_exception(e)
            raise
        finally:
            with table.lock:
                self._waiting.discard(outcome)

    def _refused(self, answer: StoreRefused, seconds: float) -> StoreError:
        if answer.reason is Refusal.TIMEOUT:
            return StoreTimeoutError(f"{self!r} after {seconds:g} s: {answer.text}")
        kind = QueueEmptyError if answer.reason is Refusal.MISSING else StoreError
        return kind(f"{self!r}: {answer.text}")

    def _register(self, target: Target) -> Registered:
        return as_registered(self._ask(watch_query(target), self._timeout))

    @property
    def _book(self) -> WatchBook:
        return self._watches

    def _unwatch(self, target: Target, taker: Taker | None) -> None:
        if self._watches.remove(target, taker):
            with self._table.lock:
                if not any(book.watches(target) for book in self._table.books):
                    self._table.state.unwatch(target)

    def statistics(self) -> dict[str, int]:
        """How many keys, queues, waiting calls (``parked``) and watched keys there are, and the revision."""
        with self._table.lock:
            return self._table.state.statistics()

    def clone(self) -> HashStore:
        return HashStore(self._timeout, table=self._table)

    def close(self) -> None:
        """Refuse all who wait, and all who come; clones go on. Idempotent."""
        self._ending.now()

    def __repr__(self) -> str:
        statistics = self._table.state.statistics()
        closed = "" if self._watches in self._table.books else ", closed"
        return f"<HashStore of {statistics['keys']} keys{closed}>"


def _close(table: Table, book: WatchBook, waiting: set[Promise[Message]]) -> None:
    table.leave(book, waiting)
    book.close()


def _register(store: weakref.ref[HashStore], target: Target) -> Registered:
    """Without keeping the store alive: callbacks run in threads that do."""
    alive = store()
    if alive is None:
        raise ClosedError("the store is gone")
    return alive._register(target)
