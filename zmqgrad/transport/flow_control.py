"""Credit-based flow control: bounds the bytes in flight to each peer (docs/guarantees.md, P10).

What goes through a socket takes memory on both sides until the peer consumes it. So each worker counts, per
peer, the bytes that it has sent, and every message of the peer tells how many it has consumed so far: a
cumulative counter in the envelope, which neither loss nor repetition of a message can falsify. A request is
consumed when its execution begins, a response when it is read. Beyond the limit the sending threads wait, in
order. A message larger than the limit is sent alone.

Requests and responses are counted separately, so responses pass while requests wait: reading never waits for
user code, so responses are always consumed. A thread of the pool that waits here counts as blocked, so other
threads start the requests of the peer; hence two workers that flood each other make progress. The thread that
reads must not wait, and sends at once. Messages of less than :data:`MIN_COUNTED_BYTES` are not counted, as
what their sender keeps for each takes more; nor is shared memory, which has its own limit.

The receiver returns credit with any message; by a message of its own in batches, or as soon as it has
consumed what the peer reports to wait for.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zmqgrad.errors import ClosedError, CongestionError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise
from zmqgrad.wire.messages import Credit, CreditWanted, Message

logger = logging.getLogger(__name__)

DEFAULT_INFLIGHT_BYTES = 256 << 20
"""Default limit of the bytes in flight to each peer."""

MIN_COUNTED_BYTES = 1024
"""Smaller messages are not counted."""

BATCHES = 4
"""The receiver returns credit after this fraction (1 / BATCHES) of the limit."""

LOG_INTERVAL_SECONDS = 5.0
"""How often a sender that waits looks whether its time is over. The first time, it logs a warning."""

NOTHING_CONSUMED = (0, 0)

MAX_CONSUMED = (1 << 64) - 1
"""What the envelope can tell. Only a peer that claims to have sent more than it has reaches it."""

Notify = Callable[[int, Message], None]
"""Queues a small message for a peer. Must not raise because of that peer."""


class _Waiter(NamedTuple):
    size: int
    granted: Promise[None]


@dataclass(eq=False, slots=True)
class _CreditAccount:
    """The bytes sent to one peer, of requests or of responses, since the beginning. Guarded by the lock.

    Except ``reported``: whoever reads a message must not wait for a thread that a signal handler has
    interrupted, as that may wait for the message.
    """

    limit: int
    sent: int = 0
    consumed: int = 0
    waiting: deque[_Waiter] = field(default_factory=deque)
    reported: deque[int] = field(default_factory=deque)
    """What the peer has consumed by its messages, and is not in ``consumed`` yet."""
    newest: int = 0
    """The last of these: most messages repeat it, and none may be sent for long."""

    @property
    def in_flight(self) -> int:
        while self.reported:
            reported = self.reported.popleft()
            if reported > self.consumed:
                self.consumed = reported
        return max(0, self.sent - self.consumed)

    def has_room(self, size: int) -> bool:
        in_flight = self.in_flight
        return in_flight <= 0 or in_flight + size <= self.limit

    def grant(self) -> list[_Waiter]:
        """Removes and returns the waiters that may send now, in order."""
        granted = []
        while self.waiting and self.has_room(self.waiting[0].size):
            granted.append(self.waiting.popleft())
            self.sent += granted[-1].size
        return granted

    def needed(self) -> int:
        """Returns how many bytes in all must be consumed before the first waiter may send; 0: none waits."""
        if not self.waiting:
            return 0
        return min(self.sent, self.sent + self.waiting[0].size - self.limit)


class SendWindow:
    """Limits what this worker sends.

    Args:
        name: of the worker, for the log.
        limit: bytes in flight to each peer; 0 means no limit.
        notify: notifies a peer that a message waits for it.
    """

    def __init__(self, name: str, limit: int, notify: Notify) -> None:
        self.limit = limit
        self.waits = 0
        self._name = name
        self._notify = notify
        self._lock = threading.RLock()  # guards all but the constants; see Note [Calls of handlers] in links
        self._accounts: dict[tuple[int, bool], _CreditAccount] = {}  # by peer, and whether for replies
        self._closed = False

    def try_reserve(
        self, peer: int, reply: bool, size: int, may_wait: Callable[[], bool] = lambda: True
    ) -> bool:
        """Counts ``size`` bytes as sent to ``peer``. Returns False if the caller must :meth:`wait`.

        Args:
            may_wait: whether it may; otherwise the bytes are counted even beyond the limit.
        """
        if not self.limit:
            return True
        with self._lock:
            account = self._account(peer, reply)
            if (account.waiting or not account.has_room(size)) and may_wait():
                return False
            account.sent += size
            return True

    def _account(self, peer: int, reply: bool) -> _CreditAccount:
        account = self._accounts.get((peer, reply))
        if account is None:
            account = self._accounts.setdefault((peer, reply), _CreditAccount(self.limit))
        return account

    def wait(self, peer: int, reply: bool, size: int, seconds: float) -> None:
        """Waits up to ``seconds`` (0: no limit) until ``size`` bytes may be sent to ``peer``, and counts
        them.

        Raises:
            CongestionError: if the time is over.
            ClosedError: if the mailbox is closed or the connection to ``peer`` dropped meanwhile.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"the mailbox of {self._name} is closed")
            account, waiter = self._account(peer, reply), _Waiter(size, Promise())
            account.waiting.append(waiter)
            self.waits += 1
        self._grant(peer, reply, account)
        try:
            self._wait(peer, account, waiter, Deadline.after(seconds or None))
        except BaseException:
            self._withdraw(peer, reply, account, waiter)
            raise

    def _wait(self, peer: int, account: _CreditAccount, waiter: _Waiter, deadline: Deadline) -> None:
        granted, logged = waiter.granted, False
        while not granted.wait_done(deadline.capped(LOG_INTERVAL_SECONDS).left()):
            what = f"{self._name}: {self._describe(peer, account)}"
            if deadline.passed():
                raise CongestionError(what)
            if not logged:
                logged = True
                logger.warning("%s", what)
        granted.result()

    def _describe(self, peer: int, account: _CreditAccount) -> str:
        return (
            f"{len(account.waiting)} messages for worker {peer} wait until it has consumed more of the "
            f"{account.in_flight} bytes in flight to it (ZMQGRAD_INFLIGHT_BYTES is {self.limit})"
        )

    def _withdraw(self, peer: int, reply: bool, account: _CreditAccount, waiter: _Waiter) -> None:
        """Removes ``waiter``, which may have been granted its bytes at the last moment."""
        with self._lock:
            if waiter in account.waiting:
                account.waiting.remove(waiter)
                waiter.granted.set_exception(ClosedError("the sender stopped waiting"))
            elif waiter.granted.exception() is None:
                account.sent -= waiter.size
        self._grant(peer, reply, account)

    def cancel(self, peer: int, reply: bool, size: int) -> None:
        """Undoes the reservation of ``size`` bytes, which were not sent after all."""
        with self._lock:
            account = self._accounts.get((peer, reply))
            if account is None:
                return
            account.sent -= size
        self._grant(peer, reply, account)

    def on_consumed(self, peer: int, requests: int, replies: int) -> None:
        """Handles the counters in a message of ``peer``: what it has consumed since the beginning."""
        for reply, consumed in ((False, requests), (True, replies)):
            account = self._accounts.get((peer, reply))
            if account is None or consumed <= account.newest:
                continue
            account.reported.append(consumed)
            account.newest = consumed
            if account.waiting:
                self._grant(peer, reply, account)

    def _grant(self, peer: int, reply: bool, account: _CreditAccount) -> None:
        """Wakes the waiters that may send now, and requests the credit that the next one needs."""
        with self._lock:
            granted, needed = account.grant(), account.needed()
        for waiter in granted:
            waiter.granted.set_result(None)
        if needed:
            self._notify(peer, CreditWanted(0, needed) if reply else CreditWanted(needed, 0))

    def forget(self, peer: int) -> None:
        """Drops the account of ``peer``; messages that wait for it fail."""
        with self._lock:
            dropped = [a for a in (self._accounts.pop((peer, reply), None) for reply in (False, True)) if a]
            waiting = _take_waiting(dropped)
        why = f"the connection from {self._name} to worker {peer} was dropped while a message waited for it"
        for waiter in waiting:
            waiter.granted.set_exception(ClosedError(why))

    def close(self) -> None:
        """Makes all waiting senders fail. Idempotent."""
        with self._lock:
            self._closed = True
            waiting = _take_waiting(self._accounts.values())
            self._accounts.clear()
        for waiter in waiting:
            waiter.granted.set_exception(
                ClosedError(f"the mailbox of {self._name} was closed while a message waited")
            )

    def statistics(self) -> dict[str, Any]:
        """Returns the limit, bytes in flight by peer, messages and bytes waiting by peer, and past waits."""
        with self._lock:
            sent: dict[int, int] = {}
            waiting: dict[int, dict[str, int]] = {}
            for (peer, _), account in self._accounts.items():
                if account.in_flight:
                    sent[peer] = sent.get(peer, 0) + account.in_flight
                if account.waiting:
                    all_of_peer = waiting.setdefault(peer, {"messages": 0, "bytes": 0})
                    all_of_peer["messages"] += len(account.waiting)
                    all_of_peer["bytes"] += sum(w.size for w in account.waiting)
            return {"limit": self.limit, "bytes": sent, "waiting": waiting, "waits": self.waits}


