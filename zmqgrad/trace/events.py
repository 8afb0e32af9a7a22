"""The events of a trace log: what happened, when, in which thread, and to which actor.

Times are nanoseconds of the process's monotonic clock (:mod:`zmqgrad.trace.clocks` aligns processes). An
actor is what sends and receives in a process: a worker, a store client, a store server, a rendezvous node.
Actors, threads and names (of functions, keys) are numbered in the order of their appearance and declared once
by an event of their own, so that other events stay small; number 0 means none.

The recorder appends plain tuples, whose first element is the tag; they encode to the same bytes as the
structs here, by which the log is read. Payloads are never part of an event.
"""

from __future__ import annotations

import enum
import functools
import operator
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

Nanoseconds = Annotated[int, Meta(ge=0, le=1 << 60)]
"""A duration: 36 years at most, so that what is computed from several times fits 64 bits."""

Time = Annotated[int, Meta(ge=-(1 << 60), le=1 << 60)]
"""Nanoseconds of a monotonic clock."""

WallTime = Annotated[int, Meta(ge=0, le=1 << 62)]
"""Nanoseconds since 1970."""

Kind = Annotated[int, Meta(ge=0, lt=1 << 16)]
"""The number of a type of messages."""

Number = Annotated[int, Meta(ge=0)]
"""An id, or a size. None has more than 64 bits."""


class Role(enum.IntEnum):
    """What an actor is."""

    WORKER = 1
    STORE_CLIENT = 2
    STORE_SERVER = 3
    RENDEZVOUS_NODE = 4


class Path(enum.IntEnum):
    """How the bytes of a message were transferred."""

    INLINE = 0  # all in the first frame
    FRAMES = 1  # in frames through a socket
    SHARED_MEMORY = 2


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all events. ``time`` is in nanoseconds of the process's monotonic clock."""

    time: Time


class ActorStarted(Event, frozen=True, tag=1):
    """Declares actor ``actor``.

    ``name`` and ``number`` (the rank) are those of a worker; ``incarnation`` is random at each start. ``job``
    is the same for all workers of a job, and empty for others. ``address`` is where a store serves, or the
    endpoints of a worker.
    """

    actor: int
    role: Role
    name: str
    number: int = 0
    incarnation: Number = 0
    job: str = ""
    address: str = ""


class ActorStopped(Event, frozen=True, tag=2):
    """Actor ``actor`` was closed. Missing if its process was killed."""

    actor: int


class ThreadDeclared(Event, frozen=True, tag=3):
    """Declares thread ``thread``; ``native_id`` is the system's id of it."""

    thread: int
    name: str
    native_id: int


class NameDeclared(Event, frozen=True, tag=4):
    """Declares name ``number``: a function, a key of a store, a prefix."""

    number: int
    name: str


class PeerDeclared(Event, frozen=True, tag=5):
    """Messages that ``actor`` receives from worker ``peer`` are of this ``incarnation`` from here on."""

    actor: int
    peer: int
    incarnation: Number


class MessageEvent(Event, frozen=True):
    """A message at one of its ends."""

    thread: int
    actor: int
    kind: Kind
    peer: Number
    message_id: Number
    context: Number = 0
    name: int = 0
    size: Number = 0
    path: Path = Path.INLINE


class MessageSent(MessageEvent, frozen=True, tag=6):
    """``actor`` sent a message to worker ``peer``; ``time`` is just before that.

    ``kind`` is its ``MessageType``, ``context`` the distributed autograd context, ``name`` the function that
    is called, ``size`` the bytes of all frames. A reply has the message id of its request, and no name.

    Of store messages, ``peer`` is the id of the client's channel and ``message_id`` the number of the query
    on it, ``name`` the (first) key, and ``context``, at the server, identifies the connection: a reply there
    has it and no ``peer``. Of notifications, ``message_id`` is the revision.

    ``nanoseconds``, of large messages, is what it took from ``time`` on to copy and send it.
    """

    nanoseconds: Nanoseconds = 0


class MessageReceived(MessageEvent, frozen=True, tag=7):
    """``actor`` received a message; as :class:`MessageSent`. A request is queued from here on."""


class _OfRequest(Event, frozen=True):
    thread: int
    actor: int
    peer: int
    message_id: int


class _OfRequestEnded(_OfRequest, frozen=True):
    failed: bool = False


