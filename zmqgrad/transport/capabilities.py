"""Reports what the installed ZeroMQ library and this system support."""

from __future__ import annotations

import os

import zmq

from zmqgrad.transport.shared_memory.segment import Segment, supported


def libzmq_version() -> str:
    """Returns the version of the library beneath pyzmq."""
    return zmq.zmq_version()


def has_curve() -> bool:
    """Returns whether libzmq was built with CURVE encryption."""
    return zmq.has("curve")


def ipc_problem() -> str:
    """Returns why processes of this host cannot communicate by ipc; empty if they can."""
    if not zmq.has("ipc"):
        return "libzmq was built without ipc"
    context = zmq.Context()
    try:
        with context.socket(zmq.PAIR) as one:
            one.linger = 0
            one.bind(f"ipc://@zmqgrad-doctor-{os.getpid()}" if os.path.isdir("/proc") else "ipc://*")
    except zmq.ZMQError as e:
        return str(e)
    finally:
        context.term()
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
