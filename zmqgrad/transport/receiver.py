"""The receiving half of a mailbox: one thread at a time reads one ROUTER and one local listener.

With a thread pool, that is a thread of the pool, and others stand by
(:mod:`~zmqgrad.transport.leader_poller`, :meth:`~zmqgrad.runtime.thread_pool.ThreadPool.serve_from`); without
one, it is a thread of the receiver's own. It reads, decodes and hands on; it never runs user code and never
stops for what a stranger sends (P5). Small messages of this host come by the fast path
(:mod:`~zmqgrad.transport.local`), all others by the ROUTER, whose file descriptor tells when to look (and
says nothing more before all that is there has been read). Closing is a message to itself over ``inproc``,
known by a token that nobody outside the process can have.
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
from zmqgrad.wire.codec import decode_all
from zmqgrad.wire.frames import Envelope, read_envelope
from zmqgrad.wire.messages import Manifest

if TYPE_CHECKING:
    from zmqgrad.runtime.clock import Deadline

logger = logging.getLogger(__name__)

MAX_STRANGERS = 1000
"""How many senders of garbage are remembered, so that each is logged once."""

ROUTER_BURST = 16
"""After so many messages of the ROUTER, look whether some have come by the fast path."""

_EVENTS, _RCVMORE, _POLLIN = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN)
"""As numbers: pyzmq has enumerations, and joining two of those takes as long as asking libzmq."""

FindFrames = Callable[[int, Manifest, Sequence[Buffer]], Sequence[Buffer]]
"""(who sent it, manifest, the frames that came) -> the frames of the message."""

Accept = Callable[[Envelope, int], bool]
"""(envelope, bytes of all that came with it) -> whether to deliver it."""


class Receiver:
    """Reads ``socket`` and calls ``handler`` for each message; without a pool, in ``<name>-receiver``.

    Args:
        listen: makes the listener of the fast path, for a gate; None: everything comes by the ROUTER.
        find_frames: returns the frames of a message that came with a manifest; it may raise
            ``ProtocolError``.
        accept: of a message that belongs to a session, whether to deliver it.
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
        self._inproc = f"inproc://{name}-{self._stop_token.hex()}"
        self._handler: Handler | None = None
        self._on_idle: OnIdle = _nothing
        self._strangers: set[bytes] = set()
        self._started = False
        self._ended: Promise[None] = Promise()
        self._closed = False
        self._reader = 0  # the thread that reads just now
        self.messages = 0
        self.header_bytes = 0
        self.frame_bytes = 0
        self.malformed = 0
        socket.bind(self._inproc)
        self._poller = make_leader_poller(budget)
        self._router_number = _number(socket, zmq.FD)
        self._poller.register(self._router_number, select.POLLIN)
        self._local = self._open_local(listen)
        self._arrived: deque[bytes] = deque()
        self._at_router = True  # perhaps there is something to be read
        self._in_a_row = 0  # messages of the ROUTER
        self._over = False

    def _open_local(self, listen: Callable[[LeaderPoller], LocalListener] | None) -> LocalListener | None:
        try:
            return None if listen is None else listen(self._poller)
        except OSError as e:
            logger.warning("%s has no fast path, all messages come by ZeroMQ: %s", self._name, e)
            return None

    def start(self, handler: Handler, pool: ThreadPool | None = None, on_idle: OnIdle | None = None) -> None:
        """Begin to read."""
        self._handler = handler
        self._on_idle = on_idle or self._on_idle
        self._started = True
        if pool is not None:
            pool.serve_from(self)
        else:
            threading.Thread(target=self._run, name=f"{self._name}-receiver", daemon=True).start()

    def _run(self) -> None:
        while (task := self.read()) is not None:
            self._reader = threading.get_ident()  # nobody reads meanwhile
            task()

    def wait_for_lead(self) -> bool:
        """Wait until the calling thread is to read; False: it is over."""
        return self._poller.wait_for_lead()

    def try_lead(self) -> bool:
        """The calling thread is to read, unless another does."""
        return self._poller.try_lead()

    def promote(self) -> None:
        """One that stands by is to read: at once, if there is a message that was read or that libzmq has."""
        if self._at_router:
            self._at_router = bool(_number(self._socket, _EVENTS) & _POLLIN)
        self._poller.promote(at_once=bool(self._arrived) or self._at_router)

    def reads_here(self) -> bool:
        """Does nobody read while the calling thread waits?"""
        return self._reader == threading.get_ident()

    def read(self) -> Task | None:
        """Read until there is a task, or it is over (None)."""
        self._reader = threading.get_ident()
        try:
            while not self._over:
                if self._arrived:
                    inbound = self.decode(self._arrived.popleft(), (), b"local")
                elif self._at_router:
                    inbound = self._from_router()
                else:
                    task = self._on_idle()
                    if task is None:
                        self._look(None)
                        continue
                    self._reader = 0
                    return task
                task = None if inbound is None else self._deliver(inbound)
                inbound = None  # while nothing comes, the last message must not be kept alive
                if task is not None:
                    self._reader = 0
                    return task
        except zmq.ContextTerminated:
            logger.debug("%s: the context has ended", self._name)
        self._reader = 0
        self._shut()
        return None

    def _look(self, seconds: float | None) -> None:
        """See what has come, or wait for it."""
        arrived = self._arrived
        for number, _ in self._poller.poll(seconds):
            if number == self._router_number:
                self._at_router = True
            elif (readable := self._watched.get(number)) is not None:
                self._call(readable)
            elif self._local is not None:
                arrived.extend(self._local.read(number))

    def watch(self, number: int, readable: Callable[[], None]) -> None:
        """Call ``readable``, in the thread that reads, when that descriptor is readable. From any thread."""
        self._watched[number] = readable
        self._poller.register(number, select.POLLIN)

    def _call(self, readable: Callable[[], None]) -> None:
        try:
            readable()
        except Exception:
            logger.exception("%s: handling an event of a connection failed", self._name)

    def unwatch(self, number: int) -> None:
        """Not any more. Before the descriptor is closed."""
        del self._watched[number]
        self._poller.unregister(number)

    def _from_router(self) -> Inbound | None:
        """The next message at the ROUTER; None if there is none, or it was none of ours."""
        socket = self._socket
        if not _number(socket, _EVENTS) & _POLLIN:
            self._at_router = False
            return None
        self._in_a_row += 1
        if self._in_a_row % ROUTER_BURST == 0:
            self._look(0)
        identity, first = socket.recv(), socket.recv()
        frames = self._rest() if socket.getsockopt(_RCVMORE) else ()
        if first == self._stop_token:
            self._over = True
            return None
        return self.decode(first, frames, identity)

    def _shut(self) -> None:
        if self._local is not None:
            self._local.close()
        self._poller.close()
        self._socket.close(linger=0)
        self._ended.set_result(None)

    def _rest(self) -> list[Buffer]:
        """The frames after the first: ours, writable, and received without a copy."""
        frames: list[Buffer] = []
        while True:
            frame = self._socket.recv(copy=False)
            frames.append(frame.buffer)
            if not frame.more:
                return frames

    def decode(self, first: bytes, frames: Sequence[Buffer], identity: bytes = b"channel") -> Inbound | None:
        """The message of these frames; None, and counted, if it is none of ours. From any thread."""
        self.header_bytes += len(first)
        by_socket = 0
        for frame in frames:
            by_socket += len(frame)
        self.frame_bytes += by_socket
        found = frames
        try:
            envelope, manifest, message = decode_all(first)
        except ProtocolError as e:
            self._refuse(identity, e)
            self._pass_over(first)
            return None
        if (envelope.sequence or envelope.acknowledged) and not self._accept(
            envelope, len(first) + by_socket
        ):
            return None
        if manifest is not None:
            try:
                found = self._find_frames(envelope.source, manifest, frames)
            except ProtocolError as e:
                self._refuse(identity, e)
                return None
            for buffer in manifest.buffers:
                if buffer.block and not buffer.segment:  # it came before, in chunks
                    by_socket += buffer.size
        self.messages += 1
        size = len(first)
        for each in found:
            size += len(each)
        return Inbound(envelope, message, found, size, by_socket)

    def _pass_over(self, first: bytes) -> None:
        """What cannot be read counts as received in its session, or it would be sent again for ever."""
        try:
            envelope = read_envelope(first)
        except ProtocolError:
            return  # of a stranger
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
        """Stop reading. Idempotent."""
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
            waker.connect(self._inproc)
            waker.send(self._stop_token)

    def join(self, deadline: Deadline) -> list[str]:
        """Wait until nobody reads any more; gives a name if that has not come by ``deadline``."""
        if self._started and not self._ended.wait_done(deadline.timeout()):
            return [f"{self._name}-receiver"]
        return []


def _nothing() -> None:
    """There is nothing to be done."""


def _number(socket: zmq.Socket[bytes], option: int) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value
