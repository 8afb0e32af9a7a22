"""The state machine of one process that follows a :class:`~zmqgrad.store.shared_log.SharedLog`.

The log holds the queries that change something, in the order in which they took effect. Everybody applies
them to a machine of his own, so all machines pass through the same states; and a change is written first
and applied when it is read back, so what a writer that is interrupted knows is never more than the file.
Queries that only look are answered from the machine here, after it has caught up.

Nobody can be told that a file has changed, so who waits looks again after pauses of ``PAUSES``. Threads
that share a replica wake each other at once.
"""

from __future__ import annotations

import logging
import threading

from msgspec.structs import replace

from zmqgrad.errors import ProtocolError, StoreError, StoreTimeoutError
from zmqgrad.runtime.backoff import Backoff
from zmqgrad.runtime.clock import Clock, Deadline
from zmqgrad.runtime.future import Outcome
from zmqgrad.store.effects import Effect, Notice
from zmqgrad.store.shared_log import SharedLog
from zmqgrad.store.state import State
from zmqgrad.store.topics import Target
from zmqgrad.store.watch import WatchBook
from zmqgrad.wire.codec import decode, encode
from zmqgrad.wire.messages import (
    Message,
    Refusal,
    StoreNumber,
    StoreQueueLen,
    StoreQueuePop,
    StoreRefused,
)

logger = logging.getLogger(__name__)

PAUSES = (0.0005, 0.025)
"""Least and longest pause, in seconds, between two looks at the file."""

COMPACT_BYTES = 1 << 20
"""A file is written anew when it is longer than this, and twice as long as when that was last done."""

POLL_SECONDS = 30.0
"""How long the thread that looks for watches tries for the lock before it warns."""


class _Nobody:
    """Who asked what others have written; they have had their answers."""

    def set(self, answer: Message) -> None:
        """Not wanted."""


NOBODY = _Nobody()


