"""Whether peers live: a broken connection raises a suspicion, and nobody listening any more settles it.

libzmq reconnects by itself and says nothing, so a peer whose process ended would be missed only when calls
run over time. A monitor on each way out tells of a disconnect; the peer's address is then tried for real.
While it answers, the peer lives (or is just ending: it is tried again for a while). A frozen process goes
on to answer here, as its system does for it.
"""

from __future__ import annotations

import logging
import secrets
import socket as sockets
import threading
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from zmqgrad.runtime.clock import Deadline

logger = logging.getLogger(__name__)

TRY_MS = 50
"""Milliseconds between two looks at a suspect."""

SUSPECT_SECONDS = 3.0
"""A suspect that still answers after so long lives: only its connection broke."""

PROBE_SECONDS = 1.0
"""How long a tcp connection may take; a host that does not answer at all proves nothing."""

EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


def answers(endpoint: str) -> bool:
    """Does anybody listen at ``endpoint``? True as well if that cannot be told."""
    if endpoint.startswith("ipc://"):
        path = endpoint[len("ipc://") :]
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
            probe.setblocking(False)
            return probe.connect_ex("\0" + path[1:] if path.startswith("@") else path) == 0
    if not endpoint.startswith("tcp://"):
        return True
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        sockets.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return False
    except OSError as e:
        logger.debug("cannot tell whether %s answers: %s", endpoint, e)
    return True


class Watch:
    """Watches the ways out of one mailbox, in a thread named ``<name>-liveness``."""

    def __init__(
        self, name: str, context: zmq.Context[zmq.Socket[bytes]], lost: Callable[[int, str], None]
    ) -> None:
        self._context = context
        self._lost = lost
        self._token = secrets.token_hex(8)
        self._number = 0
        self._lock = threading.Lock()  # guards _orders and _number
        orders: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        orders.bind(f"inproc://watch-{self._token}")
        self._orders: zmq.Socket[bytes] | None = orders
        self._thread = threading.Thread(target=self._run, name=f"{name}-liveness", daemon=True)
        self._thread.start()

    def follow(self, peer: int, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Watch ``socket``, which is about to be connected to ``peer`` at ``endpoint``."""
        with self._lock:
            if self._orders is None:
                return
            self._number += 1
            address = f"inproc://watch-{self._token}-{self._number}"
            socket.monitor(address, EVENTS)
            self._orders.send(f"{peer} {address} {endpoint}".encode())

    def close(self) -> None:
        """Watch no more. Idempotent."""
        with self._lock:
            if self._orders is not None:
                self._orders.send(b"")
                self._orders.close(linger=-1)  # inproc: delivered in memory
                self._orders = None

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the thread; gives its name if it has not ended by ``deadline``."""
        self._thread.join(deadline.left_or_none())
        return [self._thread.name] if self._thread.is_alive() else []

    def _run(self) -> None:
        poller = zmq.Poller()
        orders: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        orders.connect(f"inproc://watch-{self._token}")
        poller.register(orders, zmq.POLLIN)
        monitors: dict[Any, tuple[int, str]] = {}
        suspects: dict[int, tuple[str, Deadline]] = {}
        try:
            while True:
                ready = poller.poll(TRY_MS if suspects else None)
                for socket, _ in ready:
                    if socket is orders:
                        order = orders.recv()
                        if not order:
                            return
                        peer, address, endpoint = order.decode().split(" ", 2)
                        monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
                        monitor.linger = 0
                        monitor.connect(address)
                        poller.register(monitor, zmq.POLLIN)
                        monitors[monitor] = int(peer), endpoint
                    elif recv_monitor_message(socket)["event"] == zmq.EVENT_MONITOR_STOPPED:
                        poller.unregister(socket)
                        del monitors[socket]
                        socket.close(linger=0)
                    else:
                        number, where = monitors[socket]
                        suspects[number] = where, Deadline.after(SUSPECT_SECONDS)
                self._look_at(suspects)
        finally:
            for socket in (orders, *monitors):
                socket.close(linger=0)

    def _look_at(self, suspects: dict[int, tuple[str, Deadline]]) -> None:
        for peer, (endpoint, deadline) in list(suspects.items()):
            if not answers(endpoint):
                del suspects[peer]
                try:
                    self._lost(peer, f"nobody listens at {endpoint} any more")
                except Exception:
                    logger.exception("telling of the loss of worker %d failed", peer)
            elif deadline.passed():
                del suspects[peer]
