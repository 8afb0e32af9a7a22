"""Workers and messages that are lost: passes end, and contexts are forgotten all the same."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.autograd.contexts import known_by, wait_until_known_by
from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients
from zmqgrad.autograd.context import MAX_ENDED_PASSES, Contexts
from zmqgrad.autograd.forwarding import autograd_of
from zmqgrad.errors import AutogradError, PeerLostError, RpcError, TransportError
from zmqgrad.rpc.core import RETRY_SECONDS
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.hooks import Hooks, Unwrapped
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.runtime.clock import ManualClock
from zmqgrad.testing import Cluster, cluster
from zmqgrad.testing.faults import Hold
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.ids import join_id
from zmqgrad.wire.messages import BackwardAutogradReq, BackwardAutogradResp, Message, MessageType

# Outcomes of calls to workers that are lost only for some are nobody's any more.
pytestmark = pytest.mark.open_outcomes


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def double(x: Tensor) -> Tensor:
    return x * 2


def relay(route: list[int], x: Tensor) -> Tensor:
    y = x * 2
    return rpc.rpc_sync(route[0], relay, (route[1:], y)) if route else y


@pytest.mark.parametrize("route", [[], [2]], ids=["by the root", "by another"])
def test_a_pass_ends_when_a_worker_that_it_waits_for_is_lost(c3: Cluster, route: list[int]) -> None:
    lost = 2 if route else 1
    failed: list[BaseException] = []

    def differentiate() -> None:
        with c3.acting(0), context() as ctx:
            loss = rpc.rpc_sync(1, relay, (route, leaf(1))).sum()
            try:
                backward(ctx, [loss])
            except PeerLostError as e:
                failed.append(e)

    with c3.network.hold(MessageType.BACKWARD_AUTOGRAD_REQ, target=lost) as held:
        thread = threading.Thread(target=differentiate)
        thread.start()
        assert isinstance(held, Hold)
        held.wait()
        for worker in c3.workers[:2]:
            if worker.id != lost:
                worker.lose(lost, "its process has ended")
        thread.join(20.0)
        assert not thread.is_alive()
    assert f"worker{lost} (worker {lost}) is gone: its process has ended" in str(failed[0])


@pytest.mark.parametrize(("loser", "lost"), [(1, 2), (2, 1)], ids=["on the way there", "on the way back"])
def test_the_root_learns_at_once_that_another_worker_has_lost_one(c3: Cluster, loser: int, lost: int) -> None:
    """The gradients between the two are in flight; the root itself still reaches both."""
    failed: list[BaseException] = []

    def differentiate() -> None:
        with c3.acting(0), context() as ctx:
            loss = rpc.rpc_sync(1, relay, ([2], leaf(1))).sum()
            try:
                backward(ctx, [loss])
            except PeerLostError as e:
                failed.append(e)

    with c3.network.hold(MessageType.BACKWARD_AUTOGRAD_REQ, source=loser, target=lost) as held:
        thread = threading.Thread(target=differentiate)
        thread.start()
        assert isinstance(held, Hold)
        held.wait()
        c3.workers[loser].lose(lost, "its link was cut")
        thread.join(5.0)
        assert not thread.is_alive()
    # Both report it, since the lost one is told. The first report ends the pass.
    first = f"worker{lost} (worker {lost}) is gone", f"worker{loser} has declared worker {lost} lost"
    assert any(f"{text}: its link was cut" in str(failed[0]) for text in first), failed
    assert not {loser, lost} & c3.workers[0].lost.keys()


def test_a_pass_ends_that_others_take_to_a_worker_that_was_lost_before(c3: Cluster) -> None:
    with (
        c3.network.hold(MessageType.BACKWARD_AUTOGRAD_REQ, target=2),
        context() as ctx,
    ):
        loss = rpc.rpc_sync(1, relay, ([2], leaf(1))).sum()
        c3.workers[0].lose(2, "its process has ended")
        with pytest.raises(PeerLostError, match=r"worker2 .* is gone: its process has ended"):
            backward(ctx, [loss])


def test_what_came_with_gradients_is_known_before_the_loss_of_their_sender() -> None:
    """Worker 1 has done its part. That its gradients still wait for a thread here changes nothing."""
    may_go_on = threading.Event()
    x = leaf(3)
    with cluster(2, RpcBackendOptions(num_worker_threads=1, rpc_timeout=20.0)) as c2, context() as ctx:
        loss = rpc.rpc_sync(1, double, (x,)).sum()
        server = c2.workers[0].server
        c2.workers[0].submit(functools.partial(may_go_on.wait, 20.0))
        before = server.served

        def lose_when_arrived() -> None:
            eventually(lambda: server.served, lambda served: served > before, 20.0)
            c2.workers[0].lose(1, "its process has ended")
            eventually(lambda: 1 in c2.workers[0].lost, bool, 20.0)
            may_go_on.set()

        thread = threading.Thread(target=lose_when_arrived)
        thread.start()
        backward(ctx, [loss])
        thread.join(20.0)
        assert get_gradients(ctx)[x].item() == 2


def keep(x: Tensor) -> rpc.RRef[Tensor]:
    return rpc.RRef(x * 2)


def add_to_kept(kept: rpc.RRef[Tensor], x: Tensor) -> Tensor:
    return kept.local_value() + x.sum()


def test_a_pass_ends_when_a_worker_is_lost_whose_gradients_have_not_arrived_with_its_report() -> None:
    """Between hosts, a report may overtake large gradients, which go by connections of their own."""
    failed: list[BaseException] = []
    entered: list[int] = []
    large, small = torch.zeros(200_000, dtype=torch.float64, requires_grad=True), leaf(1)

    def differentiate() -> None:
        with c2.acting(0), context() as ctx:
            entered.append(ctx)
            kept = rpc.rpc_sync(1, keep, (large,))
            loss = rpc.rpc_sync(1, add_to_kept, (kept, small)).sum()
            try:
                backward(ctx, [loss])
            except PeerLostError as e:
                failed.append(e)

    with (
        cluster(2) as c2,
        c2.network.hold(MessageType.BACKWARD_AUTOGRAD_REQ, times=1, source=1) as held,
    ):
        thread = threading.Thread(target=differentiate)
        thread.start()
        assert isinstance(held, Hold)
        held.wait()
        with c2.acting(0):
            eventually(lambda: get_gradients(entered[0]), bool)
        c2.workers[0].lose(1, "its process has ended")
        thread.join(10.0)
        assert not thread.is_alive()
    assert "worker1 (worker 1) is gone: its process has ended" in str(failed[0])


WEIGHT = leaf(3)


def weight() -> Tensor:
    return WEIGHT * 2


@pytest.mark.parametrize("fails", ["report", "gradients"])
def test_a_pass_ends_though_its_report_could_not_be_sent_at_first(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Without a free descriptor, a worker cannot open its connection to the one where the pass began."""
    clock, failures = ManualClock(), [TransportError("Too many open files")] * 3
    ended: list[BaseException | None] = []

    def differentiate() -> None:
        with c2.acting(0), context() as ctx:
            made = rpc.rpc_sync(1, weight) if fails == "report" else rpc.rpc_sync(1, double, (leaf(3),))
            monkeypatch.setattr(mailbox, "send", fail_at_first)
            try:
                backward(ctx, [made.sum()])
                ended.append(None)
            except TransportError as e:
                ended.append(e)

    with cluster(2, RpcBackendOptions(rpc_timeout=0), clock) as c2:
        mailbox = c2.workers[1].mailbox
        send = mailbox.send

        def fail_at_first(peer: int, message: Message, *args: Any, **kwargs: Any) -> None:
            if failures and isinstance(message, (BackwardAutogradReq, BackwardAutogradResp)):
                raise failures.pop()
            send(peer, message, *args, **kwargs)

        thread = threading.Thread(target=differentiate)
        thread.start()
        eventually(lambda: [clock.advance(RETRY_SECONDS), ended][1], bool)
        thread.join()
    assert not failures
    assert (ended[0] is None) is (fails == "report")


