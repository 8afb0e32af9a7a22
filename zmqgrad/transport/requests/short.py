"""Small questions and answers by two pipes: few steps, for the usual; all else goes by the connection.

Nearly all that goes between a store and its clients is a small question that is answered at once. Each side
does for it what :mod:`~zmqgrad.transport.zmtp` and :mod:`~zmqgrad.wire.codec` do in general, in one function:
two processes that take turns find little of their code in the processor's caches, and pay for each line.

Who has asked by pipe is answered by pipe. An answer that is too large for that goes by the connection, and
``ELSEWHERE`` by the pipe: who has asked waits at one place alone. Only whole messages go by a pipe, one at a
time, so whatever else is read there is an offence.
"""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Callable, Mapping
from typing import Any

from zmqgrad import environment
from zmqgrad.errors import ProtocolError
from zmqgrad.runtime.clock import Clock, Deadline
from zmqgrad.transport.looking import Eyes, Look
from zmqgrad.transport.requests.connection import Client
from zmqgrad.transport.requests.pipes import ELSEWHERE, LARGEST, USUAL, Ends, the_rest
from zmqgrad.transport.requests.whole import (
    HEADER,
    LAST,
    LONG_FLAG,
    NUMBER,
    READERS,
    START,
    STARTS,
    read,
    read_short,
    write,
    write_long,
    write_short,
)
from zmqgrad.transport.zmtp import HEAD_ROOM
from zmqgrad.wire.codec import UNREADABLE, UNWRITABLE, header_of
from zmqgrad.wire.frames import ENVELOPE_SIZE
from zmqgrad.wire.messages import Message

SOON_SECONDS = 0.1
"""Within so long nearly all is answered: only after that a client looks at anything but the pipe."""

SLICE_SECONDS = 1.0
"""How long it then waits in the kernel at a time."""

LOOK_SECONDS = 3e-4
"""So long either side looks before it sleeps: to wake up takes as long where a processor was idle."""

RECENTLY = 1e-3
"""Nobody looks where nothing came for so long before: the other side is asleep, and has to wake up anyway."""

UNUSUAL = (*UNREADABLE, KeyError, TypeError)
"""What reading says of what is not just a short message."""

NOTHING = b"", b""

_SOON_MS = int(SOON_SECONDS * 1000)


def eyes() -> Eyes:
    """What one side looks with, for no longer than ``ZMQGRAD_LOOK_US`` allows.

    Raises:
        ConfigurationError: if that is malformed.
    """
    allowed = environment.look_us()
    return Eyes(LOOK_SECONDS if allowed is None else min(LOOK_SECONDS, allowed * 1e-6))


class Asking:
    """The end of a client, which asks one thing at a time. Used by one thread at a time.

    ``connection`` is what the pipes came by; who hangs up on it ends what is waited for here.
    """

    __slots__ = ("_answered", "_clock", "_connection", "_ends", "_look", "_read", "_wait", "_write", "unsaid")

    def __init__(self, ends: Ends, connection: socket.socket, clock: Clock) -> None:
        self._ends = reads, writes = ends
        self._read, self._write = reads.read, writes.write
        poll = select.poll()
        poll.register(reads.fileno(), select.POLLIN)
        self._wait = poll.poll
        self._look = Look(eyes()).at
        self._connection = connection
        self._clock = clock
        self._answered = -math.inf
        self.unsaid = NOTHING
        """What has to be said by the connection yet, in two pieces."""

    def ask(self, message: Message, line: int, number: int, seconds: float) -> Message | None:
        """The answer to ``message``, question ``number`` on ``line``; None: it comes by the connection.

        Then see :attr:`unsaid`.

        Raises:
            OSError: if the connection has ended, or there is no answer within ``seconds``, which are at
                least ``SOON_SECONDS``.
            ProtocolError: if ``message`` cannot be written, or what comes back is no message of ours.
        """
        try:
            header = header_of(message)
            size = len(header) + ENVELOPE_SIZE
            if size < 256:
                head = write_short(size, STARTS[type(message)], line, number)
            else:
                head = write_long(LONG_FLAG, size, STARTS[type(message)], line, number)
        except UNWRITABLE:
            write(message, line, number)  # which says why not
            raise
        if size > LARGEST - HEAD_ROOM or self._write(head + header) is None:
            self.unsaid = head, header
            return None
        now = self._clock.now
        looked = now() - self._answered < RECENTLY and self._look(self._wait)
        if not looked and not self._wait(_SOON_MS):
            self._wait_on(seconds - SOON_SECONDS)
        heard = self._read(USUAL)
        self._answered = now()
        try:
            if heard[NUMBER] == head[LAST]:
                return READERS[heard[START]](heard[HEADER])
        except UNUSUAL:
            pass
        return self._other(heard, number)

    def _wait_on(self, seconds: float) -> None:
        """It takes longer: from now on, wait as well to be hung up on, here or there."""
        deadline = Deadline(self._clock.now() + seconds, self._clock)
        answers = self._ends[0].fileno()
        poll = select.poll()
        poll.register(answers, select.POLLIN)
        poll.register(self._connection, select.POLLIN)
        while not (ready := poll.poll(min(SLICE_SECONDS, deadline.left()) * 1000)):
            if deadline.passed():
                raise TimeoutError("it is silent")
        if answers not in dict(ready):
            raise ConnectionResetError("hung up")

    def _other(self, heard: bytes | None, number: int) -> Message | None:
        """What ``heard`` says, which is not just a short answer."""
        if not heard:  # None: another process, a fork, was quicker
            raise ConnectionResetError("hung up")
        if heard == ELSEWHERE:
            self.unsaid = NOTHING
            return None
        answer = read(the_rest(self._ends[0], heard))
        if answer is None or answer[1] != number:
            raise ProtocolError(f"no answer to question {number}, but {heard[:40]!r}")
        return answer[2]

    def close(self) -> None:
        """Idempotent. The other side finds out."""
        for end in self._ends:
            end.close()


Handler = Callable[[Client, int, int, Any], None]
"""Answers a question: of whom, on which line, with which number, and what it is."""

Handlers = Mapping[bytes, tuple[Callable[[bytes], Message], Handler]]
"""What reads a question, and what answers it, by how its envelope begins."""


class Hearing:
    """The end of a server, for ``client``, by which that is answered from its next question on.

    Args:
        other: called with what was read that is not just a short question; it is empty if the other side
            has closed its ends, and None if nothing was there.
        failed: called in the ``except`` of a handler that has failed, with the question.
    """

    __slots__ = ("_client", "_failed", "_handlers", "_other", "_read", "_reads", "_write", "heard")

    def __init__(
        self,
        ends: Ends,
        client: Client,
        handlers: Handlers,
        other: Callable[[Client, bytes | None], None],
        failed: Callable[[Message], None],
    ) -> None:
        self._reads, writes = ends
        self._read, self._write = self._reads.read, writes.write
        self._client = client
        self._handlers = handlers
        self._other = other
        self._failed = failed
        self.heard = 0
        """How many have come that were short and well-formed."""

    def hear(self) -> None:
        """Answer the question that there is to be read."""
        client = self._client
        said = self._read(USUAL)
        client.pipe = self._write
        try:
            start, line, number = read_short(said)
            reader, handle = self._handlers[start]
            question = reader(said[HEADER])  # complains of more as well as of less
        except UNUSUAL:
            self._other(client, said and the_rest(self._reads, said))
            return
        self.heard += 1
        try:
            handle(client, line, number, question)
        except Exception:
            self._failed(question)