class Replica:
    """What is in the file of ``log``, up to where it was last read. Safe to use from any thread.

    ``book`` hears of changes; ``name`` is for its thread. You must close it.
    """

    def __init__(self, name: str, log: SharedLog, book: WatchBook, clock: Clock) -> None:
        self._name = name
        self._log = log
        self._book = book
        self._clock = clock
        self._lock = threading.Lock()  # guards all that follows, and the log
        self._state = State()
        self._offset = 0
        self._moves = 0  # of the log, that this has followed
        self._short_until = COMPACT_BYTES
        self._waiting: dict[Outcome[Message], tuple[Message, Deadline]] = {}
        self._pops = 0
        self._leaving = False
        self._closed = False
        self._poller: threading.Thread | None = None
        self._stop = threading.Event()

    # ---- asking -----------------------------------------------------------------------------------------

    def ask(self, query: Message, deadline: Deadline) -> Message:
        """The answer to ``query``, perhaps a refusal.

        Raises:
            StoreError: if the file cannot be used (any more).
            StoreTimeoutError: if others hold its lock until ``deadline``.
        """
        if type(query) is StoreQueuePop and query.block:
            with self._lock:
                self._pops += 1
            try:
                return self._pop(query, deadline)
            finally:
                with self._lock:
                    self._pops -= 1
        outcome: Outcome[Message] = Outcome()
        try:
            self._put(query, outcome, deadline)
            if not outcome.done():
                self._wait_for(outcome, deadline)
        except BaseException as e:
            outcome.fail(e)  # nobody will look at it
            raise
        finally:
            self._waiting.pop(outcome, None)  # one step, as is the list() of those who go through it
        return outcome.result()

    def _put(self, query: Message, outcome: Outcome[Message], deadline: Deadline) -> None:
        """Put ``query`` to the machine; through the file, if it changes something."""
        with self._held(deadline):
            if self._closed:
                outcome.set(StoreRefused(Refusal.CLOSING, "the store is closed"))
                return
            with self._log.locked(deadline, alone=self._state.may_change(query)):
                self._catch_up()
                if self._state.would_change(query):
                    self._log.append(encode(query, 0, 0, 0), self._offset)
                    self._catch_up(outcome)
                    self._compact()
                    return
            self._waiting[outcome] = (query, deadline)
            self._carry_out(self._state.apply(query, outcome, self._clock.now()))

    def _wait_for(self, outcome: Outcome[Message], deadline: Deadline) -> None:
        backoff = Backoff(*PAUSES)
        while not outcome.wait_done(backoff.pause(deadline.left())):
            try:
                self.look(deadline)
            except StoreTimeoutError:
                pass  # the time is up, as the machine will find, too
            with self._lock:
                self._carry_out(self._state.expire(self._clock.now()))

    def _pop(self, query: StoreQueuePop, deadline: Deadline) -> Message:
        """Take turns: a pop that waited in the machine would be served by everybody's at the same time."""
        backoff = Backoff(*PAUSES)
        at_once, length = StoreQueuePop(query.key, False, 0.0), StoreQueueLen(query.key)
        while True:
            found = self.ask(length, deadline)
            if type(found) is not StoreNumber or found.number:  # or refused, as the pop will be
                answer = self.ask(at_once, deadline)
                if type(answer) is not StoreRefused or answer.reason is not Refusal.MISSING:
                    return answer
                backoff.reset()
            if deadline.passed():
                return StoreRefused(Refusal.TIMEOUT, f"the queue {query.key!r} is empty")
            self._stop.wait(backoff.pause(deadline.left()))

    # ---- following --------------------------------------------------------------------------------------

    def look(self, deadline: Deadline) -> bool:
        """Read what others have written. Was there anything?"""
        with self._held(deadline):
            if self._closed:
                return False
            with self._log.locked(deadline, alone=False):
                return self._catch_up()

    def _catch_up(self, mine: Outcome[Message] | None = None) -> bool:
        """Apply the records not read yet; the answer to the last goes to ``mine``. Called with both locks."""
        moved = self._log.moves != self._moves
        if moved:
            self._state, self._offset, self._moves = State(), 0, self._log.moves
        bodies, offset = self._log.read(self._offset)
        try:
            for n, body in enumerate(bodies, 1):
                asker = NOBODY if mine is None or n < len(bodies) else mine
                self._carry_out(self._state.apply(self._query(body), asker, self._clock.now()))
            self._offset = offset
        except BaseException:
            self._start_over()  # a Ctrl-C: who knows which of them were applied
            raise
        if moved:
            self._settle_in()
        return bool(bodies)

    def _settle_in(self) -> None:
        """The machine is another: let those wait and watch there who did so in the old one."""
        self._short_until = max(COMPACT_BYTES, 2 * self._offset)
        for outcome, (query, deadline) in list(self._waiting.items()):
            again = replace(query, timeout=deadline.left()) if hasattr(query, "timeout") else query
            self._carry_out(self._state.apply(again, outcome, self._clock.now()))
        self._book.broken()

    def _compact(self) -> None:
        """Write the file anew if most of it is history. Called with both locks."""
        if self._offset <= self._short_until:
            return
        try:
            contents = (encode(query, 0, 0, 0) for query in self._state.as_queries())
            self._offset = self._log.write_anew(contents)
        except StoreError as e:
            logger.warning("%s: it goes on growing: %s", self._name, e)
        self._short_until = max(COMPACT_BYTES, 2 * self._offset)

    def _query(self, body: bytes) -> Message:
        try:
            _, query = decode(body)
        except ProtocolError as e:
            raise StoreError(f"a record in the store's file {self._log.path!r} is not understood: {e}") from e
        if not self._state.may_change(query):
            raise StoreError(f"the store's file {self._log.path!r} holds a {type(query).__name__}")
        return query

    def _start_over(self) -> None:
        """Read everything anew when next asked."""
        self._state, self._offset = State(), 0
        for outcome in list(self._waiting):
            outcome.set(StoreRefused(Refusal.INVALID, "reading the file was interrupted; ask again"))
        self._book.broken()

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Notice):
                self._book.noticed(effect.message)
            else:
                effect.asker.set(effect.message)

    def _held(self, deadline: Deadline) -> _Held:
        return _Held(self._lock, deadline)

    # ---- for watches ------------------------------------------------------------------------------------

    def keep_looking(self) -> None:
        """Look again and again from now on, in a thread."""
        with self._lock:
            if self._poller is None and not self._closed:
                self._poller = threading.Thread(target=self._poll, name=f"{self._name}-poller", daemon=True)
                self._poller.start()

    def unwatch(self, target: Target) -> None:
        """Make no more notices of ``target``."""
        with self._lock:
            if not self._book.watches(target):
                self._state.unwatch(target)

    def _poll(self) -> None:
        backoff = Backoff(*PAUSES)
        while not self._stop.wait(backoff.pause(PAUSES[1])):
            try:
                if self.look(Deadline.after(POLL_SECONDS)):
                    backoff.reset()
            except StoreTimeoutError as e:
                logger.warning("%s: watches wait: %s", self._name, e)
            except StoreError as e:
                logger.warning("%s: watches end: %s", self._name, e)
                return

    # ---- the end ----------------------------------------------------------------------------------------

    def close(self, farewell: Message | None, leave: int, deadline: Deadline) -> None:
        """Refuse all who wait. Idempotent.

        ``farewell`` is a number to add to; whoever brings it to ``leave`` removes the file.
        """
        with self._lock:
            farewell, self._leaving = None if self._leaving else farewell, True
        try:
            if farewell is not None:
                self._say(farewell, leave, deadline)
        except StoreError as e:
            logger.warning("%s: closed without a word to the others: %s", self._name, e)
        finally:
            self._stop.set()
            with self._lock:
                self._closed = True
                for outcome in list(self._waiting):
                    outcome.set(StoreRefused(Refusal.CLOSING, "the store is closing"))
                self._log.close()
        if self._poller is not None:
            self._poller.join(deadline.left_or_none())

    def _say(self, farewell: Message, leave: int, deadline: Deadline) -> None:
        answer = self.ask(farewell, deadline)
        if type(answer) is StoreNumber and answer.number == leave:
            with self._held(deadline), self._log.locked(deadline, alone=True):
                self._log.remove()

    def statistics(self) -> dict[str, int]:
        """Those of the machine, where blocked pops count as parked, and how much of the file was read."""
        machine = self._state.statistics()
        return {**machine, "parked": machine["parked"] + self._pops, "bytes": self._offset}


class _Held:
    """The lock, waited for until ``deadline``."""

    def __init__(self, lock: threading.Lock, deadline: Deadline) -> None:
        self._lock = lock
        self._deadline = deadline

    def __enter__(self) -> None:
        left = self._deadline.left_or_none()
        if not self._lock.acquire(timeout=-1 if left is None else max(left, 0.001)):
            raise StoreTimeoutError("another thread of this store waits for the lock on its file")

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
