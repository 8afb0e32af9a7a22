"""What a callee knows of the call that it serves: time left, and whether anybody still waits."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from tests.support.waiting import eventually
from tests.support.workers import two_workers
from zmqgrad import rpc
from zmqgrad.errors import PeerLostError, RpcError, RpcTimeoutError, TransportError
from zmqgrad.rpc import core
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.rpc.remote_errors import describe_exception
from zmqgrad.rpc.serialization.serializer import serialize_call
from zmqgrad.runtime.blocking import may_wait_for_others
from zmqgrad.runtime.clock import Deadline, ManualClock
from zmqgrad.testing import Cluster, cluster
from zmqgrad.transport.base import Inbound
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.messages import (
    NONE_PAYLOAD,
    Call,
    Cancel,
    MessageType,
    Result,
    RRefAck,
    RRefChildAccept,
    RRefUserDelete,
)

ONE_THREAD = RpcBackendOptions(rpc_timeout=20.0, num_worker_threads=1)

WAIT = 20.0


@pytest.fixture
def pair(clock: ManualClock) -> Iterator[Cluster]:
    with cluster(2, ONE_THREAD, clock) as c:
        yield c


class Stage:
    """What the functions below and their test tell each other; in one process, so by a global."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.go_on = threading.Event()
        self.seen: list[Any] = []


stage = Stage()


@pytest.fixture(autouse=True)
def fresh_stage() -> Iterator[None]:
    global stage
    stage = Stage()
    yield
    stage.go_on.set()


def left_here() -> float:
    """Of the call that asks."""
    return rpc.time_left()


def left_there(timeout: float) -> float:
    """Of a call that the call makes."""
    return rpc.rpc_sync(0, left_here, timeout=timeout)


def left_by_remote(to: int) -> float:
    """Of making a value, for a call."""
    return rpc.remote(to, left_here).to_here()


def stop_and_look() -> Any:
    """Wait, then say whether anybody still waits."""
    mine = stage
    mine.running.set()
    mine.go_on.wait(WAIT)
    mine.seen.append((rpc.cancelled(), rpc.time_left()))
    try:
        mine.seen.append(rpc.rpc_sync(0, left_here))
    except RpcTimeoutError as e:
        mine.seen.append(e)


def count() -> None:
    """To see how often it ran."""
    stage.seen.append("ran")


def test_outside_of_calls_there_is_no_limit() -> None:
    assert rpc.time_left() == math.inf
    assert not rpc.cancelled()


@pytest.mark.parametrize(("timeout", "left"), [(3, 3.0), (0, math.inf), (rpc.api.UNSET_RPC_TIMEOUT, 20.0)])
def test_the_callee_can_ask(pair: Cluster, timeout: float, left: float) -> None:
    assert rpc.rpc_sync(1, left_here, timeout=timeout) == left
    assert rpc.rpc_async(1, left_here, timeout=timeout).wait() == left
    assert rpc.remote(1, left_here, timeout=timeout).to_here() == left


@pytest.mark.parametrize(("outer", "inner", "left"), [(3, 5, 3.0), (3, 0, 3.0), (5, 3, 3.0), (0, 3, 3.0)])
def test_nested_calls_do_not_outlive_the_call(pair: Cluster, outer: float, inner: float, left: float) -> None:
    assert rpc.rpc_sync(1, left_there, args=(inner,), timeout=outer) == left


def test_nor_do_nested_remote_calls(pair: Cluster) -> None:
    assert rpc.rpc_sync(1, left_by_remote, args=(0,), timeout=4) == 4.0
    assert rpc.rpc_sync(1, left_by_remote, args=(1,), timeout=4) == 4.0


def test_a_call_over_time_is_cancelled_and_can_make_no_more(pair: Cluster, clock: ManualClock) -> None:
    future = rpc.rpc_async(1, stop_and_look, timeout=5)
    assert stage.running.wait(WAIT)
    queued = rpc.rpc_async(0, left_here, timeout=0)
    assert queued.wait() == math.inf
    clock.advance(6)
    with pytest.raises(RpcTimeoutError, match=r"more than set timeout .5000 ms"):
        future.wait()
    stage.go_on.set()
    pair.network.wait_sent(MessageType.RESULT, 2)
    assert stage.seen[0] == (True, 0.0)
    assert "nobody waits any more" in str(stage.seen[1])


