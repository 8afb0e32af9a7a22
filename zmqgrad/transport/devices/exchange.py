"""What a mailbox does with frames on devices: copied there where the peer can read it, else written as bytes.

Whether a peer can is found out as with the arena (:mod:`~zmqgrad.transport.arena.desk`); one that has not
answered yet, or cannot, gets bytes, and a counter says why. Blocks go back in the manifest of the next
message to their owner, or after ``RELEASE_SECONDS`` in a message of their own.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from zmqgrad.errors import ZmqgradError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.engine_pool import Task
from zmqgrad.transport.arena.desk import Desk
from zmqgrad.transport.arena.exchange import RELEASE_SECONDS, Send
from zmqgrad.transport.arena.lender import Lender, Loan
from zmqgrad.transport.arena.segment import supported
from zmqgrad.transport.base import Timer
from zmqgrad.transport.devices.borrowings import DeviceBorrowings
from zmqgrad.transport.devices.port import Port, Unshareable
from zmqgrad.transport.devices.segment import DeviceSegment, maker
from zmqgrad.wire.messages import DeviceAnswer, DeviceOffer, DevicePiece, DeviceWithdrawal, Message, Release
from zmqgrad.wire.unwritten import Frame, OnDevice, Received

logger = logging.getLogger(__name__)

TRIM_SECONDS = 30.0
"""Memory of a device that nobody used for so long, or at most twice that, goes back to torch."""

USUAL = 64 << 20
"""Bytes of a segment, unless a block needs more: memory of a device is taken whole."""

MAX_DEVICES = 64
"""Of one worker. The number of a block, modulo this, tells of which of them it is."""


class DeviceExchange:
    """What one mailbox does with memory of devices.

    Args:
        name: of the worker.
        port: to the devices of this process.
        send: of the mailbox.
        may_wait: may the calling thread wait for an answer of a peer? (Not the one that reads them.)
    """

    def __init__(self, name: str, port: Port, send: Send, may_wait: Callable[[], bool]) -> None:
        self._name = name
        self._port = port
        self._send = send
        self._may_wait = may_wait
        self._pid = os.getpid()
        self._supported = supported()
        self._lock = threading.Lock()  # guards _desks
        self._back = threading.Condition()  # blocks may have come back
        self._desks: dict[str, Desk] = {}  # by device, in the order in which they were first used
        self._unshareable: dict[str, str] = {}  # why, by device
        self._offers: Iterator[int] = itertools.count(1)
        self._borrowings = DeviceBorrowings(port, self._owing)
        self.owes = self._borrowings.owed
        """Is there a block to give back to that peer?"""
        self._timer: Timer | None = None
        self._armed = False
        self._trimming = False
        self._retired: list[DeviceSegment] = []  # closed here, and perhaps open elsewhere
        self._closed = False
        self.fallbacks: Counter[str] = Counter()
        self.bytes_out = 0
        self.bytes_in = 0

    def start(self, timer: Timer | None) -> None:
        """From here on, blocks go back in time even if nothing else is said."""
        self._timer = timer

    # ---- sending ----------------------------------------------------------------------------------------

    def load(
        self, peer: int, local: bool, frames: Sequence[Frame]
    ) -> tuple[tuple[DevicePiece, ...], Sequence[Frame]]:
        """Those of ``frames`` that ``peer`` can read on their devices, and the others, which go as bytes."""
        numbers: dict[str, list[int]] = {}
        for number, frame in enumerate(frames):
            if isinstance(frame, OnDevice):
                numbers.setdefault(frame.device, []).append(number)
        pieces: list[DevicePiece] = []
        try:
            for device, mine in numbers.items():
                loans = self._lend(peer, local, device, [len(frames[n]) for n in mine])
                if loans is not None:
                    pieces += self._write(peer, loans, mine, frames)
        except BaseException:
            self.unload(peer, pieces, ())
            raise
        if not pieces:
            return (), frames
        pieces.sort(key=lambda piece: piece.frame)
        placed = {piece.frame for piece in pieces}
        self.bytes_out += sum([piece.size for piece in pieces])
        return tuple(pieces), [frame for n, frame in enumerate(frames) if n not in placed]

    def _write(
        self, peer: int, loans: list[Loan], numbers: list[int], frames: Sequence[Frame]
    ) -> list[DevicePiece]:
        """Copy the frames of ``numbers`` to ``loans``, with one event for those of a segment."""
        together: dict[DeviceSegment, list[tuple[Loan, int]]] = {}
        for loan, number in zip(loans, numbers, strict=True):
            together.setdefault(loan.segment, []).append((loan, number))
        pieces = []
        try:
            for segment, mine in together.items():
                ready = segment.write([(loan.offset, frames[n]) for loan, n in mine])  # type: ignore[misc]
                pieces += [
                    DevicePiece(n, segment.id, loan.number, loan.offset, loan.size, ready) for loan, n in mine
                ]
        except BaseException:
            self._take_back(peer, [loan.number for loan in loans])
            raise
        return pieces

    def _lend(self, peer: int, local: bool, device: str, sizes: list[int]) -> list[Loan] | None:
        why = self._why_not(local, device)
        if not why:
            try:
                loans = self._desk(device).lend(peer, sizes)
            except Unshareable as e:
                logger.debug("%s: memory of %s cannot be shared: %s", self._name, device, e)
                self._unshareable[device], why = str(e), "not shareable"
                self._desks[device].close()
            else:
                if not isinstance(loans, str):
                    if not self._trimming and self._timer is not None:
                        self._trimming = True
                        self._timer.call_later(TRIM_SECONDS, self._trim)
                    return loans
                why = loans
        self.fallbacks[why] += len(sizes)
        return None

    def _why_not(self, local: bool, device: str) -> str:
        """Why tensors of ``device`` cannot go so; empty if they may."""
        if self._closed or self._pid != os.getpid() or not self._supported or not self._port.limit(device):
            return "off"
        if not local:
            return "other host"
        return "not shareable" if device in self._unshareable else ""

    def _desk(self, device: str) -> Desk:
        desk = self._desks.get(device)
        if desk is None:
            with self._lock:
                desk = self._desks.get(device)
                if desk is None:
                    numbers = itertools.count(MAX_DEVICES + len(self._desks), MAX_DEVICES)
                    make, limit = maker(self._port, device), self._port.limit(device)
                    lender = Lender(limit, make, USUAL, numbers, lazy=False)
                    desk = Desk(self._name, lender, self._say, self._may_wait, self._offers)
                    self._desks[device] = desk
        return desk

    def unload(self, peer: int, pieces: Sequence[DevicePiece], released: Sequence[int]) -> None:
        """``pieces`` could not be sent after all, nor that ``released`` go back."""
        if released:
            self._borrowings.debts.untake(peer, released)
        if pieces:
            self._take_back(peer, [piece.block for piece in pieces])

    def _take_back(self, peer: int, blocks: Sequence[int]) -> None:
        """``peer`` has finished with these, or was never sent them."""
        for number, desk in enumerate(list(self._desks.values())):
            desk.release(peer, [block for block in blocks if block % MAX_DEVICES == number])
        with self._back:
            self._back.notify_all()

    def take_owed(self, peer: int) -> tuple[int, ...]:
        """The blocks to give back to ``peer``; whoever takes them must tell it."""
        return self._borrowings.debts.take(peer) if self._borrowings.owed(peer) else ()

    def _say(self, peer: int, message: Message, message_id: int) -> None:
        try:
            self._send(peer, message, message_id)
        except ZmqgradError as e:
            logger.debug("%s cannot tell worker %d %s: %s", self._name, peer, message, e)

    # ---- receiving --------------------------------------------------------------------------------------

    def open(
        self, peer: int, pieces: Sequence[DevicePiece], released: Sequence[int], frames: Sequence[Received]
    ) -> Sequence[Received]:
        """The frames of a message that came with ``pieces`` beside ``frames``; takes in what it releases.

        Raises:
            ProtocolError: if it does not fit what was lent.
        """
        if released:
            self._take_back(peer, released)
        if not pieces:
            return frames
        woven = self._borrowings.weave(peer, pieces, frames)
        self.bytes_in += sum([piece.size for piece in pieces])
        return woven

    def heard(
        self, peer: int, message: DeviceOffer | DeviceAnswer | DeviceWithdrawal, message_id: int
    ) -> Task | None:
        """In the reading thread: a message for the exchange. What takes longer is a task."""
        if isinstance(message, DeviceOffer):
            return partial(self._answer, peer, message, message_id)
        if isinstance(message, DeviceWithdrawal):
            return partial(self._borrowings.withdraw, peer, message.segment)
        for desk in list(self._desks.values()):
            desk.answered(peer, message.nonce, message.why, message_id)
        return None

    def _answer(self, peer: int, offer: DeviceOffer, message_id: int) -> None:
        if not self._closed:
            self._say(peer, self._borrowings.accept(peer, offer), message_id)

    # ---- giving back ------------------------------------------------------------------------------------

    def _owing(self) -> None:
        """Called by finalizers: enqueues. See Note [Finalizers only enqueue]."""
        if not self._armed and self._timer is not None and not self._closed:
            self._armed = True
            self._timer.call_later(RELEASE_SECONDS, self._release)

    def finish_copies(self, deadline: Deadline | None) -> None:
        """Wait until what was read of peers' memory has been copied, so that they may go.

        With a deadline, wait also, so long, until they have given back what they have of ours.
        """
        self._borrowings.finish()
        if deadline is not None:
            with self._back:
                self._back.wait_for(lambda: not self._lent(), deadline.left_or_none())

    def _lent(self) -> int:
        """Blocks that peers have."""
        return sum(desk.lender.statistics()["blocks_lent"] for desk in list(self._desks.values()))

    def _release(self) -> None:
        self._borrowings.look()
        self._armed = False  # what has ended by now is told below, what ends from here on arms anew
        for peer in self._borrowings.debts.creditors():
            if not self._closed:
                self._say(peer, Release(), 0)  # its manifest says it all
        for desk in list(self._desks.values()):
            desk.lender.reclaim()
        with self._back:
            self._back.notify_all()
        if self._borrowings.copying():
            self._owing()

    def _trim(self) -> None:
        if self._closed or self._timer is None:
            return
        for desk in list(self._desks.values()):
            for segment, peers in desk.lender.retire(list(desk.borrowers.values())):
                assert isinstance(segment, DeviceSegment)
                segment.retire()
                self._retired.append(segment)
                for peer in peers:
                    self._say(peer, DeviceWithdrawal(segment.id), 0)
        for segment in [s for s in self._retired if s.is_left()]:
            segment.close()
            self._retired.remove(segment)
        self._timer.call_later(TRIM_SECONDS, self._trim)

    # ---- ends -------------------------------------------------------------------------------------------

    def forget(self, peer: int) -> None:
        """The way to ``peer`` was dropped; if it comes back, it is asked anew."""
        self._borrowings.forget(peer)
        for desk in list(self._desks.values()):
            desk.forget(peer)
        with self._back:
            self._back.notify_all()

    def close(self) -> None:
        """Lend and release no more. Idempotent."""
        self._closed = True
        self._borrowings.close()
        for desk in list(self._desks.values()):
            desk.close()
        for segment in list(self._retired):
            segment.close()

    def statistics(self) -> dict[str, Any]:
        """Use of memory on each device, fallbacks by their reason (in tensors), and who refused why."""
        desks = dict(self._desks)
        return {
            "lent": {device: desk.lender.statistics() for device, desk in desks.items()},
            **self._borrowings.statistics(),
            "fallbacks": dict(self.fallbacks),
            "refused_by": {device: told for device, desk in desks.items() if (told := desk.refused_by())},
            "not_shareable": dict(self._unshareable),
        }
