"""The contract of a transport: a mailbox delivers typed messages to the mailboxes of peers.

Traffic is one-way: a mailbox receives on one socket of its own and sends on one per peer, requests and
responses alike. Two implementations fulfil this contract and pass one test suite:
:class:`~zmqgrad.transport.mailbox.ZmqMailbox` and :class:`~zmqgrad.testing.mailbox.MemoryMailbox`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.runtime.thread_pool import Task, ThreadPool
from zmqgrad.transport.tap import OnHeartbeat, Tap
from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.lazy_frame import Buffer as Buffer
from zmqgrad.wire.lazy_frame import Frame as Frame
from zmqgrad.wire.messages import Message


def no_memory(size: int, peer: int) -> MemoryError:
    """The error for whoever reads a message of ``peer`` of which ``size`` bytes could not be kept."""
    return MemoryError(f"this process has no memory for {size} bytes that worker {peer} has sent")


class Unreceived(Sequence[Buffer]):
    """The frames of a message for which there was no memory: reading them raises ``error``."""

    def __init__(self, error: MemoryError) -> None:
        self._text = str(error)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        raise MemoryError(self._text)

    def __getitem__(self, index: Any) -> Any:
        raise MemoryError(self._text)


class Inbound(NamedTuple):
    """A message that arrived.

    Args:
        frames: the frames after the header; the handler may keep them and write to them. To read those for
            which there was no memory raises MemoryError.
        size: in bytes, of all frames including the header.
        socket_bytes: what the message counts for flow control: the bytes that arrived through a socket.
    """

    envelope: Envelope
    message: Message
    frames: Sequence[Buffer]
    size: int = 0
    socket_bytes: int = 0

    def release_frames(self) -> None:
        """Drops the frames; tensors built on them keep the memory that they need.

        If none does, a block of the sender's shared memory is released with the reply, not after it.
        """
        if isinstance(self.frames, list):
            self.frames.clear()


Handler = Callable[[Inbound], Task | None]
"""Called with one message at a time; must not block and must not run user code.

Longer work is returned as a task, which runs in a thread of the pool.
"""

OnIdle = Callable[[], Task | None]
"""Called by the reading thread before it blocks or runs a task. May return a task, which runs like a
handler's."""


class PeerAddress(NamedTuple):
    """The endpoints of a peer's mailbox, best first, and its incarnation (0: unknown)."""

    endpoints: Sequence[str]
    incarnation: int = 0


Resolver = Callable[[int], PeerAddress]
"""Maps a worker id to its address. Raises ``UnknownPeerError``."""


class PeerEnd(NamedTuple):
    """The last event of a link: this incarnation of the peer delivers nothing more."""

    peer: int
    incarnation: int
    reason: str


def text_of_loss(accuser: str, lost: int, reason: str) -> str:
    """What a worker is told that another has declared lost, on whichever way it hears of that first."""
    return f"{accuser} has declared worker {lost} lost: {reason}; it must join again"


OnEnd = Callable[[PeerEnd], None]
"""Called in the reading thread with the end of a link, after all of its messages; must not block."""

OnSuspected = Callable[[int, float], None]
"""Called with a suspected peer and its seconds of silence; 0: it replies again. Must not block."""


class ReplyChannel(Protocol):
    """Receives the replies to one thread (see :mod:`zmqgrad.transport.local.channels`)."""

    @property
    def number(self) -> int:
        """The channel number in the envelope of a request; never 0."""

    spins: bool
    """Whether :meth:`receive` may spin before it blocks. True whenever the channel was acquired."""

    def receive(self, seconds: float | None) -> Inbound | None:
        """Returns the next message; None after ``seconds`` (None: no limit) or a wake-up without one."""

    def settle(self) -> None:
        """The owner has taken note of the message that it received last, and may now do something else.

        Until then, or until it receives again, the end of the peer is not delivered.
        """

    def wake(self) -> None:
        """Makes :meth:`receive` return. From any thread."""

    def abandon(self, held: list[ReplyChannel], handle: Callable[[Inbound], None]) -> None:
        """Closes the channel, as :meth:`release`, instead of releasing it, as late messages may arrive.

        ``handle`` is called with those that have arrived; others reach the receiver of the mailbox.
        """

    def release(self, held: list[ReplyChannel]) -> None:
        """Returns the channel, which is in ``held``, to its mailbox, and empties ``held``. Idempotent.

        Called by the thread that acquired it, also after :meth:`abandon` was interrupted.
        """


