"""One process of a cell: talks to the runner, counts what it does, and reports each step."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tools.faults.model import Moment, Step
from tools.faults.moments import Moments
from zmqgrad.errors import ZmqgradError
from zmqgrad.rpc.rref.table import ORPHAN_GRACE_SECONDS

PAUSE_SECONDS = 0.02
"""Between two steps: workers of the table load a machine, but do not exhaust it."""

WARM_UP_STEPS = 3
SLOW_SECONDS = 0.02
CLOSE_SECONDS = ORPHAN_GRACE_SECONDS + 10.0
"""Limit of what becomes true at the end: the last are the forks of a worker that was lost."""


@dataclass(frozen=True)
class Place:
    """Where and as what a process runs.

    Args:
        name: of the worker: w0, w1 (the victim) or w2.
        directory: shared by the processes of the cell.
        moment: at which the victim reports to the runner and waits for the fault.
        frozen_timeout: of the failure detector; None: the default.
        step_seconds: timeout of each operation: longer than any fault that must be survived.
        incarnation: 0, or 1 for a victim that was started again.
    """

    name: str
    directory: str
    address: str
    victims_address: str
    port: int
    moment: Moment | None = None
    frozen_timeout: float | None = None
    step_seconds: float = 60.0
    incarnation: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The rank of the worker."""
        return int(self.name[1:])

    @property
    def is_victim(self) -> bool:
        """Whether the fault strikes this process."""
        return self.name == "w1"


class Participant:
    """The process's side of the conversation with the runner."""

    def __init__(self, place: Place, connection: Connection) -> None:
        self.place = place
        self.problems: list[str] = []
        self.has_lost: set[str] = set()
        self.moments = Moments(place.moment, self._strike)
        self.finish, self._begin, self._go, self._close = (threading.Event() for _ in range(4))
        self._connection = connection
        self._send_lock = threading.Lock()
        self._runs = os.open(Path(place.directory) / "runs", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        threading.Thread(target=self._listen, name="runner", daemon=True).start()

    def _listen(self) -> None:
        orders: dict[str, Callable[[], None]] = {
            "begin": self._begin.set,
            "go": self._go.set,
            "finish": self.finish.set,
            "close": self._close.set,
            "clock": _jump,
            "slow": self._slow_down,
            "fast": self._speed_up,
        }
        try:
            while True:
                orders[self._connection.recv()]()
        except EOFError:
            os._exit(3)  # the runner has ended

    def _slow_down(self) -> None:
        self.moments.on_message = lambda: time.sleep(SLOW_SECONDS)  # the fault itself

    def _speed_up(self) -> None:
        self.moments.on_message = None

    def report(self, kind: str, *content: Any) -> None:
        """Send a message to the runner."""
        with self._send_lock:
            self._connection.send((kind, *content))

    def _strike(self) -> None:
        self.report("moment")
        self._go.wait()

    def ready(self) -> None:
        """Wait until all are ready; from then on the moment counts."""
        self.report("ready")
        self._begin.wait()

    def ran(self, number: int) -> None:
        """Count a run of a numbered function, such that SIGKILL does not lose it."""
        os.write(self._runs, number.to_bytes(8, "little"))

    def steps(self, step: Callable[[int], None], needs_victim: bool = True) -> None:
        """Call ``step`` with rising numbers until the runner says that it is enough.

        The victim's first steps are not struck: the others know it by then.
        """
        number = self.place.incarnation << 32 | self.place.rank << 24 | needs_victim << 20
        while not self.finish.is_set():
            number += 1
            if number & 0xFFFF == WARM_UP_STEPS:
                self.moments.arm()
            self.step(step, number, needs_victim)
            self.finish.wait(PAUSE_SECONDS)

    def step(self, step: Callable[[int], None], number: int, needs_victim: bool) -> None:
        """Call ``step`` and report what came of it."""
        began, error, library_error = time.monotonic(), "", True
        try:
            step(number)
        except Exception as e:
            error = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
            library_error = isinstance(e, ZmqgradError)
            if not library_error:
                traceback.print_exc()
        self.report(
            "step",
            Step(self.place.name, number, needs_victim, began, time.monotonic(), error, library_error),
        )

    def idle(self) -> None:
        """All steps are done; wait until those of the others are."""
        gc.collect()
        self.report("idle")
        self._close.wait()

    def eventually(self, what: str, holds: Callable[[], object]) -> None:
        """Note a broken promise ``what`` unless it holds within ``CLOSE_SECONDS``."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while not holds():
            if time.monotonic() > deadline:
                self.problems.append(what)
                return
            gc.collect()
            time.sleep(0.05)  # state of another process's references: nothing tells of its change


def _jump() -> None:
    """The wall clock, as Python code sees it, jumps by an hour; monotonic clocks do not."""
    for name, unit in (("time", 1), ("time_ns", 10**9)):
        read = getattr(time, name)
        setattr(time, name, lambda read=read, unit=unit: read() + 3600 * unit)


def run(work: Callable[[Participant], None], place: Place, connection: Connection, output: str) -> None:
    """The main function of each process."""
    os.setpgid(0, 0)
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.update(place.environ)
    tempfile.tempdir = None  # read TMPDIR: the process was forked from one that knows another
    participant = Participant(place, connection)
    try:
        if place.is_victim:
            participant.moments.install()
        work(participant)
        left = [t.name for t in threading.enumerate() if t.name.startswith(("zmqgrad", place.name))]
        if left:
            participant.problems.append(f"P6: threads are left: {left}")
    except BaseException as e:
        traceback.print_exc()
        participant.problems.append(
            f"{place.name} ended by {type(e).__name__}: {' '.join(str(e).split())[:400]}"
        )
    participant.report("closed", participant.problems, participant.moments.seen)
    sys.stdout.flush()
