"""Workers over sockets whose credit is small: floods pass, and a caller that waits says for what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.transport.test_contract import TcpAlone
from zmqgrad import autograd
from zmqgrad.errors import PeerLostError, RpcTimeoutError
from zmqgrad.rpc.api import rpc_async, rpc_sync
from zmqgrad.rpc.current import reset_current_worker, set_current_worker
from zmqgrad.rpc.debug import debug_info
from zmqgrad.rpc.membership.group import make_worker
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.transport.tap import Tapped, observer
from zmqgrad.wire.messages import CreditWanted

LIMIT = 1 << 20
N = 100_000
"""Elements of a tensor: two are within the limit, three are not."""


class _Mailbox(TcpAlone):
    def __init__(self, name: str, worker_id: int) -> None:
        ZmqMailbox.__init__(self, name, worker_id, inflight=LIMIT)


@contextmanager
def workers(count: int, threads: int = 2) -> Iterator[list[Worker]]:
    options = RpcBackendOptions(rpc_timeout=30.0, num_worker_threads=threads)
    made = [make_worker(f"w{i}", i, count, _Mailbox(f"w{i}", i), options) for i in range(count)]
    for worker in made:
        for other in made:
            worker.membership.learn(other.membership.own)
        worker.start()
    try:
        yield made
    finally:
        for worker in made:
            worker.close()
        assert [name for worker in made for name in worker.join(Deadline.after(10))] == []


@contextmanager
def acting(worker: Worker) -> Iterator[None]:
    token = set_current_worker(worker)
    try:
        yield
    finally:
        reset_current_worker(token)


def asked(worker: Worker) -> threading.Event:
    """Set once ``worker`` has had to wait."""
    event = threading.Event()

    def tap(tapped: Tapped) -> None:
        if tapped.outgoing and isinstance(tapped.message, CreditWanted):
            event.set()

    worker.mailbox.tap = observer(tap)
    return event


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def there_and_on(x: torch.Tensor, names: list[str]) -> torch.Tensor:
    """``x`` doubled on each of ``names``, one call within the other."""
    if not names:
        return x
    y: torch.Tensor = rpc_sync(names[0], there_and_on, args=(x * 2, names[1:]))
    return y


def test_workers_that_flood_each_other_finish() -> None:
    """Each asks for more than all credit together, in calls that call back; all answers are right."""
    calls = 25
    with workers(2) as both:
        waits = [asked(worker) for worker in both]
        failed: list[BaseException] = []

        def flood(worker: Worker, other: str) -> None:
            try:
                with acting(worker):
                    mine = torch.full((N,), float(worker.id))
                    simple = [rpc_async(other, double, args=(mine + i,)) for i in range(calls)]
                    nested = [
                        rpc_async(other, there_and_on, args=(mine + i, [worker.name, other]))
                        for i in range(calls)
                    ]
                    for i in reversed(range(calls)):  # answers are not waited for in order
                        assert simple[i].wait().eq(2 * (worker.id + i)).all()
                        assert nested[i].wait().eq(4 * (worker.id + i)).all()
            except BaseException as e:
                failed.append(e)

        threads = [
            threading.Thread(target=flood, args=(a, b.name))
            for a, b in zip(both, reversed(both), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert failed == []
        assert all(event.is_set() for event in waits)
        assert [w.mailbox.statistics()["inflight"]["waiting"] for w in both] == [{}, {}]


def test_backward_passes_at_once_give_the_gradients_of_one_process() -> None:
    """Tensors and gradients, each of them a third of all credit, cross each other in both directions."""
    passes = 8
    with workers(2) as both:
        wrong: list[object] = []

        def run(number: int) -> None:
            own, other = both[number % 2], both[1 - number % 2]
            x = torch.full((N,), number + 1.0, requires_grad=True)
            w = torch.full((N,), 2.0, requires_grad=True)
            try:
                with acting(own), autograd.context() as context_id:
                    y = rpc_sync(other.name, torch.mul, args=(x, w))
                    z = rpc_sync(other.name, torch.mul, args=(y * x, y))
                    autograd.backward(context_id, [z.sum()])
                    got = autograd.get_gradients(context_id)
                    expected = torch.autograd.grad(((x * w * x) * (x * w)).sum(), (x, w))
                    wrong.extend(
                        n for n, t, e in zip("xw", (x, w), expected, strict=True) if not got[t].equal(e)
                    )
            except BaseException as e:
                wrong.append(e)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(passes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert wrong == []


class Gate:
    """Holds all threads of worker 1, so that it takes in nothing."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)

    def __call__(self) -> None:
        self.entered.release()
        assert self.opened.wait(30)


_gates: dict[int, Gate] = {}


def stand_at(number: int) -> None:
    _gates[number]()


@contextmanager
def held(both: list[Worker]) -> Iterator[None]:
    """Worker 1 begins nothing of what worker 0 asks for: its only thread stands at a gate."""
    gate = _gates[0] = Gate()
    with acting(both[0]):
        held_there = rpc_async("w1", stand_at, args=(0,))
        assert gate.entered.acquire(timeout=30)
        try:
            yield
        finally:
            gate.opened.set()
            if 1 not in both[0].lost:
                held_there.wait()


def test_the_timeout_of_an_unsent_call_names_flow_control() -> None:
    with workers(2, threads=1) as both, held(both):
        x = torch.ones(N)
        sent = [rpc_async("w1", double, args=(x,)) for _ in range(2)]
        with pytest.raises(RpcTimeoutError, match=r"double on w1.*ZMQGRAD_INFLIGHT_BYTES"):
            rpc_async("w1", double, args=(x,), timeout=0.2)
        assert rpc_async("w1", torch.add, args=(1, 2)) is not None  # small ones pass
        _gates[0].opened.set()
        assert all(f.wait().eq(2).all() for f in sent)
        assert rpc_sync("w1", double, args=(x,)).eq(2).all()


def test_waiting_sends_show_in_debug_info_and_fail_with_their_peer() -> None:
    with workers(2, threads=1) as both, held(both):
        event = asked(both[0])
        outcome: list[object] = []

        def call() -> None:
            with acting(both[0]):
                for _ in range(3):
                    outcome.append(rpc_async("w1", double, args=(torch.ones(N),)))

        thread = threading.Thread(target=call)
        thread.start()
        assert event.wait(20)
        shown = next(p for p in debug_info(both[0])["peers"] if p["name"] == "w1")
        assert 2 * N * 4 < shown["on_the_way"] < 2 * N * 4 + 2000  # headers count
        assert shown["waiting"]["messages"] == 1
        assert N * 4 < shown["waiting"]["bytes"] < N * 4 + 1000
        both[0].lose(1, "unplugged")
        thread.join(20)
        assert len(outcome) == 3  # the third is a future as well
        for future in outcome:
            with pytest.raises(PeerLostError, match="unplugged"):
                future.wait()  # type: ignore[attr-defined]
        assert both[0].mailbox.statistics()["inflight"]["bytes"] == {}
        _gates[0].opened.set()


def test_replies_larger_than_the_limit_are_sent_one_by_one() -> None:
    with workers(2) as both, acting(both[0]):
        many = [rpc_async("w1", torch.full, args=((3 * N,), float(i))) for i in range(8)]
        for i, future in enumerate(many):
            assert future.wait().eq(i).all()
