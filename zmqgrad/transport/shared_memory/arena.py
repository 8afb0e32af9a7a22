"""The arena of one worker: blocks of its segments, leased to peers of its host.

A peer gets the descriptor of a segment with the first message that has a block of it. As long as it may read
the segment, a byte of it is locked (:mod:`~zmqgrad.transport.shared_memory.segment`), so that the arena can
find out.

Each lease has a number that is never used again, so a repeated or late release frees nothing that is in use.
The leases of a lost peer end as soon as no process maps the segment on its behalf: a worker may have left its
group while its program, or a fork of it, still holds tensors.

A block may be leased to several peers. It is free when the last of these leases has ended.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from zmqgrad.transport.local.connection import check_is_of_system
from zmqgrad.transport.shared_memory.free_list import PAGE_BYTES, align_up, block_size
from zmqgrad.transport.shared_memory.segment import Segment

logger = logging.getLogger(__name__)

T = TypeVar("T")

OWN = -1
"""Stands for this worker among the peers: it has leases of the blocks that it shares."""

LOST = -2
"""Stands for peers that are lost while a process on their behalf still maps their blocks."""

SEGMENT_BYTES = 1 << 30
"""Size of a segment, unless a block needs more. Memory is only allocated as it is written."""

SINGLE_SEGMENT_FACTOR = 3
"""A limit of at most this many segments is covered by one segment of the whole size."""


class Lease(NamedTuple):
    """A block that one peer may read until it releases it."""

    number: int
    segment: Segment
    offset: int
    size: int


class LeaseState:
    """The leases of one peer. Guarded by the arena's lock."""

    def __init__(self) -> None:
        self.locks: dict[int, int] = {}  # segment id -> the byte that is locked for this peer
        self.leases: dict[int, Lease] = {}


