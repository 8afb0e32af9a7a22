"""Ports for servers that others are told of before they listen."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path


def free_port() -> int:
    """Returns a port at which nothing listens just now, and that no other caller has got.

    Not one that the system picks: the next connection of any program could be given it before we use it.
    """
    while True:
        port = next(_ports())
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


SHARES = 8
"""Each process of pytest-xdist has ports of its own."""


@functools.cache
def _ports() -> Iterator[int]:
    picked_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SHARES
    ports = list(range(10_000 + share, picked_from if picked_from > 11_000 else 65_536, SHARES))
    random.SystemRandom().shuffle(ports)  # not seeded, for the same test may be running beside this one
    return itertools.cycle(ports)
