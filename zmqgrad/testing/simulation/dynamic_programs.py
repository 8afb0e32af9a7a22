"""Drawn programs of dynamic groups: workers join late, leave while others call them, and come back.

Worker 0 serves the stores, joins first and leaves last. Each of the others is a member once or more: it takes
steps (:mod:`~zmqgrad.testing.simulation.programs`) with whoever is there, and leaves, in order or at once.
Which steps may fail depends on who left meanwhile: :mod:`~zmqgrad.testing.simulation.oracles` decides.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from zmqgrad import rpc
from zmqgrad.rpc.membership.membership import LEFT, LEFT_AT_ONCE
from zmqgrad.testing.simulation.programs import PATIENCE, Job, executed, make, operations, outcomes

LIVES, STEPS = 2, 4
"""How often a worker is a member at most, and most steps of each time."""

LATE_SECONDS = 0.05
"""How late a worker joins, at most."""

FROZEN_SECONDS = 2.0
"""How long a worker may be silent, if others are not to lose it."""

JOIN_SECONDS = 5.0
"""How long a worker that wants to leave waits for worker 0, which may not have joined yet: longer, if it may
be stopped meanwhile."""

FIRST = "worker0"

__all__ = ["Life", "StepFailure", "executed", "failures", "lives", "operations", "program", "unresolved"]


@dataclass
class Life:
    """One membership of this process.

    Attributes:
        began: when it had joined.
        leaving: when it began to leave.
        ended: when it had left.
        error: why it could not leave in order.
        events: of which workers it was told that they have joined or are lost, and when.
    """

    name: str
    number: int
    began: float
    leaving: float = math.inf
    ended: float = math.inf
    error: str = ""
    host: str = field(default_factory=socket.gethostname)
    events: list[tuple[str, int, str, float]] = field(default_factory=list)

    def is_told(self, kind: str, info: rpc.WorkerInfo) -> None:
        """Notes an event."""
        self.events.append((kind, info.id, info.name, time.monotonic()))

    def held(self) -> set[int]:
        """The workers that it knows to have joined, and not that they are lost."""
        told = {
            kind: {number for what, number, *_ in self.events if what == kind} for kind in ("join", "loss")
        }
        return told["join"] - told["loss"]


@dataclass(frozen=True)
class StepFailure:
    """A step that raised an error."""

    token: str
    life: Life
    began: float
    ended: float
    error: str


lives: list[Life] = []
failures: list[StepFailure] = []

unresolved: list[str] = []
"""Calls of which this process learned nothing before it had left."""

_lock = threading.RLock()
_changed = threading.Condition(_lock)
_departed = set[int]()  # on worker 0: those that leave for the last time, or cannot tell it any more


def depart(number: int) -> None:
    """Tells worker 0 that worker ``number`` leaves for the last time."""
    with _lock:
        _departed.add(number)
        _changed.notify_all()


def program(rank: int, patience: float = PATIENCE) -> dict[str, str]:
    """Runs worker ``rank``."""
    member = Member(rank)
    member.patience = patience
    for number in range(member.rng.randrange(1, LIVES + 1) if rank else 0):
        time.sleep(LATE_SECONDS * member.rng.random())
        member.live(number, last=False)
    member.live(LIVES)
    return outcomes


def program_with_deaths(rank: int) -> dict[str, str]:
    """Runs worker ``rank`` of a group of which some are killed: they do not say that they leave."""
    return program(rank, 50.0)


def program_with_suspicions(rank: int) -> dict[str, str]:
    """Runs worker ``rank`` of a group in which workers lose each other that the others can reach."""
    member = Member(rank)
    member.options = rpc.RpcBackendOptions(
        rpc_timeout=PATIENCE, join_timeout=PATIENCE, liveness_timeout=1.0, refused_timeout=1.0
    )
    member.pause = 2.0
    member.live(0)
    return outcomes


def program_with_freezes(rank: int) -> dict[str, str]:
    """Runs worker ``rank`` of a group in which one is stopped for long. Only worker 1 loses who is silent."""
    member = Member(rank)
    frozen = FROZEN_SECONDS if rank == 1 else 0.0
    member.options = rpc.RpcBackendOptions(
        PATIENCE, liveness_timeout=1.0, frozen_timeout=frozen, join_timeout=PATIENCE
    )
    member.pause = 2.0
    member.join_seconds = PATIENCE
    member.live(0)
    return outcomes


class Member(Job):
    """What the seed draws for a worker that joins and leaves."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        del os.environ["WORLD_SIZE"]
        self.patience = PATIENCE
        """How long worker 0 waits for the others to leave."""
        self.join_seconds = JOIN_SECONDS
        self.pause = 0.02
        """How long it rests between two steps, at most."""

    def choose(self) -> str:
        """Returns a worker that is there."""
        return self.rng.choice(sorted(info.name for info in rpc.get_worker_infos()))

    def live(self, number: int, last: bool = True) -> None:
        """Joins, takes a few steps, and leaves."""
        rpc.init_rpc(self.name, rank=0 if self.rank == 0 else None, rpc_backend_options=self.options)
        life = Life(self.name, rpc.get_worker_info().id, time.monotonic())
        lives.append(life)
        rpc.on_join(lambda info: life.is_told("join", info))
        rpc.on_loss(partial(self._is_told_of_a_loss, life))
        with self.noting(f"{self.rank}.{number}store", life):
            self.open_store()
        steps = partial(self._steps, number, life)
        beside = threading.Thread(target=steps)
        if self.rank and self.rng.random() < 0.3:  # it leaves meanwhile
            beside.start()
            time.sleep(0.01 * self.rng.random())
        else:
            steps()
        calls = self._call_all(f"{self.rank}.{number}last", life)
        if self.rank == 0:
            self._wait_for_the_others(life)
        elif last:
            with self.noting(f"{self.rank}.{number}depart", life):
                rpc.wait_for_workers([FIRST], self.join_seconds)
                rpc.rpc_sync(FIRST, depart, args=(life.number,))
        life.leaving = time.monotonic()
        try:
            rpc.shutdown(graceful=self.rank == 0 or self.rng.random() < 0.7)
        except RuntimeError as e:
            life.error = repr(e)
        life.ended = time.monotonic()
        unresolved.extend(f"{self.name} calls {to}" for to, call in calls if not call.done())
        if beside.ident is not None:
            beside.join()
        self.close_store()
        self.watches.clear()

    def _is_told_of_a_loss(self, life: Life, info: rpc.WorkerInfo, reason: str) -> None:
        life.is_told("loss", info)
        if self.rank == 0 and reason not in (LEFT, LEFT_AT_ONCE):
            depart(info.id)

    def _steps(self, number: int, life: Life) -> None:
        for i in range(self.rng.randrange(STEPS + 1)):
            token = f"{self.rank}.{number}{i}"
            with self.noting(token, life):
                if self.rng.random() < 0.3:
                    time.sleep(self.pause * self.rng.random())
                self.rng.choice(self.kinds)(token, self)

    def _call_all(self, token: str, life: Life) -> list[tuple[str, torch.futures.Future[int]]]:
        """Calls all that are there, and waits for none of them: it leaves meanwhile."""
        found: list[tuple[str, torch.futures.Future[int]]] = []
        for info in rpc.get_worker_infos() if self.rng.random() < 0.5 else []:
            with self.noting(f"{token}.{info.id}", life):
                call = rpc.rpc_async(info.name, make, args=(f"{token}.{info.id}", 1))
                found.append((info.name, call))
        return found

    def _wait_for_the_others(self, life: Life) -> None:
        with _lock:
            have_left = _changed.wait_for(lambda: len(_departed) >= self.size - 1, self.patience)
        if not have_left and self.patience >= PATIENCE:
            raise AssertionError("a worker has not left in time")
        until = time.monotonic() + PATIENCE
        while (len(rpc.get_worker_infos()) > 1 or life.held()) and time.monotonic() < until:
            time.sleep(0.01)  # no event tells that this list is read now
        if len(rpc.get_worker_infos()) > 1 or life.held():
            raise AssertionError(f"all have left but {rpc.get_worker_infos()}; not told of: {life.held()}")
        self.wait_until_nothing_is_referenced()

    @contextmanager
    def noting(self, token: str, life: Life) -> Iterator[None]:
        """Notes what becomes of a step."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as e:
            failures.append(StepFailure(token, life, began, time.monotonic(), repr(e)))
