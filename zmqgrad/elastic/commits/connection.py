"""How a worker reaches the holder of its commits: by a unix socket of its agent, or within its process.

The socket is in a directory that only this user can enter. Each request is one packet, and so is its reply,
with the descriptor of a segment if it names one. A reply has the number of its request: that to one which
Ctrl-C has interrupted is not taken for that to the next.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from zmqgrad import environment
from zmqgrad.elastic.commits.agreement import REPLICATED, Choice
from zmqgrad.elastic.commits.holder import Alone, Holder
from zmqgrad.errors import CommitError
from zmqgrad.runtime.clock import Deadline

logger = logging.getLogger(__name__)

MAX_PACKET_BYTES = 64 << 10

REPLY_SECONDS = 30.0
"""How long an agent may take to reply, beyond what a request waits for."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first packet: worker ``rank`` of ``round``. Reply: Done."""

    rank: int
    round: int


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Agree on a commit. Reply: Choice."""

    saved: tuple[int, ...]
    seconds: float


class Open(msgspec.Struct, frozen=True, tag=True):
    """Where a part of the chosen commit is. Reply: Room."""

    rank: int
    seconds: float


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Give me memory for a commit. Reply: Room."""

    number: int
    size: int
    seconds: float


class Written(msgspec.Struct, frozen=True, tag=True):
    """The commit is written: rank, offset and size of each part. Reply: Done."""

    number: int
    shards: int
    parts: tuple[tuple[int, int, int], ...]


class Await(msgspec.Struct, frozen=True, tag=True):
    """Wait until the commit is whole. Reply: Done."""

    number: int
    seconds: float


class Done(msgspec.Struct, frozen=True, tag=True):
    """Reply: done. Or not, because of ``error``."""

    error: str = ""


class Room(msgspec.Struct, frozen=True, tag=True):
    """Reply, with its descriptor: a segment of ``size`` bytes, and where in it the part is.

    ``fd`` is set where it arrives; the caller closes it.
    """

    segment: int
    size: int
    offset: int = 0
    length: int = 0
    fd: int = -1


class Chosen(msgspec.Struct, frozen=True, tag=True):
    """Reply: the choice."""

    choice: Choice


Request = Hello | Restore | Open | Begin | Written | Await
Reply = Done | Room | Chosen

decode_request = msgspec.msgpack.Decoder(tuple[int, Request]).decode
decode_reply = msgspec.msgpack.Decoder(tuple[int, Reply]).decode
encode = msgspec.msgpack.encode


class Place(NamedTuple):
    """Of this process in its job."""

    rank: int = 0
    world_size: int = 1
    is_first_of_host: bool = True


def reply_to(request: Request, holder: Holder, rank: int) -> tuple[Reply, list[int]]:
    """Carry out ``request`` of ``rank``. Returns the reply, and descriptors for it, which the holder keeps.

    Raises:
        CommitError: as the methods of :class:`Holder`.
    """
    match request:
        case Restore(saved, seconds):
            return Chosen(holder.restore(rank, saved, Deadline.after(seconds))), []
        case Open(owner, seconds):
            segment, offset, size = holder.open(owner, Deadline.after(seconds))
            return Room(segment.id, segment.size, offset, size), [segment.fd]
        case Begin(number, size, seconds):
            segment = holder.begin(rank, number, size, Deadline.after(seconds))
            return Room(segment.id, segment.size), [segment.fd]
        case Written(number, shards, parts):
            holder.commit(rank, number, shards, parts)
        case Await(number, seconds):
            holder.wait_whole(number, Deadline.after(seconds))
    return Done(), []


