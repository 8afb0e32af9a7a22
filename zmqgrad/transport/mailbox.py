"""The mailbox over ZeroMQ: receives by a ROUTER, and sends by one DEALER per peer; ipc on one host, else tcp.

It assembles the receiver (:mod:`~zmqgrad.transport.receiver`), the outgoing connections
(:mod:`~zmqgrad.transport.connections`), the fast path within a host with its reply channels
(:mod:`~zmqgrad.transport.local`), the heartbeats (:mod:`~zmqgrad.transport.heartbeat`), and the data plane
(:mod:`~zmqgrad.transport.data_plane`), which decides how frames are transferred.

On Linux the ipc address is in the abstract namespace, so a killed process leaves no file behind, and libzmq
checks the peer's user id. Elsewhere it is a socket in a private directory (0700).
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
from functools import partial
from typing import Any

import zmq

from zmqgrad.errors import TransportError, UnknownPeerError
from zmqgrad.runtime.clock import Deadline, monotonic_ns
from zmqgrad.runtime.spinning import SPIN_SECONDS, SpinBudget
from zmqgrad.runtime.thread_pool import Task, ThreadPool
from zmqgrad.runtime.timer import TimerThread
from zmqgrad.transport import local
from zmqgrad.transport.base import (
    Frame,
    Handler,
    Inbound,
    Mailbox,
    OnIdle,
    OnLost,
    OnSuspected,
    Resolver,
    Timer,
)
from zmqgrad.transport.bind_policy import bind, tcp_address
from zmqgrad.transport.bulk import split
from zmqgrad.transport.connections import ConnectionPool, best_endpoint, set_up_unbounded
from zmqgrad.transport.data_plane import DATA_PLANE_TYPES, DataPlane
from zmqgrad.transport.flow_control import DEFAULT_INFLIGHT_BYTES
from zmqgrad.transport.heartbeat import HeartbeatListener, HeartbeatMonitor, heartbeat_endpoint
from zmqgrad.transport.heartbeat.failure_detector import LivenessTimeouts
from zmqgrad.transport.local import LocalListener
from zmqgrad.transport.local.channels import ReplyChannel, ReplyChannels, channel_endpoint
from zmqgrad.transport.local.listener import Registry
from zmqgrad.transport.receiver import Receiver
from zmqgrad.transport.sealed.transport import SEALED_TYPES, SealedTransport
from zmqgrad.transport.security import Keys, ZapAuthenticator, secure_server
from zmqgrad.transport.sessions import Sessions
from zmqgrad.transport.shared_memory.packing import PreparedFrames
from zmqgrad.transport.shared_memory.settings import OFF, ArenaSettings
from zmqgrad.transport.tap import FRAMES, INLINE, SHARED_MEMORY, OnHeartbeat, Tap
from zmqgrad.wire.codec import encode
from zmqgrad.wire.messages import Ack, Message, MessageType

logger = logging.getLogger(__name__)

STABLE_TENSOR_TYPES = frozenset({MessageType.CALL, MessageType.REMOTE_CALL, MessageType.FORWARD_AUTOGRAD_REQ})
"""Requests of the user's program, which must not modify their tensors until they are done. Tensors of other
messages may change as soon as they are sent; between hosts they are copied, as they may have to be resent."""

MAX_IO_THREADS = 64
"""Limit of libzmq's I/O threads: each has a bit of ``ZMQ_AFFINITY``."""

UNTAPPED_TYPES = frozenset({MessageType.CHUNK, MessageType.ACK}) | SEALED_TYPES
"""Messages that the tap does not see: parts of others, acknowledgements, and keys."""

MAX_SOCKETS = 16_384
"""About as many peers can be sent to: each has a socket. libzmq's default is 1,023; each costs 12 bytes."""

MAILBOX_DESCRIPTORS = 32
"""That must be free where a mailbox is opened. It uses some 20, and more for each peer."""

LAST_REPLIES_SECONDS = 0.05
"""A peer that the monitor finds lost is reported lost after this time, in which its last replies are read."""

NO_FRAMES = PreparedFrames(None, ())
NO_PARTS: Sequence[tuple[bytearray, memoryview]] = ()


