"""Gradients that are there together travel and run together, unless they are many or take long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients
from zmqgrad.autograd.engine import batch, participant, step
from zmqgrad.rpc.current import current_worker
from zmqgrad.runtime.clock import ManualClock
from zmqgrad.testing import Cluster, cluster
from zmqgrad.transport.tap import Tapped, observer
from zmqgrad.wire.messages import BackwardAutogradReq, BackwardAutogradResp, MessageType

MICRO_BATCHES = 6
EVER, NEVER = 1e9, 0.0
"""Seconds: no entry takes so long, and all do."""


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, all that is there is handled in one go."""
    monkeypatch.setattr(step, "FLUSH_SECONDS", EVER)
    monkeypatch.setattr(participant, "HELP_SECONDS", EVER)


@pytest.fixture
def c3() -> Iterator[Cluster]:
    with cluster(3) as c, c.acting(0):
        yield c


@contextmanager
def sent_in(c: Cluster) -> Iterator[list[tuple[int, int, BackwardAutogradReq]]]:
    """Source, target and message of all gradients that are sent inside it."""
    sent: list[tuple[int, int, BackwardAutogradReq]] = []

    def note(tapped: Tapped) -> None:
        if tapped.outgoing and isinstance(tapped.message, BackwardAutogradReq):
            sent.append((tapped.envelope.source, tapped.peer, tapped.message))

    for worker in c.workers:
        worker.mailbox.tap = observer(note)
    try:
        yield sent
    finally:
        for worker in c.workers:
            worker.mailbox.tap = None


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


WEIGHTS = [leaf(3, 3) for _ in range(3)]


def stage(route: list[int], x: Tensor) -> Tensor:
    """One stage on each worker of ``route``, with weights of its own."""
    y = torch.tanh(x @ WEIGHTS[current_worker().id])
    return rpc.rpc_sync(route[0], stage, (route[1:], y)) if route else y


def pipeline(route: list[int], xs: list[Tensor]) -> Tensor:
    """The loss of all ``xs``, in flight at a time."""
    ys = [rpc.rpc_async(route[0], stage, (route[1:], x)) for x in xs]
    return torch.cat([y.wait() for y in ys]).square().sum()


def expected(route: list[int], xs: list[Tensor]) -> dict[Tensor, Tensor]:
    ys = xs
    for worker in route:
        ys = [torch.tanh(y @ WEIGHTS[worker]) for y in ys]
    leaves = [*xs, *(WEIGHTS[worker] for worker in route)]
    found = torch.autograd.grad(torch.cat(ys).square().sum(), leaves)
    return dict(zip(leaves, found, strict=True))


def gradients_of(c: Cluster, ctx: int) -> dict[Tensor, Tensor]:
    found: dict[Tensor, Tensor] = {}
    for worker in c.workers:
        with c.acting(worker.id):
            found |= get_gradients(ctx)
    return found


def check_pipeline(c: Cluster) -> list[tuple[int, int, BackwardAutogradReq]]:
    """Two stages there and back have the gradients of one process; gives what was sent for them."""
    xs = [leaf(2, 3) for _ in range(MICRO_BATCHES)]
    with context() as ctx:
        loss = pipeline([1, 2], xs)
        with sent_in(c) as sent:
            backward(ctx, [loss])
        found = gradients_of(c, ctx)
        for tensor, gradient in expected([1, 2], xs).items():
            torch.testing.assert_close(found[tensor], gradient)
    return sent


def test_micro_batches_take_one_message_from_worker_to_worker(c3: Cluster) -> None:
    sent = check_pipeline(c3)
    assert [(source, target) for source, target, _ in sent] == [(0, 1), (1, 2), (2, 1), (1, 0)]
    assert [len(message.sends) for *_, message in sent] == [MICRO_BATCHES] * 4
    assert sent[-1][2].handled is not None  # the report needs no message of its own


