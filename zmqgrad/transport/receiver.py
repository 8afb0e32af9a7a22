"""The receiving half of a mailbox: one thread at a time reads the ROUTER and the local listener.

With a thread pool, threads of the pool take turns, by leader/followers
(:mod:`~zmqgrad.transport.leader_poller`, :meth:`~zmqgrad.runtime.thread_pool.ThreadPool.serve_from`); without
one, the receiver has a thread of its own. The reading thread decodes messages and passes them to the handler.
It runs no user code, and malformed messages do not end it.

Small messages of this host arrive by the fast path (:mod:`~zmqgrad.transport.local`), all others by the
ROUTER. The ROUTER's file descriptor reports new messages only after all earlier ones were read. To stop, the
receiver sends itself a random token over ``inproc``, which no other process can know.
"""

from __future__ import annotations

import logging
import secrets
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import zmq

from zmqgrad.errors import ProtocolError
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.spinning import SpinBudget
from zmqgrad.runtime.thread_pool import Task, ThreadPool
from zmqgrad.transport.base import Buffer, Handler, Inbound, OnIdle
from zmqgrad.transport.leader_poller import LeaderPoller, make_leader_poller
from zmqgrad.transport.local import LocalListener
from zmqgrad.transport.sockets import get_int
from zmqgrad.wire.codec import decode_all
from zmqgrad.wire.frames import Envelope, read_envelope
from zmqgrad.wire.messages import Manifest

if TYPE_CHECKING:
    from zmqgrad.runtime.clock import Deadline

logger = logging.getLogger(__name__)

MAX_STRANGERS = 1000
"""How many senders of malformed messages are remembered, so that each is logged once."""

ROUTER_BURST = 16
"""Messages read from the ROUTER in a row before the fast path has its turn."""

_EVENTS, _RCVMORE, _POLLIN = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN)
"""Plain integers: combining pyzmq's enumerations takes as long as a call into libzmq."""

FindFrames = Callable[[int, Manifest, Sequence[Buffer]], Sequence[Buffer]]
"""(sender, manifest, received frames) -> the frames of the message."""

Accept = Callable[[Envelope, int], bool]
"""(envelope, bytes of the whole message) -> whether to deliver it."""