class _WithDuration(_OfRequest, frozen=True):
    nanoseconds: Nanoseconds
    failed: bool = False

    def _parts(self, begin: type[_B], end: type[_E]) -> tuple[_B, _E]:
        key = (self.thread, self.actor, self.peer, self.message_id)
        return begin(self.time, *key), end(self.time + self.nanoseconds, *key, self.failed)


_B = TypeVar("_B", bound=_OfRequest)
_E = TypeVar("_E", bound=_OfRequestEnded)


class RequestStarted(_OfRequest, frozen=True, tag=8):
    """A thread of ``actor`` took the request ``message_id`` of worker ``peer`` from the queue."""


class RequestFinished(_OfRequestEnded, frozen=True, tag=9):
    """That thread is done with the request. Usually the reply was sent just before."""


class RequestDescribed(Event, frozen=True, tag=10):
    """The function of the request ``message_id``, if the message does not name it, and its arguments.

    ``arguments`` is empty unless ZMQGRAD_TRACE_ARGS=1; its length is bounded.
    """

    thread: int
    actor: int
    message_id: int
    function: str
    arguments: str = ""


class Serialized(_OfRequest, frozen=True, tag=32):
    """The payload of request ``message_id`` to ``peer``, or of the reply to one of its requests, was made.

    It began at ``time`` and took ``nanoseconds``. ``contents`` identifies the contents of each large tensor:
    the number of its memory in this process, the offset and the version there, and the bytes.
    """

    nanoseconds: Nanoseconds
    is_reply: bool
    contents: tuple[tuple[int, int, int, int], ...] = ()


class WaitBegun(_OfRequest, frozen=True, tag=11):
    """A thread of ``actor`` waits for the reply of worker ``peer`` to its request ``message_id``.

    If it waits for the end of a backward pass, ``message_id`` is the pass and ``peer`` is the actor's own.
    """


class WaitEnded(_OfRequestEnded, frozen=True, tag=12):
    """The wait is over; ``failed``: without a reply (timeout, loss, Ctrl-C)."""


class RequestRan(_WithDuration, frozen=True, tag=24):
    """:class:`RequestStarted` at ``time`` and :class:`RequestFinished` after ``nanoseconds``, in one.

    Only in logs: the reader yields the two.
    """

    def parts(self) -> tuple[RequestStarted, RequestFinished]:
        """The two events."""
        return self._parts(RequestStarted, RequestFinished)


class Waited(_WithDuration, frozen=True, tag=25):
    """:class:`WaitBegun` at ``time`` and :class:`WaitEnded` after ``nanoseconds``, in one; only in logs."""

    def parts(self) -> tuple[WaitBegun, WaitEnded]:
        """The two events."""
        return self._parts(WaitBegun, WaitEnded)


class _OfContext(Event, frozen=True):
    thread: int
    actor: int
    context: int


class _OfPass(_OfContext, frozen=True):
    pass_id: int


class ContextCreated(_OfContext, frozen=True, tag=13):
    """``actor`` takes part in distributed autograd context ``context`` from here on."""


class ContextReleased(_OfContext, frozen=True, tag=14):
    """``actor`` has forgotten the context."""


class PassStarted(_OfPass, frozen=True, tag=15):
    """``actor`` began backward pass ``pass_id``, as its coordinator."""


class PassFinished(_OfPass, frozen=True, tag=16):
    """The pass is over on all workers."""

    failed: bool = False


class GroupExecuted(_OfPass, frozen=True, tag=17):
    """``actor`` ran the groups of a pass that the gradients of ``sends`` completed.

    It began at ``time`` and took ``nanoseconds``. ``sends`` are autograd ids, empty for the roots of the
    pass; ``recvs`` are (autograd id, worker that the gradients go to). ``missing`` lists those of ``sends``
    that got gradients in part: for each of their tensors, 1 if it got none.
    """

    nanoseconds: Nanoseconds
    sends: tuple[int, ...] = ()
    recvs: tuple[tuple[int, int], ...] = ()
    missing: tuple[tuple[int, tuple[int, ...]], ...] = ()


class StepTaken(_OfContext, frozen=True, tag=28):
    """``actor`` stepped shared parameters with gradients of ``context``, which were ``staleness`` steps old.

    Not ``applied``: they were older than the optimizer allows.
    """

    staleness: int
    applied: bool