def test_gradients_for_a_worker_that_is_being_shut_down_say_so() -> None:
    """Its contexts are released by then, and not because a ``with`` block was left."""
    with cluster(2) as c2, context() as ctx:
        loss = rpc.rpc_sync(1, double, (leaf(3),)).sum()
        with c2.network.hold(MessageType.BACKWARD_AUTOGRAD_REQ, target=1) as held:
            raised = threading.Event()

            def deliver() -> None:
                held.release()
                raised.wait(20.0)  # the mailbox is closed only then

            def shut_down() -> None:
                held.wait()
                c2.workers[1].close()

            c2.workers[1].hooks.closing.append(deliver)
            thread = threading.Thread(target=shut_down)
            thread.start()
            with pytest.raises(RuntimeError, match="worker worker1 was shut down while a backward pass"):
                backward(ctx, [loss])
            raised.set()
            thread.join(20.0)


def test_gradients_that_cannot_be_sent_to_a_lost_worker_name_its_loss(c3: Cluster) -> None:
    with context() as ctx:
        loss = rpc.rpc_sync(1, double, (leaf(1),)).sum()
        c3.workers[0].lose(1, "its process has ended")
        eventually(lambda: 1 in c3.workers[0].lost, bool)
        with pytest.raises(PeerLostError, match=r"worker1 .* is gone: its process has ended"):
            backward(ctx, [loss])


