"""What a trace tells about a job: its processes and actors, messages and calls. Made by a :class:`Job`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path as FilePath
from typing import NamedTuple

import msgspec

from zmqgrad.trace.events import Event, Path, ProcessInfo, Role, ThreadDeclared
from zmqgrad.trace.kinds import type_name
from zmqgrad.wire.messages import MessageType

JUMP_NANOSECONDS = 100_000_000
"""A wall clock that moves by more than this against the monotonic one between two samples has jumped."""


class Actor(msgspec.Struct, eq=False):
    """What sent and received in a process: a worker, a store client, a store server, a rendezvous node."""

    process: Process
    number: int
    role: Role
    name: str
    rank: int
    incarnation: int
    job: str
    address: str
    started: int
    stopped: int | None = None
    """None if it was not closed: it was killed, or its job still runs."""

    def __repr__(self) -> str:
        return f"<{self.role.name.lower()} {self.name or self.address} of process {self.process.info.pid}>"


class Process(msgspec.Struct, eq=False):
    """One process of a job, and what its log declares. Times are of its own clock."""

    path: FilePath
    info: ProcessInfo
    actors: dict[int, Actor] = {}
    named: list[Actor] = []
    """Its workers and rendezvous nodes: it may have opened thousands of stores beside them."""
    threads: dict[int, ThreadDeclared] = {}
    names: dict[int, str] = {}
    first: int = 0
    last: int = 0
    events: int = 0
    dropped: int = 0
    dropped_until: int = 0
    """Before this time, events may have been dropped."""
    samples: list[tuple[int, int]] = []
    """The wall clock at times of its own clock, with that time: the first, and those where it was set."""
    damage: str = ""
    """Why its log cannot be read to the end; empty: it can."""
    is_live: bool = False
    """Whether it still records; see :meth:`zmqgrad.trace.job.Job.cut_live`."""

    @property
    def has_end(self) -> bool:
        """Whether its log ends with all of its actors closed. False: cut, killed, or still running."""
        return bool(self.actors) and all(actor.stopped is not None for actor in self.actors.values())

    @property
    def clock(self) -> str:
        """The id of its clock. Processes with the same id share a clock."""
        return self.info.clock or f"{self.info.host} {self.info.pid}"

    @property
    def wall_offset(self) -> int:
        """What its wall clock was ahead of its monotonic clock when the log began."""
        return self.info.wall - self.info.monotonic

    @property
    def wall_span(self) -> tuple[int, int]:
        """The wall times between which it has its log, whichever was right if its wall clock was set."""
        offsets = [self.wall_offset, *(wall - time for wall, time in self.samples)]
        return self.info.monotonic + min(offsets), self.last + max(offsets)

    @property
    def jumps(self) -> list[int]:
        """The times at which its wall clock was set."""
        samples = [(self.info.wall, self.info.monotonic), *self.samples]
        moved = [(time, wall - time - (w - t)) for (w, t), (wall, time) in itertools.pairwise(samples)]
        return [time for time, by in moved if abs(by) > JUMP_NANOSECONDS]

    def thread_name(self, number: int) -> str:
        """The name of thread ``number``."""
        declared = self.threads.get(number)
        return declared.name if declared is not None else f"thread {number}"

    def jobs(self) -> set[str]:
        """The jobs it belongs to: that of its launcher, or those of its workers."""
        return {self.info.job} if self.info.job else {a.job for a in self.actors.values() if a.job}

    def __repr__(self) -> str:
        names = ", ".join(a.name for a in self.actors.values() if a.role is Role.WORKER)
        return f"<process {self.info.pid} on {self.info.host}{names and f': {names}'}>"


def newest_job(processes: Iterable[Process]) -> str:
    """The job of the process that began last; empty: none belongs to a job."""
    began = [(process.info.wall, job) for process in processes for job in process.jobs()]
    return max(began, default=(0, ""))[1]


class Stamped(NamedTuple):
    """An event with its time on the clock of the job. ``actor`` is None if it concerns none."""

    time: int
    process: Process
    actor: Actor | None
    event: Event


class Message(msgspec.Struct, eq=False):
    """A message: its send, its receive, or usually both. What only the other end knows is None."""

    kind: int
    message_id: int
    source: Actor | None = None
    target: Actor | None = None
    sent: int | None = None
    received: int | None = None
    sender_thread: int = 0
    receiver_thread: int = 0
    context: int = 0
    name: str = ""
    size: int = 0
    path: Path = Path.INLINE
    peer: int = 0
    """The rank of the other worker as the first event tells it; known even if that worker has no log."""
    sending: int = 0
    """The nanoseconds that its sender took to copy and send it; 0: it is small."""
    requester: int = 0
    """Who asked: the incarnation of a worker, or the channel of a store's client; 0: unknown."""

    @property
    def type(self) -> str:
        """The name of the message type."""
        return type_name(self.kind)

    @property
    def key(self) -> tuple[int, int]:
        """The requester and the message id, by which a request and its reply belong together."""
        return self.requester, self.message_id

    @property
    def time(self) -> int:
        """The time at which it was sent; of its receive if the send was not recorded."""
        return self.sent if self.sent is not None else self.received or 0

    @property
    def transfer(self) -> int | None:
        """The nanoseconds from its send to its receive; None if one was not recorded."""
        if self.sent is None or self.received is None:
            return None
        return max(self.received - self.sent - self.sending, 0)


