"""Credit: how much may be on its way to a peer. Who has more to say waits, and can say for what (P10).

Frames that go through a socket take memory on both sides until the peer has got to them, and libzmq would
queue them without end. So each worker counts, peer by peer, what it has sent and the peer has not *taken in*
yet: a request is taken in when it begins to be run, an answer when it is read. Beyond the limit, the sending
thread waits, in turn; a message that is larger than the limit passes when nothing else is on its way.

Requests and answers are counted apart, so that answers pass while requests wait: reading never waits for
user code, so answers are always taken in. A thread of the engine pool that waits here counts as blocked, so
others take its place and begin what the peer has sent; hence two workers that flood each other go on.
The thread that reads, which must not wait, sends at once. Messages without frames (control messages and
small ones) and what goes by shared memory, which has a limit of its own, are not counted.

What was taken in is told in batches, or as soon as the peer says that it waits for it. Who has waited for
long asks again, behind all that it sent: what has not come by then was lost with a connection, and is counted
as taken in.
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

INFLIGHT = 256 << 20
"""Bytes that may be on their way to each peer, unless told otherwise."""

BATCHES = 4
"""What was taken in is told when it comes to one part in so many of the limit."""

SAY_SECONDS = 5.0
"""A sender that waits for longer says so in the log, and asks again, so often."""

Say = Callable[[int, Message], None]
"""Queue a small message for a peer; must not raise because of that peer."""


class _Waiter(NamedTuple):
    size: int
    granted: Promise[None]


class _Account:
    """What is on its way to one peer: requests, or answers. Its owner's lock guards it."""

    __slots__ = ("limit", "sent", "waiting")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sent = 0
        self.waiting: deque[_Waiter] = deque()

    def has_room(self, size: int) -> bool:
        return not self.sent or self.sent + size <= self.limit

    def grant(self) -> list[_Waiter]:
        """Those whose turn has come, in order."""
        granted = []
        while self.waiting and self.has_room(self.waiting[0].size):
            granted.append(self.waiting.popleft())
            self.sent += granted[-1].size
        return granted

    def needed(self) -> int:
        """So many bytes more must be taken in before the first that waits can go; 0 if none waits."""
        return min(self.sent, self.sent + self.waiting[0].size - self.limit) if self.waiting else 0