def test_no_context_begins_when_the_worker_that_began_it_is_lost() -> None:
    contexts = Contexts()
    contexts.lose(1)
    assert contexts.get_or_create(join_id(1, 7)) is None
    assert contexts.get_or_create(join_id(2, 7)) is not None


def test_a_trace_shows_that_a_context_is_created_before_what_others_do_in_it() -> None:
    seen: list[str] = []

    class Recording:
        """Another message of the context arrives while its creation is being recorded."""

        def context_created(self, context: int) -> None:
            other.start()
            other.join(0.1)  # all the time it needs, if it does not wait
            seen.append("created")

    def use() -> None:
        assert contexts.get_or_create(7) is not None
        seen.append("used")

    contexts, other = Contexts(Hooks(tracer=Recording())), threading.Thread(target=use)  # type: ignore[arg-type]
    contexts.get_or_create(7)
    other.join(10)
    assert seen == ["created", "used"]


@pytest.mark.parametrize("mode", ["smart", "auto"])
def test_a_pass_ends_when_a_worker_is_lost_during_discovery(c3: Cluster, mode: str) -> None:
    failed: list[BaseException] = []

    def differentiate() -> None:
        with c3.acting(0), context() as ctx:
            x = leaf(1)
            rpc.rpc_sync(1, double_elsewhere, (x,))
            loss = rpc.rpc_sync(1, double_elsewhere, (x,)).sum()
            try:
                backward(ctx, [loss + x.sum()], mode=mode)
            except PeerLostError as e:
                failed.append(e)

    with c3.network.hold(MessageType.DISCOVER_AUTOGRAD_REQ) as held:
        thread = threading.Thread(target=differentiate)
        thread.start()
        held.wait()
        c3.workers[0].lose(1, "its process has ended")
        thread.join(20.0)
        assert not thread.is_alive()
    assert "worker1 (worker 1) is gone: its process has ended" in str(failed[0])


def test_a_pass_ends_when_its_context_is_left_meanwhile(c3: Cluster) -> None:
    ended: list[BaseException] = []

    def differentiate(ctx: int, loss: Tensor) -> None:
        with c3.acting(0):
            try:
                backward(ctx, [loss])
            except AutogradError as e:
                ended.append(e)

    with c3.network.hold(MessageType.BACKWARD_AUTOGRAD_REQ, target=1) as held:
        with context() as ctx:
            loss = rpc.rpc_sync(1, relay, ([2], leaf(1))).sum()
            thread = threading.Thread(target=differentiate, args=(ctx, loss))
            thread.start()
            held.wait()
        wait_until_known_by(c3)
    thread.join(20.0)
    assert not thread.is_alive()
    assert "has been released" in str(ended[0])
    assert known_by(c3) == []


def test_concurrent_passes_that_free_one_graph_do_not_hang(c3: Cluster) -> None:
    x = leaf(3)
    refused: list[str] = []

    def differentiate(ctx: int, loss: Tensor, together: threading.Barrier) -> None:
        with c3.acting(0):
            together.wait(10.0)
            try:
                backward(ctx, [loss])
            except RuntimeError as e:
                refused.append(str(e))

    for _ in range(10):
        together = threading.Barrier(2)
        refused.clear()
        with context() as ctx:
            loss = (rpc.rpc_sync(1, square, (x,)) * x).sum()
            threads = [threading.Thread(target=differentiate, args=(ctx, loss, together)) for _ in range(2)]
            for t in threads:
                t.start()
            for t in threads:
                t.join(20.0)
                assert not t.is_alive()
        assert all("backward through the graph a second time" in text for text in refused), refused