def test_what_makes_a_value_goes_on_making_calls_after_its_time(pair: Cluster, clock: ManualClock) -> None:
    made = rpc.remote(1, stop_and_look, timeout=5)
    assert stage.running.wait(WAIT)
    clock.advance(6)
    with pytest.raises(RpcTimeoutError):  # the thread of the timer has seen that
        made._get_future().wait()
    with pytest.raises(RpcTimeoutError):
        made.to_here()
    stage.go_on.set()
    pair.network.wait_sent(MessageType.REMOTE_RESULT)
    assert stage.seen == [(True, 0.0), 20.0]  # its call has the default timeout of its own worker


def test_a_queued_call_whose_time_is_over_is_not_run(pair: Cluster, clock: ManualClock) -> None:
    with pair.network.hold(MessageType.CANCEL):  # so that the callee has nothing but its own clock
        first = rpc.rpc_async(1, stop_and_look, timeout=0)
        assert stage.running.wait(WAIT)
        late = rpc.rpc_async(1, count, timeout=5)
        made = rpc.remote(1, count, timeout=5)
        on_time = rpc.rpc_async(1, count, timeout=50)
        pair.network.wait_quiet()  # all have arrived, and wait for the one thread
        clock.advance(6)
        stage.go_on.set()
        first.wait()
        on_time.wait()
    with pytest.raises(RpcTimeoutError):
        late.wait()
    with pytest.raises(RpcTimeoutError):
        made._get_future().wait()
    with pytest.raises(RpcTimeoutError):
        made.to_here()
    assert stage.seen.count("ran") == 1


def test_a_value_that_is_late_is_a_timeout_on_either_side(pair: Cluster) -> None:
    worker = current_worker()
    with pair.network.hold(MessageType.REMOTE_CALL):
        made = rpc.remote(1, count, timeout=0)
        (call,) = worker.client.pending.all()
        assert worker.client.pending.take(call.message_id) is call
        refusal = describe_exception(RpcTimeoutError("too late"), "worker1")
        envelope = Envelope(refusal.TYPE, 1, 0, call.message_id)
        call.promise.set_result(Inbound(envelope, refusal, ()))
        with pytest.raises(RpcTimeoutError, match="too late"):
            made.to_here()


def test_a_caller_that_stops_waiting_cancels_the_call(pair: Cluster) -> None:
    worker = current_worker()
    call = worker.call(1, stop_and_look, timeout=0)
    assert stage.running.wait(WAIT)
    queued = worker.call(1, count, timeout=0)
    pair.network.wait_quiet()
    for given_up in (queued, call):
        worker.client.cancel(given_up)
    pair.network.wait_sent(MessageType.CANCEL, 2)
    pair.network.wait_quiet()
    stage.go_on.set()
    assert rpc.rpc_sync(1, left_here) == 20.0, "the one thread is free again"
    assert stage.seen[0] == (True, 0.0)
    assert "ran" not in stage.seen
    assert len(pair.workers[1].server.in_flight) == 0


@pytest.mark.parametrize(("source", "incarnation"), [(0, 7), (9, 7)])
def test_a_request_of_another_process_is_not_read(
    pair: Cluster, caplog: pytest.LogCaptureFixture, source: int, incarnation: int
) -> None:
    """It claims to be a member of the group, which has another incarnation or none."""
    callee = pair.workers[1]
    assert rpc.rpc_sync(1, count) is None
    reference, serialized = serialize_call(count, (), {})
    call = Call(reference, serialized.payload, 5.0)
    task = callee.server.on_message(Inbound(Envelope(call.TYPE, source, incarnation, 77), call, ()))
    assert task is not None
    task()
    assert stage.seen.count("ran") == 1
    assert f"refused Call: its sender claims to be worker {source}, and is another process" in caplog.text
    assert len(callee.server.in_flight) == 0


def test_a_reply_of_another_worker_is_not_taken(pair: Cluster) -> None:
    worker = current_worker()
    with pair.network.hold(MessageType.RESULT):
        pending = rpc.rpc_async(1, left_here, timeout=0)
        (call,) = worker.client.pending.all()
        forged = Result()
        worker.client.on_reply(Inbound(Envelope(forged.TYPE, 0, 0, call.message_id), forged, ()))
        assert not pending.done()
    assert pending.wait() == math.inf


