"""Notices: one publishes, many listen, each to the topics that it subscribed to.

A fresh subscription takes effect some time after it was made, and a notice published before then is lost
(DESIGN 16.1: 63 to 78 of 100 first notices arrived). So the publisher's socket is an XPUB, which reports
subscriptions as they take effect: a subscriber asks for its topics, then for a one-time topic; once the
publisher has seen that one, the others are in place, for one connection carries them in order.

A subscriber whose connection broke has missed what was published meanwhile. It is told, so that it can
look again.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

import zmq

from zmqgrad.errors import ClosedError, ProtocolError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.security import Doorkeeper, Keys
from zmqgrad.transport.sockets import bind, connect, send, set_up
from zmqgrad.wire.codec import decode, encode
from zmqgrad.wire.messages import Message

logger = logging.getLogger(__name__)

Topic = bytes

MAX_UPSTREAM = 1 << 20
"""Bytes of what a subscriber may say: the name of a topic, which has at most a key of 64 Ki characters."""


class NoticePublisher:
    """Publishes at ``address``; belongs to one thread, that of the request server beside it.

    Args:
        on_abandoned: called with a topic when its last subscriber has gone.
        keys: only who has them is let in; None: whoever comes.

    Raises: as :class:`~zmqgrad.transport.requests.RequestServer`.
    """

    def __init__(
        self,
        address: str,
        incarnation: int,
        on_abandoned: Callable[[Topic], None],
        keys: Keys | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._on_abandoned = on_abandoned
        self._expected: dict[Topic, Callable[[], None]] = {}
        self.topics: set[Topic] = set()
        self.published = 0
        # Not verbose: the second subscriber to a topic is not reported, and need not be, for one-time
        # topics have one subscriber each.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        try:
            set_up(self._socket)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_UPSTREAM)
            if keys is not None:
                Doorkeeper("notices", self._context, keys)
            self.endpoint = bind(self._socket, address, keys)
        except BaseException:
            self.close()
            raise

    def when_subscribed(self, topic: Topic, action: Callable[[], None]) -> None:
        """Call ``action`` once somebody is subscribed to ``topic``: at once, if so already."""
        self.take_subscriptions()
        if topic in self.topics:
            action()
        else:
            self._expected[topic] = action

    def expect_no_more(self, topic: Topic) -> bool:
        """Do not wait for ``topic``. Was it still waited for?"""
        return self._expected.pop(topic, None) is not None

    @property
    def fd(self) -> int:
        """Readable when there may be subscriptions to take; but publishing can swallow that sign."""
        return int(self._socket.getsockopt(zmq.FD))

    def take_subscriptions(self) -> None:
        """Note who came and who went since the last look."""
        while True:
            try:
                event = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            topic = event[1:]
            if event[:1] == b"\x01":
                self.topics.add(topic)
                if topic in self._expected:
                    self._expected.pop(topic)()
            elif event[:1] == b"\x00":
                self.topics.discard(topic)
                self._on_abandoned(topic)
            # Anything else a subscriber sends upstream is not ours, and is dropped.

    def publish(self, topic: Topic, message: Message) -> None:
        """Send ``message`` to all who are subscribed to ``topic``."""
        self.published += 1
        self._socket.send(topic, zmq.SNDMORE | zmq.NOBLOCK)
        send(self._socket, encode(message, 0, self._incarnation, 0))

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close(linger=0)
        self._context.term()


class NoticeSubscriber:
    """Listens to the publisher at ``address`` in a thread named ``<name>-notices``.

    Args:
        on_notice: called there with each message: must be quick, and must not raise.
        on_broken: called there when the connection breaks; notices may be lost until a one-time topic has
            been seen again. The socket connects anew by itself, but see :meth:`move`.
    """

    def __init__(
        self,
        name: str,
        address: str,
        on_notice: Callable[[Message], None],
        on_broken: Callable[[], None],
        keys: Keys | None = None,
    ) -> None:
        self._keys = keys
        self.name = name
        self.address = address
        self._on_notice = on_notice
        self._on_broken = on_broken
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards _bell, _closed and the end of _context
        self._closed = False
        self._topics: set[Topic] = set()
        self.malformed = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        set_up(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._bell, self._ear = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        inproc = f"inproc://{name}-{secrets.token_hex(8)}"
        self._ear.bind(inproc)
        self._bell.connect(inproc)
        self._thread = threading.Thread(target=self._run, name=f"{name}-notices", daemon=True)
        self._thread.start()

    def subscribe(self, topic: Topic) -> None:
        """Listen to ``topic``, soon; twice is as once. They take effect in the order of the calls."""
        self._order(partial(self._set, zmq.SUBSCRIBE, topic))

    def unsubscribe(self, topic: Topic) -> None:
        """Do not listen to ``topic`` any more."""
        self._order(partial(self._set, zmq.UNSUBSCRIBE, topic))

    def move(self, address: str) -> None:
        """Listen at ``address`` from now on, if that is another: the publisher has moved."""
        self._order(partial(self._move, address))

    def _order(self, order: Callable[[], None] | None) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.name} does not listen to {self.address} any more")
            self._closed = order is None
            self._orders.put(order)
            try:
                self._bell.send(b"", zmq.NOBLOCK)
            except zmq.Again as e:  # the thread has ended, and said why
                raise ClosedError(f"{self.name} has lost the notices of {self.address}") from e

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._socket, self._monitor, self._ear):
            poller.register(socket, zmq.POLLIN)
        try:
            connect(self._socket, self.address, self._keys)
            while True:
                ready = dict(poller.poll())
                if self._ear in ready:
                    self._ear.recv()
                    if not self._obey():
                        return
                if self._monitor in ready:
                    self._monitor.recv_multipart()  # there is but one kind of event
                    self._on_broken()
                if self._socket in ready:
                    self._take(self._socket.recv_multipart())
        except Exception:
            logger.exception("%s: the notices of %s are lost from here on", self.name, self.address)
        finally:
            self._socket.disable_monitor()
            for socket in (self._socket, self._monitor, self._ear):
                socket.close(linger=0)

    def _obey(self) -> bool:
        try:
            order = self._orders.get_nowait()
        except Empty:  # each order rings once; there is one for each ring
            return True
        if order is None:
            return False
        order()
        return True

    def _set(self, option: int, topic: Topic) -> None:
        if (option == zmq.SUBSCRIBE) != (topic in self._topics):  # libzmq would count
            self._topics ^= {topic}
            self._socket.setsockopt(option, topic)

    def _move(self, address: str) -> None:
        if address != self.address:
            self._socket.disconnect(self.address)
            connect(self._socket, address, self._keys)
            self.address = address

    def _take(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a notice of {len(frames)} frames (expected two)")
            message = decode(frames[1])[1]
        except ProtocolError as e:
            self.malformed += 1
            if self.malformed == 1:
                logger.warning("%s: dropped a malformed notice from %s (%s)", self.name, self.address, e)
            return
        self._on_notice(message)

    def close(self) -> None:
        """Stop listening. Idempotent; safe from any thread."""
        try:
            self._order(None)
        except ClosedError:
            pass  # as asked

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the thread; gives its name if it has not ended by ``deadline``."""
        if self._thread is not threading.current_thread():
            self._thread.join(deadline.left_or_none())
        if self._thread.is_alive():
            return [self._thread.name]
        with self._lock:  # libzmq aborts the process where two threads end a context at the same time
            self._bell.close(linger=0)
            self._context.term()
        return []