def square(x: Tensor) -> Tensor:
    return x * x


def test_a_pass_ends_when_its_worker_is_shut_down(c3: Cluster) -> None:
    failed: list[BaseException] = []

    def differentiate() -> None:
        with c3.acting(0), context() as ctx:
            loss = rpc.rpc_sync(1, double, (leaf(1),)).sum()
            try:
                backward(ctx, [loss])
            except RpcError as e:
                failed.append(e)

    with c3.network.hold(MessageType.BACKWARD_AUTOGRAD_REQ, target=1) as held:
        thread = threading.Thread(target=differentiate)
        thread.start()
        held.wait()
        c3.workers[0].close()
        thread.join(20.0)
        assert not thread.is_alive()
    assert "worker0 was shut down while a backward pass was under way" in str(failed[0])


def test_a_pass_continues_when_an_uninvolved_worker_is_lost(c3: Cluster) -> None:
    x = leaf(1)
    with context() as ctx:
        loss = rpc.rpc_sync(1, double, (x,)).sum()
        with c3.network.hold(MessageType.BACKWARD_AUTOGRAD_REQ, target=1) as held:

            def lose_and_let_go() -> None:
                held.wait()
                c3.workers[0].lose(2, "its process has ended")
                held.release()  # type: ignore[attr-defined]

            thread = threading.Thread(target=lose_and_let_go)
            thread.start()
            backward(ctx, [loss])
            thread.join()
        assert get_gradients(ctx)[x].tolist() == [2.0]


def test_contexts_go_with_the_worker_that_made_them(c3: Cluster) -> None:
    with context():
        rpc.rpc_sync(1, relay, ([2], leaf(1)))
        assert known_by(c3) == [0, 1, 2]
        with c3.network.partition(0):
            c3.workers[1].lose(0, "its process has ended")
            wait_until_known_by(c3, 0, 2)
            c3.workers[2].lose(0, "its process has ended")
            wait_until_known_by(c3, 0)


def test_contexts_stay_where_the_worker_that_made_them_is_not_lost(c3: Cluster) -> None:
    x = leaf(1)
    with context() as ctx:
        rpc.rpc_sync(1, relay, ([2], leaf(1)))
        loss = rpc.rpc_sync(2, double, (x,)).sum()

        def sent_by_1() -> int:
            return sum(each.envelope.source == 1 and each.target == 2 for each in list(c3.network.history))

        before = sent_by_1()
        c3.workers[1].lose(0, "unplugged")
        eventually(sent_by_1, lambda count: count > before)
        wait_until_known_by(c3, 0, 2)
        c3.network.wait_quiet()
        backward(ctx, [loss])
        assert get_gradients(ctx)[x].tolist() == [2.0]
    wait_until_known_by(c3)


def test_a_release_arrives_though_an_intermediate_worker_is_lost(c3: Cluster) -> None:
    """0 called 1, which called 2; 0 does not know of 2 until 2, which misses 1, asks."""
    with context():
        rpc.rpc_sync(1, relay, ([2], leaf(1)))
        with c3.network.partition(1):
            for worker in (c3.workers[0], c3.workers[2]):
                worker.lose(1, "its process has ended")
            made = autograd_of(c3.workers[0]).contexts.live()[0]
            eventually(made.peers, lambda peers: 2 in peers)
    eventually(lambda: known_by(c3), lambda known: 2 not in known)