def test_only_the_caller_can_cancel_a_call() -> None:
    with cluster(3, ONE_THREAD) as c:
        call = c.workers[0].call(1, stop_and_look)
        assert stage.running.wait(WAIT)
        c.workers[2].client.post(call.peer, Cancel(call.message_id))
        c.network.wait_sent(MessageType.CANCEL)
        c.network.wait_quiet()
        stage.go_on.set()
        c.workers[0].wait(call)
        assert stage.seen[0][0] is False


def test_a_caller_can_cancel_its_call_though_another_has_used_its_number() -> None:
    with cluster(3, ONE_THREAD) as c:
        call = c.workers[0].call(1, stop_and_look)
        assert stage.running.wait(WAIT)
        c.workers[2].mailbox.send(1, Call("builtins:list", NONE_PAYLOAD), call.message_id)
        c.network.wait_quiet()
        c.workers[0].client.cancel(call)
        c.network.wait_sent(MessageType.CANCEL)
        c.network.wait_quiet()
        stage.go_on.set()
        eventually(lambda: stage.seen)
        assert stage.seen[0][0] is True


def test_the_calls_of_a_dead_caller_are_cancelled(pair: Cluster) -> None:
    future = rpc.rpc_async(1, stop_and_look, timeout=0)
    assert stage.running.wait(WAIT)
    pair.workers[1].lose(0, "it fell over")
    pair.network.wait_quiet()
    stage.go_on.set()
    pair.workers[0].lose(1, "it fell over")
    with pytest.raises(PeerLostError, match=r"worker1 .worker 1. is gone.*it fell over.*stop_and_look"):
        future.wait()
    assert pair.workers[1].pool.wait_idle(Deadline.after(WAIT))
    assert stage.seen[0] == (True, 0.0)
    with pytest.raises(PeerLostError, match="it fell over"):
        rpc.rpc_sync(1, count)


def helpers_of_a_product() -> int:
    """How many threads a matrix product starts here."""
    factor = torch.rand(256, 256)
    before = len(os.listdir("/proc/self/task"))
    torch.mm(factor, factor)
    return len(os.listdir("/proc/self/task")) - before


@pytest.mark.skipif(sys.platform != "linux" or os.cpu_count() == 1, reason="counts OpenMP's threads in /proc")
def test_functions_use_the_number_of_threads_set_in_torch() -> None:
    told = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with cluster(2):
            assert rpc.rpc_sync(1, helpers_of_a_product) == 0
    finally:
        torch.set_num_threads(told)


@pytest.mark.parametrize("graceful", [True, False])
def test_shutdown_inside_a_call_is_refused(pair: Cluster, graceful: bool) -> None:
    """It would wait for its own end, and a concurrent shutdown would wait for it."""
    with pytest.raises(RpcError, match="shutdown was called inside a remote call"):
        rpc.rpc_sync(1, rpc.shutdown, args=(graceful,))


mine: ContextVar[str] = ContextVar("mine", default="as new")


def leave_behind() -> int:
    """Sets modes of its thread, which last unless the server resets them."""
    mine.set("left")
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    return threading.get_ident()


def what_is_there() -> tuple[int, str, bool, str]:
    """The same, as a call finds it."""
    return threading.get_ident(), mine.get(), torch.is_grad_enabled(), torch.empty(0).device.type


def test_a_call_leaves_nothing_behind_in_its_thread(pair: Cluster) -> None:
    """What is run next must not depend on which thread is free; above all not whether it has gradients."""
    left = {rpc.rpc_sync(1, leave_behind) for _ in range(3)}
    found = [rpc.rpc_sync(1, what_is_there) for _ in range(20)]
    assert left & {thread for thread, *_ in found}, "else nothing was tried"
    assert {tuple(rest) for _, *rest in found} == {("as new", True, "cpu")}


def frames_below() -> list[str]:
    """The names of the functions under this one."""
    frame = sys._getframe(1)
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return names


def test_few_frames_lie_under_a_served_function(pair: Cluster) -> None:
    for names in rpc.rpc_sync(1, frames_below), rpc.remote(1, frames_below).to_here():
        assert len(names) <= 8, names


