"""Answers that come after their caller has gone, over real sockets: nothing is read, and nothing kept."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zmqgrad.autograd as dist_autograd
from tests.support.waiting import eventually
from tests.support.workers import WAIT, two_workers
from zmqgrad import rpc
from zmqgrad.errors import PeerLostError, RpcError, RpcTimeoutError
from zmqgrad.rpc import server
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.rref import table
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.base import Handler, Inbound, OnEnd, PeerEnd, Resolver
from zmqgrad.transport.local.channels import ReplyChannel
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.wire.messages import MessageType


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Worker]]:
    """Two workers; the test acts for the first."""
    monkeypatch.setattr(table, "FLUSH_SECONDS", 0.001)
    with two_workers() as workers:
        yield workers


class Gate:
    """What a slow function waits for; a global, as both workers are of one process."""

    def __init__(self) -> None:
        self.opened = threading.Event()


gate = Gate()


def give_rref(wait: bool) -> rpc.RRef[Any]:
    """A reference, perhaps late."""
    if wait:
        gate.opened.wait(WAIT)
    return rpc.RRef([1])


def use_reply_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls until a reply is read at a channel.

    A callee replies to the receiver until its connection to the channel is accepted, which the caller does
    only while it waits there: under load, the replies of many calls may be quicker.
    """
    read: list[Inbound] = []
    receive = ReplyChannel.receive

    def noted(self: ReplyChannel, seconds: float | None) -> Inbound | None:
        inbound = receive(self, seconds)
        read.extend([] if inbound is None else [inbound])
        return inbound

    with monkeypatch.context() as patched:
        patched.setattr(ReplyChannel, "receive", noted)
        deadline = Deadline.after(WAIT)
        while not read:
            assert not deadline.passed(), "no reply is read at a reply channel"
            assert rpc.rpc_sync(1, len, args=("abc",)) == 3


def what_is_kept(worker: Worker) -> dict[str, int]:
    """For others, and of theirs."""
    gc.collect()
    worker.references.flush_releases()
    return worker.references.statistics()


def wait_until_empty(workers: list[Worker]) -> None:
    """No reference is left anywhere."""
    eventually(
        lambda: [what_is_kept(w) for w in workers], lambda kept: not any(any(k.values()) for k in kept)
    )


def test_a_reply_after_the_timeout(pair: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    gate.opened.clear()
    use_reply_channels(monkeypatch)
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync(1, give_rref, args=(True,), timeout=0.02)
    gate.opened.set()
    wait_until_empty(pair)
    assert rpc.rpc_sync(1, len, args=("abc",)) == 3


def test_a_reply_in_flight_to_the_channel_at_the_timeout(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callee is in time by its own clock, and hears too late that the caller has given up."""
    gate.opened.clear()
    use_reply_channels(monkeypatch)
    monkeypatch.setattr(server, "cancelled", lambda: False)  # on both sides; the caller waits for less
    worker = current_worker()
    call = worker.call(1, give_rref, (True,), timeout=0.02, waits=True)
    assert call.port.number != 0
    with pytest.raises(RpcTimeoutError):
        worker.wait(call)
    gate.opened.set()
    assert pair[1].pool.wait_idle(Deadline.after(WAIT))
    wait_until_empty(pair)


def test_a_reply_that_is_read_while_the_call_times_out(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer has removed the call already, and has yet to wake the thread that waits."""
    use_reply_channels(monkeypatch)
    worker = current_worker()
    call = worker.call(1, give_rref, (False,), waits=True)
    channel: Any = call.port.held[0]
    expired = worker.client.pending.expire(call.deadline + 1)  # and no notification
    assert expired == [call]

    def go_on() -> None:
        try:
            eventually(lambda: channel.in_hand, bool)
        finally:  # else the test would wait for ever
            worker.client._time_out(expired)

    timer = threading.Thread(target=go_on)
    timer.start()
    with pytest.raises(RpcTimeoutError):
        worker.wait(call)
    timer.join(WAIT)
    wait_until_empty(pair)


has_run = threading.Event()


def run_and_tell() -> int:
    """Says when it has run."""
    has_run.set()
    return 4


def test_a_reply_that_arrived_before_its_sender_was_lost(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_reply_channels(monkeypatch)
    has_run.clear()
    worker = current_worker()
    call = worker.call(1, run_and_tell, waits=True)
    assert call.port.number != 0
    assert has_run.wait(WAIT)
    assert pair[1].pool.wait_idle(Deadline.after(WAIT))
    worker.lose(1, "its process has ended")
    assert worker.decode(worker.wait(call)) == 4


_made: list[torch.Tensor] = []


def make(x: torch.Tensor) -> None:
    """What :func:`times` multiplies."""
    _made.append(x * 2)


def times(factor: float) -> torch.Tensor:
    """Has a graph in common with the other calls."""
    return _made[-1] * factor


def test_the_end_of_a_worker_is_noticed_while_a_pass_asks_what_will_never_arrive() -> None:
    """Its last report was read at the reply channel, where its end then stays until the channel is left."""
    with two_workers() as workers, dist_autograd.context() as context:
        threads: list[threading.Thread] = []

        def end(_: Inbound) -> None:
            threads.append(threading.Thread(target=workers[1].close))
            threads[0].start()

        workers[1].hooks.requests[MessageType.DISCOVER_AUTOGRAD_REQ] = end
        rpc.rpc_sync(1, make, (torch.ones(2, requires_grad=True),))
        loss, _ = rpc.rpc_sync(1, times, (3.0,)).sum(), rpc.rpc_sync(1, times, (4.0,))
        with pytest.raises(PeerLostError, match="worker1"):
            dist_autograd.backward(context, [loss])
        threads[0].join(WAIT)
        _made.clear()


def test_a_call_that_begins_while_its_worker_shuts_down_fails(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is registered after the pending calls were failed, and could still be sent."""
    worker = pair[0]
    add = worker.client.pending.add

    def closed_before(call: Any) -> None:
        worker.close()
        add(call)

    monkeypatch.setattr(worker.client.pending, "add", closed_before)
    with pytest.raises(RpcError, match="worker0 has been shut down"):
        rpc.rpc_sync("worker1", current_worker, timeout=0)


def test_a_call_between_the_end_of_a_peer_and_word_of_it_names_the_loss() -> None:
    """The link takes nothing more before the worker is told that the peer is lost."""
    ended, go_on = threading.Event(), threading.Event()

    class Held(ZmqMailbox):
        """Its worker is told late."""

        def start(self, handler: Handler, resolve: Resolver, pool: Any, on_end: OnEnd, *args: Any) -> None:
            def held(end: PeerEnd) -> None:
                if self.worker_id == 0:
                    ended.set()
                    assert go_on.wait(WAIT)
                on_end(end)

            super().start(handler, resolve, pool, held, *args)

    with two_workers(Held) as workers:
        assert rpc.rpc_sync("worker1", len, args=("abc",)) == 3
        workers[0].lose(1, "it fell over")
        try:
            assert ended.wait(WAIT)
            with pytest.raises(PeerLostError, match=r"worker1 .worker 1. is gone: .*it fell over"):
                rpc.rpc_sync("worker1", len, args=("abc",))
        finally:
            go_on.set()
