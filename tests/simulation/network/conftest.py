"""The world that a test runs in: the real one, or the model of it."""

from __future__ import annotations

import itertools
import os
import select
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from zmqgrad.testing.simulation.network import ManualScheduler, Network

_numbers = itertools.count()


class World:
    """The modules of one process; ``os`` has the functions for descriptors only."""

    def __init__(self, model: bool) -> None:
        self.model = model
        if model:
            self.network = Network(ManualScheduler())
            process = self.process = self.network.process("host0", 101)
            modules = process.modules
            self.socket: Any = modules["socket"]
            self.select: Any = modules["select"]
            self.zmq: Any = modules.get("zmq")
            self.os: Any = SimpleNamespace(**process.os_functions)
            self.pid = 101
        else:
            self.socket, self.select, self.zmq, self.os, self.pid = socket, select, zmq, os, os.getpid()

    def name(self) -> str:
        """Returns an abstract name that nothing has."""
        return f"\0zmqgrad-test-{os.getpid()}-{next(_numbers)}"

    def ready(self, fd: Any, mask: int, milliseconds: float = 0) -> int:
        """Returns the events of ``fd`` among ``mask``, after waiting for one."""
        poll = self.select.poll()
        poll.register(fd, mask)
        found = poll.poll(milliseconds)
        return int(found[0][1]) if found else 0


@pytest.fixture(params=["real", "model"])
def world(request: pytest.FixtureRequest) -> World:
    """The real modules, or those of the model."""
    return World(request.param == "model")
