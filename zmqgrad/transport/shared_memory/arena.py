"""The arena of one worker: blocks of its segments, leased to peers that have proved that they can read them.

Before the first lease, a peer is offered a segment. It maps the segment and sends back the nonce found there;
host or boot ids are never compared. A message waits for that reply no longer than a socket would take for it.
As long as the segment is mapped on behalf of a peer, a byte of it is locked
(:mod:`~zmqgrad.transport.shared_memory.segment`), so that the arena can find out.

Each lease has a number that is never used again, so a repeated or late release frees nothing that is in use.
The leases of a lost peer end as soon as no process maps the segment on its behalf: a worker may have left its
group while its program, or a fork of it, still holds tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from zmqgrad.runtime.future import Promise
from zmqgrad.transport.shared_memory.free_list import PAGE_BYTES, block_size
from zmqgrad.transport.shared_memory.segment import NONCE_BYTES, Segment
from zmqgrad.wire.messages import ArenaOffer, ArenaReply

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 1 << 30
"""Size of a segment, unless a block needs more. Memory is only allocated as it is written."""

SINGLE_SEGMENT_FACTOR = 3
"""A limit of at most this many segments is covered by one segment of the whole size."""

SOCKET_BYTES_PER_SECOND = 1 << 29
"""Approximate throughput of a socket within one host."""

MIN_WAIT_BYTES = 1 << 20
MAX_WAIT_SECONDS = 0.25
"""Messages of at least ``MIN_WAIT_BYTES`` wait for the reply to an offer, at most ``MAX_WAIT_SECONDS``."""

NO_REPLY = "no reply yet"
"""Reason for a fallback to the socket: the peer has not replied to an offer."""


class Lease(NamedTuple):
    """A block that one peer may read until it releases it."""

    number: int
    segment: Segment
    offset: int
    size: int


class LeaseState:
    """Segments offered to one peer and mapped by it, and its leases. Guarded by the arena's lock."""

    def __init__(self) -> None:
        self.locks: dict[
            int, int
        ] = {}  # segment id -> the byte that this peer locks; of all offered segments
        self.mapped: set[int] = set()  # ids of the segments that this peer has mapped
        self.leases: dict[int, Lease] = {}
        self.offered: Segment | None = None  # offered and not yet replied to
        self.offer_id = 0
        self.replied: Promise[None] | None = None  # completed by the reply to the last offer
        self.is_slow = False  # a message waited for that reply until its timeout
        self.refused = ""  # why this peer cannot read the arena

    def settle(self) -> None:
        """Wake the threads that wait for a reply: it has been received, or never will be."""
        if self.replied is not None:
            self.replied.set_result(None)


