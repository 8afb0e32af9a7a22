"""What a mailbox does with frames: into the arena where the peer can read it, side by side where not.

Whether a peer can is found out at the first message that is large enough. If the answer is no, or is not here
in time, or the arena is full, frames travel as frames, and a counter says why.

Blocks that are done with go back in the manifest of the next message to their owner, or after
:data:`RELEASE_SECONDS` in a message of their own.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from zmqgrad.errors import ZmqgradError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.base import Buffer, Timer
from zmqgrad.transport.shared_memory import forks
from zmqgrad.transport.shared_memory.arena import BlockAllocator, Lease
from zmqgrad.transport.shared_memory.copier import Copier
from zmqgrad.transport.shared_memory.mapped_blocks import MappedBlocks
from zmqgrad.transport.shared_memory.negotiator import AccessNegotiator
from zmqgrad.transport.shared_memory.packing import arrange
from zmqgrad.transport.shared_memory.segment import supported
from zmqgrad.transport.shared_memory.settings import ArenaSettings
from zmqgrad.wire.lazy_frame import Frame, materialize
from zmqgrad.wire.messages import ArenaAnswer, ArenaOffer, Manifest, Message, Piece, Release

logger = logging.getLogger(__name__)

RELEASE_SECONDS = 0.05
"""Blocks that are done with wait so long for a message that takes them along."""

JOIN = 8
"""From so many frames on, small ones are joined where there is no arena: each costs system calls."""

TRIM_SECONDS = 30.0
"""Free memory of an arena that nobody used for so long, or at most twice that, goes back to the system."""


class Send(Protocol):
    """How the exchange says something itself."""

    def __call__(self, peer: int, message: Message, message_id: int) -> None:
        """Queue ``message`` for ``peer``."""
        ...


class PreparedFrames(NamedTuple):
    """Frames ready to send: what stands before the header, and what follows it."""

    manifest: Manifest | None
    frames: Sequence[Buffer]


class SharedMemoryTransport:
    """What one mailbox does with shared memory.

    Args:
        name: of the worker.
        settings: of its arena; where that is off, it lends nothing, and still reads what others lend.
        send: of the mailbox.
        may_wait: may the calling thread wait for an answer of a peer? (Not the one that reads them.)
    """

    def __init__(
        self, name: str, settings: ArenaSettings, send: Send, may_wait: Callable[[], bool] = lambda: False
    ) -> None:
        self._name = name
        self._threshold = settings.threshold
        self._send = send
        self._pid = os.getpid()
        lends = settings.limit and supported()
        self._lender = BlockAllocator(settings.limit if lends else 0)
        self._desk = AccessNegotiator(name, self._lender, self._say, may_wait) if lends else None
        self._copier = Copier(name)
        self._copy = self._copier.copy
        self._borrowings = MappedBlocks(self._owing)
        self.owes = self._borrowings.debts.owed
        """Is there a block to give back to that peer?"""
        self._timer: Timer | None = None
        self._armed = False
        self._trimming = False
        self._closed = False
        self.fallbacks: Counter[str] = Counter()
        self.bytes_out = 0
        self.bytes_in = 0

    def start(self, timer: Timer | None) -> None:
        """From here on, blocks go back in time even if nothing else is said."""
        self._timer = timer

    # ---- sending ----------------------------------------------------------------------------------------

    def load(self, peer: int, local: bool, frames: Sequence[Frame]) -> PreparedFrames:
        """``frames`` ready for ``peer``, which is on this host if ``local``; with what it gets back."""
        released = self._borrowings.debts.take(peer)
        if not frames:
            return PreparedFrames(Manifest(released=released) if released else None, ())
        sizes = [len(f) for f in frames]
        total = sum(sizes)
        if total >= self._threshold:
            pieces, windows = arrange(sizes)
            blocks = self._lend(peer, local, pieces)
            if blocks is not None:
                placed = tuple([Piece(b.segment.id, b.number, b.offset, b.size) for b in blocks])
                load = PreparedFrames(Manifest(placed, windows, released), ())
                try:
                    for window, frame in zip(windows, frames, strict=True):
                        block = blocks[window.piece]
                        block.segment.write(block.offset + window.offset, frame, self._copy)
                except BaseException:  # Ctrl-C, too, while much is copied
                    self.unload(peer, load)
                    raise
                self.bytes_out += total
                return load
        return _in_frames(frames, sizes, released)

    def unload(self, peer: int, load: PreparedFrames) -> None:
        """``load`` could not be sent after all."""
        if load.manifest is not None:
            self._borrowings.debts.untake(peer, load.manifest.released)
            blocks = [p.block for p in load.manifest.pieces if p.segment]
            if blocks and self._desk is not None:
                self._desk.release(peer, blocks)

    def _lend(self, peer: int, local: bool, sizes: list[int]) -> list[Lease] | None:
        if self._desk is None or self._pid != os.getpid():
            self.fallbacks["off"] += 1
            return None
        if not local:
            self.fallbacks["other host"] += 1
            return None
        blocks = self._desk.lend(peer, sizes)
        if isinstance(blocks, str):
            self.fallbacks[blocks] += 1
            return None
        if not self._trimming:
            self._trimming = True
            self._later(TRIM_SECONDS, self._trim)
        return blocks

    def _say(self, peer: int, message: Message, message_id: int) -> None:
        try:
            self._send(peer, message, message_id)
        except ZmqgradError as e:
            logger.debug("%s cannot tell worker %d %s: %s", self._name, peer, message, e)

    # ---- receiving --------------------------------------------------------------------------------------

    def open(self, peer: int, manifest: Manifest, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """The frames of a message that came with ``manifest``; takes in what it releases.

        Raises:
            ProtocolError: if it does not fit what came, or what was lent.
        """
        if manifest.released and self._desk is not None:
            self._desk.release(peer, manifest.released)
        if not manifest.pieces and not manifest.windows:
            return frames
        opened = self._borrowings.open(peer, manifest, frames)
        self.bytes_in += sum([p.size for p in manifest.pieces if p.segment])
        return opened

    def heard(self, peer: int, message: Message, message_id: int) -> bool:
        """In the reading thread: is ``message`` for the exchange? Then it is dealt with."""
        if isinstance(message, ArenaOffer):
            answer = self._borrowings.accept(peer, message)
            self._say(peer, answer, message_id)
            if answer.nonce and self._desk is not None:
                # Who has much to say may be answered with much; and it is on this host, which is now certain.
                self._desk.offer_first(peer, self._threshold)
        elif isinstance(message, ArenaAnswer):
            if self._desk is not None:
                self._desk.answered(peer, message.nonce, message.why, message_id)
        elif not isinstance(message, Release):
            return False
        return True

    # ---- giving back ------------------------------------------------------------------------------------

    def _owing(self) -> None:
        """Called by finalizers: enqueues. See Note [Finalizers only enqueue]."""
        if not self._armed:
            self._armed = True
            self._later(RELEASE_SECONDS, self._release)

    def _later(self, seconds: float, job: Callable[[], None]) -> None:
        if self._timer is not None and not self._closed:
            self._timer.call_later(seconds, job)

    def _release(self) -> None:
        self._armed = False  # what ends from here on arms anew
        forks.release_ended()
        for peer in self._borrowings.debts.creditors():
            if not self._closed:
                self._say(peer, Release(), 0)  # its manifest says it all
        if self._desk is not None:
            self._desk.lender.reclaim()

    def _trim(self) -> None:
        if self._desk is not None and not self._closed:
            given = self._desk.lender.trim()
            if given:
                logger.debug("%s gave %d bytes of its arena back", self._name, given)
            self._later(TRIM_SECONDS, self._trim)

    # ---- ends -------------------------------------------------------------------------------------------

    def forget(self, peer: int) -> None:
        """The way to ``peer`` was dropped; if it comes back, it is asked anew."""
        self._borrowings.forget(peer)
        if self._desk is not None:
            self._desk.forget(peer)

    def close(self) -> None:
        """Lend and release no more. Tensors that were received stay valid. Idempotent."""
        self._closed = True
        self._borrowings.close()
        self._copier.close()
        if self._desk is not None:
            self._desk.close()

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for threads; names those that have not ended by ``deadline``."""
        return self._copier.join(deadline)

    def statistics(self) -> dict[str, Any]:
        """Use of the arena, fallbacks by their reason, and who refused why."""
        return {
            **self._lender.statistics(),
            **self._borrowings.statistics(),
            "fallbacks": dict(self.fallbacks),
            "refused_by": self._desk.refused_by() if self._desk is not None else {},
        }


def _in_frames(frames: Sequence[Frame], sizes: Sequence[int], released: tuple[int, ...]) -> PreparedFrames:
    """``frames`` without an arena; if they are many, the small ones side by side."""
    pieces, windows = arrange(sizes) if len(frames) >= JOIN else (sizes, ())
    if len(pieces) == len(frames):
        return PreparedFrames(
            Manifest(released=released) if released else None, [materialize(f) for f in frames]
        )
    joined: list[Any] = [None] * len(pieces)
    for window, frame in zip(windows, frames, strict=True):
        if window.size == pieces[window.piece]:
            joined[window.piece] = materialize(frame)
            continue
        if joined[window.piece] is None:
            joined[window.piece] = bytearray(pieces[window.piece])
        joined[window.piece][window.offset : window.offset + window.size] = materialize(frame)
    return PreparedFrames(Manifest(tuple(Piece(size=s) for s in pieces), windows, released), joined)
