"""Monitors of sockets that nobody reads any more must not stop the other sockets of their context."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import zmq

from tools.ports import free_port
from zmqgrad.transport.sockets import CONNECT_FAILED, CONNECTED, DISCONNECTED, SocketMonitor

SECONDS = 10


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def is_alive(context: zmq.Context[zmq.Socket[bytes]]) -> bool:
    """Whether two sockets of ``context`` reach each other by tcp."""
    with context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        push.linger = 0
        push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
        push.send(b"")
        return bool(pull.poll(SECONDS * 1000))


def fails_to_connect(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """A socket that reports an event every millisecond, once it is told to connect."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.reconnect_ivl = 1
    return socket


def drop(monitor: SocketMonitor) -> None:
    """Nothing refers to it any more, and nobody has closed it."""


def close(monitor: SocketMonitor) -> None:
    monitor.close()


@pytest.mark.parametrize("end", [drop, close])
def test_a_monitor_that_is_gone_blocks_no_other_socket(
    context: zmq.Context[zmq.Socket[bytes]], end: Callable[[SocketMonitor], None]
) -> None:
    socket = fails_to_connect(context)
    end(SocketMonitor(socket, CONNECTED | DISCONNECTED | CONNECT_FAILED))
    socket.connect(f"tcp://127.0.0.1:{free_port()}")
    assert is_alive(context)
    socket.close()
