"""The mailbox: local connections to the workers of this host, ZeroMQ (ROUTER and DEALER, over tcp) to others.

It assembles the endpoint, which reads (:mod:`~zmqgrad.transport.endpoint`), the sender
(:mod:`~zmqgrad.transport.sending`) and its links (:mod:`~zmqgrad.transport.links`), the reply channels
(:mod:`~zmqgrad.transport.local.channels`), the heartbeats (:mod:`~zmqgrad.transport.heartbeat`), and the data
plane (:mod:`~zmqgrad.transport.data_plane`), which decides how frames are transferred.

On Linux local addresses are in the abstract namespace, so a killed process leaves no file behind.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import zmq

from zmqgrad.errors import ClosedError, TransportError, UnknownPeerError, ZmqgradError
from zmqgrad.runtime.backoff import Backoff
from zmqgrad.runtime.clock import Deadline, monotonic_ns
from zmqgrad.runtime.late_threads import start_thread
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.runtime.spinning import SPIN_SECONDS, SpinBudget
from zmqgrad.runtime.thread_pool import Task, ThreadPool
from zmqgrad.transport import local
from zmqgrad.transport.base import (
    Frame,
    Handler,
    Inbound,
    Mailbox,
    OnEnd,
    OnIdle,
    OnSuspected,
    PeerEnd,
    ReplyChannel,
    Resolver,
    text_of_loss,
)
from zmqgrad.transport.bind_policy import tcp_address
from zmqgrad.transport.data_plane import DATA_PLANE_TYPES, DataPlane
from zmqgrad.transport.endpoint import PROCESS_ENDED, Endpoint
from zmqgrad.transport.flow_control import DEFAULT_INFLIGHT_BYTES
from zmqgrad.transport.heartbeat import HeartbeatListener, HeartbeatMonitor, heartbeat_endpoint
from zmqgrad.transport.heartbeat.failure_detector import LivenessTimeouts
from zmqgrad.transport.links import Link, Links, set_up_unbounded
from zmqgrad.transport.local import LocalConnection, LocalListener
from zmqgrad.transport.local.channels import ReplyChannels, channel_endpoint
from zmqgrad.transport.local.handshake import PROTOCOL, Hello
from zmqgrad.transport.local.listener import Registry
from zmqgrad.transport.sealed.transport import SEALED_TYPES, SealedTransport
from zmqgrad.transport.security import Keys, ZapAuthenticator, local_key, secure_server
from zmqgrad.transport.sending import Sender
from zmqgrad.transport.sessions import Sessions
from zmqgrad.transport.shared_memory.packing import array_beneath
from zmqgrad.transport.shared_memory.settings import OFF, ArenaSettings
from zmqgrad.transport.tap import FRAMES, INLINE, SHARED_MEMORY, OnHeartbeat, Tap
from zmqgrad.wire.codec import encode
from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.messages import Ack, Goodbye, Message, MessageType

logger = logging.getLogger(__name__)

MAX_IO_THREADS = 64
"""Limit of libzmq's I/O threads: each has a bit of ``ZMQ_AFFINITY``."""

UNTAPPED_TYPES = frozenset({MessageType.CHUNK, MessageType.ACK}) | SEALED_TYPES
"""Messages that the tap does not see: parts of others, acknowledgements, and keys."""

CONTROL_TYPES = DATA_PLANE_TYPES | SEALED_TYPES | {MessageType.GOODBYE}
"""Messages between mailboxes, which are not passed to the handler."""

MAX_SOCKETS = 16_384
"""About as many peers can be sent to: each has a socket. libzmq's default is 1,023; each costs 12 bytes."""

MAILBOX_DESCRIPTORS = 32
"""That must be free where a mailbox is opened. It uses some 20, and more for each peer."""

GOODBYE_LINGER_MS = 1000
"""How long the last message to a peer may take to leave."""

FLUSH_SECONDS = 0.001, 0.1
"""First and longest interval at which :meth:`ZmqMailbox.flush` looks: libzmq reports no acknowledgement."""