class Allowance:
    """What this worker may send.

    Args:
        name: of the worker, for the log.
        limit: bytes on their way to a peer; 0: no limit.
        say: how peers are told that something waits for them.
    """

    def __init__(self, name: str, limit: int, say: Say) -> None:
        self.limit = limit
        self.waits = 0
        self._name = name
        self._say = say
        self._lock = threading.Lock()  # guards all but the constants
        self._accounts: dict[tuple[int, bool], _Account] = {}  # by peer, and whether for answers
        self._closed = False

    def take(self, peer: int, answer: bool, size: int, *, wait: bool = True) -> bool:
        """Count ``size`` bytes for ``peer`` as on their way. False: they have to :meth:`wait`."""
        if not self.limit:
            return True
        with self._lock:
            account = self._account(peer, answer)
            if wait and (account.waiting or not account.has_room(size)):
                return False
            account.sent += size
            return True

    def _account(self, peer: int, answer: bool) -> _Account:
        account = self._accounts.get((peer, answer))
        if account is None:
            account = self._accounts[peer, answer] = _Account(self.limit)
        return account

    def wait(self, peer: int, answer: bool, size: int, seconds: float) -> None:
        """Wait until ``size`` bytes may go to ``peer``, at most ``seconds`` (0: no limit), and count them.

        Raises:
            CongestionError: if the time is over, saying what was waited for.
            ClosedError: if the mailbox is closed meanwhile, or its way to ``peer`` dropped.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"the mailbox of {self._name} is closed")
            account, waiter = self._account(peer, answer), _Waiter(size, Promise())
            account.waiting.append(waiter)
            granted = account.grant()
            is_first = len(account.waiting) <= 1  # else another has asked, and will ask again
            self.waits += 1
        if is_first:
            self._go_on(peer, answer, account, granted)
        try:
            self._wait(peer, answer, account, waiter, Deadline.after(seconds or None))
        except BaseException:
            self._withdraw(peer, answer, account, waiter)
            raise

    def _wait(self, peer: int, answer: bool, account: _Account, waiter: _Waiter, deadline: Deadline) -> None:
        granted, said = waiter.granted, False
        while not granted.wait_done(deadline.capped(SAY_SECONDS).left()):
            what = f"{self._name}: {self._describe(peer, account)}"
            if deadline.passed():
                raise CongestionError(what)
            if not said:
                said = True
                logger.warning("%s", what)
            self._ask(peer, answer, account, again=True)
        granted.result()

    def _describe(self, peer: int, account: _Account) -> str:
        return (
            f"{len(account.waiting)} messages for worker {peer} wait until it has taken in more of the "
            f"{account.sent} bytes that it was sent (ZMQGRAD_INFLIGHT_BYTES is {self.limit})"
        )

    def _withdraw(self, peer: int, answer: bool, account: _Account, waiter: _Waiter) -> None:
        """``waiter`` waits no more; it may have been granted its bytes at the last moment."""
        with self._lock:
            if waiter in account.waiting:
                account.waiting.remove(waiter)
                waiter.granted.set_exception(ClosedError("its sender waits no more"))
            elif waiter.granted.exception() is None:
                account.sent = max(0, account.sent - waiter.size)
            granted = account.grant()
        self._go_on(peer, answer, account, granted)

    def give_back(self, peer: int, answer: bool, size: int) -> None:
        """``size`` bytes were taken in by ``peer``, or were not sent after all."""
        with self._lock:
            account = self._accounts.get((peer, answer))
            if account is None:  # forgotten, or somebody's mistake
                return
            account.sent = max(0, account.sent - size)
            granted = account.grant()
        if granted or account.waiting:
            self._go_on(peer, answer, account, granted)

    def heard(self, peer: int, credit: Credit) -> None:
        """``peer`` says what it has taken in."""
        if credit.requests:
            self.give_back(peer, False, credit.requests)
        if credit.answers:
            self.give_back(peer, True, credit.answers)

    def _go_on(self, peer: int, answer: bool, account: _Account, granted: list[_Waiter]) -> None:
        """Let those go who may, and tell ``peer`` what the next one waits for."""
        for waiter in granted:
            waiter.granted.set_result(None)
        self._ask(peer, answer, account)

    def _ask(self, peer: int, answer: bool, account: _Account, again: bool = False) -> None:
        with self._lock:
            needed = account.needed()
        if needed:
            self._say(peer, CreditWanted(0, needed, again) if answer else CreditWanted(needed, 0, again))

    def forget(self, peer: int) -> None:
        """What was on its way to ``peer`` is lost, and so is what waits."""
        with self._lock:
            dropped = [a for a in (self._accounts.pop((peer, answer), None) for answer in (False, True)) if a]
            waiting = _take_waiting(dropped)
        why = f"the way from {self._name} to worker {peer} was dropped while a message waited for it"
        for waiter in waiting:
            waiter.granted.set_exception(ClosedError(why))

    def close(self) -> None:
        """Nobody waits any more. Idempotent."""
        with self._lock:
            self._closed = True
            waiting = _take_waiting(self._accounts.values())
            self._accounts.clear()
        for waiter in waiting:
            waiter.granted.set_exception(
                ClosedError(f"the mailbox of {self._name} was closed while a message waited")
            )

    def statistics(self) -> dict[str, Any]:
        """The limit, bytes on their way by peer, messages and bytes that wait by peer, and waits so far."""
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


def _take_waiting(accounts: Collection[_Account]) -> list[_Waiter]:
    waiting = [waiter for account in accounts for waiter in account.waiting]
    for account in accounts:
        account.waiting.clear()
    return waiting


class _Debt:
    """What came of one peer: not taken in yet, and taken in but not told yet."""

    __slots__ = ("due", "held", "taken")

    def __init__(self, due: int) -> None:
        self.held = 0
        self.taken = 0
        self.due = due


class Intake:
    """What this worker has taken in, and owes its peers the word of.

    Args:
        limit: that of this worker; peers may have another.
        say: how peers are told.
    """

    def __init__(self, limit: int, say: Say) -> None:
        self._batch = max(1, limit // BATCHES)
        self._say = say
        self._lock = threading.Lock()  # guards _debts
        self._debts: dict[tuple[int, bool], _Debt] = {}

    def came(self, peer: int, answer: bool, size: int) -> None:
        """``size`` bytes of frames of ``peer`` are here; they will be taken in."""
        with self._lock:
            self._debt(peer, answer).held += size

    def took(self, peer: int, answer: bool, size: int) -> None:
        """They have been."""
        with self._lock:
            debt = self._debt(peer, answer)
            debt.held = max(0, debt.held - size)  # it may have been forgotten since they came
            debt.taken += size
            told = self._due(debt)
        self._tell(peer, answer, told)

    def wanted(self, peer: int, message: CreditWanted) -> None:
        """``peer`` waits for so much to be taken in."""
        for answer, needed in ((False, message.requests), (True, message.answers)):
            if needed:
                with self._lock:
                    debt = self._debt(peer, answer)
                    debt.due = min(debt.due, needed)
                    if message.again and debt.held + debt.taken < needed:
                        debt.taken = needed - debt.held  # the rest was lost on its way
                    told = self._due(debt)
                self._tell(peer, answer, told)

    def _debt(self, peer: int, answer: bool) -> _Debt:
        debt = self._debts.get((peer, answer))
        if debt is None:
            debt = self._debts[peer, answer] = _Debt(self._batch)
        return debt

    def _due(self, debt: _Debt) -> int:
        """What has to be told now. Called with the lock held."""
        told = debt.taken if debt.taken >= debt.due else 0
        if told:
            debt.taken, debt.due = 0, self._batch
        return told

    def _tell(self, peer: int, answer: bool, told: int) -> None:
        if told:
            self._say(peer, Credit(0, told) if answer else Credit(told, 0))

    def forget(self, peer: int) -> None:
        """Nothing is owed to ``peer``."""
        with self._lock:
            for answer in (False, True):
                self._debts.pop((peer, answer), None)