class ZmqMailbox(Mailbox):
    """One worker's ROUTER and DEALERs. The constructor binds; :meth:`start` begins to receive.

    Args:
        name: of the worker, used in the names of its threads.
        worker_id: 0 to 65535.
        tcp_host: address to listen on by tcp, at a port that the system chooses; None: ipc only.
        advertised: address at which peers reach ``tcp_host``, at the same ports; None: as it is.
        arena: settings of the memory shared with workers of this host; by default none is.
        timeouts: of the failure detector.
        inflight: limit of the bytes of frames in flight to each peer; 0: no limit.
        keys: the job's; by tcp, all peers must have them. None: tcp is not authenticated.
        io_threads: number of I/O threads of libzmq.
        spin_seconds: how long a thread spins before it blocks.
        job: identifies the job; the fast path refuses processes of other jobs.
        fast_path: whether to use it (:mod:`~zmqgrad.transport.local`) where the system supports it.

    Raises:
        TransportError: if a socket cannot be opened or bound.
    """

    def __init__(
        self,
        name: str,
        worker_id: int,
        *,
        tcp_host: str | None = "127.0.0.1",
        advertised: str | None = None,
        arena: ArenaSettings = OFF,
        timeouts: LivenessTimeouts = LivenessTimeouts(),  # noqa: B008 (immutable)
        inflight: int = DEFAULT_INFLIGHT_BYTES,
        keys: Keys | None = None,
        io_threads: int = 1,
        spin_seconds: float = SPIN_SECONDS,
        job: bytes = b"",
        fast_path: bool = True,
    ) -> None:
        try:
            local.check_can_open(MAILBOX_DESCRIPTORS)
        except OSError as e:
            raise TransportError(f"{name} cannot open its sockets: {e.strerror}") from e
        self.worker_id = worker_id
        self.incarnation = secrets.randbits(63)
        self.tap: Tap | None = None
        self.on_heartbeat: OnHeartbeat | None = None
        self._name = name
        self._handler: Handler = _drop
        self._directory: str | None = None
        self._timeouts = timeouts
        self._keys = keys
        self._zap: ZapAuthenticator | None = None
        self._heartbeats: HeartbeatMonitor | None = None
        self._plane = DataPlane(
            name,
            arena,
            inflight,
            self.send,
            self._send_behind,
            lambda: not self._receiver.reads_here(),
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(
            io_threads if tcp_host is None else min(io_threads + 1, MAX_IO_THREADS)
        )
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._spin_budget = SpinBudget(spin_seconds)
        fast_path = fast_path and local.supported()
        self.job = job
        ack = bytes(encode(Ack(), worker_id, self.incarnation, 0))
        self._sessions = Sessions(
            name, self.incarnation, ack, lambda peer: self._connections.acknowledge(peer)
        )
        self._own_timer: TimerThread | None = None
        self._connections = ConnectionPool(
            name, self._context, keys, job, fast_path, self._sessions, self._watch
        )
        router = self._context.socket(zmq.ROUTER)
        try:
            set_up_unbounded(router)
            self._endpoints = tuple(self._bind(router, tcp_host, advertised))
            self._receiver = Receiver(
                name,
                self._context,
                router,
                partial(self._listen, channel_endpoint(self._endpoints[0])) if fast_path else None,
                self._plane.find_frames,
                self._sessions.receive,
                self._spin_budget,
            )
            self._sealed = SealedTransport(
                name,
                self.incarnation,
                self._context,
                tcp_host,
                keys is not None,
                self._zap,
                self._sessions,
                self._plane.reassembler,
                self._plane.notify,
                self._receiver.inproc,
                lambda peer: self._connections.to(peer).endpoint,
                lambda: not self._receiver.reads_here(),
            )
            self._channels = ReplyChannels(self._endpoints[0], self._listen, self._decode, self._spin_budget)
            self._listener = HeartbeatListener(self._endpoints[0], tcp_host, advertised)
            if self._listener.endpoint is not None:
                self._endpoints += (self._listener.endpoint,)
        except BaseException:
            router.close(linger=0)
            self._context.term()
            self._remove_directory()
            raise

    def _listen(self, endpoint: str, poll: Registry) -> LocalListener:
        return LocalListener(endpoint, poll, self.job, self.incarnation)

    def _bind(self, router: zmq.Socket[bytes], tcp_host: str | None, advertised: str | None) -> list[str]:
        bound = [bind(router, self._ipc_address(router))]
        if tcp_host is not None:
            if ":" in tcp_host:
                router.setsockopt(zmq.IPV6, 1)
            if self._keys is not None:  # after ipc was bound: it stays unencrypted
                self._zap = ZapAuthenticator(self._name, self._context, self._keys)
                secure_server(router, self._keys)
            port = bind(router, tcp_address(tcp_host, "*")).rpartition(":")[2]
            bound.append(tcp_address(advertised or tcp_host, port))
        return bound

    def _ipc_address(self, router: zmq.Socket[bytes]) -> str:
        if platform.system() == "Linux":
            router.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
            return local.abstract_endpoint("worker")
        self._directory = tempfile.mkdtemp(prefix="zmqgrad-")
        return f"ipc://{self._directory}/{secrets.token_hex(4)}"

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The addresses at which peers reach this mailbox: ipc, tcp, and the heartbeat endpoint last."""
        return self._endpoints

    def start(
        self,
        handler: Handler,
        resolve: Resolver,
        pool: ThreadPool | None = None,
        lost: OnLost | None = None,
        timer: Timer | None = None,
        suspected: OnSuspected | None = None,
        on_idle: OnIdle | None = None,
    ) -> None:
        if lost is not None:
            self._lost = lost
            self._heartbeats = HeartbeatMonitor(
                self._name,
                self._listener,
                self._lose,
                suspected or _log_suspected,
                self._timeouts,
                on_heartbeat=lambda: self.on_heartbeat,
            )
        if timer is None:
            timer = self._own_timer = TimerThread(self._name)
            self._own_timer.start()
        self._timer = timer
        self._plane.start(timer)
        self._sessions.start(timer, self._receiver)
        self._connections.resolve = resolve
        self._handler = handler
        self._receiver.start(self._received, pool, on_idle)

    def _lose(self, peer: int, where: str) -> None:
        # The monitor may notice the end of a process before its last replies, which have arrived, are read.
        self._timer.call_later(LAST_REPLIES_SECONDS, lambda: self._lose_now(peer, where))

    def _lose_now(self, peer: int, where: str) -> None:
        self._plane.shared_memory.forget(peer)
        self._lost(peer, where)

    def _received(self, inbound: Inbound) -> Task | None:
        if self.tap is not None and inbound.envelope.type not in UNTAPPED_TYPES:
            self._call_tap(inbound)
        if inbound.envelope.type in DATA_PLANE_TYPES:
            self._plane.on_message(inbound)
            return None
        if inbound.envelope.type in SEALED_TYPES:
            self._sealed.on_message(inbound)
            return None
        task = self._plane.deliver(inbound, self._handler) if inbound.socket_bytes else self._handler(inbound)
        if task is not None:
            self._spin_budget.yield_cpu()
        return task

    def _decode(self, first: bytes) -> Inbound | None:
        """Decodes a packet of a reply channel."""
        inbound = self._receiver.decode(first, ())
        if self.tap is not None and inbound is not None:
            self._call_tap(inbound)
        return inbound

    def _call_tap(self, inbound: Inbound) -> None:
        assert self.tap is not None
        envelope, message, frames, size, socket_bytes = inbound
        path = INLINE if not frames else FRAMES if socket_bytes else SHARED_MEMORY
        self.tap(False, envelope.source, envelope, message, size, monotonic_ns(), path)

    def acquire_channel(self, peer: int) -> ReplyChannel | None:
        """As ``Mailbox``. Only peers of this host can reach a reply channel."""
        return self._channels.acquire() if peer in self._connections.same_host else None

    def acquire_idle_channels(self) -> Sequence[ReplyChannel]:
        return self._channels.acquire_idle()

    def send(
        self,
        peer: int,
        message: Message,
        message_id: int,
        frames: Sequence[Frame] = (),
        channel: int = 0,
        timeout: float = 0.0,
    ) -> None:
        """As ``Mailbox``. Frames of ``ZERO_COPY_BYTES`` and more must not be modified afterwards."""
        pool = self._connections
        connection = pool.known(peer) or pool.to(peer)
        prepared, sealed, encrypts = NO_FRAMES, None, False
        if frames or self._plane.has_releases(peer):
            if not connection.is_open:
                pool.open(peer, connection)  # only then is it known whether the peer is on this host
            same_host = connection.endpoint.startswith("ipc:")
            sealed = None if same_host else self._sealed.to(peer, frames)
            encrypts = sealed is not None and sealed.cipher.encrypts
            if not (same_host or encrypts or message.TYPE in STABLE_TENSOR_TYPES):
                frames = self._plane.copies(frames)
            prepared = self._plane.prepare(peer, same_host, message, frames, timeout)
        going, parts = prepared, NO_PARTS
        try:
            if prepared.frames:
                going, chunks = split(prepared)
                parts = [(encode(c, self.worker_id, self.incarnation, 0), data) for c, data in chunks]
            first = encode(message, self.worker_id, self.incarnation, message_id, channel, going.manifest)
            began = 0 if self.tap is None else monotonic_ns()
            small = not prepared.frames and len(first) <= local.MAX_PACKET_BYTES
            to_channel = small and channel and message.is_awaited_by(peer)
            if sealed and prepared.frames:
                with connection.lock:
                    connection.count(first, going.frames, parts)
                self._sealed.send(sealed, parts, first, going.frames)
            elif not (to_channel and pool.send_to_channel(peer, channel, first)):
                pool.send(peer, connection, first, going.frames, small, parts, bool(channel))
        except BaseException:
            self._plane.rollback(peer, message, prepared)
            raise
        if self.tap is not None and message.TYPE not in SEALED_TYPES:
            envelope = (message.TYPE, self.worker_id, self.incarnation, message_id, channel, 0, 0, 0)
            size = len(first) + sum(map(len, frames)) if frames else len(first)
            path = INLINE if not frames else FRAMES if prepared.frames else SHARED_MEMORY
            self.tap(True, peer, envelope, message, size, began or monotonic_ns(), path)

    def _send_behind(self, peer: int, message: Message) -> None:
        """Queues a message without frames behind all that were sent to ``peer`` before.

        It cannot overtake a sealed message, so it is dropped while one is on its way. It is sent repeatedly.
        """
        if self._sealed.unacknowledged(peer):
            return
        first = encode(message, self.worker_id, self.incarnation, 0)
        self._connections.send(peer, self._connections.to(peer), first, (), False, (), False)

    def _watch(self, peer: int, endpoint: str, known: Sequence[str]) -> None:
        heartbeat = heartbeat_endpoint(endpoint, known)
        if self._heartbeats is not None and peer != self.worker_id and heartbeat is not None:
            self._heartbeats.watch(peer, heartbeat)

    def monitor(self, peer: int) -> None:
        known = self._connections.resolve(peer).endpoints
        try:
            self._watch(peer, best_endpoint(known), known)
        except UnknownPeerError as e:
            if self._heartbeats is not None:
                self._lose(peer, str(e))

    def unmonitor(self, peer: int) -> None:
        connection = self._connections.to(peer)
        with connection.lock:  # opening a connection begins to monitor the peer, under the same lock
            if not connection.is_open and self._heartbeats is not None:
                self._heartbeats.forget(peer)

    def forget(self, peer: int) -> None:
        """As ``Mailbox``. What was queued for ``peer`` is lost."""
        if self._heartbeats is not None:
            self._heartbeats.forget(peer)
        self._connections.forget(peer)
        self._sealed.forget(peer)
        self._plane.forget(peer)

    def close(self, linger: int = 0) -> None:
        """Stops sending and receiving; unsent messages may take ``linger`` ms to leave. Idempotent."""
        if not self._connections.close():
            return
        self._sessions.close()
        self._plane.send_window.close()
        self._connections.shut(linger)
        self._sealed.close(linger)
        self._channels.close()
        if self._heartbeats is not None:
            self._heartbeats.close()
        else:
            self._listener.close()
        self._receiver.close()
        self._plane.close()
        if self._own_timer is not None:
            self._own_timer.close()

    def join(self, deadline: Deadline) -> list[str]:
        left = self._receiver.join(deadline)
        if self._heartbeats is not None:
            left += self._heartbeats.join(deadline)
        left += self._plane.shared_memory.join(deadline) + self._connections.join(deadline)
        if left:
            return left
        if self._own_timer is not None and (left := self._own_timer.join(deadline)):
            return left
        if not self._channels.join(deadline.timeout()):
            return [f"{self._name}-channels"]
        self._connections.shut(0)  # a send that raced with close may have connected
        # term() has no timeout, and would wait for a socket that was left open.
        ending = threading.Thread(target=self._context.term, name=f"{self._name}-term", daemon=True)
        ending.start()
        ending.join(deadline.timeout())
        if ending.is_alive():
            return [ending.name]
        self._remove_directory()
        return []

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def statistics(self) -> dict[str, Any]:
        """Returns messages and bytes in and out, by path, and the state of arena, credit and sessions.

        Paths: ``inline`` (in the header frame), ``frames`` (through a socket), ``arena`` (shared memory).
        """
        messages, header_bytes, frame_bytes = self._connections.counts()
        shared_memory, receiver = self._plane.shared_memory, self._receiver
        sent = {
            "inline": header_bytes,
            "frames": frame_bytes,
            "arena": shared_memory.bytes_out,
        }
        received = {
            "inline": receiver.header_bytes,
            "frames": receiver.frame_bytes + self._sealed.bytes_in(),
            "arena": shared_memory.bytes_in,
        }
        return {
            "messages_sent": messages,
            "bytes_sent": sum(sent.values()),
            "sent_by_path": sent,
            "messages_received": receiver.messages,
            "bytes_received": sum(received.values()),
            "received_by_path": received,
            "malformed": receiver.malformed,
            "peers": self._connections.peers_connected(),
            "sessions": self._sessions.statistics(),
            "sealed": self._sealed.statistics(),
            **self._plane.statistics(),
        }

    def __repr__(self) -> str:
        state = "closed" if self._connections.closed else f"{len(self._connections)} peers"
        return f"<ZmqMailbox {self._name} id={self.worker_id} at {self._endpoints[0]}: {state}>"


def _log_suspected(peer: int, silent: float) -> None:
    logger.debug("worker %d has been silent for %.1f s", peer, silent)


def _drop(inbound: Inbound) -> None:
    logger.debug("no handler yet for %s", inbound.message)