class Commits(ABC):
    """The holder of the commits of one rank. Its methods are those of :class:`Holder`, and raise as these."""

    place: Place

    @abstractmethod
    def _ask(self, request: Request, seconds: float = 0.0) -> Reply:
        """The reply to ``request``, which may wait ``seconds``."""

    def restore(self, saved: tuple[int, ...], seconds: float) -> Choice:
        reply = self._ask(Restore(saved, seconds), seconds)
        assert isinstance(reply, Chosen)
        return reply.choice

    def open(self, rank: int, seconds: float) -> Room:
        reply = self._ask(Open(rank, seconds), seconds)
        assert isinstance(reply, Room)
        return reply

    def begin(self, number: int, size: int, seconds: float) -> Room:
        reply = self._ask(Begin(number, size, seconds), seconds)
        assert isinstance(reply, Room)
        return reply

    def commit(self, number: int, shards: int, parts: Sequence[tuple[int, int, int]]) -> None:
        self._ask(Written(number, shards, tuple(parts)))

    def wait_whole(self, number: int, seconds: float) -> None:
        self._ask(Await(number, seconds), seconds)


def connect() -> Commits:
    """Connect to the agent of this process; without an agent, hold commits here.

    Raises:
        CommitError: if the agent does not reply.
    """
    launch, address = environment.read_launch(), environment.commits_address()
    place = Place(launch.rank or 0, launch.world_size or 1, not launch.local_rank)
    if address is not None:
        return AgentCommits(place, *address)
    logger.warning(
        "commits are in this process only, as no agent has started it: they are lost with it, and not agreed "
        "upon with other ranks. Start the program by `zmqgrad run`, or save() to disk"
    )
    return OwnCommits(place)


class OwnCommits(Commits):
    """Within this process: the only rank, as far as the holder knows."""

    def __init__(self, place: Place) -> None:
        self.place = place._replace(is_first_of_host=True)
        self._holder = Holder()
        self._holder.begin_round(0, [0], Alone(self._holder))

    def _ask(self, request: Request, seconds: float = 0.0) -> Reply:
        reply, fds = reply_to(request, self._holder, 0)
        return msgspec.structs.replace(reply, fd=os.dup(fds[0])) if isinstance(reply, Room) else reply

    def _own(self, rank: int) -> int:
        return rank if rank == REPLICATED else 0

    def restore(self, saved: tuple[int, ...], seconds: float) -> Choice:
        choice = super().restore(saved, seconds)
        shards = self.place.world_size if choice.shards else 0
        return msgspec.structs.replace(choice, shards=shards, origin=0)  # other ranks have another

    def open(self, rank: int, seconds: float) -> Room:
        return super().open(self._own(rank), seconds)

    def commit(self, number: int, shards: int, parts: Sequence[tuple[int, int, int]]) -> None:
        shards = min(shards, 1)
        super().commit(number, shards, [(self._own(rank), offset, size) for rank, offset, size in parts])
        self._holder.spread(0, number, shards)
        self._holder.make_whole(number)  # Ctrl-C may have kept an attempt before from that


class AgentCommits(Commits):
    """With the agent that listens at ``path``."""

    def __init__(self, place: Place, round: int, path: str) -> None:
        self.place = place
        self._requests = itertools.count()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        weakref.finalize(self, self._socket.close).atexit = False  # a program may commit at exit
        try:
            self._socket.settimeout(REPLY_SECONDS)
            self._socket.connect(path)
            self._ask(Hello(place.rank, round))
        except BaseException as e:
            self._socket.close()
            if isinstance(e, OSError):
                raise CommitError(f"the agent does not reply at {path}: {e}") from e
            raise

    def _ask(self, request: Request, seconds: float = 0.0) -> Reply:
        deadline = Deadline.after(seconds + REPLY_SECONDS)
        number, replied = next(self._requests), -1
        try:
            self._socket.settimeout(deadline.timeout())
            self._socket.send(encode((number, request)))
            while replied != number:
                self._socket.settimeout(deadline.timeout())
                data, fds, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 1)
                if not data:
                    raise ConnectionResetError
                replied, reply = decode_reply(data)
                if replied != number:
                    for fd in fds:
                        os.close(fd)
        except ConnectionError as e:
            raise CommitError(
                "the agent has closed its connection to this State: the round has ended, or the process has "
                "made another State. Pass all values to one"
            ) from e
        except OSError as e:
            raise CommitError(f"the agent of this worker does not reply: {e}") from e
        if isinstance(reply, Done) and reply.error:
            raise CommitError(reply.error)
        return msgspec.structs.replace(reply, fd=fds[0]) if isinstance(reply, Room) and fds else reply
