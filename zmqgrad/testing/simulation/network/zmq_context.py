"""A context of libzmq: its sockets, its names within the process, and its I/O thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from zmqgrad.testing.simulation.network.kernel import Process
from zmqgrad.testing.simulation.network.scheduler import State
from zmqgrad.testing.simulation.network.zmq_pipes import connect
from zmqgrad.testing.simulation.network.zmq_sockets import TYPES, Core, Monitor

if TYPE_CHECKING:
    from zmqgrad.testing.simulation.network.zmq_engine import Session


class IoThread:
    """Does in order what it is asked for; when, is up to the scheduler."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._waiting: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def post(self, act: Callable[[], None]) -> None:
        """Calls ``act`` soon."""
        self._waiting.append(act)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._process.soon(self._run, self._process.network.faults.io_delay())

    def _run(self) -> None:
        self._scheduled = False
        self._waiting.popleft()()
        if self._waiting:
            self._schedule()


class ContextCore:
    """A context of libzmq."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.io = IoThread(process)
        self.cores: list[Core] = []
        self.sessions: set[Session] = set()
        self.contents = State()
        """Of :attr:`cores` and :attr:`sessions`, for who waits until there are none."""
        self.terminated = False
        self.names: dict[str, Core | Monitor] = {}
        """What is bound within this process."""
        self._early: list[tuple[str, Core]] = []  # connected to a name that was not bound

    def open(self, kind: int) -> Core:
        """Returns a new socket.

        Raises:
            zmq.ContextTerminated: after :meth:`terminate`.
        """
        if self.terminated:
            raise zmq.ContextTerminated()
        if kind not in TYPES:
            raise NotImplementedError(f"sockets of type {kind} in the simulation")
        core = TYPES[kind](self, kind)
        self.cores.append(core)
        return core

    def bind_name(self, name: str, owner: Core | Monitor) -> None:
        """Binds ``owner`` to ``name``.

        Raises:
            zmq.ZMQError: if it is in use.
        """
        if name in self.names:
            raise zmq.ZMQError(zmq.EADDRINUSE)
        self.names[name] = owner
        early, self._early = self._early, []
        for wanted, core in early:
            self.connect_name(wanted, core)

    def forget_name(self, owner: Core | Monitor) -> None:
        """Unbinds all names of ``owner``."""
        self.names = {name: one for name, one in self.names.items() if one is not owner}

    def connect_name(self, name: str, core: Core) -> None:
        """Connects ``core`` to ``name``, now or once it is bound."""
        if core.closed:
            return
        bound = self.names.get(name)
        if bound is None:
            self._early.append((name, core))
            return
        if isinstance(bound, Monitor):
            core.attach(bound.connected(core))
            return
        send, receive = core.options[zmq.SNDHWM], core.options[zmq.RCVHWM]
        theirs_in, theirs_out = bound.options[zmq.RCVHWM], bound.options[zmq.SNDHWM]
        there = send + theirs_in if send and theirs_in else 0
        back = receive + theirs_out if receive and theirs_out else 0
        own, other = connect(core, bound, there, back)
        other.identity, own.identity = core.options[zmq.IDENTITY], bound.options[zmq.IDENTITY]
        core.attach(own)
        bound.command(lambda: bound.attach(other))

    def is_over(self) -> bool:
        """Returns whether nothing is open, nor lingers."""
        return not self.cores and not self.sessions

    def terminate(self) -> None:
        """Lets all calls fail, and waits until all sockets are closed."""
        self.terminated = True
        for core in self.cores:
            core.command(lambda: None)
        self.process.network.scheduler.wait_until(self.is_over, None, self.contents)