class Receiver:
    """Reads ``socket`` and calls ``handler`` for each message; without a pool, in ``<name>-receiver``.

    Args:
        listen: creates the listener of the fast path for a poller; None: there is no fast path.
        find_frames: returns the frames of a message that has a manifest; may raise ``ProtocolError``.
        accept: called for messages that belong to a session.
        budget: how long a thread spins before it blocks.
    """

    def __init__(
        self,
        name: str,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        listen: Callable[[LeaderPoller], LocalListener] | None,
        find_frames: FindFrames,
        accept: Accept,
        budget: SpinBudget,
    ) -> None:
        self._name = name
        self._context = context
        self._socket = socket
        self._find_frames = find_frames
        self._accept = accept
        self._watched: dict[int, Callable[[], None]] = {}
        self._stop_token = secrets.token_bytes(16)
        self.inproc = f"inproc://{name}-{secrets.token_hex(16)}"
        """Where threads of this process reach ``socket``."""
        self._handler: Handler | None = None
        self._on_idle: OnIdle = _nothing
        self._strangers: set[bytes] = set()
        self._started = False
        self._ended: Promise[None] = Promise()
        self._closed = False
        self._reader = 0  # id of the reading thread; 0: none
        self.messages = 0
        self.header_bytes = 0
        self.frame_bytes = 0
        self.malformed = 0
        socket.bind(self.inproc)
        self._poller = make_leader_poller(budget)
        self.wait_for_lead, self.try_lead = self._poller.wait_for_lead, self._poller.try_lead
        """As :class:`~zmqgrad.runtime.thread_pool.Source`."""
        self._router_fd = get_int(socket, zmq.FD)
        self._poller.register(self._router_fd, select.POLLIN)
        self._local = self._open_local(listen)
        self._arrived: deque[bytes] = deque()
        self._at_router = True  # whether the ROUTER may have messages
        self._in_a_row = 0  # messages read from the ROUTER
        self._stopped = False

    def _open_local(self, listen: Callable[[LeaderPoller], LocalListener] | None) -> LocalListener | None:
        try:
            return None if listen is None else listen(self._poller)
        except OSError as e:
            logger.warning("%s has no fast path, all messages arrive by ZeroMQ: %s", self._name, e)
            return None

    def start(self, handler: Handler, pool: ThreadPool | None = None, on_idle: OnIdle | None = None) -> None:
        """Starts to read. Arguments as :meth:`~zmqgrad.transport.base.Mailbox.start`."""
        self._handler = handler
        self._on_idle = on_idle or self._on_idle
        self._started = True
        if pool is not None:
            pool.serve_from(self)
        else:
            threading.Thread(target=self._run, name=f"{self._name}-receiver", daemon=True).start()

    def _run(self) -> None:
        while (task := self.read()) is not None:
            self._reader = threading.get_ident()  # no thread reads meanwhile
            task()

    def promote(self) -> None:
        """As ``Source``. A follower is woken at once if there is a message already."""
        if self._at_router:
            self._at_router = bool(get_int(self._socket, _EVENTS) & _POLLIN)
        self._poller.promote(at_once=bool(self._arrived) or self._at_router)

    def reads_here(self) -> bool:
        """Returns whether the calling thread is the reading thread, so must not wait for messages."""
        return self._reader == threading.get_ident()

    def read(self) -> Task | None:
        """Reads until a message results in a task. Returns None at the end."""
        self._reader = threading.get_ident()
        try:
            while not self._stopped:
                if self._arrived:
                    inbound = self.decode(self._arrived.popleft(), (), b"local")
                elif self._at_router:
                    inbound = self._from_router()
                else:
                    task = self._on_idle()
                    if task is None:
                        self._poll(None)
                        continue
                    self._reader = 0
                    return task
                task = None if inbound is None else self._deliver(inbound)
                inbound = None  # else it would stay alive until the next message
                if task is not None:
                    self._reader = 0
                    return task
        except zmq.ContextTerminated:
            logger.debug("%s: the context has ended", self._name)
        self._reader = 0
        self._shut()
        return None

    def _poll(self, seconds: float | None) -> None:
        """Waits up to ``seconds`` (None: no limit) for events, and handles them."""
        arrived = self._arrived
        for fd, _ in self._poller.poll(seconds):
            if fd == self._router_fd:
                self._at_router = True
            elif (readable := self._watched.get(fd)) is not None:
                self._call(readable)
            elif self._local is not None:
                arrived.extend(self._local.read(fd))

    def watch(self, fd: int, readable: Callable[[], None]) -> None:
        """Makes the reading thread call ``readable`` when that descriptor is readable. From any thread."""
        self._watched[fd] = readable
        self._poller.register(fd, select.POLLIN)

    def _call(self, readable: Callable[[], None]) -> None:
        try:
            readable()
        except Exception:
            logger.exception("%s: handling an event of a connection failed", self._name)

    def unwatch(self, fd: int) -> None:
        """Undoes :meth:`watch`. Must be called before the descriptor is closed."""
        del self._watched[fd]
        self._poller.unregister(fd)

    def _from_router(self) -> Inbound | None:
        """Returns the next message of the ROUTER; None if there is none, or it must not be delivered."""
        socket = self._socket
        if not get_int(socket, _EVENTS) & _POLLIN:
            self._at_router = False
            return None
        self._in_a_row += 1
        if self._in_a_row % ROUTER_BURST == 0:
            self._poll(0)
        identity, first = socket.recv(), socket.recv()
        frames = self._rest() if socket.getsockopt(_RCVMORE) else ()
        if first == self._stop_token:
            self._stopped = True
            return None
        return self.decode(first, frames, identity)

    def _shut(self) -> None:
        if self._local is not None:
            self._local.close()
        self._poller.close()
        self._socket.close(linger=0)
        self._ended.set_result(None)

    def _rest(self) -> list[Buffer]:
        """Receives the frames after the first without a copy; they are writable."""
        frames: list[Buffer] = []
        while True:
            frame = self._socket.recv(copy=False)
            frames.append(frame.buffer)
            if not frame.more:
                return frames

    def decode(self, first: bytes, frames: Sequence[Buffer], identity: bytes = b"channel") -> Inbound | None:
        """Decodes a message. From any thread.

        Returns:
            None if it is malformed, which is counted, or must not be delivered.
        """
        self.header_bytes += len(first)
        socket_bytes = 0
        for frame in frames:
            socket_bytes += len(frame)
        self.frame_bytes += socket_bytes
        found = frames
        try:
            envelope, manifest, message = decode_all(first)
        except ProtocolError as e:
            self._refuse(identity, e)
            self._acknowledge_malformed(first)
            return None
        if (envelope.sequence or envelope.acknowledged) and not self._accept(
            envelope, len(first) + socket_bytes
        ):
            return None
        if manifest is not None:
            try:
                found = self._find_frames(envelope.source, manifest, frames)
            except ProtocolError as e:
                self._refuse(identity, e)
                return None
            for buffer in manifest.buffers:
                if buffer.block and not buffer.segment:  # it was received before, in chunks
                    socket_bytes += buffer.size
        self.messages += 1
        size = len(first)
        for each in found:
            size += len(each)
        return Inbound(envelope, message, found, size, socket_bytes)

    def _acknowledge_malformed(self, first: bytes) -> None:
        """Counts a malformed message as received in its session, else it would be resent forever."""
        try:
            envelope = read_envelope(first)
        except ProtocolError:
            return  # not from a worker
        if envelope.sequence:
            self._accept(envelope, len(first))

    def _deliver(self, inbound: Inbound) -> Task | None:
        assert self._handler is not None
        try:
            return self._handler(inbound)
        except ProtocolError as e:
            self._refuse(b"worker %d" % inbound.envelope.source, e)
            return None
        except Exception:
            source = inbound.envelope.source
            logger.exception("%s: handling %s from worker %d failed", self._name, inbound.message, source)
            return None

    def _refuse(self, identity: bytes, error: ProtocolError) -> None:
        self.malformed += 1
        if identity in self._strangers or len(self._strangers) >= MAX_STRANGERS:
            return
        self._strangers.add(identity)
        logger.warning("%s: dropped a malformed message (%s)", self._name, error)

    def close(self) -> None:
        """Stops reading. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._started:
            self._shut()
            return
        if self._ended.done():
            return
        with self._context.socket(zmq.DEALER) as waker:
            waker.linger = -1  # inproc: delivered in memory, at once
            waker.connect(self.inproc)
            waker.send(self._stop_token)

    def join(self, deadline: Deadline) -> list[str]:
        """Waits until no thread reads. Returns a name if that has not happened by ``deadline``."""
        if self._started and not self._ended.wait_done(deadline.timeout()):
            return [f"{self._name}-receiver"]
        return []


def _nothing() -> None:
    """The default of ``on_idle``."""