def note(text: str) -> str:
    NOTED.append(text)
    return text


NOTED: list[str] = []


def test_a_worker_that_does_not_serve_yet_keeps_requests_and_serves_them_later() -> None:
    """As between ``worker.start(serving=False)`` in ``init_rpc`` and its return."""
    NOTED.clear()
    with cluster(2) as c:
        c.workers[1].server.hold()
        calls = [c.workers[0].call(1, note, (f"early {n}",)) for n in range(3)]
        c.network.wait_quiet()
        assert c.workers[1].call(0, abs, (-1,)).promise.wait_done(WAIT), "it may call others itself"
        assert NOTED == []
        c.workers[1].server.serve()
        for call in calls:
            assert call.promise.wait_done(WAIT)
        c.workers[1].server.serve()
        c.workers[0].wait(c.workers[0].call(1, note, ("late",)))
        assert sorted(NOTED) == ["early 0", "early 1", "early 2", "late"]


def test_a_call_ends_though_its_reply_could_not_be_sent_at_first(
    pair: Cluster, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a free descriptor, a worker cannot open its connection to the caller."""
    mailbox, failures = pair.workers[1].mailbox, [TransportError("Too many open files")] * 3
    send = mailbox.send

    def fail_at_first(*args: Any, **kwargs: Any) -> None:
        if failures:
            raise failures.pop()
        send(*args, **kwargs)

    monkeypatch.setattr(mailbox, "send", fail_at_first)
    future = rpc.rpc_async(1, len, args=("abc",), timeout=0)
    eventually(lambda: [clock.advance(core.RETRY_SECONDS), future.done()][1])
    with pytest.raises(TransportError, match="Too many open files"):
        future.wait()
    assert not failures


def test_an_acknowledgement_to_a_worker_that_is_unknown_here_stops_no_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its address is in the store. Whoever waits for that must not be the thread that reads for all."""
    with two_workers(ZmqMailbox) as (_, owner):
        membership, send, could_wait = owner.membership, owner.mailbox.send, list[bool]()

        def note_and_send(peer: int, message: Any, *args: Any) -> None:
            if isinstance(message, RRefAck):
                could_wait.append(may_wait_for_others())
            send(peer, message, *args)

        monkeypatch.setattr(membership, "find_known", lambda worker: None)
        monkeypatch.setattr(owner.mailbox, "send", note_and_send)
        reference = rpc.remote(1, len, args=("abc",))
        assert reference.to_here() == 3
        del reference
        assert eventually(lambda: could_wait, timeout=WAIT) == [True]


may_reply = threading.Event()


def reply_late(given: rpc.RRef) -> list[rpc.RRef]:
    may_reply.wait(WAIT)
    return [given, rpc.RRef("made here")]


def test_references_in_a_late_reply_stop_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads that reply, and its RRefs are released: at owners whose addresses are in the store."""
    may_reply.clear()
    with two_workers(ZmqMailbox) as (caller, _):
        send, could_wait = caller.mailbox.send, dict[type, bool]()

        def note_and_send(peer: int, message: Any, *args: Any) -> None:
            could_wait[type(message)] = may_wait_for_others()
            send(peer, message, *args)

        future = rpc.rpc_async(1, reply_late, args=(rpc.RRef("of the caller"),), timeout=0.1)
        with pytest.raises(RpcTimeoutError):
            future.wait()
        monkeypatch.setattr(caller.membership, "find_known", lambda worker: None)
        monkeypatch.setattr(caller.mailbox, "send", note_and_send)
        may_reply.set()
        eventually(lambda: {RRefChildAccept, RRefUserDelete} <= could_wait.keys(), timeout=WAIT)
        assert could_wait[RRefChildAccept]
        assert could_wait[RRefUserDelete]


def test_a_reference_to_the_value_of_an_unknown_worker_is_dropped_alone() -> None:
    """As no program sends it. Those that are released with it are released at their owners."""
    with two_workers(ZmqMailbox) as (caller, owner):
        reference = rpc.remote(1, len, args=("abc",))
        assert reference.to_here() == 3
        caller.references.discard([(7, 1001, 1002, 7)])
        del reference
        caller.references.flush_releases()
        eventually(lambda: owner.references.statistics()["owner_rrefs"], lambda count: count == 0, WAIT)
