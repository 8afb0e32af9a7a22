"""Who may borrow of a lender: each peer is asked first whether it can read what it would get.

That is found out by a real round trip: the peer opens a segment and sends back the nonce that it finds there
(never by comparing host or boot ids). A message waits for the answer as long as a socket would take for it,
at most.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable

from zmqgrad.runtime.future import Promise
from zmqgrad.transport.shared_memory.arena import BlockAllocator, Lease, LeaseState
from zmqgrad.wire.messages import Message

logger = logging.getLogger(__name__)

SOCKET_SPEED = 1 << 29
"""Bytes a second that a socket carries on one host, roughly."""

WORTH_WAITING = 1 << 20
LONGEST_WAIT = 0.25
"""Messages of at least so many bytes wait for the answer to an offer, but not for more seconds than that."""

NO_ANSWER = "no answer yet"


class AccessNegotiator:
    """Lends what ``lender`` has.

    Args:
        name: of the worker.
        lender: of its segments.
        say: tells a peer something.
        may_wait: may the calling thread wait for an answer of a peer? (Not the one that reads them.)
    """

    def __init__(
        self,
        name: str,
        lender: BlockAllocator,
        say: Callable[[int, Message, int], None],
        may_wait: Callable[[], bool],
    ) -> None:
        self.lender = lender
        self.borrowers: dict[int, LeaseState] = {}
        self._name = name
        self._say = say
        self._may_wait = may_wait
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards borrowers and _offers
        self._offers: dict[int, tuple[LeaseState, int]] = {}  # message id -> of whom, and which segment

    def lend(self, peer: int, sizes: list[int]) -> list[Lease] | str:
        """A block for each of ``sizes``; or else why there is none (``full``, ``refused``, ...)."""
        borrower = self.borrowers.get(peer)
        if borrower is None:
            with self._lock:
                borrower = self.borrowers.setdefault(peer, LeaseState(peer))
        if borrower.refused:
            return "refused"
        blocks = self.lender.lend(borrower, sizes)
        if blocks is None:
            why = self._offer(borrower, sizes)
            if why == NO_ANSWER and self._await_answer(borrower, sum(sizes)):
                blocks = self.lender.lend(borrower, sizes)
                if blocks is None:
                    why = "refused" if borrower.refused else self._offer(borrower, sizes)
            if blocks is None:
                return why
        return blocks

    def _await_answer(self, borrower: LeaseState, size: int) -> bool:
        """Wait for the answer to an offer, no longer than it takes to send ``size`` bytes by a socket."""
        answer = borrower.answer
        if size < WORTH_WAITING or answer is None or borrower.is_slow or not self._may_wait():
            return False
        borrower.is_slow = not answer.wait_done(min(size / SOCKET_SPEED, LONGEST_WAIT))
        return not borrower.is_slow

    def _offer(self, borrower: LeaseState, sizes: list[int]) -> str:
        """Offer memory in which blocks of ``sizes`` fit; gives why there is none of it yet."""
        try:
            offer = self.lender.room_for(borrower, sizes)
        except OSError as e:
            logger.debug("%s gets no memory to share: %s", self._name, e)
            return "no memory"
        if offer is None:
            return NO_ANSWER if borrower.waiting else "full"
        with self._lock:
            number = next(self._numbers)
            self._offers[number] = borrower, offer.segment
            borrower.answer = Promise()
        self._say(borrower.peer, offer, number)
        return NO_ANSWER

    def offer_first(self, peer: int, size: int) -> None:
        """Offer memory for ``size`` bytes to ``peer``, unless it was offered some already."""
        if peer not in self.borrowers:
            with self._lock:
                borrower = self.borrowers.setdefault(peer, LeaseState(peer))
            self._offer(borrower, [size])

    def answered(self, peer: int, nonce: bytes, why: str, number: int) -> None:
        """``peer`` answered offer ``number``; an answer to nothing is of no consequence."""
        with self._lock:
            borrower, segment = self._offers.get(number, (None, 0))
            if borrower is None or borrower.peer != peer:
                return
            del self._offers[number]
        accepted = self.lender.answered(borrower, nonce, segment, why)
        borrower.is_slow = False
        borrower.settle()
        if not accepted:
            logger.debug("%s sends frames to worker %d: %s", self._name, peer, borrower.refused)

    def release(self, peer: int, blocks: Iterable[int]) -> None:
        """``peer`` has finished with these, or was never sent them."""
        borrower = self.borrowers.get(peer)
        if borrower is not None:
            self.lender.release(borrower, blocks)

    def forget(self, peer: int) -> None:
        """The way to ``peer`` was dropped; if it comes back, it is asked anew."""
        with self._lock:
            borrower = self.borrowers.pop(peer, None)
            for number in [n for n, (b, _) in self._offers.items() if b.peer == peer]:
                del self._offers[number]
        if borrower is not None:
            self.lender.lose(borrower)
            borrower.settle()

    def close(self) -> None:
        """Lend no more. What is lent stays valid."""
        self.lender.close()
        with self._lock:
            for borrower in self.borrowers.values():
                borrower.settle()
            self.borrowers.clear()  # their loans keep the segments
            self._offers.clear()

    def refused_by(self) -> dict[int, str]:
        """Which peers take nothing, and why."""
        return {b.peer: b.refused for b in list(self.borrowers.values()) if b.refused}