class Mailbox(Protocol):
    """One worker's end of the transport."""

    worker_id: int
    incarnation: int
    tap: Tap | None
    on_heartbeat: OnHeartbeat | None

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The addresses at which peers reach this mailbox, best first."""

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
        """Starts to receive.

        Args:
            handler: called with each message.
            resolve: looks up the address of a peer at the first message to it.
            pool: runs the tasks of the handler; None: the receiver's own thread does.
            on_end: called with the end of each link, behind its last message. Nothing is sent to or
                received from the peer any more.
            service: runs periodic work and heartbeats; None: the mailbox starts one.
            suspected: called when a monitored peer is silent.
            on_idle: called before the reading thread blocks or runs a task, so a handler can batch work.
        """

    def acquire_channel(self, peer: int, held: list[ReplyChannel]) -> bool:
        """Puts a channel into ``held`` by which ``peer`` can reply to the calling thread.

        The caller passes ``held`` to the channel when it releases it.

        Returns:
            Whether a channel was free.
        """

    def send(
        self,
        peer: int,
        message: Message,
        message_id: int,
        frames: Sequence[Frame] = (),
        channel: int = 0,
        timeout: float = 0.0,
    ) -> None:
        """Queues ``message`` for ``peer``; ``frames`` were copied or handed over when this returns.

        Waits while too many bytes are in flight to ``peer`` (:mod:`zmqgrad.transport.flow_control`).

        Args:
            channel: for a request, the number of the reply channel at which its sender waits; for a reply,
                the number in the request's envelope.
            timeout: how many seconds to wait for credit at most; 0: no limit.

        Raises:
            CongestionError: if it waited that long.
            ClosedError: after :meth:`close`.
            UnknownPeerError: if the resolver does not know the peer.
        """

    def monitor(self, peer: int) -> None:
        """Monitors ``peer`` by heartbeats, even if nothing was sent to it."""

    def unmonitor(self, peer: int) -> None:
        """Undoes :meth:`monitor`. No effect on a peer to which messages were sent."""

    def end(self, peer: int, reason: str) -> None:
        """Ends the link to ``peer``, whose end is delivered behind what has arrived. From any thread.

        The peer is told ``reason`` if it can be reached. No effect if the link has ended.
        """

    def flush(self, deadline: Deadline) -> bool:
        """Waits until all that was sent has left, and by tcp has arrived. Returns whether it has in time."""

    def close(self, goodbye: str = "") -> None:
        """Stops sending and receiving; queued messages may be lost. Idempotent.

        Args:
            goodbye: why this worker leaves, which peers receive as the last message; empty: none.
        """

    def join(self, deadline: Deadline) -> list[str]:
        """Waits for threads and sockets to end. Returns the names of those that have not by ``deadline``."""

    def allocate(self, size: int, deadline: Deadline) -> Any:
        """Allocates memory that all peers of this host can read, as :meth:`SharedMemoryTransport.allocate`.

        A frame that is a view of it is sent to them without a copy, and is in memory that each of them has
        for itself.

        Returns:
            A writable ctypes array, which must not change any more once it was sent; or why there is none.
        """

    def share(self, frames: Sequence[Frame]) -> Sequence[Frame]:
        """Returns copies of ``frames`` in such memory; ``frames`` itself if they are small or it is full."""

    def allocated(self, frame: Frame) -> Any:
        """Returns the array of :meth:`allocate` that has just the bytes of ``frame``; None: they have none.

        That is so of a received frame that its sender has in such memory, if there was room for it.
        """

    def write(self, array: Any, offset: int, data: Frame) -> None:
        """Copies ``data`` to ``offset`` of such an array."""

    def holders(self, lease: Any) -> list[int]:
        """Returns who can read memory of which this was the ``lease``; -1: this worker; -2: lost ones."""

    def is_local(self, peer: int) -> bool:
        """Whether messages to ``peer`` stay within this host. It must have been sent one."""

    def statistics(self) -> dict[str, Any]:
        """Returns counters: messages and bytes in and out, malformed messages."""
