"""Delays all packets between two hosts, also where the kernel has no netem: they pass through this process.

Each host gets a tun device, and a route to the other host through it. A thread reads the packets of both
devices, and writes each to the other device when its time has come.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.support.namespaces import CLONE_NEWNET, Hosts
from zmqgrad.runtime.clock import MONOTONIC

ONE_WAY_SECONDS = 0.1

DEVICE = "zgdelay"

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_MAX_PACKET = 1 << 16


@contextmanager
def delayed(hosts: Hosts, seconds: float = ONE_WAY_SECONDS) -> Iterator[None]:
    """Packets between ``hosts`` take ``seconds`` longer each way meanwhile."""
    with ExitStack() as undo:
        ends = []
        for name, own, other in zip(hosts.names, hosts.addresses, reversed(hosts.addresses), strict=True):
            ends.append(_open_device(name))
            undo.callback(os.close, ends[-1])
            hosts.command(name, "ip", "link", "set", DEVICE, "up")
            hosts.command(name, "ip", "route", "add", f"{other}/32", "dev", DEVICE, "src", own)
        stop, stopped = os.pipe()
        undo.callback(os.close, stop)
        thread = threading.Thread(target=_relay, args=(ends, stop, seconds), name="delay", daemon=True)
        thread.start()
        undo.callback(thread.join, 10)
        undo.callback(os.close, stopped)
        yield


def _open_device(namespace: str) -> int:
    """Makes the tun device of a host. It is gone, with its routes, when its descriptor is closed."""
    made: list[int] = []

    def make() -> None:
        with open(f"/run/netns/{namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                return
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        made.append(fd)

    # Only this thread enters the namespace.
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not made:
        raise OSError(f"no tun device in {namespace}")
    return made[0]


def _relay(ends: list[int], stop: int, seconds: float) -> None:
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        now = MONOTONIC.now()
        while waiting and waiting[0][0] <= now:
            _, end, packet = waiting.popleft()
            os.write(end, packet)
        ready, _, _ = select.select([*ends, stop], [], [], waiting[0][0] - now if waiting else None)
        if stop in ready:
            return
        for end, other in zip(ends, reversed(ends), strict=True):
            if end in ready:
                waiting.append((MONOTONIC.now() + seconds, other, os.read(end, _MAX_PACKET)))
