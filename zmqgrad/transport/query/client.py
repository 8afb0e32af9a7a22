"""Sends queries to one server, from any thread. The calling thread itself sends and receives.

A client keeps a few channels (:mod:`~zmqgrad.transport.query.channel`) and uses one for each query under way.
So a round trip needs no other thread, and a query that waits long does not delay others.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque

from zmqgrad.errors import ClosedError
from zmqgrad.runtime import blocking
from zmqgrad.runtime.clock import MONOTONIC, Clock, monotonic_ns
from zmqgrad.runtime.forks import in_forks
from zmqgrad.runtime.polling import SPENT, Wakeup
from zmqgrad.transport import local
from zmqgrad.transport import tap as tapping
from zmqgrad.transport.query.channel import QueryChannel
from zmqgrad.transport.query.dealer import ServerInfo
from zmqgrad.transport.security import Keys
from zmqgrad.transport.tap import Identity, Tracer
from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.messages import Message, StoreItem, StoreNumber, StoreQueueAck

MAX_IDLE = 8
"""How many idle channels a client keeps."""


class QueryClient:
    """Sends queries to the server at ``address``. Connects at the first one, and reconnects by itself.

    Safe to use from any thread. You must close it.

    Args:
        keys: of the store; None: traffic is not encrypted.
        fast_path: whether to use it where the server is on this host and the system supports it.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str = "client",
        keys: Keys | None = None,
        fast_path: bool = True,
        clock: Clock = MONOTONIC,
    ) -> None:
        self.address = address
        self.name = name
        self.server = ServerInfo(address, keys)
        """What is known about it."""
        self._fast_path = fast_path and local.supported()
        self._clock = clock
        self._closed = False
        self._closing = Wakeup()
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards _channels and writes to _closed
        self._idle: deque[QueryChannel] = deque()
        self._channels: weakref.WeakSet[QueryChannel] = weakref.WeakSet()  # those of threads, too
        in_forks(self, QueryClient.forget)
        self.tracer: Tracer | None = None
        tapping.register(self)

    def identity(self) -> Identity:
        """As :class:`~zmqgrad.transport.tap.Traced`."""
        return Identity(tapping.STORE_CLIENT, self.name, address=self.address)

    def request(self, message: Message, seconds: float) -> Message:
        """Sends ``message`` and returns the reply. Ctrl-C abandons the query.

        An item of a queue is acknowledged before it is returned, by the channel that has popped it: any other
        query there would return the item to its queue. If that is too late, returns a ``StoreNumber`` of 0.

        Raises:
            TimeoutError: if there is no reply within ``seconds``; the text names the last problem.
            ClosedError: if the client is or was closed, or belongs to the parent of a forked process.
            ProtocolError: if ``message`` cannot be encoded, or the reply is malformed.
            AuthenticationError: if the server has another secret, or only one of the two ends has one.
            TransportError: if the system has no socket left.
        """
        try:
            channel = self._idle.pop()  # empty once the client is closed, and in a forked child
        except IndexError:
            channel = self._new_channel()
        item: StoreItem | None = None
        try:
            while True:
                if self.tracer is not None:
                    envelope = (message.TYPE, 0, channel.id, channel.last_request_id + 1, 0, 0, 0, 0)
                    self.tracer.tap(True, channel.id, envelope, message, 0, monotonic_ns())
                if not blocking.used_by_a_pool or blocking.thread_state.pool is None:
                    reply = channel.request(message, seconds)
                else:
                    with blocking.thread_state.pool.blocked():
                        reply = channel.request(message, seconds)
                if self.tracer is not None:
                    arrived = Envelope(reply.TYPE, 0, channel.id, channel.last_request_id)
                    self.tracer.tap(False, channel.id, arrived, reply, 0, monotonic_ns())
                if type(reply) is not StoreItem:
                    break
                item, message = reply, StoreQueueAck(reply.item)
            if item is not None and type(reply) is StoreNumber and reply.number:
                reply = item
            has_room = len(self._idle) < MAX_IDLE
        except BaseException:
            channel.close()
            raise
        if has_room:
            self._idle.append(channel)
            if not self._closed:  # otherwise close() may have emptied _idle before
                return reply
            try:
                self._idle.remove(channel)
            except ValueError:
                return reply  # close() has closed it
        channel.close()
        return reply

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that it belongs to."""
        return os.getpid() != self._pid

    def check_not_forked(self) -> None:
        """Refuses to work in a forked child, before a lock is taken that a thread of the parent may hold.

        Raises:
            ClosedError: if this process is one.
        """
        if self.is_inherited:
            raise ClosedError(
                f"{self.name}, connected to {self.address}, belongs to process {self._pid} and cannot be "
                f"used in a fork of it: start processes by spawn or forkserver, or connect in the child"
            )

    def _new_channel(self) -> QueryChannel:
        self.check_not_forked()
        with self._lock:
            self._check_open()
            channel = QueryChannel(self.server, self._fast_path, self._closing, self._check_open, self._clock)
            self._channels.add(channel)
        return channel

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.name}, connected to {self.address}, is closed")

    def close(self) -> None:
        """Disconnects; queries under way raise ``ClosedError``. Idempotent."""
        if self.is_inherited:
            return
        tapping.unregister(self)
        with self._lock:
            self._closed = True
            channels = list(self._channels)
        self._closing.set()
        self._closing = SPENT
        for channel in channels:
            channel.hang_up()
        while self._idle:
            try:
                channel = self._idle.pop()
            except IndexError:
                break  # another thread took it, and finds that the client is closed
            try:
                channel.close()
            except BaseException:
                self._idle.append(channel)  # for the next call
                raise

    def forget(self) -> None:
        """In a forked child: drops the channels, which belong to the parent."""
        self._idle.clear()
        for channel in self._channels:
            channel.abandon()

    def __repr__(self) -> str:
        return f"<QueryClient {self.name} of {self.address}{': closed' if self._closed else ''}>"
