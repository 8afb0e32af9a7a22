"""What peers have lent to this worker: their segments, the blocks in use, and those to give back.

A block is in use as long as anything is built on it; a weak reference notices the end, and its callback
only enqueues (DESIGN 16.3). What is built on a block is the reader's own: its maker does not touch it before
it is released. Nor is it released while a fork of this process may look at it: see Note [Forks and blocks] in
:mod:`~zmqgrad.transport.shared_memory.forks`.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from zmqgrad.errors import ProtocolError
from zmqgrad.transport.base import Buffer
from zmqgrad.transport.shared_memory import forks
from zmqgrad.transport.shared_memory.free_list import ALIGNMENT
from zmqgrad.transport.shared_memory.pending_releases import PendingReleases
from zmqgrad.transport.shared_memory.segment import NONCE, MappedSegment, supported
from zmqgrad.wire.messages import ArenaAnswer, ArenaOffer, Manifest, Piece, Window

MAX_SEGMENTS = 64
"""Segments of one peer that are mapped at most."""


class _Use(weakref.ref[Any]):
    """Notices the end of what block ``block`` is built on, at a third of the cost of ``weakref.finalize``."""

    __slots__ = ("block",)
    block: int


class _Source:
    """One mapped segment, and which of its blocks are in use."""

    def __init__(self, mapped: MappedSegment, dead: deque[int], tell: Callable[[], None]) -> None:
        self.mapped = mapped
        self._in_use: dict[int, _Use] = {}
        self._pinned: Counter[int] = Counter()  # how many living forks may look at a block
        self._done: set[int] = set()  # blocks that only forks look at any more
        self._dead = dead
        self._tell = tell
        forks.watch(self)

    def open(self, piece: Piece) -> memoryview:
        """The bytes of a block, which is in use until nothing refers to them."""
        block, offset, size = piece.block, piece.offset, piece.size
        if block in self._in_use:
            raise ProtocolError(f"block {block} came twice")
        if offset % ALIGNMENT or not 0 < size <= self.mapped.size - offset:
            raise ProtocolError(
                f"a block of {size} bytes at {offset} does not lie in its segment of {self.mapped.size}"
            )
        array = self.mapped.block(offset, size)
        use = _Use(array, self._died)
        use.block = block
        self._in_use[block] = use
        return memoryview(array).cast("B")

    def _died(self, use: _Use) -> None:
        """A callback of the collector: runs at any line of any thread, and so enqueues and nothing else."""
        block = use.block
        self._in_use.pop(block, None)
        if not self._pinned:
            self._dead.append(block)
            self._tell()
            return
        self._done.add(block)
        if block not in self._pinned:
            self._let_go(block)

    def _let_go(self, block: int) -> None:
        """Nobody looks at it any more. Two threads may come to see that, of which one releases it."""
        try:
            self._done.remove(block)
        except KeyError:
            return
        self._dead.append(block)
        self._tell()

    def pin(self) -> list[int]:
        """As :meth:`forks.Pinnable.pin`."""
        blocks = list(self._in_use)
        self._pinned.update(blocks)
        return blocks

    def unpin(self, blocks: Iterable[int]) -> None:
        """As :meth:`forks.Pinnable.unpin`."""
        for block in blocks:
            self._pinned[block] -= 1
            if self._pinned[block] <= 0:
                del self._pinned[block]
                self._let_go(block)

    def counts(self) -> tuple[int, int]:
        """Blocks in use, and blocks pinned."""
        return len(self._in_use), len(self._pinned)


class MappedBlocks:
    """Blocks of peers. ``owing`` is called, at any line of any thread, when there is one to give back."""

    def __init__(self, owing: Callable[[], None]) -> None:
        self._owing = owing
        self._sources: dict[tuple[int, int], _Source] = {}  # by peer and segment id
        self.debts = PendingReleases()
        self._closed = False

    def accept(self, peer: int, offer: ArenaOffer) -> ArenaAnswer:
        """Map what ``peer`` offers; the answer to it, whether or not that went well."""
        if not supported():
            return ArenaAnswer(b"", "this system has no shared memory of this kind")
        if sum(1 for p, _ in self._sources if p == peer) >= MAX_SEGMENTS:
            return ArenaAnswer(b"", f"{MAX_SEGMENTS} segments are mapped already")
        try:
            mapped = MappedSegment(offer)
            nonce = mapped.read(offer.nonce_at, NONCE)
        except (OSError, ValueError, OverflowError) as e:
            return ArenaAnswer(b"", str(e))
        self._sources[peer, offer.segment] = _Source(mapped, self.debts.to(peer), self._owing)
        if self._closed:  # meanwhile
            self._sources.clear()
        return ArenaAnswer(nonce)

    def open(self, peer: int, manifest: Manifest, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """The frames of a message of ``peer``; a list, so that they can be let go of (``Inbound.let_go``).

        Raises:
            ProtocolError: if the manifest does not fit the segments or the frames that came.
        """
        if not manifest.windows and not manifest.pieces:
            return frames
        windows = manifest.windows
        if len(windows) == len(manifest.pieces) == 1 and not frames:
            view = self._open(peer, manifest.pieces[0], iter(()))
            return [view if windows[0] == Window(0, 0, len(view)) else _window(windows[0], (view,))]
        following = iter(frames)
        pieces = [self._open(peer, piece, following) for piece in manifest.pieces]
        if next(following, None) is not None:
            raise ProtocolError(f"a manifest speaks of fewer than the {len(frames)} frames that came")
        return [_window(w, pieces) for w in windows]

    def _open(self, peer: int, piece: Piece, following: Any) -> memoryview:
        if not piece.segment:
            frame = next(following, None)
            if frame is None:
                raise ProtocolError("a manifest speaks of more frames than came")
            return memoryview(frame)
        source = self._sources.get((peer, piece.segment))
        if source is None:
            raise ProtocolError(f"a block came of segment {piece.segment}, which worker {peer} never offered")
        return source.open(piece)

    def forget(self, peer: int) -> None:
        """``peer`` is gone: its segments stay mapped as long as something is built on them, no longer."""
        self.debts.forget(peer)
        for key in [k for k in self._sources if k[0] == peer]:
            self._sources.pop(key, None)

    def close(self) -> None:
        """Forget everybody."""
        self._closed = True
        self.debts.clear()
        self._sources.clear()

    def statistics(self) -> dict[str, int]:
        """Segments mapped, blocks in use, blocks that a fork keeps from going back."""
        sources = list(self._sources.values())
        return {
            "segments_mapped": len(sources),
            "blocks_in_use": sum(s.counts()[0] for s in sources),
            "blocks_pinned": sum(s.counts()[1] for s in sources),
        }


def _window(window: Window, pieces: Sequence[memoryview]) -> memoryview:
    if window.piece >= len(pieces):
        raise ProtocolError(f"a frame lies in piece {window.piece} of {len(pieces)}")
    piece = pieces[window.piece]
    end = window.offset + window.size
    if end > len(piece):
        raise ProtocolError(
            f"a frame of {window.size} bytes at {window.offset} lies in a piece of {len(piece)}"
        )
    return piece[window.offset : end]