class Published(Event, frozen=True, tag=29):
    """``actor`` published a version of ``name``: it copied ``bytes``.

    It began at ``time`` and took ``nanoseconds``.
    """

    thread: int
    actor: int
    nanoseconds: Nanoseconds
    name: str
    version: int
    bytes: int


class GroupCalled(Event, frozen=True, tag=30):
    """A thread of ``actor`` began at ``time`` to call ``function`` on the members of a group.

    ``calls`` are the message ids of the requests. All had ended after ``nanoseconds``; ``failed``: not all by
    a result.
    """

    thread: int
    actor: int
    nanoseconds: Nanoseconds
    function: str
    calls: tuple[int, ...]
    failed: bool = False


class Interrupted(Event, frozen=True, tag=31):
    """Ctrl-C ended a wait of a thread of this process."""

    thread: int


class RendezvousStep(Event, frozen=True, tag=18):
    """A node of an elastic rendezvous applied ``action`` to the state, in round ``round``."""

    thread: int
    actor: int
    round: int
    action: str
    participants: int = 0
    waiting: int = 0


class Heartbeat(Event, frozen=True, tag=19):
    """A heartbeat to (``outgoing``) or from worker ``peer``. Recorded on request only."""

    thread: int
    actor: int
    peer: int
    outgoing: bool


class ClockSample(Event, frozen=True, tag=20):
    """The wall clock (nanoseconds since 1970) at ``time``; written at each flush that is a second later."""

    wall: WallTime


class Dropped(Event, frozen=True, tag=21):
    """``count`` events before this one were not recorded, because the buffer was full."""

    count: int


class SendRecorded(_OfContext, frozen=True, tag=22):
    """``actor`` recorded a send in ``context``: the message ``message_id`` to ``peer`` may get gradients.

    ``is_reply``: the message is the reply to the request ``message_id`` of that worker.
    """

    autograd_id: int
    peer: int
    message_id: int
    is_reply: bool


class StackDumped(Event, frozen=True, tag=23):
    """What a thread was just doing: its Python stack as text, the innermost frame last.

    Recorded when somebody asks for it (:mod:`zmqgrad.trace.stacks`); ``native_id`` is the system's id of the
    thread, 0 if Python did not start it.
    """

    native_id: int
    name: str
    stack: str


class Usage(Event, frozen=True, tag=26):
    """What worker ``actor`` uses; written at each flush that is a second later, if it has changed.

    Of the ``threads`` of its pool, ``blocked`` wait for something, and at most ``working_limit`` work;
    ``leased_bytes`` of shared memory, of at most ``leased_limit``, are in messages.
    """

    actor: int
    threads: int
    blocked: int
    working_limit: int
    leased_bytes: int = 0
    leased_limit: int = 0


class PeerLost(Event, frozen=True, tag=27):
    """``actor`` declared worker ``peer`` lost, for ``reason``; or it left, which ``reason`` says then."""

    thread: int
    actor: int
    peer: int
    reason: str = ""


class CallFailed(Event, frozen=True, tag=33):
    """``actor`` gave up its request ``message_id`` to worker ``peer``: it raised ``error``, a class, itself.

    The deadline has passed, or the peer was lost, or the worker has shut down.
    """

    thread: int
    actor: int
    peer: int
    message_id: int
    error: str


@functools.cache
def tag_of(kind: type[Event]) -> int:
    """The first element of the events of a kind."""
    tag = kind.__struct_config__.tag
    assert isinstance(tag, int)
    return tag


def decoded() -> Any:
    """The type of what a log has: any of the events above."""
    kinds: list[type[Event]] = [Event]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return functools.reduce(operator.or_, (kind for kind in kinds if kind.__struct_config__.tag is not None))


class ProcessInfo(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The process of a log; the first record of the file.

    ``wall`` and ``monotonic`` are both clocks, in nanoseconds, at the same moment. ``clock`` identifies the
    monotonic clock: processes with the same one share it, so their times need no alignment; empty: unknown.
    ``job`` is set by the launcher; without one, workers tell it (:class:`ActorStarted`). ``library`` is the
    directory of this package there: its frames in stacks are not of the program.
    """

    host: str
    pid: int
    wall: WallTime
    monotonic: Time
    clock: str = ""
    job: str = ""
    program: str = ""
    parent: int = 0
    library: str = ""
