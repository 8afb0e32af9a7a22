"""What a transport is: mailboxes that take typed messages to the mailboxes of peers.

Traffic is one-way: a mailbox receives on one socket of its own and sends on one per peer, requests and
responses alike (DESIGN section 4). Two implementations keep this contract and pass one suite:
:class:`~zmqgrad.transport.mailbox.ZmqMailbox` and :class:`~zmqgrad.transport.memory.MemoryMailbox`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.thread_pool import Task, ThreadPool
from zmqgrad.transport.tap import Tap
from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.lazy_frame import Buffer, Frame
from zmqgrad.wire.messages import Message

__all__ = [
    "Buffer",
    "Frame",
    "Handler",
    "Inbound",
    "Lost",
    "Mailbox",
    "OnIdle",
    "PeerAddress",
    "ReplyChannel",
    "Resolver",
    "Suspected",
    "Timer",
]


class Inbound(NamedTuple):
    """A message that arrived. ``frames`` are those after the header.

    They are ours to keep and write to.

    ``size`` counts the bytes of all frames, the header's included; ``by_socket`` those of frames that came
    through a socket, without the header's.
    """

    envelope: Envelope
    message: Message
    frames: Sequence[Buffer]
    size: int = 0
    by_socket: int = 0

    def let_go(self) -> None:
        """Drop the frames: what was built on them keeps what it needs.

        With the last of that, memory of the sender's goes back by the answer, not only after it.
        """
        if isinstance(self.frames, list):
            self.frames.clear()


Handler = Callable[[Inbound], Task | None]
"""Called with one message at a time; must not block and must not run user code.

It may give a task, which does what takes longer, and is run in a thread of the pool.
"""

OnIdle = Callable[[], Task | None]
"""Called by the thread that reads when nothing more is at hand: is there something to be done before it
waits? Like a handler's, the task runs in an engine thread."""


class PeerAddress(NamedTuple):
    """Where a peer is: the endpoints of its mailbox, best first, and its incarnation (0: not known)."""

    endpoints: Sequence[str]
    incarnation: int = 0


Resolver = Callable[[int], PeerAddress]
"""Worker id to its address. Raises ``UnknownPeerError``."""


Lost = Callable[[int, str], None]
"""Told of a peer that is gone, and why that is believed; must not block."""

Suspected = Callable[[int, float], None]
"""Told of a peer that has been silent for so many seconds; 0: it answers again. Must not block."""


class ReplyChannel(Protocol):
    """Where one thread waits for replies (see :mod:`zmqgrad.transport.local.channels`)."""

    @property
    def number(self) -> int:
        """What the envelope of a request says; not 0."""
        ...

    def receive(self, seconds: float | None) -> Inbound | None:
        """The next message; None if there is none within ``seconds`` (None: no limit), or after a wake-up."""
        ...

    def wake(self) -> None:
        """Let the thread that waits here look around. From any thread."""
        ...

    @property
    def release(self) -> Callable[[], None]:
        """To be called by the thread that waited: it waits no more."""
        ...


class Timer(Protocol):
    """Who runs what has to wait (:class:`~zmqgrad.runtime.timer.TimerThread`)."""

    def call_later(self, seconds: float, job: Callable[[], None]) -> object:
        """Run ``job`` in ``seconds``. Safe inside finalizers."""
        ...


class Mailbox(Protocol):
    """One worker's end of the transport."""

    worker_id: int
    incarnation: int
    tap: Tap | None

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where peers can send to, best first."""
        ...

    def start(
        self,
        handler: Handler,
        resolve: Resolver,
        pool: ThreadPool | None = None,
        lost: Lost | None = None,
        timer: Timer | None = None,
        suspected: Suspected | None = None,
        on_idle: OnIdle | None = None,
    ) -> None:
        """Begin to receive; look peers up by ``resolve`` at the first message to them.

        Tasks of the handler run in ``pool``; without one, in the receiver's own thread. ``lost``
        hears of peers that were sent to and are gone, ``suspected`` of those that have fallen silent.
        ``timer`` runs what the mailbox does now and then. ``on_idle`` lets what a handler has put off be done
        for many messages at once.
        """
        ...

    def acquire_channel(self, peer: int) -> ReplyChannel | None:
        """A channel by which ``peer`` can reply to the calling thread; None if none is to be had."""
        ...

    def acquire_idle_channels(self) -> Sequence[ReplyChannel]:
        """All channels that nobody waits at, to be read and released."""
        ...

    def send(
        self,
        peer: int,
        message: Message,
        message_id: int,
        frames: Sequence[Frame] = (),
        channel: int = 0,
        patience: float = 0.0,
    ) -> None:
        """Queue ``message`` for ``peer``; ``frames`` have been copied or handed over when this returns.

        Waits while too much is on its way to ``peer`` already (:mod:`zmqgrad.transport.flow_control`).

        Args:
            channel: of a request, the number of the channel at which its sender waits; of a reply, that of
                the request's envelope.
            patience: seconds that it may wait; 0: no limit.

        Raises:
            CongestionError: if it has waited for so long.
            ClosedError: after :meth:`close`.
            UnknownPeerError: if the resolver does not know the peer.
        """
        ...

    def monitor(self, peer: int) -> None:
        """Monitors ``peer`` by heartbeats, even if nothing was sent to it."""
        ...

    def forget(self, peer: int) -> None:
        """Drop the connection to ``peer``; the next message looks it up anew."""
        ...

    def close(self) -> None:
        """Send and receive no more; what was queued may be lost. Idempotent."""
        ...

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for threads and sockets to end; names those that did not."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Counters: messages and bytes in and out, malformed messages."""
        ...