class ZmqMailbox(Mailbox):
    """One worker's mailbox. The constructor binds; :meth:`start` begins to receive.

    Args:
        name: of the worker, used in the names of its threads.
        worker_id: 0 to 65535.
        tcp_host: address to listen on by tcp, at a port that the system chooses; None: this host only.
        advertised: address at which peers reach ``tcp_host``, at the same ports; None: as it is.
        arena: settings of the memory shared with workers of this host; by default none is.
        timeouts: of the failure detector.
        inflight: limit of the bytes in flight to each peer; 0: no limit.
        keys: the job's; by tcp, all peers must have them. None: tcp is not authenticated.
        io_threads: number of I/O threads of libzmq.
        spin_seconds: how long a thread spins before it blocks.
        job: random, known to the processes of the job only; others are refused on this host.
        fast_path: whether to use local connections (:mod:`~zmqgrad.transport.local`) where the system
            supports them.

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
        local.check_can_open(MAILBOX_DESCRIPTORS, f"{name} cannot open its sockets")
        fast_path = fast_path and local.supported()
        if tcp_host is None and not fast_path:
            raise TransportError(f"{name} has no address: neither local connections nor tcp may be used")
        self.worker_id = worker_id
        self.incarnation = secrets.randbits(63)
        self.tap: Tap | None = None
        self.on_heartbeat: OnHeartbeat | None = None
        self.job = job
        self._name = name
        self._handler: Handler
        self._on_end: OnEnd = lambda end: None
        self._timeouts = timeouts
        self._keys = keys
        self._heartbeats: HeartbeatMonitor | None = None
        self._refused: set[int] = set()  # peers that were told that their link has ended
        self._plane = DataPlane(name, arena, inflight, self.notify)
        self._plane.shared_memory.sender = (worker_id, self.incarnation)
        self._ending: threading.Thread | None = None  # waits for the context to end
        self._end_lock = threading.Lock()  # guards _ending: libzmq frees a context that ends twice at a time
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(
            io_threads if tcp_host is None else min(io_threads + 1, MAX_IO_THREADS)
        )
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._spin_budget = SpinBudget(spin_seconds)
        self._local_key = local_key(keys, job)
        ack = bytes(encode(Ack(), worker_id, self.incarnation, 0))
        self._sessions = Sessions(name, self.incarnation, ack, self._acknowledge)
        self._links = Links(
            name,
            self._context,
            lambda target, number: Hello(PROTOCOL, target, worker_id, self.incarnation, number),
            self._local_key,
            keys,
            fast_path,
            self._sessions,
            self._watch,
            self._on_broken,
        )
        self._service: ServiceThread | None = None
        self._own_service: ServiceThread | None = None
        self._run_in_pool: Callable[[Task], None] = lambda task: task()
        with ExitStack() as undo:
            undo.callback(self._context.destroy, 0)  # term() would wait for a socket that was left open
            self._open(tcp_host, advertised, fast_path, undo)
            undo.pop_all()

    def _open(self, tcp_host: str | None, advertised: str | None, fast_path: bool, undo: ExitStack) -> None:
        """Opens all sockets. ``undo`` closes them after an error."""
        endpoint = local.abstract_endpoint("worker")
        router: zmq.Socket[bytes] | None = None
        if tcp_host is not None:
            router = self._context.socket(zmq.ROUTER)
            undo.callback(router.close, linger=0)
            set_up_unbounded(router)
        self._endpoint = Endpoint(
            self._name,
            router,
            partial(self._listen, channel_endpoint(endpoint)) if fast_path else None,
            self._links,
            self._plane,
            self._sessions.receive,
            self._on_ending,
            self._ended,
            self._refuse,
            self._spin_budget,
        )
        undo.callback(self._endpoint.reader.close)
        self._endpoints: tuple[str, ...] = (endpoint,) if fast_path else ()
        zap: ZapAuthenticator | None = None
        if router is not None and tcp_host is not None:
            if self._keys is not None:
                zap = ZapAuthenticator(self._context, self._keys, self._endpoint.reader)
                secure_server(router, self._keys)
            # Whoever chose the address has checked it: see worker_address().
            port = self._endpoint.listen(tcp_address(tcp_host, "*"))
            self._endpoints += (tcp_address(advertised or tcp_host, port),)
        self._sealed = SealedTransport(
            self._context,
            tcp_host,
            self._keys is not None,
            zap,
            self._sessions,
            self._plane.reassembler,
            self.notify,
            self._endpoint.take_bulk,
            lambda peer: self._links.to(peer).endpoint,
            self._may_wait,
            self._endpoint.end,
        )
        self._endpoint.end_bulk = self._sealed.end
        source = self.worker_id, self.incarnation
        self._sender = Sender(source, self._links, self._plane, self._sealed, self._may_wait)
        self._channels = ReplyChannels(
            endpoint,
            self._listen,
            self._decode,
            self._endpoint.on_channel_path_closed,
            self._endpoint.on_channel_settled,
            self._endpoint.ending,
            self._spin_budget,
        )
        self._endpoint.channels = self._channels
        self._listener = HeartbeatListener(
            endpoint if fast_path else None, tcp_host, advertised, self._local_key
        )
        if self._listener.endpoint is not None:
            self._endpoints += (self._listener.endpoint,)

    def _listen(self, endpoint: str, poll: Registry) -> LocalListener:
        return LocalListener(
            endpoint,
            poll,
            self._local_key,
            self.incarnation,
            self._call_later,
            on_opened=lambda connection: self._endpoint.on_path_opened(connection),
            on_continued=lambda connection: self._endpoint.on_path_continued(connection),
        )

    def _call_later(self, seconds: float, job: Callable[[], None]) -> None:
        if self._service is not None:
            self._service.call_later(seconds, job)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The addresses at which peers reach this mailbox: ipc, tcp, and the heartbeat endpoint last."""
        return self._endpoints

    def start(
        self,
        handler: Handler,
        resolve: Resolver,
        pool: ThreadPool | None = None,
        on_end: OnEnd | None = None,
        service: ServiceThread | None = None,
        suspected: OnSuspected | None = None,
        on_idle: OnIdle | None = None,
    ) -> None:
        if service is None:
            service = self._own_service = ServiceThread(self._name)
            service.start()
        self._service = service
        if pool is not None:
            self._run_in_pool = pool.submit
        if on_end is not None:
            self._on_end = on_end
            self._heartbeats = HeartbeatMonitor(
                self._name,
                self._listener,
                service,
                self._on_lost,
                suspected or _log_suspected,
                self._timeouts,
                on_heartbeat=lambda: self.on_heartbeat,
            )
        self._plane.start(service)
        self._links.service = service
        self._sessions.start(service, self._endpoint.reader)
        self._links.resolve = resolve
        self._handler = handler
        self._endpoint.start(self._received, pool, on_idle)

    def _submit(self, task: Task) -> None:
        """Runs what may have to wait for the store elsewhere; not at all, if the worker is closing."""
        try:
            self._run_in_pool(task)
        except ClosedError as e:
            logger.debug("%s: a control message is not sent: %s", self._name, e)

    def _may_wait(self) -> bool:
        """Whether the calling thread may wait for messages of a peer."""
        return not (self._endpoint.reader.reads_here() or (self._service and self._service.is_current()))

    # ---- receiving --------------------------------------------------------------------------------------

    def _received(self, inbound: Inbound) -> Task | None:
        envelope = inbound.envelope
        kind = envelope.type
        if self.tap is not None and kind not in UNTAPPED_TYPES:
            self._call_tap(inbound)
        if envelope.requests or envelope.replies:
            self._note_credit(envelope)
        if kind in CONTROL_TYPES:
            self._control(kind, inbound)
            return None
        task = self._plane.deliver(inbound, self._handler) if inbound.socket_bytes else self._handler(inbound)
        if task is not None:
            self._spin_budget.yield_cpu()
        return task

    def _control(self, kind: int, inbound: Inbound) -> None:
        """Handles a message of the transport itself."""
        if kind in DATA_PLANE_TYPES:
            self._plane.on_message(inbound)
        elif kind in SEALED_TYPES:
            self._sealed.on_message(inbound)
        else:
            assert isinstance(inbound.message, Goodbye)
            reason = inbound.message.reason or PROCESS_ENDED
            self._endpoint.on_goodbye(inbound.envelope.source, reason)

    def _note_credit(self, envelope: Envelope) -> None:
        self._plane.send_window.on_consumed(envelope.source, envelope.requests, envelope.replies)

    def _decode(self, first: bytes, connection: LocalConnection) -> Inbound | None:
        """Decodes a packet of a reply channel."""
        inbound = self._endpoint.decode(first, (), connection)
        if inbound is not None:
            envelope = inbound.envelope
            if envelope.requests or envelope.replies:
                self._note_credit(envelope)
            if inbound.socket_bytes:
                self._plane.count_consumed(inbound.envelope, inbound.socket_bytes)
            if self.tap is not None:
                self._call_tap(inbound)
        return inbound

    def _call_tap(self, inbound: Inbound) -> None:
        assert self.tap is not None
        envelope, message, frames, size, socket_bytes = inbound
        path = INLINE if not frames else FRAMES if socket_bytes else SHARED_MEMORY
        self.tap(False, envelope.source, envelope, message, size, monotonic_ns(), path)

    def acquire_channel(self, peer: int, held: list[ReplyChannel]) -> bool:
        """As ``Mailbox``. Only peers of this host can reach a reply channel."""
        return peer in self._links.same_host and self._channels.acquire(held)

    # ---- sending ----------------------------------------------------------------------------------------

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
        links = self._links
        link = links.known(peer) or links.to(peer)
        connection = link.local
        if connection is None and link.session is None:
            links.open(link)
            connection = link.local
        began = 0 if self.tap is None else monotonic_ns()
        if connection is not None:
            sent = self._sender.send_local(link, connection, message, message_id, frames, channel, timeout)
        else:
            sent = self._sender.send_tcp(link, message, message_id, frames, channel, timeout)
        if link.ended:  # what this message has reserved since is not to be kept for ever
            self._endpoint.reader.post(partial(self._plane.forget, peer))
        if self.tap is not None and message.TYPE not in SEALED_TYPES:
            envelope = (message.TYPE, self.worker_id, self.incarnation, message_id, channel, 0, 0, 0)
            size = sent[0] + sum(map(len, frames))
            self.tap(True, peer, envelope, message, size, began or monotonic_ns(), sent[1])

    def notify(self, peer: int, message: Message, message_id: int = 0) -> None:
        """Sends a control message, if the peer can be reached."""
        try:
            self.send(peer, message, message_id)
        except ZmqgradError as e:
            logger.debug("%s cannot send worker %d %s: %s", self._name, peer, message, e)

    def _acknowledge(self, link: Link) -> None:
        """Sends an acknowledgement of the session. In the service thread."""
        if link.session is None:
            self._submit(partial(self._open_and_acknowledge, link))  # it may have to look up the address
            return
        with link.lock:
            if link.session is not None:
                link.session.send_ack()

    def _open_and_acknowledge(self, link: Link) -> None:
        try:
            self._links.open(link)
        except ZmqgradError as e:  # a duplicate schedules the next attempt
            logger.debug("%s cannot acknowledge what worker %d sent: %s", self._name, link.peer, e)
            return
        with link.lock:
            if link.session is not None:
                link.session.send_ack()

    def flush(self, deadline: Deadline) -> bool:
        """As ``Mailbox``."""
        return _wait_until(lambda: self._links.flushed() and self._bulk_has_arrived(), deadline)

    def _bulk_has_arrived(self) -> bool:
        return not any(self._sealed.unacknowledged(link.peer) for link in self._links.all() if not link.ended)

    # ---- the ends of links ------------------------------------------------------------------------------

    def _watch(self, peer: int, endpoint: str, known: Sequence[str]) -> None:
        heartbeat = heartbeat_endpoint(endpoint, known)
        if self._heartbeats is not None and peer != self.worker_id and heartbeat is not None:
            self._heartbeats.watch(peer, heartbeat)

    def monitor(self, peer: int) -> None:
        known = self._links.resolve(peer)
        try:
            self._watch(peer, self._links.best_endpoint(peer, known), known.endpoints)
        except UnknownPeerError as e:
            self._endpoint.end(peer, str(e))

    def unmonitor(self, peer: int) -> None:
        link = self._links.to(peer)
        with link.lock:  # opening a link begins to monitor the peer, under the same lock
            if not link.is_open and self._heartbeats is not None:
                self._heartbeats.forget(peer)

    def end(self, peer: int, reason: str) -> None:
        self._endpoint.end(peer, reason)

    def _on_lost(self, peer: int, reason: str, ended: bool) -> None:
        self._endpoint.end(peer, reason, disconnects=ended, tell=not ended)

    def _on_broken(self, peer: int) -> None:
        self._endpoint.end(peer, PROCESS_ENDED, disconnects=True, tell=False)

    def _on_ending(self, link: Link) -> None:
        self._say_goodbye(link, self._verdict(link))

    def _ended(self, end: PeerEnd) -> None:
        """Closes what belongs to a link. In the reading thread, behind all of its messages."""
        peer = end.peer
        if self._heartbeats is not None:
            self._heartbeats.forget(peer)
        self._links.shut(self._links.to(peer), GOODBYE_LINGER_MS)
        self._sealed.forget(peer)
        self._on_end(end)
        self._plane.forget(peer)

    def _verdict(self, link: Link) -> str:
        """What a peer is told that this worker has declared lost."""
        return text_of_loss(self._name, link.peer, link.end_reason)

    def _say_goodbye(self, link: Link, reason: str, waits: float = 0.0) -> None:
        """Sends the last message of a link, unless the peer has certainly ended.

        Args:
            waits: as :meth:`Links.send_once`.
        """
        first = encode(Goodbye(reason[:1000]), self.worker_id, self.incarnation, 0)
        try:
            with link.lock:  # another thread may be just opening the link
                local, session = link.local, link.session
                is_sent = session is not None and session.send_last(first)
                if session is not None and local is None and not is_sent and self._links.closed:
                    if session.is_under_way():
                        return
                    self._links.shut(link)  # what waits for a connection would follow the last message
            if local is not None:
                self._links.send_packet(link, local, first, awaited=False)
            elif not is_sent and self._links.closed and link.paths:
                self._links.send_once(link, first, GOODBYE_LINGER_MS, waits)
        except (ZmqgradError, OSError, zmq.ZMQError) as e:
            logger.debug("%s: worker %d does not get the last message: %s", self._name, link.peer, e)

    def _refuse(self, link: Link) -> None:
        """Tells a peer whose link has ended that it is lost. In the reading thread."""
        if link.peer in self._refused:
            return
        self._refused.add(link.peer)
        logger.debug("%s refuses worker %d: %s", self._name, link.peer, link.ended)
        self._submit(partial(self._tell_lost, link))  # it may have to look up the address

    def _tell_lost(self, link: Link) -> None:
        first = encode(Goodbye(self._verdict(link)[:1000]), self.worker_id, self.incarnation, 0)
        try:
            self._links.send_once(link, first, GOODBYE_LINGER_MS, GOODBYE_LINGER_MS / 1000)
        except (ZmqgradError, OSError, zmq.ZMQError) as e:
            logger.debug("%s: worker %d is not told that it is lost: %s", self._name, link.peer, e)

    # ---- closing ----------------------------------------------------------------------------------------

    def close(self, goodbye: str = "") -> None:
        """As ``Mailbox``."""
        if not self._links.close():
            return
        self._sessions.close()
        self._plane.send_window.close()
        if goodbye:
            deadline, waits = Deadline.after(GOODBYE_LINGER_MS / 1000), self._may_wait()
            if waits:  # what went by other connections must not be overtaken
                _wait_until(self._bulk_has_arrived, deadline)
            for link in self._links.all():
                if link.peer != self.worker_id and not link.ended:
                    self._say_goodbye(link, goodbye, deadline.left() if waits else 0.0)
            if waits:
                _wait_until(self._links.have_left, deadline)
        for link in self._links.all():
            self._links.shut(link, GOODBYE_LINGER_MS if goodbye else 0)
        self._sealed.close(GOODBYE_LINGER_MS if goodbye else 0)
        self._channels.close()
        if self._heartbeats is not None:
            self._heartbeats.close(goodbye)
        else:
            self._listener.close()
        self._endpoint.reader.close()
        self._plane.close()

    def join(self, deadline: Deadline) -> list[str]:
        left = self._endpoint.reader.join(deadline)
        if not left:  # then no more channels open
            left += self._sealed.join(deadline)
        if self._heartbeats is not None and not self._heartbeats.join(deadline):
            left.append(f"{self._name}-liveness")
        left += self._plane.shared_memory.join(deadline)
        if left:
            return left
        if self._own_service is not None:
            self._own_service.close()
            if left := self._own_service.join(deadline):
                return left
        if not self._channels.join(deadline.timeout()):
            return [f"{self._name}-channels"]
        self._plane.drop_received()  # now that no thread reads: else what it has in hand seemed malformed
        for link in self._links.all():
            self._links.shut(link)  # a send that raced with close may have connected
        # term() has no timeout, and would wait for a socket that was left open.
        with self._end_lock:
            if self._ending is None:
                try:
                    self._ending = start_thread(self._context.term, f"{self._name}-term")
                except RuntimeError:
                    if threading.main_thread().is_alive():
                        raise
                    return []  # the interpreter ends, and the context with it: see late_threads
        self._ending.join(deadline.timeout())
        return [self._ending.name] if self._ending.is_alive() else []

    def allocate(self, size: int, deadline: Deadline) -> Any:
        return self._plane.shared_memory.allocate(size, deadline)

    def allocated(self, frame: Frame) -> Any:
        array = array_beneath(frame)
        return None if array is None or array.lease is None or array.lease.size != len(frame) else array

    def share(self, frames: Sequence[Frame]) -> Sequence[Frame]:
        return self._plane.shared_memory.share(frames)

    def write(self, array: Any, offset: int, data: Frame) -> None:
        self._plane.shared_memory.write(array, offset, data)

    def holders(self, lease: Any) -> list[int]:
        return self._plane.shared_memory.holders(lease)

    def is_local(self, peer: int) -> bool:
        link = self._links.known(peer) or self._links.to(peer)
        if link.local is None and link.session is None:
            self._links.open(link)
        return link.local is not None

    def statistics(self) -> dict[str, Any]:
        """Returns messages and bytes in and out, by path, and the state of arena, credit and sessions.

        Paths: ``inline`` (in the header frame), ``frames`` (through a socket), ``arena`` (shared memory).
        """
        messages, header_bytes, frame_bytes = self._links.counts()
        shared_memory, receiver = self._plane.shared_memory, self._endpoint
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
            "malformed": receiver.reader.malformed,
            "peers": self._links.peers_connected(),
            "sessions": self._sessions.statistics(),
            "sealed": self._sealed.statistics(),
            **self._plane.statistics(),
        }

    def __repr__(self) -> str:
        state = "closed" if self._links.closed else f"{len(self._links)} peers"
        return f"<ZmqMailbox {self._name} id={self.worker_id} at {self._endpoints[0]}: {state}>"


def _wait_until(condition: Callable[[], bool], deadline: Deadline) -> bool:
    """Waits for a condition that no event reports. Returns whether it was met in time."""
    pause, backoff = threading.Event(), Backoff(*FLUSH_SECONDS)
    while not condition():
        if deadline.passed():
            return False
        pause.wait(backoff.pause(deadline.left()))
    return True


def _log_suspected(peer: int, silent: float) -> None:
    logger.debug("worker %d has been silent for %.1f s", peer, silent)