def _take_waiting(accounts: Collection[_CreditAccount]) -> list[_Waiter]:
    waiting = [waiter for account in accounts for waiter in account.waiting]
    for account in accounts:
        account.waiting.clear()
    return waiting


@dataclass(eq=False, slots=True)
class _Consumed:
    """Bytes of one peer that were consumed here, of requests or of replies."""

    due: int  # a message of its own returns credit once the total reaches this
    total: int = 0


class ReceiveWindow:
    """Counts what this worker consumes, and returns credit to its peers.

    Args:
        limit: of this worker; peers may have another one.
        notify: sends credit to a peer.
    """

    def __init__(self, limit: int, notify: Notify) -> None:
        self._batch = max(1, limit // BATCHES)
        self._notify = notify
        self._lock = threading.RLock()  # guards all below; see Note [Calls of handlers] in links
        self._peers: dict[int, tuple[_Consumed, _Consumed]] = {}  # of its requests, and of its replies
        self._totals: dict[int, tuple[int, int]] = {}
        self.totals = self._totals.get
        """(peer, NOTHING_CONSUMED) -> what was consumed of its requests and replies, for the next message."""

    def consumed(self, peer: int, reply: bool, size: int) -> None:
        """Counts ``size`` bytes as consumed, and returns credit if it is due."""
        with self._lock:
            requests, replies = both = self._of(peer)
            consumed = both[reply]
            consumed.total += size  # without a call, in which a handler might count something, too
            if consumed.total > MAX_CONSUMED:
                consumed.total = MAX_CONSUMED
            self._totals[peer] = requests.total, replies.total
            is_due = self._is_due(both)
        if is_due:
            self._notify(peer, Credit())

    def credit_requested(self, peer: int, message: CreditWanted) -> None:
        """Handles a message in which ``peer`` requests credit."""
        with self._lock:
            both = self._of(peer)
            for consumed, wanted in zip(both, (message.requests, message.replies), strict=True):
                if wanted:
                    consumed.due = min(consumed.due, wanted)
            is_due = self._is_due(both)
        if is_due:
            self._notify(peer, Credit())

    def _of(self, peer: int) -> tuple[_Consumed, _Consumed]:
        both = self._peers.get(peer)
        if both is None:
            both = self._peers.setdefault(peer, (_Consumed(self._batch), _Consumed(self._batch)))
        return both

    def _is_due(self, both: tuple[_Consumed, _Consumed]) -> bool:
        """Whether credit must be returned now; if so, schedules the next time. Called with the lock held."""
        due = [consumed for consumed in both if consumed.total >= consumed.due]
        for consumed in due:
            consumed.due = consumed.total + self._batch
        return bool(due)

    def forget(self, peer: int) -> None:
        """Drops the counts of ``peer``."""
        with self._lock:
            self._peers.pop(peer, None)
            self._totals.pop(peer, None)