class Arena:
    """Allocates blocks of at most ``limit`` bytes in all, and leases them to peers. Thread-safe.

    Args:
        limit: of all segments together, in bytes; 0 disables the arena.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.RLock()  # guards everything below
        self._busy = False  # blocks are being allocated or freed: see _change
        self._released: deque[tuple[int, Collection[int]]] = deque()  # peers, and leases that are to end
        self._segments: list[Segment] = []
        self._peers: dict[int, LeaseState] = {}
        self._departed: list[LeaseState] = []  # lost peers with leases in segments that are still mapped
        self._writing: set[int] = set()  # leases that a thread is still writing to
        self._more: Counter[tuple[int, int]] = Counter()  # leases but one of shared blocks, by their place
        self._freed = threading.Condition(self._lock)
        self._awaited = 0  # threads that wait for it
        self.frees = 0
        """How many blocks have been freed so far."""
        self._lease_numbers = itertools.count(1)
        self._lock_bytes = itertools.count(1)  # offsets of the bytes locked for peers
        self._unknown_releases = 0
        self._used = False  # something was leased since the last trim
        self._trimmed = True
        self._closed = False

    # ---- leases -----------------------------------------------------------------------------------------

    def lease(self, peer: int, sizes: Sequence[int], *, keep: bool = False) -> list[Lease] | str:
        """Lease a block of each of ``sizes`` to ``peer``: all or none.

        Args:
            peer: the reader.
            sizes: of the blocks.
            keep: do not free them before :meth:`written`, even if the peer is lost.

        Returns:
            The leases, or the reason for having none: ``full`` or ``no memory``.
        """
        try:
            with self._lock:
                if self._busy:
                    return "full"
                leases = self._change(partial(self._lease, peer, sizes, keep))
        except OSError as e:
            check_is_of_system(e)
            logger.debug("no shared memory for worker %d: %s", peer, e)
            return "no memory"
        self._end_released()
        return leases

    def _change(self, make: Callable[[], T]) -> T:
        """Call ``make``, which allocates or frees blocks, and end the leases that were released.

        A signal handler, or a finalizer, that interrupts this allocates nothing, and what it releases waits
        for the end: see Note [Calls of handlers] in links. Called with the lock held.
        """
        self._busy = True
        try:
            self._end_leases()
            try:
                return make()
            finally:
                self._end_leases()
        except BaseException as e:
            if getattr(e, "errno", None) is None:  # not of the system, which only refuses a segment
                self._free_rest()
            raise
        finally:
            self._busy = False

    def _lease(self, peer: int, sizes: Sequence[int], keep: bool) -> list[Lease] | str:
        if self._departed:
            self._reclaim()
        self._used, self._trimmed = True, False
        leases = self._allocate(self._segments, sizes)
        if leases is None:
            segment = self._new_segment(sum(map(block_size, sizes)))
            leases = None if segment is None else self._allocate([segment], sizes)
        if leases is None:
            return "full"
        state = self._peers.get(peer) or self._peers.setdefault(peer, LeaseState())
        for lease in leases:
            state.leases[lease.number] = lease
            if keep:
                self._writing.add(lease.number)
        return leases

    def share(self, peer: int, lease: Lease) -> Lease:
        """Lease the block of ``lease``, which does not end meanwhile, to ``peer`` as well."""
        with self._lock:
            shared = lease._replace(number=next(self._lease_numbers))
            self._more[shared.segment.id, shared.offset] += 1
            self._peers.setdefault(peer, LeaseState()).leases[shared.number] = shared
            return shared

    def written(self, leases: Iterable[Lease]) -> None:
        """Nothing more is written to ``leases``: they may be freed if their peer is lost."""
        with self._lock:
            for lease in leases:
                self._writing.discard(lease.number)

    def _allocate(self, segments: Sequence[Segment], sizes: Sequence[int]) -> list[Lease] | None:
        """Allocate blocks of ``segments``; None if there is no room."""
        leases: list[Lease] = []
        for size in sizes:
            for segment in segments:
                offset = segment.free_list.allocate(size)
                if offset is not None:
                    leases.append(Lease(next(self._lease_numbers), segment, offset, size))
                    break
            else:
                self._free(leases)
                return None
        return leases

    def holders(self, lease: Lease) -> list[int]:
        """The peers that have a lease of the block of ``lease``, :data:`OWN` and :data:`LOST` included."""
        with self._lock:
            states = [*self._peers.items(), *((LOST, state) for state in self._departed)]
            return [
                peer
                for peer, state in states
                if any(x.segment is lease.segment and x.offset == lease.offset for x in state.leases.values())
            ]

    def wait_freed(self, frees: int, seconds: float) -> None:
        """Wait until more than ``frees`` blocks have been freed, at most ``seconds``."""
        with self._lock:
            self._awaited += 1
            try:
                self._freed.wait_for(lambda: self.frees > frees or self._closed, seconds)
            finally:
                self._awaited -= 1

    def _free(self, leases: Iterable[Lease]) -> None:
        """Free the blocks of ``leases`` that nobody else has. Called with the lock held."""
        for lease in leases:
            place = lease.segment.id, lease.offset
            if place not in self._more:
                lease.segment.free_list.free(lease.offset)
                self.frees += 1
                if self._awaited:
                    self._freed.notify_all()
            elif self._more[place] > 1:
                self._more[place] -= 1
            else:
                del self._more[place]

    def open_for(self, peer: int, segment: Segment) -> int:
        """Return a descriptor of ``segment`` for ``peer``. The caller must close it.

        Raises:
            OSError: if no descriptor is left.
        """
        with self._lock:
            state = self._peers.setdefault(peer, LeaseState())
            lock = state.locks.setdefault(segment.id, next(self._lock_bytes))
        return segment.open_for_reader(lock)

    def release(self, peer: int, numbers: Collection[int]) -> None:
        """End leases of ``peer``: it has finished with them, or they were not sent."""
        self._released.append((peer, numbers))
        self._end_released()

    def _end_released(self) -> None:
        """End the leases that were released, unless a thread has the lock, which does it then.

        Not waited for: a signal handler may have interrupted that thread, and wait for the message by which
        they were released.
        """
        while self._released:
            held: list[bool] = []
            try:
                held.extend(map(self._lock.acquire, (False,)))  # of C, so that Ctrl-C leaves it to others
                if True not in held or self._busy:
                    return
                self._change(bool)
            finally:
                if True in held:
                    self._lock.release()

    def _end_leases(self) -> None:
        """Called with the lock held, in a change."""
        while self._released:
            peer, numbers = self._released[0]
            state = self._peers.get(peer)
            if state is not None:
                leases = [lease for n in numbers if (lease := state.leases.pop(n, None)) is not None]
                self._unknown_releases += len(numbers) - len(leases)
                self._free(leases)
            self._released.popleft()  # last: after Ctrl-C, the next change does the rest

    def _free_rest(self) -> None:
        """Free all that has no lease: Ctrl-C came while blocks were allocated or freed.

        Called with the lock held.
        """
        leases = [x for s in (*self._peers.values(), *self._departed) for x in s.leases.values()]
        places = Counter([(lease.segment.id, lease.offset) for lease in leases])
        self._more = Counter({place: count - 1 for place, count in places.items() if count > 1})
        for segment in self._segments:
            segment.free_list.keep_only((x.offset, x.size) for x in leases if x.segment is segment)
        self.frees += 1
        self._freed.notify_all()

    def _new_segment(self, needed: int) -> Segment | None:
        """Add a segment with room for ``needed`` bytes; None beyond the limit.

        Raises:
            OSError: if the system has no memory or descriptor for a new one.
        """
        if self._closed:
            return None
        left = self.limit - sum(s.size for s in self._segments)
        least = align_up(needed, PAGE_BYTES)
        if left < least:
            return None
        usual = min(max(SEGMENT_BYTES, least), left)
        sizes = [usual, max(least, usual // 16)]  # ulimit may forbid the first size and allow the second
        if least > SEGMENT_BYTES or left <= SINGLE_SEGMENT_FACTOR * SEGMENT_BYTES:
            sizes.insert(0, left)  # of several segments, none might have room for a block within the limit
        for size in sizes[:-1]:
            try:
                self._segments.append(Segment(size))
                break
            except OSError as e:
                check_is_of_system(e)
        else:
            self._segments.append(Segment(sizes[-1]))
        return self._segments[-1]

    # ---- lost peers, unused memory ----------------------------------------------------------------------

    def forget(self, peer: int) -> None:
        """End the leases of a lost ``peer`` once no process maps them."""
        with self._lock:
            state = self._peers.pop(peer, None)
            if state is None:
                return
            if not self._closed:
                self._departed.append(state)
                self.reclaim()

    def reclaim(self) -> None:
        """Free the blocks that lost peers have unmapped since."""
        self._end_released()
        with self._lock:
            if self._departed and not self._busy:
                self._change(self._reclaim)

    def _reclaim(self) -> None:
        for state in self._departed:
            mapped = {s.id for s in self._segments if s.is_mapped_by_peer(state.locks.get(s.id, 0))}
            unmapped = [
                lease
                for lease in state.leases.values()
                if lease.segment.id not in mapped and lease.number not in self._writing
            ]
            for lease in unmapped:
                del state.leases[lease.number]
            self._free(unmapped)
        self._departed = [state for state in self._departed if state.leases]

    def trim(self) -> int:
        """Return free memory to the system, if nothing was leased since the last call.

        Returns:
            The number of bytes that were returned.
        """
        with self._lock:
            used, self._used = self._used, False
            if self._closed or used or self._trimmed or self._busy:
                return 0
            self._trimmed = True
            return self._change(self._trim)

    def _trim(self) -> int:
        self._reclaim()
        return sum(s.trim() for s in self._segments)

    def close(self) -> None:
        """Lease no more. Leased blocks stay valid for their readers. Idempotent."""
        with self._lock:
            self._closed = True
            for segment in self._segments:
                segment.close()
            self._segments, self._departed = [], []
            self._peers.clear()
            self._more.clear()
            self._freed.notify_all()

    def statistics(self) -> dict[str, Any]:
        """Return the limit, the use of memory, and the leases."""
        self._end_released()
        with self._lock:
            return {
                "limit": self.limit,
                "segments": len(self._segments),
                "memory": sum(s.memory() for s in self._segments),
                "blocks_leased": sum(len(s.free_list) for s in self._segments),
                "bytes_leased": sum(s.free_list.used for s in self._segments),
                "unknown_releases": self._unknown_releases,
            }