def test_slow_entries_are_sent_one_by_one(c3: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "FLUSH_SECONDS", NEVER)
    sent = check_pipeline(c3)
    for way in ((1, 2), (2, 1), (1, 0)):
        assert [len(m.sends) for *ends, m in sent if tuple(ends) == way] == [1] * MICRO_BATCHES


class Waits(torch.autograd.Function):
    """Its backward function does not compute, while the clock goes on."""

    clock = ManualClock()

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        Waits.clock.advance(WAIT_SECONDS)
        return gradient


WAIT_SECONDS = 6.0


def wait_in_backward(x: Tensor) -> Tensor:
    found: Tensor = Waits.apply(x)  # type: ignore[no-untyped-call]
    return found


@pytest.mark.parametrize(("flush", "messages"), [(1.5 * WAIT_SECONDS, 1), (WAIT_SECONDS / 5, 3)])
def test_a_wait_for_a_core_counts_in_part(
    monkeypatch: pytest.MonkeyPatch, flush: float, messages: int
) -> None:
    monkeypatch.setattr(step, "FLUSH_SECONDS", flush)
    with cluster(2, clock=Waits.clock) as c, context() as ctx:
        asked = [rpc.rpc_async(1, wait_in_backward, (leaf(2),)) for _ in range(3)]
        loss = torch.cat([answer.wait() for answer in asked]).sum()
        with sent_in(c) as sent:
            backward(ctx, [loss])
    assert [len(message.sends) for source, _, message in sent if source == 1] == [3 // messages] * messages


def test_full_batches_are_sent_immediately(c3: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    each = 2 * 3 * 8 + batch.GRADIENT_OVERHEAD_BYTES
    monkeypatch.setattr(batch, "FULL_BYTES", 2 * each)
    first = [message for source, _, message in check_pipeline(c3) if source == 0]
    assert [len(message.sends) for message in first] == [2] * (MICRO_BATCHES // 2)


def test_a_duplicate_message_is_handled_once(c3: Cluster) -> None:
    with (
        c3.network.duplicate(MessageType.BACKWARD_AUTOGRAD_REQ),
        c3.network.duplicate(MessageType.BACKWARD_AUTOGRAD_RESP),
    ):
        check_pipeline(c3)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ValueError("this entry fails")


def double_or_fail(fail: bool, x: Tensor) -> Tensor:
    return Fails.apply(x) if fail else x * 2


@pytest.mark.parametrize("share", [NEVER, EVER])
def test_one_entry_that_fails_fails_the_pass(
    c3: Cluster, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(step, "FLUSH_SECONDS", share)
    x = leaf(2)
    for failing in range(3):
        with context() as ctx:
            ys = [rpc.rpc_async(1, double_or_fail, (i == failing, x)) for i in range(3)]
            loss = torch.cat([y.wait() for y in ys]).sum()
            with pytest.raises(ValueError, match="this entry fails"):
                backward(ctx, [loss])


def test_a_gradient_does_not_keep_others_of_its_message_alive(c3: Cluster) -> None:
    xs = [leaf(5) for _ in range(40)]
    with context() as ctx:
        answers = [rpc.rpc_async(1, double_or_fail, (False, x)) for x in xs]
        backward(ctx, [torch.stack([a.wait() for a in answers]).sum()])
        for gradient in get_gradients(ctx).values():
            assert gradient.untyped_storage().nbytes() == gradient.nbytes


def test_reports_contain_handled_requests(c3: Cluster) -> None:
    reports: list[BackwardAutogradResp] = []

    def note(tapped: Tapped) -> None:
        if tapped.outgoing and isinstance(tapped.message, BackwardAutogradResp):
            reports.append(tapped.message)

    c3.workers[1].mailbox.tap = observer(note)
    with context() as ctx:
        loss = pipeline([1], [torch.randn(2, 3, dtype=torch.float64) for _ in range(MICRO_BATCHES)])
        backward(ctx, [loss])
    (report,) = reports
    assert len(report.handled.requests) == MICRO_BATCHES
    assert report.handled.sent == ()
