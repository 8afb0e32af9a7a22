"""Two pipes beside a unix socket, for small questions and answers: the shortest way of one host.

A small message takes half as long by a pipe as by a socket, and whoever waits at one is woken by nothing but
what he waits for. A server makes them for those who come nearby (:mod:`~zmqgrad.transport.requests.nearby`),
keeps an end of each, and hands the others over with its first word. The socket stays: it takes what is
large, and tells each side that the other has gone. Who gets no pipes, or loses them, does without.
"""

from __future__ import annotations

import fcntl
import io
import os
import resource
import socket

LARGEST = 16 << 10
"""Bytes of a message that goes by a pipe, which has room for so many: it goes whole, or not at all."""

USUAL = 448
"""Bytes that are read at a time: Python has room for so few at hand. More are rare, and read after them."""

ELSEWHERE = b"\0\0"
"""What goes by a pipe if the answer comes by the connection. To ZMTP it is a message of no bytes."""

MOST = 128
"""How many clients of a server have pipes, which cost two descriptors more at either side; and no more than
a client for each ``SHARE`` of those that the server's process may have."""

SHARE = 8

SIZE = 4096
"""How much is read of what is said first, with which the pipes come."""

Ends = tuple[io.FileIO, io.FileIO]
"""Where one side reads, and where it writes; neither blocks."""


def has_room(there: int) -> bool:
    """May a server that has given pipes to so many clients give them to one more?"""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return there < MOST and (allowed == resource.RLIM_INFINITY or there < allowed // SHARE)


def send_with_pipes(connection: socket.socket, said: bytes) -> Ends | None:
    """Send ``said``, a few bytes, on a new unix connection, and two pipes with it. Gives our ends.

    None: it cannot be done, and nothing has been sent.
    """
    ours: list[int] = []
    theirs: list[int] = []
    try:
        for near, far in ((0, 1), (1, 0)):  # one to read from, then one to write to
            pipe = os.pipe()
            ours.append(pipe[near])
            theirs.append(pipe[far])
            fcntl.fcntl(pipe[0], fcntl.F_SETPIPE_SZ, LARGEST)
        socket.send_fds(connection, [said], [theirs[1], theirs[0]])
    except OSError:
        _close(ours)
        return None
    finally:
        _close(theirs)
    return _ends(ours)


def receive_with_pipes(connection: socket.socket) -> tuple[bytes, Ends | None]:
    """What has been said first on a new unix connection, and our ends of the pipes that came with it.

    Raises:
        OSError: if nothing comes.
    """
    said, numbers, _, _ = socket.recv_fds(connection, SIZE, 2, socket.MSG_CMSG_CLOEXEC)
    if len(numbers) != 2:  # the system had none to give, here or there
        _close(numbers)
        return said, None
    return said, _ends(numbers)


def _ends(numbers: list[int]) -> Ends:
    for number in numbers:
        os.set_blocking(number, False)
    return io.FileIO(numbers[0], "rb"), io.FileIO(numbers[1], "wb")


def _close(numbers: list[int]) -> None:
    for number in numbers:
        os.close(number)


def the_rest(reads: io.FileIO, said: bytes) -> bytes:
    """``said``, which has been read, and what has not."""
    return said + (reads.read(LARGEST) or b"") if len(said) == USUAL else said
