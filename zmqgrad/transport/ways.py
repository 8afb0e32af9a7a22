"""The ways out: to each peer a DEALER, and beside it, on one host, short ways past libzmq's thread.

A way is written by whichever thread has something to say, under that way's lock (a ZeroMQ socket may move
between threads across a lock). High-water marks are zero: a send never blocks inside libzmq (DESIGN section
4). Small messages to peers of this host go by :mod:`~zmqgrad.transport.direct`: to their door, or to the lane
at which a thread of theirs waits.
"""

from __future__ import annotations

import logging
import os
import socket as sockets
import threading
from collections.abc import Callable, Sequence

import zmq

from zmqgrad.errors import ClosedError, TransportError, UnknownPeerError
from zmqgrad.transport.base import Buffer, Resolver
from zmqgrad.transport.dataplane.plane import frames_size
from zmqgrad.transport.direct import Direct
from zmqgrad.transport.door import door_address, is_of_this_user, unix_address
from zmqgrad.transport.lanes import MAX_LANES
from zmqgrad.transport.pulse import SCHEME
from zmqgrad.transport.security import Keys
from zmqgrad.transport.zap import HANDSHAKE_MS, key_caller

logger = logging.getLogger(__name__)

TAKE_OVER = 256 << 10
"""Frames of at least so many bytes are handed to libzmq without a copy; the sender must not write to them."""

_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""As numbers: joining pyzmq's enumerations takes as long as a small message."""

Connected = Callable[[int, str, Sequence[str]], None]
"""Told of a peer that is sent to from now on: where, and all its addresses."""


class Way:
    """The way out to one peer; ``lock`` guards everything else."""

    __slots__ = ("direct", "endpoint", "frame_bytes", "header_bytes", "lock", "messages", "socket")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.socket: zmq.Socket[bytes] | None = None
        self.direct: Direct | None = None
        self.endpoint = ""
        self.messages = 0
        self.header_bytes = 0
        self.frame_bytes = 0

    def close_direct(self) -> None:
        """From now on everything goes by the DEALER."""
        if self.direct is not None:
            self.direct.close()
            self.direct = None


