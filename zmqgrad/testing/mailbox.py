"""One worker's mailbox in memory: implements :class:`~zmqgrad.transport.base.Mailbox`.

Each message is encoded, and its frames are copied. Each mailbox delivers in a thread of its own, named
``<name>-receiver``. Messages between two workers arrive in the order in which they were sent, unless a fault
(:mod:`~zmqgrad.testing.faults`) is active. As with a dead process, messages to a closed mailbox are lost.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from zmqgrad.errors import ClosedError, ProtocolError, UnknownPeerError, ZmqgradError
from zmqgrad.runtime.clock import Deadline, monotonic_ns
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.runtime.thread_pool import ThreadPool
from zmqgrad.testing.faults import InFlightMessage
from zmqgrad.testing.network import MemoryNetwork
from zmqgrad.transport.base import (
    Frame,
    Handler,
    Inbound,
    OnEnd,
    OnIdle,
    OnSuspected,
    PeerAddress,
    PeerEnd,
    ReplyChannel,
    Resolver,
    text_of_loss,
)
from zmqgrad.transport.tap import FRAMES, INLINE, OnHeartbeat, Tap
from zmqgrad.wire.codec import decode, encode
from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.lazy_frame import materialize
from zmqgrad.wire.messages import Goodbye, Message, MessageType

logger = logging.getLogger(__name__)


class MemoryMailbox:
    """One worker's end of a :class:`MemoryNetwork`. Queues messages until it is started."""

    def __init__(self, network: MemoryNetwork, name: str, worker_id: int, hosts: Sequence[str] = ()) -> None:
        """``hosts``: the name of the host of each worker; empty: all are on one."""
        self.worker_id = worker_id
        self.incarnation = secrets.randbits(63)
        self.tap: Tap | None = None
        self.on_heartbeat: OnHeartbeat | None = None
        self.is_open = True
        self._network = network
        self._hosts = hosts
        self._name = name
        self._arrived = threading.Condition(network.lock)
        self._inbox: list[tuple[bytearray, ...]] = []
        self._ends: list[tuple[int, PeerEnd]] = []  # with the number of messages that come before
        self._ended: dict[int, str] = {}
        self._told: set[int] = set()  # peers that ended the link themselves
        self._on_end: OnEnd | None = None
        self._handling = False
        self._peer_endpoints: dict[int, str] = {}
        self._heard: dict[int, None] = {}  # the peers of which something has arrived
        self._counters = dict.fromkeys(
            ("messages_sent", "bytes_sent", "messages_received", "bytes_received", "malformed"), 0
        )
        self._handler: Handler | None = None
        self._on_idle: OnIdle | None = None
        self._pool: ThreadPool | None = None
        self._resolve: Resolver = _not_started
        self._thread = threading.Thread(target=self._run, name=f"{name}-receiver", daemon=True)
        self._endpoint = network.register(self)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The address for peers: ``memory://<n>``."""
        return (self._endpoint,)

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
        """Start to deliver; ``handler`` runs in the receiver thread. Links end by :meth:`end` only."""
        del service, suspected
        self._on_end = on_end
        self._handler, self._resolve, self._pool, self._on_idle = handler, resolve, pool, on_idle
        self._thread.start()

    def acquire_channel(self, peer: int, held: list[ReplyChannel]) -> bool:
        """Return False: there are no reply channels in memory."""
        del peer, held
        return False

    def send(
        self,
        peer: int,
        message: Message,
        message_id: int,
        frames: Sequence[Frame] = (),
        channel: int = 0,
        timeout: float = 0.0,
    ) -> None:
        """Queue ``message`` for ``peer``. As :meth:`Mailbox.send`, but without flow control."""
        first = encode(message, self.worker_id, self.incarnation, message_id)
        if peer in self._ended:
            raise ClosedError(f"{self._name} sends nothing more to worker {peer}: {self._ended[peer]}")
        self._send(peer, message, message_id, first, frames)

    def _send(
        self, peer: int, message: Message, message_id: int, first: bytearray, frames: Sequence[Frame]
    ) -> None:
        endpoint = self._endpoint_of(peer)
        envelope = Envelope(message.TYPE, self.worker_id, self.incarnation, message_id)
        # An int as a frame is a TypeError, as with ZeroMQ, while bytearray(5) would be five zeros.
        copies = (first, *(bytearray(memoryview(materialize(f))) for f in frames))
        sent = InFlightMessage(envelope, peer, endpoint, message, sum(map(len, copies)), copies)
        with self._network.lock:
            self._counters["messages_sent"] += 1
            self._counters["bytes_sent"] += sent.size
        began = 0 if self.tap is None else monotonic_ns()
        self._network.send(sent)
        if self.tap is not None:
            path = FRAMES if frames else INLINE
            self.tap(True, peer, envelope, message, sent.size, began or monotonic_ns(), path)

    def _endpoint_of(self, peer: int) -> str:
        if not self.is_open:
            raise ClosedError(f"the mailbox of {self._name} is closed")
        endpoint = self._peer_endpoints.get(peer)
        if endpoint is None:
            known = self._resolve(peer).endpoints  # with no lock held: it may query a store
            endpoint = next((e for e in known if self._network.knows(e)), None)
            if endpoint is None:
                raise UnknownPeerError(
                    f"none of the addresses {list(known)} of worker {peer} is of this network"
                )
            self._peer_endpoints[peer] = endpoint
        return endpoint

    def enqueue(self, frames: tuple[bytearray, ...]) -> bool:
        """Queue ``frames``. Returns False if closed. Called with the network's lock held."""
        if self.is_open:
            self._inbox.append(frames)
            self._arrived.notify()
        return self.is_open

    def is_busy(self) -> bool:
        """Return whether a message is queued or being handled. Called with the network's lock held."""
        return self.is_open and (bool(self._inbox) or bool(self._ends) or self._handling)

    def _run(self) -> None:
        while (frames := self._take()) is not None:
            if isinstance(frames, PeerEnd):
                if frames.peer not in self._told:
                    self._refuse(frames.peer)
                if self._on_end is not None:
                    self._on_end(frames)
            else:
                self._deliver(frames)
            del frames  # an idle mailbox must not keep the last message alive

    def _take(self) -> tuple[bytearray, ...] | PeerEnd | None:
        with self._network.lock:
            self._handling = False
            self._network.changed.notify_all()
            self._arrived.wait_for(lambda: self._inbox or self._ends or not self.is_open)
            if not self.is_open:
                return None
            self._handling = True
            if self._ends and self._ends[0][0] <= 0:
                end = self._ends.pop(0)[1]
                self._ended[end.peer] = end.reason
                return end
            self._ends = [(before - 1, end) for before, end in self._ends]
            return self._inbox.pop(self._network.choose(self.worker_id, len(self._inbox)))

    def _deliver(self, frames: tuple[bytearray, ...]) -> None:
        try:
            envelope, message = decode(frames[0])
        except ProtocolError as e:
            self._counters["malformed"] += 1
            logger.warning("%s: dropped a malformed message (%s)", self._name, e)
            return
        if envelope.source in self._ended:
            if envelope.type != MessageType.GOODBYE:
                self._refuse(envelope.source)
            return
        if isinstance(message, Goodbye) and self._on_end is not None:
            self._told.add(envelope.source)
            self.end(envelope.source, message.reason)
            return
        self._heard[envelope.source] = None
        inbound = Inbound(envelope, message, frames[1:], sum(map(len, frames)))
        self._counters["messages_received"] += 1
        self._counters["bytes_received"] += inbound.size
        assert self._handler is not None
        try:
            if self.tap is not None:
                path = FRAMES if inbound.frames else INLINE
                self.tap(False, envelope.source, envelope, message, inbound.size, monotonic_ns(), path)
            task = self._handler(inbound)
            if task is None and self._on_idle is not None:
                task = self._on_idle()
            if task is None:
                return
            if self._pool is None:
                task()
            else:
                self._pool.submit(task)
        except ClosedError:
            logger.debug("%s: %s arrived while closing", self._name, message)
        except Exception:
            logger.exception("%s: handling %s from worker %d failed", self._name, message, envelope.source)

    def _refuse(self, peer: int) -> None:
        """Tell a peer that its link has ended here."""
        self._say_goodbye(peer, text_of_loss(self._name, peer, self._ended[peer]))

    def _say_goodbye(self, peer: int, reason: str) -> None:
        goodbye = Goodbye(reason[:1000])
        try:
            self._send(peer, goodbye, 0, encode(goodbye, self.worker_id, self.incarnation, 0), ())
        except ZmqgradError as e:
            logger.debug("%s: worker %d does not get the last message: %s", self._name, peer, e)

    def monitor(self, peer: int) -> None:
        """Do nothing: no peer is ever silent in memory."""

    def unmonitor(self, peer: int) -> None:
        """Do nothing."""

    def end(self, peer: int, reason: str) -> None:
        """End the link to ``peer``, behind what has arrived."""
        with self._network.lock:
            if peer in self._ended or any(end.peer == peer for _, end in self._ends) or not self.is_open:
                return
            self._ends.append((len(self._inbox), PeerEnd(peer, 0, reason)))
            self._arrived.notify()

    def flush(self, deadline: Deadline) -> bool:
        """Return True: what was sent has arrived."""
        return True

    def close(self, goodbye: str = "") -> None:
        """Stop sending and receiving. Queued messages are lost. Idempotent."""
        for peer in [*{**self._peer_endpoints, **self._heard}] if goodbye and self.is_open else ():
            if peer != self.worker_id and peer not in self._ended:
                self._say_goodbye(peer, goodbye)
        with self._network.lock:
            self.is_open = False
            self._inbox.clear()
            self._ends.clear()
            self._arrived.notify()
            self._network.changed.notify_all()

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the receiver thread. Returns its name if it has not ended by ``deadline``."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(deadline.timeout())
        return [self._thread.name] if self._thread.is_alive() else []

    def allocate(self, size: int, deadline: Deadline) -> str:
        """Return why there is no shared memory: frames are copied."""
        return "off"

    def share(self, frames: Sequence[Frame]) -> Sequence[Frame]:
        """Return ``frames``: see :meth:`allocate`."""
        return frames

    def allocated(self, frame: Frame) -> None:
        """Return None: see :meth:`allocate`."""

    def write(self, array: Any, offset: int, data: Frame) -> None:
        """Never called: see :meth:`allocate`."""
        raise NotImplementedError

    def holders(self, lease: Any) -> list[int]:
        """Return no peers: see :meth:`allocate`."""
        return []

    def is_local(self, peer: int) -> bool:
        """Return whether the test has put ``peer`` on the host of this worker."""
        return not self._hosts or self._hosts[peer] == self._hosts[self.worker_id]

    def statistics(self) -> dict[str, Any]:
        """Return messages and bytes in and out, malformed messages, and the number of peers sent to."""
        with self._network.lock:
            return {**self._counters, "peers": len(self._peer_endpoints)}

    def __repr__(self) -> str:
        state = f"{len(self._inbox)} waiting" if self.is_open else "closed"
        return f"<MemoryMailbox {self._name} id={self.worker_id} at {self._endpoint}: {state}>"


def _not_started(peer: int) -> PeerAddress:
    raise UnknownPeerError(f"no address is known for worker {peer}: the mailbox was not started")