def test_a_release_arrives_though_its_query_could_not_be_sent_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a free descriptor, 2 cannot open a connection to 0, of which only 1 knows."""
    clock, failures = ManualClock(), [TransportError("Too many open files")] * 3
    with cluster(3, RpcBackendOptions(rpc_timeout=0), clock) as c3:
        mailbox = c3.workers[2].mailbox
        send = mailbox.send

        def fail_at_first(peer: int, *args: Any, **kwargs: Any) -> None:
            if failures and peer == 0:
                raise failures.pop()
            send(peer, *args, **kwargs)

        with context():
            rpc.rpc_sync(1, relay, ([2], leaf(1)))
            monkeypatch.setattr(mailbox, "send", fail_at_first)
            with c3.network.partition(1):
                for worker in (c3.workers[0], c3.workers[2]):
                    worker.lose(1, "its process has ended")
                eventually(lambda: 1 in c3.workers[2].lost, bool)
        eventually(lambda: [clock.advance(RETRY_SECONDS), 2 not in known_by(c3)][1], bool)
    assert not failures


def test_a_context_whose_first_call_is_just_served_when_its_caller_is_lost_is_released(c3: Cluster) -> None:
    """0 called 1, which called 2. When 2 misses 1, it does not know the context yet."""
    here = c3.workers[2]
    open_request = here.hooks.request_unwrappers[MessageType.FORWARD_AUTOGRAD_REQ]

    def open_late(inbound: Inbound) -> Unwrapped:
        here.lose(1, "its process has ended")
        eventually(lambda: 1 in here.lost, bool)
        c3.network.wait_quiet()
        return open_request(inbound)

    here.hooks.request_unwrappers[MessageType.FORWARD_AUTOGRAD_REQ] = open_late
    with context():
        waits = rpc.rpc_async(1, relay, ([2], leaf(1)))
        eventually(lambda: 2 in known_by(c3), bool)
        c3.workers[0].lose(1, "its process has ended")
        with pytest.raises(PeerLostError):
            waits.wait()
    eventually(lambda: known_by(c3), lambda known: 2 not in known)


def test_a_worker_that_queries_an_ended_context_releases_it(c3: Cluster) -> None:
    with c3.network.partition(1):
        pass
    with context():
        rpc.rpc_sync(1, relay, ([2], leaf(1)))
        with c3.network.partition(1):
            c3.workers[0].lose(1, "its process has ended")
            c3.network.wait_quiet()
    assert known_by(c3) == [1, 2]  # nobody could tell worker 1, and nobody else knew of worker 2
    c3.workers[2].lose(1, "its process has ended")
    wait_until_known_by(c3)  # worker 1 learns that it was lost


going_on, may_go_on = threading.Event(), threading.Event()


def call_late(peer: int, x: Tensor) -> Tensor:
    """Calls ``peer`` when the context that it was called in has ended."""
    going_on.set()
    may_go_on.wait(20.0)
    return rpc.rpc_sync(peer, double, (x,))


def test_calls_of_a_context_that_has_ended_meanwhile_leave_nothing(c3: Cluster) -> None:
    """Their callees would never be notified: the release has been sent already."""
    for event in (going_on, may_go_on):
        event.clear()
    with context():
        waits = rpc.rpc_async(1, call_late, (2, leaf(1)))
        going_on.wait(20.0)
    wait_until_known_by(c3)
    may_go_on.set()
    with pytest.raises(AutogradError, match="ended before the reply of this call arrived"):
        waits.wait()
    assert known_by(c3) == []


@pytest.mark.parametrize("learns", ["in time", "too late"])
def test_a_reply_after_its_context_is_an_error_if_it_would_have_a_history(c3: Cluster, learns: str) -> None:
    """The callee learns that the context has ended before or after it replies. As on torch's RPC."""
    held = (
        MessageType.FORWARD_AUTOGRAD_REQ if learns == "in time" else MessageType.CLEANUP_AUTOGRAD_CONTEXT_REQ
    )
    with c3.network.hold(held, target=1):
        with c3.network.hold(MessageType.FORWARD_AUTOGRAD_RESP, target=0), context() as ctx:
            waits = rpc.rpc_async(1, double, (leaf(1),))
            constant = rpc.rpc_async(1, double, (torch.ones(1),))
            with torch.no_grad():
                without = rpc.rpc_async(1, double, (leaf(2),))
        there = autograd_of(c3.workers[1]).contexts
        if learns == "in time":
            eventually(lambda: there.get_or_create(ctx), lambda found: found is None)
        else:
            eventually(lambda: there.live(), bool)
    with pytest.raises(AutogradError, match="Wait for the reply inside"):
        waits.wait()
    assert constant.wait().tolist() == [2.0]
    assert without.wait().tolist() == [4.0]
    wait_until_known_by(c3)


def test_a_call_that_its_release_has_overtaken_leaves_nothing(c3: Cluster) -> None:
    """As a call with large tensors, or one that waits for a thread."""
    done = MessageType.CLEANUP_AUTOGRAD_CONTEXT_RESP
    with c3.network.hold(MessageType.FORWARD_AUTOGRAD_REQ, target=1):
        with context():
            waits = rpc.rpc_async(1, relay, ([2], leaf(1)))
        eventually(lambda: [m for m in c3.network.history if m.envelope.type == done], bool)
    with pytest.raises(AutogradError, match="ended before the reply of this call arrived"):
        waits.wait()
    assert known_by(c3) == []


