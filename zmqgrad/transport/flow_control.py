"""Credit-based flow control: bounds the bytes in flight to each peer (docs/guarantees.md, P10).

Frames that go through a socket take memory on both sides until the peer consumes them, and libzmq would queue
them without limit. So each worker counts, per peer, the bytes that it has sent and the peer has not consumed.
A request is consumed when its execution begins, a response when it is read. Beyond the limit the sending
threads wait, in order. A message larger than the limit is sent alone.

Requests and responses are counted separately, so responses pass while requests wait: reading never waits for
user code, so responses are always consumed. A thread of the pool that waits here counts as blocked, so other
threads start the requests of the peer; hence two workers that flood each other make progress. The thread that
reads must not wait, and sends at once. Messages without frames (control messages and small ones) and shared
memory, which has its own limit, are not counted.

The receiver returns credit in batches, or as soon as the peer reports that it waits. A sender that waits for
long reports again, behind all that it sent: what has not arrived by then was lost with a connection, and
counts as consumed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from zmqgrad.errors import ClosedError, CongestionError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise
from zmqgrad.wire.messages import Credit, CreditWanted, Message

logger = logging.getLogger(__name__)

DEFAULT_INFLIGHT_BYTES = 256 << 20
"""Default limit of the bytes in flight to each peer."""

BATCHES = 4
"""The receiver returns credit after this fraction (1 / BATCHES) of the limit."""

LOG_INTERVAL_SECONDS = 5.0
"""How often a sender that waits reports that to its peer. The first time, it logs a warning."""

Notify = Callable[[int, Message], None]
"""Queues a small message for a peer. Must not raise because of that peer."""


class _Waiter(NamedTuple):
    size: int
    granted: Promise[None]


class _CreditAccount:
    """The bytes in flight to one peer, of requests or of responses. Guarded by the lock of the window."""

    __slots__ = ("limit", "sent", "waiting")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sent = 0
        self.waiting: deque[_Waiter] = deque()

    def has_room(self, size: int) -> bool:
        return not self.sent or self.sent + size <= self.limit

    def grant(self) -> list[_Waiter]:
        """Removes and returns the waiters that may send now, in order."""
        granted = []
        while self.waiting and self.has_room(self.waiting[0].size):
            granted.append(self.waiting.popleft())
            self.sent += granted[-1].size
        return granted

    def needed(self) -> int:
        """Returns how many bytes must be consumed before the first waiter may send; 0 if there is none."""
        return min(self.sent, self.sent + self.waiting[0].size - self.limit) if self.waiting else 0


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
        self._lock = threading.Lock()  # guards all but the constants
        self._accounts: dict[tuple[int, bool], _CreditAccount] = {}  # by peer, and whether for replies
        self._closed = False

    def try_reserve(self, peer: int, reply: bool, size: int, *, wait: bool = True) -> bool:
        """Counts ``size`` bytes as in flight to ``peer``. Returns False if the caller must :meth:`wait`
        instead."""
        if not self.limit:
            return True
        with self._lock:
            account = self._account(peer, reply)
            if wait and (account.waiting or not account.has_room(size)):
                return False
            account.sent += size
            return True

    def _account(self, peer: int, reply: bool) -> _CreditAccount:
        account = self._accounts.get((peer, reply))
        if account is None:
            account = self._accounts[peer, reply] = _CreditAccount(self.limit)
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
            granted = account.grant()
            is_first = len(account.waiting) <= 1  # else the first waiter reports to the peer
            self.waits += 1
        if is_first:
            self._resume(peer, reply, account, granted)
        try:
            self._wait(peer, reply, account, waiter, Deadline.after(seconds or None))
        except BaseException:
            self._withdraw(peer, reply, account, waiter)
            raise

    def _wait(
        self, peer: int, reply: bool, account: _CreditAccount, waiter: _Waiter, deadline: Deadline
    ) -> None:
        granted, logged = waiter.granted, False
        while not granted.wait_done(deadline.capped(LOG_INTERVAL_SECONDS).left()):
            what = f"{self._name}: {self._describe(peer, account)}"
            if deadline.passed():
                raise CongestionError(what)
            if not logged:
                logged = True
                logger.warning("%s", what)
            self._request_credit(peer, reply, account, again=True)
        granted.result()

    def _describe(self, peer: int, account: _CreditAccount) -> str:
        return (
            f"{len(account.waiting)} messages for worker {peer} wait until it has consumed more of the "
            f"{account.sent} bytes in flight to it (ZMQGRAD_INFLIGHT_BYTES is {self.limit})"
        )

    def _withdraw(self, peer: int, reply: bool, account: _CreditAccount, waiter: _Waiter) -> None:
        """Removes ``waiter``, which may have been granted its bytes at the last moment."""
        with self._lock:
            if waiter in account.waiting:
                account.waiting.remove(waiter)
                waiter.granted.set_exception(ClosedError("the sender stopped waiting"))
            elif waiter.granted.exception() is None:
                account.sent = max(0, account.sent - waiter.size)
            granted = account.grant()
        self._resume(peer, reply, account, granted)

    def return_credit(self, peer: int, reply: bool, size: int) -> None:
        """Returns credit: ``peer`` has consumed ``size`` bytes, or they were not sent after all."""
        with self._lock:
            account = self._accounts.get((peer, reply))
            if account is None:  # forgotten, or an error of the peer
                return
            account.sent = max(0, account.sent - size)
            granted = account.grant()
        if granted or account.waiting:
            self._resume(peer, reply, account, granted)

    def on_credit(self, peer: int, credit: Credit) -> None:
        """Handles a message in which ``peer`` returns credit."""
        if credit.requests:
            self.return_credit(peer, False, credit.requests)
        if credit.replies:
            self.return_credit(peer, True, credit.replies)

    def _resume(self, peer: int, reply: bool, account: _CreditAccount, granted: list[_Waiter]) -> None:
        """Wakes the granted waiters, and requests the credit that the next one needs."""
        for waiter in granted:
            waiter.granted.set_result(None)
        self._request_credit(peer, reply, account)

    def _request_credit(self, peer: int, reply: bool, account: _CreditAccount, again: bool = False) -> None:
        with self._lock:
            needed = account.needed()
        if needed:
            self._notify(peer, CreditWanted(0, needed, again) if reply else CreditWanted(needed, 0, again))

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
                if account.sent:
                    sent[peer] = sent.get(peer, 0) + account.sent
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


class _Unacked:
    """Bytes of one peer that are not consumed, and bytes consumed whose credit was not returned."""

    __slots__ = ("consumed", "due", "unconsumed")

    def __init__(self, due: int) -> None:
        self.unconsumed = 0
        self.consumed = 0  # since credit was last returned
        self.due = due  # credit is returned once this much was consumed


class ReceiveWindow:
    """Counts what this worker consumes, and returns credit to its peers.

    Args:
        limit: of this worker; peers may have another one.
        notify: sends credit to a peer.
    """

    def __init__(self, limit: int, notify: Notify) -> None:
        self._batch = max(1, limit // BATCHES)
        self._notify = notify
        self._lock = threading.Lock()  # guards _peers
        self._peers: dict[tuple[int, bool], _Unacked] = {}

    def received(self, peer: int, reply: bool, size: int) -> None:
        """Counts ``size`` bytes of frames that arrived from ``peer``."""
        with self._lock:
            self._unacked(peer, reply).unconsumed += size

    def consumed(self, peer: int, reply: bool, size: int) -> None:
        """Counts ``size`` bytes as consumed, and returns credit if it is due."""
        with self._lock:
            unacked = self._unacked(peer, reply)
            unacked.unconsumed = max(0, unacked.unconsumed - size)  # the peer may have been forgotten since
            unacked.consumed += size
            credit = self._due(unacked)
        self._return_credit(peer, reply, credit)

    def credit_requested(self, peer: int, message: CreditWanted) -> None:
        """Handles a message in which ``peer`` requests credit."""
        for reply, needed in ((False, message.requests), (True, message.replies)):
            if needed:
                with self._lock:
                    unacked = self._unacked(peer, reply)
                    unacked.due = min(unacked.due, needed)
                    if message.again and unacked.unconsumed + unacked.consumed < needed:
                        unacked.consumed = needed - unacked.unconsumed  # the rest was lost with a connection
                    credit = self._due(unacked)
                self._return_credit(peer, reply, credit)

    def _unacked(self, peer: int, reply: bool) -> _Unacked:
        unacked = self._peers.get((peer, reply))
        if unacked is None:
            unacked = self._peers[peer, reply] = _Unacked(self._batch)
        return unacked

    def _due(self, unacked: _Unacked) -> int:
        """Returns the credit to return now, and resets the count. Called with the lock held."""
        credit = unacked.consumed if unacked.consumed >= unacked.due else 0
        if credit:
            unacked.consumed, unacked.due = 0, self._batch
        return credit

    def _return_credit(self, peer: int, reply: bool, credit: int) -> None:
        if credit:
            self._notify(peer, Credit(0, credit) if reply else Credit(credit, 0))

    def forget(self, peer: int) -> None:
        """Drops the counts of ``peer``."""
        with self._lock:
            for reply in (False, True):
                self._peers.pop((peer, reply), None)
