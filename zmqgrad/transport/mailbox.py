"""The mailbox over ZeroMQ: ROUTER in, one DEALER a peer out, ipc on one host and tcp between hosts.

A DEALER is written by whichever thread has something to say, under that peer's lock (a ZeroMQ socket
may move between threads across a lock). High-water marks are zero: a send never blocks inside libzmq
(DESIGN section 4). On one host, small messages go past libzmq's thread
(:mod:`~zmqgrad.transport.direct`), and answers to the thread that waits (:mod:`~zmqgrad.transport.lanes`).

On Linux the ipc address lies in the abstract namespace, so a killed process leaves no file behind, and
the kernel's word for the peer's user id is checked at connect. Elsewhere it is a socket in a private
directory (0700).

How frames travel is decided in :mod:`~zmqgrad.transport.dataplane`.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import shutil
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

import zmq

from zmqgrad.errors import AddressInUseError, ClosedError, TransportError, UnknownPeerError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.engine_pool import EnginePool, Task
from zmqgrad.transport import direct
from zmqgrad.transport.arena.exchange import Load
from zmqgrad.transport.arena.settings import OFF, ArenaSettings
from zmqgrad.transport.base import Buffer, Frame, Handler, Inbound, Lost, Resolver, Suspected, Timer
from zmqgrad.transport.dataplane.chunks import cut
from zmqgrad.transport.dataplane.credit import INFLIGHT
from zmqgrad.transport.dataplane.plane import OWN, DataPlane, frames_size
from zmqgrad.transport.direct import Direct
from zmqgrad.transport.door import door_address
from zmqgrad.transport.lanes import MAX_LANES, Lane, Lanes
from zmqgrad.transport.liveness import Limits, answers
from zmqgrad.transport.pulse import SCHEME, Listener, Watch, pulse_of
from zmqgrad.transport.receiver import Receiver
from zmqgrad.transport.security import Keys
from zmqgrad.transport.tap import Tap, Tapped
from zmqgrad.transport.zap import HANDSHAKE_MS, Doorkeeper, key_caller, key_listener
from zmqgrad.wire.codec import encode
from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.messages import Message, MessageType

logger = logging.getLogger(__name__)

TAKE_OVER = 256 << 10
"""Frames of at least so many bytes are handed to libzmq without a copy; the sender must not write to them."""

NO_LOAD = Load(None, ())
NO_PARTS: Sequence[tuple[bytearray, memoryview]] = ()


class _Peer:
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

    def send_directly(self, frame: bytearray) -> bool:
        """Write ``frame`` if there is a short way and it is free."""
        if self.direct is None:
            return False
        written = self.direct.send(frame)
        if written is None:
            self.close_direct()
        return bool(written)

    def close_direct(self) -> None:
        """From now on everything goes by the DEALER."""
        if self.direct is not None:
            self.direct.close()
            self.direct = None


class ZmqMailbox:
    """One worker's ROUTER and DEALERs. Binds at birth; receives once started.

    Args:
        name: of the worker, for its threads.
        worker_id: 0 to 65535.
        tcp_host: address to listen on with tcp, at a port that the system picks; None for ipc alone.
        arena: how much memory to share with workers of this host; by default none.
        limits: how long peers may be silent.
        inflight: bytes of frames that may be on their way to each peer; 0: no limit.
        keys: by tcp, talk to none but those who have them; None: to whoever comes.

    Raises:
        TransportError: if a socket cannot be bound.
    """

    def __init__(
        self,
        name: str,
        worker_id: int,
        *,
        tcp_host: str | None = "127.0.0.1",
        arena: ArenaSettings = OFF,
        limits: Limits = Limits(),  # noqa: B008 (immutable)
        inflight: int = INFLIGHT,
        keys: Keys | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = secrets.randbits(63)
        self.tap: Tap | None = None
        self._name = name
        self._pid = os.getpid()
        self._closed = False
        self._peers: dict[int, _Peer] = {}
        self._ways_to_lanes: dict[tuple[int, int], _Peer] = {}
        self._peers_lock = threading.Lock()  # guards the ways and _closed
        self._resolve: Resolver = _knows_nobody
        self._handler: Handler = _drop
        self._directory: str | None = None
        self._limits = limits
        self._keys = keys
        self._watch: Watch | None = None
        self._plane = DataPlane(
            name, arena, inflight, self.send, self._send_behind, lambda: not self._receiver.reads_here()
        )
        self._owes = self._plane.exchange.owes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = self._context.socket(zmq.ROUTER)
        try:
            _set_up(router)
            self._endpoints = tuple(self._bind(router, tcp_host))
            self._receiver = Receiver(
                name, self._context, router, door_address(self._endpoints[0]), self._plane.find_frames
            )
            self._lanes = Lanes(self._endpoints[0], self._decode)
            self._listener = Listener(self._endpoints[0], tcp_host)
            if self._listener.endpoint is not None:
                self._endpoints += (self._listener.endpoint,)
        except BaseException:
            router.close(linger=0)
            self._context.term()
            self._remove_directory()
            raise

    def _bind(self, router: zmq.Socket[bytes], tcp_host: str | None) -> list[str]:
        bound = [_bind(router, self._ipc_address(router))]
        if tcp_host is not None:
            shown = f"[{tcp_host}]" if ":" in tcp_host else tcp_host
            if ":" in tcp_host:
                router.setsockopt(zmq.IPV6, 1)
            if self._keys is not None:  # after ipc was bound, which needs none
                Doorkeeper(self._name, self._context, self._keys)
                key_listener(router, self._keys)
            bound.append(_bind(router, f"tcp://{shown}:*"))
        return bound

    def _ipc_address(self, router: zmq.Socket[bytes]) -> str:
        token = secrets.token_hex(16)
        if platform.system() == "Linux":
            router.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
            return f"ipc://@zmqgrad-{token}"
        self._directory = tempfile.mkdtemp(prefix="zmqgrad-")
        return f"ipc://{self._directory}/{token[:8]}"

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where peers can send to: ipc, then tcp; last, where those of other hosts ask whether it lives."""
        return self._endpoints

    def start(
        self,
        handler: Handler,
        resolve: Resolver,
        pool: EnginePool | None = None,
        lost: Lost | None = None,
        timer: Timer | None = None,
        suspected: Suspected | None = None,
    ) -> None:
        """Begin to receive, in a thread of ``pool`` if there is one, and to watch those that are sent to."""
        if lost is not None:
            self._lost = lost
            self._watch = Watch(self._name, self._listener, self._lose, suspected or _unheard, self._limits)
        self._plane.start(timer)
        self._resolve = resolve
        self._handler = handler
        self._receiver.start(self._received, pool)

    def _lose(self, peer: int, where: str) -> None:
        self._plane.exchange.forget(peer)
        self._lost(peer, where)

    def _received(self, inbound: Inbound) -> Task | None:
        if self.tap is not None and inbound.envelope.type != MessageType.CHUNK:
            self._show(inbound)
        if inbound.envelope.type in OWN:
            self._plane.heard(inbound)
            return None
        task = self._plane.take_in(inbound, self._handler) if inbound.by_socket else self._handler(inbound)
        if task is not None:
            self._lanes.look_away()
        return task

    def _decode(self, first: bytes) -> Inbound | None:
        """What came in by a lane."""
        inbound = self._receiver.decode(first, ())
        if self.tap is not None and inbound is not None:
            self._show(inbound)
        return inbound

    def _show(self, inbound: Inbound) -> None:
        assert self.tap is not None
        envelope = inbound.envelope
        self.tap(Tapped(False, envelope.source, envelope, inbound.message, inbound.size))

    def take_lane(self, peer: int) -> Lane | None:
        """A lane, if ``peer`` is reached over ipc (then it reaches us so) and not too many threads wait."""
        way = self._peers.get(peer)
        if way is None or not way.endpoint.startswith("ipc:"):
            return None  # the first message has yet to find out
        return self._lanes.take()

    def take_idle_lanes(self) -> Sequence[Lane]:
        """All lanes that nobody waits at, to be read and given back."""
        return self._lanes.take_idle()

    def send(
        self,
        peer: int,
        message: Message,
        message_id: int,
        frames: Sequence[Frame] = (),
        lane: int = 0,
        patience: float = 0.0,
    ) -> None:
        """Queue ``message`` for ``peer``. Frames of ``TAKE_OVER`` bytes and more must not change after."""
        way = self._peers.get(peer) or self._way_to(peer)
        load = NO_LOAD
        if frames or self._owes(peer):
            if way.socket is None:
                self._open_way(peer, way)  # only then is it known whether the peer is on this host
            load = self._plane.load(peer, way.endpoint.startswith("ipc:"), message, frames, patience)
        going, parts = load, NO_PARTS
        try:
            if load.frames:
                going, chunks = cut(load)
                parts = [(encode(c, self.worker_id, self.incarnation, 0), data) for c, data in chunks]
            first = encode(message, self.worker_id, self.incarnation, message_id, lane, going.manifest)
            small = not load.frames and len(first) <= direct.LARGEST
            at_lane = small and lane and message.is_awaited_by(peer) and self._put_at_lane(peer, lane, first)
            if not at_lane:
                self._put(peer, way, first, going.frames, small, parts)
        except BaseException:
            self._plane.unload(peer, message, load)
            raise
        if self.tap is not None:
            envelope = Envelope(message.TYPE, self.worker_id, self.incarnation, message_id, lane)
            self.tap(Tapped(True, peer, envelope, message, len(first) + sum(map(len, frames))))

    def _send_behind(self, peer: int, message: Message) -> None:
        """Queue a message without frames that overtakes none which was sent before."""
        first = encode(message, self.worker_id, self.incarnation, 0)
        self._put(peer, self._way_to(peer), first, (), False, ())

    def _open_way(self, peer: int, way: _Peer) -> None:
        with way.lock:
            if way.socket is None:
                self._connect(peer, way)

    def _put(
        self,
        peer: int,
        way: _Peer,
        first: bytearray,
        frames: Sequence[Buffer],
        small: bool,
        parts: Sequence[tuple[bytearray, memoryview]],
    ) -> None:
        """Queue a message; ``parts`` are chunks, each with its own header, that go before it."""
        with way.lock:
            socket = way.socket
            if socket is None:
                socket = self._connect(peer, way)
            way.messages += 1
            way.header_bytes += len(first)
            if small and way.send_directly(first):
                return
            try:
                for head, data in parts:
                    way.frame_bytes += len(data)
                    _send_all(socket, head, (data,))
                if not frames:
                    socket.send(first, zmq.NOBLOCK)
                else:
                    way.frame_bytes += frames_size(frames)
                    _send_all(socket, first, frames)
            except BaseException:
                # Half a message may be in the pipe: nothing must follow it.
                way.socket = None
                socket.close(linger=0)
                raise

    def _way_to(self, peer: int) -> _Peer:
        with self._peers_lock:
            return self._peers.setdefault(peer, _Peer())

    def _put_at_lane(self, peer: int, lane: int, first: bytearray) -> bool:
        """Write to lane ``lane`` of ``peer``; False if that cannot be done now, or ever."""
        way = self._ways_to_lanes.get((peer, lane)) or self._way_to_lane(peer, lane)
        if way is None:
            return False
        with way.lock:
            written = way.send_directly(first)
            if written:
                way.messages += 1
                way.header_bytes += len(first)
        return written

    def _way_to_lane(self, peer: int, lane: int) -> _Peer | None:
        main = self._peers.get(peer)
        # The way to the ROUTER is the one that is watched, so it is there before any other.
        if lane > MAX_LANES or main is None or main.socket is None or not main.endpoint.startswith("ipc:"):
            return None
        with self._peers_lock:
            if self._closed:
                return None
            way = self._ways_to_lanes.get((peer, lane))
            if way is None:
                way = self._ways_to_lanes[peer, lane] = _Peer()
                way.endpoint = door_address(main.endpoint, lane)
                way.direct = Direct.open(way.endpoint)
            return way

    def _connect(self, peer: int, way: _Peer) -> zmq.Socket[bytes]:
        if self._closed:
            raise ClosedError(f"the mailbox of {self._name} is closed")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the mailbox of {self._name} belongs to process {self._pid}; it cannot be used in a "
                f"fork of it: start processes by spawn or forkserver, or call init_rpc in the child"
            )
        known = self._resolve(peer)
        endpoint = _best(known)
        socket = self._context.socket(zmq.DEALER)
        try:
            _set_up(socket)
            if self._keys is not None and endpoint.startswith("tcp:"):
                key_caller(socket, self._keys)
            socket.connect(endpoint)
        except zmq.ZMQError as e:
            socket.close(linger=0)
            raise TransportError(f"cannot connect to worker {peer} at {endpoint}: {e}") from e
        way.socket, way.endpoint = socket, endpoint
        self._feel(peer, endpoint, known)
        if endpoint.startswith("ipc:"):
            way.direct = Direct.open(door_address(endpoint))
        logger.debug("%s sends to worker %d at %s", self._name, peer, endpoint)
        return socket

    def _feel(self, peer: int, endpoint: str, known: Sequence[str]) -> None:
        pulse = pulse_of(endpoint, known)
        if self._watch is not None and peer != self.worker_id and pulse is not None:
            self._watch.follow(peer, pulse)

    def follow(self, peer: int) -> None:
        """Feel the pulse of ``peer``, though nothing was sent to it yet."""
        known = self._resolve(peer)
        try:
            self._feel(peer, _best(known), known)
        except UnknownPeerError as e:
            if self._watch is not None:
                self._lose(peer, str(e))

    def forget(self, peer: int) -> None:
        """Drop the way to ``peer``; what was queued for it is lost."""
        # Its place stays: a thread that is about to send by it must find this one, or nobody would ever
        # close the socket that it opens.
        if self._watch is not None:
            self._watch.forget(peer)
        for way in self._all_ways(peer):
            self._shut(way, linger=0)
        with self._peers_lock:  # its lanes are found anew, where it then is
            for key in [key for key in self._ways_to_lanes if key[0] == peer]:
                del self._ways_to_lanes[key]
        self._plane.forget(peer)

    def _all_ways(self, peer: int | None = None) -> list[_Peer]:
        with self._peers_lock:
            ways = [way for number, way in self._peers.items() if peer is None or number == peer]
            lanes = [
                way for (number, _), way in self._ways_to_lanes.items() if peer is None or number == peer
            ]
        return ways + lanes

    def _shut(self, way: _Peer, linger: int) -> None:
        with way.lock:
            way.close_direct()
            if way.socket is not None:
                way.socket.close(linger=linger)
                way.socket = None

    def close(self, linger: int = 0) -> None:
        """Stop; ``linger`` is how many ms unsent messages may take to leave. Idempotent."""
        with self._peers_lock:
            if self._closed:
                return
            self._closed = True
        self._plane.allowance.close()
        for way in self._all_ways():
            self._shut(way, linger)
        self._lanes.close()
        if self._watch is not None:
            self._watch.close()
        else:
            self._listener.close()
        self._receiver.close()
        self._plane.close()

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the receiver and for libzmq; names what has not ended by ``deadline``."""
        left = self._receiver.join(deadline)
        if self._watch is not None:
            left += self._watch.join(deadline)
        left += self._plane.exchange.join(deadline)
        if left:
            return left
        if not self._lanes.join(deadline.left_or_none()):
            return [f"{self._name}-lanes"]
        for way in self._all_ways():
            self._shut(way, 0)  # a send that raced with close may have connected anew
        # term() waits for sockets that are still open, which should be none, and knows no deadline.
        ending = threading.Thread(target=self._context.term, name=f"{self._name}-term", daemon=True)
        ending.start()
        ending.join(deadline.left_or_none())
        if ending.is_alive():
            return [ending.name]
        self._remove_directory()
        return []

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def statistics(self) -> dict[str, Any]:
        """Messages in and out, bytes by path, arena, peers with an open way, what waits, malformed messages.

        Paths: ``inline`` (beside the header), ``frames`` (of a socket), ``arena`` (shared memory).
        """
        ways = self._all_ways()
        exchange, receiver = self._plane.exchange, self._receiver
        sent = {
            "inline": sum(w.header_bytes for w in ways),
            "frames": sum(w.frame_bytes for w in ways),
            "arena": exchange.bytes_out,
        }
        received = {
            "inline": receiver.header_bytes,
            "frames": receiver.frame_bytes,
            "arena": exchange.bytes_in,
        }
        return {
            "messages_sent": sum(w.messages for w in ways),
            "bytes_sent": sum(sent.values()),
            "sent_by_path": sent,
            "messages_received": receiver.messages,
            "bytes_received": sum(received.values()),
            "received_by_path": received,
            "malformed": receiver.malformed,
            "peers": sum(w.socket is not None for w in list(self._peers.values())),
            **self._plane.statistics(),
        }

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._peers)} peers"
        return f"<ZmqMailbox {self._name} id={self.worker_id} at {self._endpoints[0]}: {state}>"


def _knows_nobody(peer: int) -> Sequence[str]:
    raise UnknownPeerError(f"no address is known for worker {peer}: the mailbox was not started")


def _unheard(peer: int, silent: float) -> None:
    logger.debug("worker %d has been silent for %.1f s", peer, silent)


def _drop(inbound: Inbound) -> None:
    logger.debug("no handler yet for %s", inbound.message)


def _set_up(socket: zmq.Socket[bytes]) -> None:
    socket.linger = 0
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.handshake_ivl = HANDSHAKE_MS


def _bind(socket: zmq.Socket[bytes], address: str) -> str:
    try:
        socket.bind(address)
    except zmq.ZMQError as e:
        kind = AddressInUseError if e.errno == zmq.EADDRINUSE else TransportError
        raise kind(f"cannot listen on {address}: {e}") from e
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _send_all(socket: zmq.Socket[bytes], first: Buffer, frames: Sequence[Buffer]) -> None:
    socket.send(first, zmq.NOBLOCK | zmq.SNDMORE)
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        flags = zmq.NOBLOCK if i == last else zmq.NOBLOCK | zmq.SNDMORE
        socket.send(frame, flags, copy=len(frame) < TAKE_OVER)


def _best(endpoints: Sequence[str]) -> str:
    """The first endpoint that can be reached from here.

    An ipc address is tried for real: boot ids are equal across containers that share nothing.
    """
    for endpoint in endpoints:
        if endpoint.startswith(SCHEME):
            continue
        if not endpoint.startswith("ipc://") or answers(endpoint):
            return endpoint
    raise UnknownPeerError(f"none of the addresses {list(endpoints)} can be reached from this host")