class Call(msgspec.Struct, eq=False):
    """A request with its reply, and what happened to it at the server. What is unknown is None."""

    request: Message
    reply: Message | None = None
    started: int | None = None
    finished: int | None = None
    thread: int = 0
    failed: bool = False
    given_up: int | None = None
    """When its caller got an error, of the class ``error``, without a reply: after a timeout, for example."""
    error: str = ""
    function: str = ""
    arguments: str = ""
    serializing: int = 0
    """The nanoseconds that both ends took to serialize arguments and result."""
    contents: list[tuple[bool, tuple[int, int, int, int]]] = []
    """The contents of large tensors, as :class:`~zmqgrad.trace.events.Serialized` has them; of the result?"""

    @property
    def sending(self) -> int:
        """The nanoseconds that both ends took to serialize, copy and send the call and its reply."""
        return self.serializing + self.request.sending + (self.reply.sending if self.reply else 0)

    @property
    def is_complete(self) -> bool:
        """Whether the reply has arrived."""
        return self.reply is not None and self.reply.received is not None

    @property
    def has_failed(self) -> bool:
        """Whether it raised at its caller."""
        return self.given_up is not None or self.has_raised

    @property
    def has_raised(self) -> bool:
        """Whether the function raised, as its server recorded or its reply shows."""
        return self.failed or (self.reply is not None and self.reply.kind == MessageType.EXCEPTION)

    @property
    def duration(self) -> int | None:
        """The nanoseconds from the send to the arrival of the reply; None if one was not recorded."""
        if self.reply is None or self.reply.received is None or self.request.sent is None:
            return None
        return self.reply.received - self.request.sent

    @property
    def queued(self) -> int | None:
        """How long the request waited for a thread at the server."""
        if self.started is None or self.request.received is None:
            return None
        return self.started - self.request.received

    @property
    def running(self) -> int | None:
        """How long it ran at the server until its reply was sent: not what its thread does after that."""
        if self.started is None or self.finished is None:
            return None
        sent = self.reply.sent if self.reply is not None else None
        return max((self.finished if sent is None else min(self.finished, sent)) - self.started, 0)


class Declared:
    """What a log declares; the incarnations of peers as declared so far."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.names = process.names
        self.incarnations: dict[tuple[int, int], int] = {}

    def entries(self, events: Iterable[Event], convert: Callable[[int], int]) -> list[Entry]:
        """The events as they are in a merged stream, with times that ``convert`` returns."""
        find = self.process.actors.get
        return [(convert(event.time), self, find(getattr(event, "actor", 0)), event) for event in events]


Entry = tuple[int, Declared, Actor | None, Event]
"""An event in a merged stream: its time on the clock of the job, what its log declares, its actor."""