def test_a_release_reaches_workers_of_unawaited_no_grad_calls(c3: Cluster) -> None:
    with c3.network.hold(MessageType.FORWARD_AUTOGRAD_REQ, target=1) as held:
        with context(), torch.no_grad():
            waits = rpc.rpc_async(1, double, (leaf(1),))
        held.release()  # type: ignore[attr-defined]
        assert waits.wait().tolist() == [2.0]
    wait_until_known_by(c3)


def double_elsewhere(x: Tensor) -> Tensor:
    """The result of worker 2 is unused, so its part of a pass never ends by itself."""
    rpc.rpc_sync(2, double, (x,))
    return x * 2


watched: list[weakref.ref[object]] = []


def watch(ctx: int) -> None:
    """Remembers, weakly, what is here of a context."""
    gradients = get_gradients(ctx)
    context_here = autograd_of(current_worker()).contexts.find(ctx)
    watched.extend(map(weakref.ref, [context_here, *context_here.passes.values(), *gradients.values()]))


def test_a_released_context_frees_its_tensors_without_garbage_collection(c3: Cluster) -> None:
    """Graphs and gradients are large, and the collector may come late."""
    x = leaf(1)
    watched.clear()
    gc.collect()
    gc.disable()
    try:
        with context() as ctx:
            w = rpc.remote(1, leaf, (2.0,))
            y = rpc.rpc_sync(1, times, (w, x))
            z = rpc.rpc_sync(1, times, (w, y)) * y
            backward(ctx, [y.sum()], retain_graph=True)
            backward(ctx, [z.sum()])
            watch(ctx)
            rpc.rpc_sync(1, watch, (ctx,))
            assert len(watched) == 2 * (1 + 2 + 1)
        del y, z
        eventually(lambda: [kept for ref in watched if (kept := ref()) is not None], lambda kept: not kept)
    finally:
        gc.enable()


def test_passes_that_have_ended_are_forgotten_everywhere(c3: Cluster) -> None:
    x = leaf(1)
    with context() as ctx:
        loss = rpc.rpc_sync(1, double_elsewhere, (rpc.rpc_sync(2, double, (x,)),)).sum()
        for _ in range(5 * MAX_ENDED_PASSES):
            backward(ctx, [loss], retain_graph=True)
        contexts = [autograd_of(w).contexts.find(ctx) for w in c3.workers]
        eventually(
            lambda: [len(one.passes) for one in contexts],
            lambda passes: all(0 < count <= MAX_ENDED_PASSES for count in passes),
        )
        assert get_gradients(ctx)[x].tolist() == [4.0 * 5 * MAX_ENDED_PASSES]


def test_a_late_message_does_not_bring_a_pass_back(c3: Cluster) -> None:
    x = leaf(1)
    with context() as ctx:
        there = rpc.remote(1, leaf, (1.0,))
        loss = rpc.rpc_sync(1, times, (there, rpc.rpc_sync(2, double, (x,)))).sum()
        with c3.network.duplicate(MessageType.BACKWARD_AUTOGRAD_REQ, target=1) as first:
            backward(ctx, [loss], retain_graph=True)
        for _ in range(MAX_ENDED_PASSES):
            backward(ctx, [loss], retain_graph=True)
        context_there = autograd_of(c3.workers[1]).contexts.find(ctx)
        number = first.caught[0].message.pass_id  # type: ignore[attr-defined]
        eventually(lambda: set(context_there.passes), lambda passes: number not in passes)
        with c3.network.changed:
            for message in first.caught:
                c3.network.deliver(message.copy())
        c3.network.wait_quiet()
        assert number not in context_there.passes
        assert get_gradients(ctx)[x].tolist() == [2.0 * (1 + MAX_ENDED_PASSES)]
        assert rpc.rpc_sync(1, gradient_of, (ctx, there)).tolist() == [2.0 * (1 + MAX_ENDED_PASSES)]


def times(w: rpc.RRef[Tensor], x: Tensor) -> Tensor:
    return w.local_value() * x


def gradient_of(ctx: int, w: rpc.RRef[Tensor]) -> Tensor:
    return get_gradients(ctx)[w.local_value()]


@pytest.fixture
def c3():  # type: ignore[no-untyped-def]
    with cluster(3) as made:
        yield made
