"""A write that holds the interpreter does what the socket's own does."""

from __future__ import annotations

import socket

import pytest

from zmqgrad.transport.holding import send_holding


def test_it_writes_and_says_when_it_cannot() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert send_holding(ours.fileno(), b"a\0b") == 3
        assert theirs.recv(10) == b"a\0b"
        ours.setblocking(False)
        while _takes_more(ours):
            pass
        ours.setblocking(True)
        with pytest.raises(BlockingIOError):  # where the socket's own would wait
            send_holding(ours.fileno(), b"x")
        theirs.close()
        with pytest.raises(BrokenPipeError):
            send_holding(ours.fileno(), b"x")
    with pytest.raises(OSError, match="file descriptor"):
        send_holding(-1, b"x")


def _takes_more(full: socket.socket) -> bool:
    try:
        return full.send(bytes(1 << 10)) > 0
    except BlockingIOError:
        return False