class Arena:
    """Allocates blocks of at most ``limit`` bytes in all, and leases them to peers. Thread-safe.

    Args:
        limit: of all segments together, in bytes; 0 disables the arena.
        send: sends an offer to a peer under a message id.
        may_wait: returns whether the calling thread may wait for a message of a peer. The receiver must not.
    """

    def __init__(
        self, limit: int, send: Callable[[int, ArenaOffer, int], None], may_wait: Callable[[], bool]
    ) -> None:
        self.limit = limit
        self._send = send
        self._may_wait = may_wait
        self._lock = threading.Lock()  # guards everything below
        self._segments: list[Segment] = []
        self._peers: dict[int, LeaseState] = {}
        self._departed: list[LeaseState] = []  # lost peers with leases in segments that are still mapped
        self._lease_numbers = itertools.count(1)
        self._offer_ids = itertools.count(1)
        self._lock_bytes = itertools.count(1)  # offsets of the bytes locked for peers
        self._unknown_releases = 0
        self._used = False  # something was leased since the last trim
        self._trimmed = True
        self._closed = False

    # ---- leases -----------------------------------------------------------------------------------------

    def lease(self, peer: int, sizes: Sequence[int]) -> list[Lease] | str:
        """Lease a block of each of ``sizes`` to ``peer``: all or none.

        Returns:
            The leases, or the reason for having none: ``refused``, ``full``, ``no memory`` or ``NO_REPLY``.
        """
        result = self._try_lease(peer, sizes)
        if result == NO_REPLY and self._wait_for_reply(peer, sum(sizes)):
            result = self._try_lease(peer, sizes)
        return result

    def _try_lease(self, peer: int, sizes: Sequence[int]) -> list[Lease] | str:
        """Lease blocks of mapped segments. Without room in these, offers a segment to ``peer``."""
        try:
            with self._lock:
                state = self._peers.get(peer)
                if state is None:
                    state = self._peers[peer] = LeaseState()
                if state.refused:
                    return "refused"
                leases = self._allocate(state, sizes)
                if leases is not None:
                    return leases
                if state.offered is not None:
                    return NO_REPLY
                segment = self._segment_for(state, sum(map(block_size, sizes)))
                if segment is None:
                    return "full"
                lock, offer_id = next(self._lock_bytes), next(self._offer_ids)
                offer = segment.offer(lock)  # may raise: no state is changed before
                state.locks[segment.id] = lock
                state.offered, state.offer_id, state.replied = segment, offer_id, Promise()
        except OSError as e:
            logger.debug("no shared memory for worker %d: %s", peer, e)
            return "no memory"
        self._send(peer, offer, offer_id)
        return NO_REPLY

    def _allocate(self, state: LeaseState, sizes: Sequence[int]) -> list[Lease] | None:
        """Lease blocks of segments that the peer has mapped; None if there is no room."""
        if self._departed:
            self._reclaim()
        self._used, self._trimmed = True, False
        leases: list[Lease] = []
        for size in sizes:
            for segment in self._segments:
                if segment.id in state.mapped:
                    offset = segment.free_list.allocate(size)
                    if offset is not None:
                        leases.append(Lease(next(self._lease_numbers), segment, offset, size))
                        break
            else:
                _free(leases)
                return None
        for lease in leases:
            state.leases[lease.number] = lease
        return leases

    def release(self, peer: int, numbers: Iterable[int]) -> None:
        """End leases of ``peer``: it has finished with them, or they were not sent."""
        with self._lock:
            state = self._peers.get(peer)
            if state is None:
                return
            found = [state.leases.pop(n, None) for n in numbers]
            leases = [lease for lease in found if lease is not None]
            self._unknown_releases += len(found) - len(leases)
            _free(leases)

    # ---- offers -----------------------------------------------------------------------------------------

    def offer_if_new(self, peer: int, size: int) -> None:
        """Offer memory for ``size`` bytes to ``peer``, unless it has been offered some."""
        if peer not in self._peers:
            result = self._try_lease(peer, [size])
            if not isinstance(result, str):  # another thread made an offer, which was accepted
                self.release(peer, [lease.number for lease in result])

    def _segment_for(self, state: LeaseState, needed: int) -> Segment | None:
        """Return a segment that the peer has not been offered, if need be a new one; None beyond the limit.

        Raises:
            OSError: if the system has no memory or descriptor for a new one.
        """
        if self._closed:
            return None
        for segment in self._segments:
            if segment.id not in state.locks and segment.size - segment.free_list.used >= needed:
                return segment
        left = self.limit - sum(s.size for s in self._segments)
        least = needed + PAGE_BYTES  # with the nonce
        if left < least:
            return None
        usual = min(max(SEGMENT_BYTES, least), left)
        sizes = [usual, max(least, usual // 16)]  # ulimit may forbid the first size and allow the second
        if least > SEGMENT_BYTES or left <= SINGLE_SEGMENT_FACTOR * SEGMENT_BYTES:
            sizes.insert(0, left)  # of several segments, none might have room for a block within the limit
        for size in sizes[:-1]:
            with contextlib.suppress(OSError):
                self._segments.append(Segment(size))
                break
        else:
            self._segments.append(Segment(sizes[-1]))
        return self._segments[-1]

    def _wait_for_reply(self, peer: int, size: int) -> bool:
        """Wait for the reply to an offer, no longer than a socket takes to send ``size`` bytes."""
        state = self._peers.get(peer)
        if size < MIN_WAIT_BYTES or state is None or state.is_slow or not self._may_wait():
            return False
        if state.replied is None:
            return False
        seconds = min(size / SOCKET_BYTES_PER_SECOND, MAX_WAIT_SECONDS)
        state.is_slow = not state.replied.wait_done(seconds)
        return not state.is_slow

    def on_reply(self, peer: int, reply: ArenaReply, offer_id: int) -> None:
        """Process the reply of ``peer`` to an offer. Replies to no offer, or to an old one, are ignored."""
        with self._lock:
            state = self._peers.get(peer)
            if state is None or state.offered is None or state.offer_id != offer_id:
                return
            segment, state.offered = state.offered, None
            if reply.nonce == segment.nonce:
                state.mapped.add(segment.id)
            else:
                state.refused = reply.why or "the nonce is wrong"
            state.is_slow = False
        state.settle()
        if state.refused:
            logger.debug("worker %d cannot map shared memory: %s", peer, state.refused)

    # ---- lost peers, unused memory ----------------------------------------------------------------------

    def forget(self, peer: int) -> None:
        """End the leases of a lost ``peer`` once no process maps them. If it returns, it gets an offer."""
        with self._lock:
            state = self._peers.pop(peer, None)
            if state is None:
                return
            if not self._closed:
                self._departed.append(state)
                self._reclaim()
        state.settle()

    def reclaim(self) -> None:
        """Free the blocks that lost peers have unmapped since."""
        with self._lock:
            self._reclaim()

    def _reclaim(self) -> None:
        for state in self._departed:
            mapped = {s.id for s in self._segments if s.is_mapped_by_peer(state.locks.get(s.id, 0))}
            unmapped = [lease for lease in state.leases.values() if lease.segment.id not in mapped]
            for lease in unmapped:
                del state.leases[lease.number]
            _free(unmapped)
        self._departed = [state for state in self._departed if state.leases]

    def trim(self) -> int:
        """Return free memory to the system, if nothing was leased since the last call.

        Returns:
            The number of bytes that were returned.
        """
        with self._lock:
            used, self._used = self._used, False
            if self._closed or used or self._trimmed:
                return 0
            self._trimmed = True
            self._reclaim()
            return sum(s.trim() for s in self._segments)

    def close(self) -> None:
        """Lease no more. Leased blocks stay valid for their readers. Idempotent."""
        with self._lock:
            self._closed = True
            for segment in self._segments:
                segment.close()
            peers = list(self._peers.values())
            self._segments, self._departed = [], []
            self._peers.clear()
        for state in peers:
            state.settle()

    def statistics(self) -> dict[str, Any]:
        """Return the limit, the use of memory, the leases, and why peers refused."""
        with self._lock:
            return {
                "limit": self.limit,
                "segments": len(self._segments),
                "memory": sum(s.memory() for s in self._segments),
                "blocks_leased": sum(len(s.free_list) - 1 for s in self._segments),
                "bytes_leased": sum(s.free_list.used - block_size(NONCE_BYTES) for s in self._segments),
                "unknown_releases": self._unknown_releases,
                "refused_by": {peer: s.refused for peer, s in self._peers.items() if s.refused},
            }


def _free(leases: Iterable[Lease]) -> None:
    for lease in leases:
        lease.segment.free_list.free(lease.offset)
