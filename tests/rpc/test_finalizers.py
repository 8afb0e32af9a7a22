"""Finalizers of the program (``__del__``) that make calls, in the threads where the collector runs them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

import pytest
import torch

from tests.support.waiting import eventually
from tests.support.workers import WAIT, two_workers
from tests.transport.test_contract import TcpAlone
from zmqgrad import rpc
from zmqgrad.errors import RpcError
from zmqgrad.rpc.current import set_current_worker
from zmqgrad.rpc.worker import Worker
from zmqgrad.transport.mailbox import ZmqMailbox


@pytest.fixture(params=[ZmqMailbox, TcpAlone])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    """Two workers; the test acts for the first."""
    told.clear()
    with two_workers(request.param) as workers:
        yield workers


told: list[str] = []


def tell(what: str) -> str:
    """Called remotely, by the finalizer."""
    told.append(what)
    return what


def as_worker(worker: Worker, work: Callable[[], Any]) -> Any:
    """Call ``work`` with ``worker`` as the current one, in a context of its own.

    The collector may run a finalizer while a context variable is being set. One that sets another in the same
    context makes the interpreter crash (python/cpython#148891).
    """
    context = copy_context()
    context.run(set_current_worker, worker)
    return context.run(work)


class Remote:
    """Stands for something at worker 1, which it releases when it is collected."""

    def __init__(self, worker: Worker, release: Callable[[], Any]) -> None:
        self.cycle, self.worker, self.release = self, worker, release
        self.outcome: list[Any] = []
        outcomes.append(self.outcome)

    def __del__(self) -> None:
        self.outcome.append(threading.current_thread().name)
        try:
            self.outcome.append(as_worker(self.worker, self.release))
        except RpcError as e:
            self.outcome.append(str(e))


outcomes: list[list[Any]] = []


def collect_in_reading_thread(worker: Worker) -> None:
    """The next message that is read makes its reader the one that runs the collector."""
    idle = threading.get_ident()

    def tap(outgoing: bool, *_: Any) -> None:
        if not outgoing and threading.get_ident() != idle and not told:
            worker.mailbox.tap = None
            gc.collect()

    worker.mailbox.tap = tap
    rpc.rpc_async(1, len, args=("abc",))


def collect_in_timer(worker: Worker) -> None:
    """As the name says."""
    worker.timer.call_soon(lambda: [gc.collect(), None][1])


CALLS = {
    "sync": lambda: rpc.rpc_sync(1, tell, args=("released",)),
    "future": lambda: rpc.rpc_async(1, tell, args=("released",)).wait(),
    "to_here": lambda: rpc.remote(1, tell, args=("released",)).to_here(),
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("collect", [collect_in_reading_thread, collect_in_timer])
def test_a_finalizer_that_waits_stops_no_other_call(
    pair: list[Worker], collect: Callable[[Worker], None], how: str
) -> None:
    gc.collect()
    Remote(pair[0], CALLS[how])
    collect(pair[0])
    outcome = eventually(lambda: outcomes[-1], lambda seen: len(seen) == 2, WAIT / 2)
    assert outcome[0].startswith(("worker0-engine", "worker0-service"))
    assert "was sent, but its result cannot be waited for" in outcome[1]
    assert "rpc_async" in outcome[1]
    eventually(lambda: told, lambda seen: seen == ["released"], WAIT / 2)
    assert rpc.rpc_async(1, tell, args=("still here",), timeout=WAIT / 2).wait() == "still here"


gate = threading.Event()


def tell_late(what: str) -> str:
    """As :func:`tell`, but later than whoever waits for it begins to wait."""
    gate.wait(WAIT / 4)
    return tell(what)


OTHER_WAITS = {
    "then": lambda: rpc.rpc_async(1, tell_late, args=("released",)).then(lambda done: done.wait()).wait(),
    "wait_all": lambda: rpc.wait_all([rpc.rpc_async(1, tell_late, args=("released",))]),
    "own_value": lambda: rpc.remote(0, tell_late, args=("released",)).to_here(),
}


@pytest.mark.parametrize("how", OTHER_WAITS)
@pytest.mark.parametrize("collect", [collect_in_reading_thread, collect_in_timer])
def test_a_finalizer_that_waits_for_anything_else_stops_no_call(
    pair: list[Worker], collect: Callable[[Worker], None], how: str
) -> None:
    gate.clear()
    gc.collect()
    Remote(pair[0], OTHER_WAITS[how])
    collect(pair[0])
    try:
        outcome = eventually(lambda: outcomes[-1], lambda seen: len(seen) == 2, WAIT / 8)
    finally:
        gate.set()
    assert outcome[0].startswith(("worker0-engine", "worker0-service"))
    assert "nothing can be waited for in worker0-" in outcome[1]
    assert rpc.rpc_async(1, tell, args=("still here",), timeout=WAIT / 2).wait() == "still here"
    eventually(lambda: told, lambda seen: "released" in seen, WAIT / 2)


@pytest.mark.parametrize("collect", [collect_in_reading_thread, collect_in_timer])
def test_a_finalizer_may_call_without_waiting(pair: list[Worker], collect: Callable[[Worker], None]) -> None:
    gc.collect()
    Remote(pair[0], lambda: rpc.rpc_async(1, tell, args=("released",)))
    collect(pair[0])
    outcome = eventually(lambda: outcomes[-1], lambda seen: len(seen) == 2, WAIT / 2)
    assert outcome[1].wait() == "released"


def test_a_finalizer_in_a_thread_of_the_program_may_wait(pair: list[Worker]) -> None:
    gc.collect()
    Remote(pair[0], CALLS["sync"])
    gc.collect()
    assert outcomes[-1] == [threading.current_thread().name, "released"]


class Released:
    """Its finalizer calls worker 1 with a tensor in shared memory, like :class:`Remote`."""

    made = 0
    calls: list[Any] = []

    def __init__(self, worker: Worker) -> None:
        Released.made += 1
        self.cycle, self.worker = self, worker

    def __del__(self) -> None:
        self.calls.append(as_worker(self.worker, lambda: rpc.rpc_async(1, len, args=(LARGE,), timeout=WAIT)))


LARGE = torch.ones(30_000)


def test_a_finalizer_may_call_whatever_the_collector_interrupts(pair: list[Worker]) -> None:
    thresholds = gc.get_threshold()
    gc.collect()
    Released.made = 0
    try:
        gc.set_threshold(1)  # so it runs wherever anything is made, also where one of our locks is held
        for _ in range(100):
            Released(pair[0])
            assert rpc.rpc_sync(1, len, args=(LARGE,), timeout=WAIT) == len(LARGE)
            Released(pair[0])
            assert rpc.remote(1, len, args=(LARGE,), timeout=WAIT).to_here(WAIT) == len(LARGE)
    finally:
        gc.set_threshold(*thresholds)
        gc.collect()
    # Another thread may have collected one, and be making the call: then collect() does nothing meanwhile.
    eventually(lambda: len(Released.calls), lambda made: made == Released.made)
    while Released.calls:
        assert Released.calls.pop().wait() == len(LARGE)


class Litter:
    """Leaves garbage while it is pickled, which the collector finds while the library is at work."""

    def __init__(self, worker: Worker, errors: list[str]) -> None:
        self.worker, self.errors = worker, errors

    def __reduce__(self) -> Any:
        Waits(self.worker, self.errors)
        return str, ("litter",)


class Waits(Released):
    """Its finalizer waits, or makes references, which needs locks."""

    def __init__(self, worker: Worker, errors: list[str]) -> None:
        super().__init__(worker)
        self.errors = errors

    def __del__(self) -> None:
        for call in (lambda: rpc.RRef(1), lambda: rpc.rpc_sync(1, len, args=("abc",), timeout=WAIT)):
            try:
                as_worker(self.worker, call)
            except RpcError as e:
                self.errors.append(str(e))


def test_a_finalizer_that_waits_where_the_library_is_interrupted_gets_an_error(pair: list[Worker]) -> None:
    thresholds = gc.get_threshold()
    gc.collect()
    errors: list[str] = []  # of this test: one that another thread runs may still wait when its test ends
    try:
        gc.set_threshold(1)
        for _ in range(100):
            assert rpc.rpc_sync(1, len, args=(Litter(pair[0], errors),), timeout=WAIT) == len("litter")
    finally:
        gc.set_threshold(*thresholds)
        gc.collect()
    assert errors
    for error in errors:
        assert "in a finalizer" in error or "was sent, but its result cannot be waited for" in error
