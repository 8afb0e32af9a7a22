"""How this floor opens ZeroMQ sockets: bounds at birth, and errors that name the address."""

from __future__ import annotations

import zmq

from zmqgrad.errors import AddressInUseError, TransportError
from zmqgrad.transport.exposure import check_exposure
from zmqgrad.transport.security import Keys, key_caller, key_listener
from zmqgrad.wire.frames import MAX_HEADER

HANDSHAKE_MS = 10_000
"""How long a connection may take to say who it is."""

LARGE = 64 << 10
"""Frames of at least so many bytes are handed to libzmq without a copy."""


def set_up(socket: zmq.Socket[bytes]) -> None:
    """What every socket gets at birth: no linger, no high-water mark, a bound on a frame's size."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)


def bind(socket: zmq.Socket[bytes], address: str, keys: Keys | None = None) -> str:
    """Listen on ``address``, to those who have ``keys``; gives it with the port that was picked."""
    check_exposure(address, keys is not None)
    if keys is not None:
        key_listener(socket, keys)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(address)
    except zmq.ZMQError as e:
        if e.errno == zmq.EADDRINUSE:
            raise AddressInUseError(
                f"cannot listen on {address}: another socket does. Choose another port, or end the process "
                f"that has this one"
            ) from e
        raise TransportError(f"cannot listen on {address}: {e}") from e
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect(socket: zmq.Socket[bytes], address: str, keys: Keys | None = None) -> None:
    """Connect to ``address``, now or whenever somebody listens there who has ``keys``."""
    if keys is not None:
        key_caller(socket, keys)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.connect(address)
    except zmq.ZMQError as e:
        raise TransportError(f"cannot connect to {address}: {e}") from e


def send(socket: zmq.Socket[bytes], frame: bytearray) -> None:
    """Queue a last frame; high-water marks are zero, so this never blocks."""
    socket.send(frame, zmq.NOBLOCK, copy=len(frame) < LARGE)