class Ways:
    """The ways of the mailbox of ``name`` to its peers; opened as they are needed.

    Args:
        keys: by tcp, talk to none but those who have them.
        connected: hears of each new way to a peer, with the way's lock held.
    """

    def __init__(
        self, name: str, context: zmq.Context[zmq.Socket[bytes]], keys: Keys | None, connected: Connected
    ) -> None:
        self.resolve: Resolver = _knows_nobody
        self._name = name
        self._context = context
        self._keys = keys
        self._connected = connected
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()  # guards all below, and _closed
        self._peers: dict[int, Way] = {}
        self.known: Callable[[int], Way | None] = self._peers.get
        """The way to a peer, if it was ever sent to."""
        self.local: set[int] = set()
        """The peers that are reached within this host."""
        self._to_lanes: dict[tuple[int, int], Way] = {}

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def closed(self) -> bool:
        """Are there to be no new ones?"""
        return self._closed

    def to(self, peer: int) -> Way:
        """The way to ``peer``, which may have yet to be opened."""
        return self.known(peer) or self._new(peer)

    def _new(self, peer: int) -> Way:
        with self._lock:
            return self._peers.setdefault(peer, Way())

    def open(self, peer: int, way: Way) -> None:
        """Connect, if that has not been done: then it is known whether the peer is on this host.

        Raises:
            ClosedError, UnknownPeerError, TransportError: if that cannot be.
        """
        with way.lock:
            if way.socket is None:
                self._connect(peer, way)

    def put(
        self,
        peer: int,
        way: Way,
        first: bytearray,
        frames: Sequence[Buffer],
        small: bool,
        parts: Sequence[tuple[bytearray, memoryview]],
        awaited: bool,
    ) -> None:
        """Queue a message; ``parts`` are chunks, each with its own header, that go before it.

        ``small``: it may go the short way. ``awaited``: as :meth:`Direct.send` says.
        """
        with way.lock:
            socket = way.socket
            if socket is None:
                socket = self._connect(peer, way)
            way.messages += 1
            way.header_bytes += len(first)
            if small and way.direct is not None:
                written = way.direct.send(first, awaited)
                if written:
                    return
                if written is None:
                    way.close_direct()
            try:
                for head, data in parts:
                    way.frame_bytes += len(data)
                    _send_all(socket, head, (data,))
                if not frames:
                    socket.send(first, _NOBLOCK)
                else:
                    way.frame_bytes += frames_size(frames)
                    _send_all(socket, first, frames)
            except BaseException:
                # Half a message may be in the pipe: nothing must follow it.
                way.socket = None
                socket.close(linger=0)
                raise

    def put_at_lane(self, peer: int, lane: int, first: bytearray) -> bool:
        """Write to lane ``lane`` of ``peer``; False if that cannot be done now, or ever."""
        way = self._to_lanes.get((peer, lane)) or self._way_to_lane(peer, lane)
        if way is None:
            return False
        with way.lock:
            written = None if way.direct is None else way.direct.send(first, True)
            if written is None:
                way.close_direct()
            elif written:
                way.messages += 1
                way.header_bytes += len(first)
        return bool(written)

    def _way_to_lane(self, peer: int, lane: int) -> Way | None:
        main = self._peers.get(peer)
        # The way to the ROUTER is the one that is watched, so it is there before any other.
        if lane > MAX_LANES or main is None or main.socket is None or not main.endpoint.startswith("ipc:"):
            return None
        with self._lock:
            if self._closed:
                return None
            way = self._to_lanes.get((peer, lane))
            if way is None:
                way = self._to_lanes[peer, lane] = Way()
                way.endpoint = door_address(main.endpoint, lane)
                way.direct = Direct.open(way.endpoint)
            return way

    def _connect(self, peer: int, way: Way) -> zmq.Socket[bytes]:
        if self._closed:
            raise ClosedError(f"the mailbox of {self._name} is closed")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the mailbox of {self._name} belongs to process {self._pid}; it cannot be used in a "
                f"fork of it: start processes by spawn or forkserver, or call init_rpc in the child"
            )
        known = self.resolve(peer)
        endpoint = best(known)
        socket = self._context.socket(zmq.DEALER)
        try:
            set_up(socket)
            if self._keys is not None and endpoint.startswith("tcp:"):
                key_caller(socket, self._keys)
            socket.connect(endpoint)
        except zmq.ZMQError as e:
            socket.close(linger=0)
            raise TransportError(f"cannot connect to worker {peer} at {endpoint}: {e}") from e
        way.socket, way.endpoint = socket, endpoint
        (self.local.add if endpoint.startswith("ipc:") else self.local.discard)(peer)
        self._connected(peer, endpoint, known)
        if endpoint.startswith("ipc:"):
            way.direct = Direct.open(door_address(endpoint))
        logger.debug("%s sends to worker %d at %s", self._name, peer, endpoint)
        return socket

    def forget(self, peer: int) -> None:
        """Drop the way to ``peer``; what was queued for it is lost."""
        # Its place stays: a thread that is about to send by it must find this one, or nobody would ever
        # close the socket that it opens.
        for way in self.all(peer):
            _shut(way, linger=0)
        with self._lock:  # its lanes are found anew, where it then is
            for key in [key for key in self._to_lanes if key[0] == peer]:
                del self._to_lanes[key]

    def all(self, peer: int | None = None) -> list[Way]:
        """All ways, to lanes as well; or those to ``peer``."""
        with self._lock:
            ways = [way for number, way in self._peers.items() if peer is None or number == peer]
            lanes = [way for (number, _), way in self._to_lanes.items() if peer is None or number == peer]
        return ways + lanes

    def close(self) -> bool:
        """No new ones from now on. False if that was so already."""
        with self._lock:
            before, self._closed = self._closed, True
            return not before

    def shut(self, linger: int) -> None:
        """Close all sockets; ``linger`` is how many ms unsent messages may take to leave."""
        for way in self.all():
            _shut(way, linger)

    def peers_connected(self) -> int:
        """To how many peers a way is open."""
        return sum(way.socket is not None for way in list(self._peers.values()))


def _shut(way: Way, linger: int) -> None:
    with way.lock:
        way.close_direct()
        if way.socket is not None:
            way.socket.close(linger=linger)
            way.socket = None


def _knows_nobody(peer: int) -> Sequence[str]:
    raise UnknownPeerError(f"no address is known for worker {peer}: the mailbox was not started")


def set_up(socket: zmq.Socket[bytes]) -> None:
    """What every socket of ours is given at birth."""
    socket.linger = 0
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.handshake_ivl = HANDSHAKE_MS


def _send_all(socket: zmq.Socket[bytes], first: Buffer, frames: Sequence[Buffer]) -> None:
    socket.send(first, _NOBLOCK_MORE)
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        flags = _NOBLOCK if i == last else _NOBLOCK_MORE
        socket.send(frame, flags, copy=len(frame) < TAKE_OVER)


def best(endpoints: Sequence[str]) -> str:
    """The first endpoint that can be reached from here.

    An ipc address is tried for real: boot ids are equal across containers that share nothing.
    """
    for endpoint in endpoints:
        if endpoint.startswith(SCHEME):
            continue
        if not endpoint.startswith("ipc://") or _lets_us_in(endpoint):
            return endpoint
    raise UnknownPeerError(f"none of the addresses {list(endpoints)} can be reached from this host")


def _lets_us_in(endpoint: str) -> bool:
    """Does a process of our own user listen at ``endpoint`` (ipc)? Those of others would hang up later."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(unix_address(endpoint)) == 0 and is_of_this_user(probe)
