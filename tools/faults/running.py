"""Runs one cell: starts its processes, strikes at the moment, and collects what happened."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import zmq

from tools.faults import network as net
from tools.faults import participant
from tools.faults.faults import FAULTS, Fault, send_garbage
from tools.faults.judging import judge
from tools.faults.model import Cell, Effect, History, Verdict
from tools.faults.network import Network
from tools.faults.participant import Participant, Place
from tools.faults.roles import ROLES, Role, act, move_in
from tools.ports import free_port
from zmqgrad.errors import StoreError
from zmqgrad.store import TCPStore

START_SECONDS = 60.0
REACH_SECONDS = 15.0
"""How long steps are made until the moment occurs."""

SETTLE_SECONDS = 4.0
"""How long a cell goes on after a loss, and in which nothing need be noticed."""

RECOVERED_SECONDS = 1.0
"""How long it goes on after a recovery."""

RECOVER_SECONDS = 45.0
END_SECONDS = 75.0
STACKS_SECONDS = 1.0

_context = multiprocessing.get_context("forkserver")


def preload() -> None:
    """Have processes be forks of one that has imported everything."""
    _context.set_forkserver_preload(["torch._dynamo", "tools.faults.running", "tests.support.frozen"])


class _Process:
    """A process of the cell, and what it has said."""

    def __init__(self, place: Place, work: Callable[[Participant], None], output: Path) -> None:
        self.place, self.output = place, output
        self.states: set[str] = set()
        self.endpoints: tuple[str, ...] = ()
        self.connection, theirs = _context.Pipe()
        self.process: ForkServerProcess = _context.Process(
            target=participant.run, args=(work, place, theirs, str(output)), name=place.name
        )
        self.process.start()
        theirs.close()

    def order(self, what: str) -> None:
        """Send an order; one that has ended needs none."""
        try:
            self.connection.send(what)
        except (BrokenPipeError, ConnectionResetError):
            self.states.add("ended")

    def kill(self) -> None:
        """End it and what it started."""
        try:
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()  # it has not become the leader of its group yet, or has ended
        self.process.join(10.0)
        self.process.close()
        self.connection.close()


class CellRun:
    """One cell. :meth:`run` does it all; it is a context that ends all processes."""

    def __init__(self, cell: Cell, limit_seconds: float = 180.0) -> None:
        self.cell = cell
        self.role: Role = ROLES[cell.role]
        self.fault: Fault = FAULTS[cell.fault]
        self.history = History()
        self.network: Network | None = None
        self.processes: list[_Process] = []
        self._undo = ExitStack()
        self._strike = ExitStack()
        self._deadline = time.monotonic() + limit_seconds
        self.directory = Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="zg-faults-")))

    def __enter__(self) -> CellRun:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            self._undo.callback(process.kill)
        with self._undo:
            self._strike.close()  # first: the end of a fault may need the victim

    def run(self) -> Verdict:
        """Runs the cell; returns its verdict."""
        self._prepare()
        self._start()
        if self._until(lambda: self._all("ready"), START_SECONDS, "not all processes were ready"):
            for process in self.processes:
                process.order("begin")
            self._strike_at_the_moment()
            if self.history.struck is not None:
                self._settle()
        self._finish()
        self._count_runs()
        return judge(self.fault.promise(self.role), self.history)

    # ---- beginning --------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        disk = self.directory / "disk"
        disk.mkdir()
        if "mount" in self.fault.features:
            self._undo.enter_context(net.small_disk(str(disk)))
        if self.fault.between_hosts:
            self.network = Network()
            self._undo.callback(self.network.close)
            self.network.open()
        self._port = free_port()

    def _start(self) -> None:
        ranks = [rank for rank in (0, 1, 2) if self.role.works[rank] is not None]
        if self.role.serves_store:
            ranks.remove(1)
            self._add(1)  # it serves the others
            self._until(lambda: self._all("ready"), START_SECONDS, "the store was not ready")
        for rank in ranks:
            self._add(rank)

    def _add(self, rank: int, incarnation: int = 0) -> None:
        moment = self.cell.moment if rank == 1 and not incarnation else None
        hosts = self.network
        address, victims = hosts.addresses if hosts else ("127.0.0.1", "127.0.0.1")
        environ = {"TMPDIR": str(self.directory), **(hosts.environment() if hosts else {})}
        place = Place(
            f"w{rank}",
            str(self.directory),
            address,
            victims,
            self._port,
            moment,
            self.fault.frozen_timeout,
            self.fault.step_seconds,
            incarnation,
            environ,
        )
        output = self.directory / f"w{rank}-{incarnation}"
        self.processes.append(_Process(place, partial(act, self.role.name), output))

    # ---- what faults may use ----------------------------------------------------------------------------

    @property
    def _victim(self) -> _Process:
        return next(p for p in reversed(self.processes) if p.place.is_victim)

    @property
    def victim(self) -> int:
        """As :class:`~tools.faults.faults.Scene`."""
        assert self._victim.process.pid is not None
        return self._victim.process.pid

    def order(self, what: str) -> None:
        """As :class:`~tools.faults.faults.Scene`."""
        self._victim.order(what)

    def stranger(self, kind: str) -> None:
        """As :class:`~tools.faults.faults.Scene`."""
        victim = self._victim
        serves_store = victim if self.role.serves_store else self.processes[0]
        store = serves_store.place.victims_address if self.role.serves_store else victim.place.address
        place = Place(
            "w4", str(self.directory), store, "", self._port, environ=dict(victim.place.environ)
        )  # an even rank: on the host of the survivors
        work = _Stranger(kind, victim.endpoints)
        self.processes.append(_Process(place, work, self.directory / "stranger"))

    # ---- the middle -------------------------------------------------------------------------------------

    def _strike_at_the_moment(self) -> None:
        if self.cell.moment is None:
            self._until(self._is_working, START_SECONDS, "no step succeeded")
        elif not self._until(lambda: "moment" in self._victim.states, REACH_SECONDS):
            return
        self._strike.enter_context(self.fault.strike(self))
        self.history.struck = time.monotonic()
        self._victim.order("go")

    def _is_working(self) -> bool:
        return any(step.needs_victim and not step.error for step in self.history.steps)

    def _settle(self) -> None:
        fault, history, promise = self.fault, self.history, self.fault.promise(self.role)
        assert history.struck is not None
        if fault.seconds is not None:
            self._until(lambda: False, fault.seconds)
            self._strike.close()
            history.over = time.monotonic()
        elif fault.effect is Effect.DELAY:
            history.over = history.struck  # it stays, and is to be overcome
        if promise.restarts:
            self._until(lambda: False, RECOVERED_SECONDS)
            self._victim.process.kill()  # a full disk ends only its server
            self._victim.states.add("ended")
            history.restarted = time.monotonic()
            self._add(1, incarnation=1)
            self._until(
                lambda: "ready" in self._victim.states, START_SECONDS, "the victim did not start again"
            )
            self._victim.order("begin")
        if promise.effect is not Effect.LOSS or promise.restarts:
            self._until(self._has_recovered, RECOVER_SECONDS)
        elif promise.notice_seconds is not None:
            self._until(self._is_noticed, promise.notice_seconds + RECOVER_SECONDS)
        self._until(lambda: False, SETTLE_SECONDS if promise.effect is Effect.LOSS else RECOVERED_SECONDS)

    def _has_recovered(self) -> bool:
        since = self.history.restarted or self.history.over or 0.0
        return any(s.needs_victim and not s.error and s.began >= since for s in self.history.steps)

    def _is_noticed(self) -> bool:
        struck = self.history.struck or 0.0
        return bool(self.history.lost) or any(s.error and s.ended >= struck for s in self.history.steps)

    # ---- the end ----------------------------------------------------------------------------------------

    def _finish(self) -> None:
        if self.fault.effect is Effect.LOSS and self.fault.seconds is None and not self.fault.ends_victim:
            self._victim.process.kill()  # it was stopped for good
            self._victim.states.add("ended")
        for order, state in (("finish", "idle"), ("close", "closed")):
            for process in self.processes:
                process.order(order)
                process.order("go")
            self._until(partial(self._all, state), END_SECONDS, f"P3: not all became {state!r}")
        ended = [p for p in self.processes if "closed" in p.states]
        for process in ended:
            process.process.join(10.0)
            if process.process.is_alive():
                self.history.problems.append(f"P6: {process.place.name} did not end\n{self._stacks(process)}")

    def _count_runs(self) -> None:
        try:
            data = (self.directory / "runs").read_bytes()
        except FileNotFoundError:
            return
        self.history.runs.update(
            Counter(int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8))
        )

    # ---- events -----------------------------------------------------------------------------------------

    def _all(self, state: str) -> bool:
        return all(state in p.states or "ended" in p.states for p in self.processes)

    def _until(self, holds: Callable[[], bool], seconds: float, problem: str = "") -> bool:
        """Handle what comes until ``holds``. If it does not in time, ``problem`` is noted."""
        deadline = min(time.monotonic() + seconds, self._deadline)
        while not holds():
            left = deadline - time.monotonic()
            if left <= 0:
                if problem:
                    self._note(problem)
                return False
            by_connection = {p.connection: p for p in self.processes if "ended" not in p.states}
            for connection in wait(list(by_connection), min(left, 1.0)):
                assert isinstance(connection, Connection)
                self._receive(by_connection[connection])
        return True

    def _note(self, problem: str) -> None:
        laggards = [p for p in self.processes if not {"ended", "closed"} & p.states]
        stacks = "\n".join(f"{p.place.name}: {self._stacks(p)}" for p in laggards)
        self.history.problems.append(f"{problem}\n{stacks}"[:20_000])

    def _receive(self, process: _Process) -> None:
        try:
            kind, *content = process.connection.recv()
        except (EOFError, ConnectionResetError):
            process.states.add("ended")
            may_die = process.place.is_victim and (self.fault.effect is Effect.LOSS or self.fault.ends_victim)
            if not may_die and "closed" not in process.states:
                self.history.problems.append(f"{process.place.name} died:\n{self._output(process)}")
            return
        self._note_event(process, kind, content)

    def _note_event(self, process: _Process, kind: str, content: list[Any]) -> None:
        history = self.history
        if kind == "step":
            history.steps.append(content[0])
        elif kind == "lost":
            history.lost.append((time.monotonic(), process.place.name, *content))
        elif kind == "endpoints":
            process.endpoints = tuple(content[0])
        elif kind == "closed":
            history.problems += content[0]
            history.moments |= content[1]
            process.states |= {"ready", "idle"}
        process.states.add(kind)

    def _stacks(self, process: _Process) -> str:
        if process.process.pid is not None and process.process.is_alive():
            os.kill(process.process.pid, signal.SIGUSR1)
            process.process.join(STACKS_SECONDS)
        return self._output(process)

    def _output(self, process: _Process) -> str:
        return process.output.read_text(errors="replace")[-6000:] if process.output.exists() else ""


class _Stranger:
    """What a process does that is no part of the job."""

    def __init__(self, kind: str, endpoints: tuple[str, ...]) -> None:
        self.kind, self.endpoints = kind, endpoints

    def __call__(self, p: Participant) -> None:
        move_in(p)
        if self.kind == "garbage":
            send_garbage(self.endpoints)
            return
        os.environ["ZMQGRAD_SECRET"] = "a secret of another job, which is long too"
        try:
            TCPStore(p.place.address, p.place.port, timeout=10).close()
            p.problems.append("P4: a store accepted a client with another secret")
        except StoreError:
            pass  # as promised. (Groups meet at a store of torch's, which a client of ours does not know.)
        self._knock()

    def _knock(self) -> None:
        """A handshake with other keys at each worker's socket, and a message behind it."""
        public, secret = zmq.curve_keypair()
        with zmq.Context() as context:
            for endpoint in self.endpoints:
                if endpoint.startswith("tcp://"):
                    with context.socket(zmq.DEALER) as socket:
                        socket.linger = 200
                        socket.curve_publickey, socket.curve_secretkey = public, secret
                        socket.curve_serverkey = public
                        socket.connect(endpoint)
                        socket.send(b"garbage")


def run_cell(cell: Cell) -> tuple[Verdict, History]:
    """Runs ``cell`` in fresh processes."""
    run = CellRun(cell)
    try:
        with run:
            verdict = run.run()
    except Exception:  # of the tool itself: the table says so, and the other cells go on
        verdict = Verdict("", "the tool failed", [f"the tool failed: {traceback.format_exc()}"])
    return verdict, run.history
