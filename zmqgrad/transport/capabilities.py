"""Reports what the installed ZeroMQ library and this system support."""

from __future__ import annotations

import socket

import zmq

from zmqgrad.transport import local
from zmqgrad.transport.shared_memory.segment import Segment, supported


def libzmq_version() -> str:
    """Returns the version of the library beneath pyzmq."""
    return zmq.zmq_version()


def has_curve() -> bool:
    """Returns whether libzmq was built with CURVE encryption."""
    return zmq.has("curve")


def ipc_problem() -> str:
    """Returns why processes of this host cannot communicate by unix sockets; empty if they can."""
    if not local.supported():
        return "this system has no unix sockets of type SOCK_SEQPACKET, or no abstract names"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
            one.bind(local.unix_name(local.abstract_endpoint("doctor")))
    except OSError as e:
        return str(e)
    return ""


def arena_problem() -> str:
    """Returns why tensors cannot be sent through shared memory; empty if they can."""
    if not supported():
        return "this system has no sealed memfd (it needs Linux and /proc)"
    try:
        Segment(1).close()
    except OSError as e:
        return f"no memory can be had for it: {e}"
    return ""
