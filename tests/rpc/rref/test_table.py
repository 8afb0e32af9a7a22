"""RRefs over a cluster in memory, while control messages are lost, repeated and out of order."""

from __future__ import annotations

import faulthandler
import gc
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.errors import (
    PayloadError,
    PeerLostError,
    RpcError,
    RpcTimeoutError,
    RRefError,
    TransportError,
)
from zmqgrad.rpc import core
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.rpc.rref import table
from zmqgrad.rpc.worker import Worker
from zmqgrad.testing import Cluster, cluster
from zmqgrad.wire.messages import (
    NONE_PAYLOAD,
    ExceptionReply,
    Message,
    MessageType,
    RemoteCall,
    RRefUserDelete,
)

CONTROL = (
    MessageType.RREF_USER_DELETE,
    MessageType.RREF_FORK_REQUEST,
    MessageType.RREF_CHILD_ACCEPT,
    MessageType.RREF_ACK,
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "FLUSH_SECONDS", 0.001)
    monkeypatch.setattr(table, "ORPHAN_GRACE_SECONDS", 0.05)


@pytest.fixture
def trio() -> Iterator[Cluster]:
    with cluster(3) as c:
        yield c
        assert_nothing_left(c)


def assert_nothing_left(c: Cluster, workers: Sequence[Worker] = ()) -> None:
    """In the end no worker (of ``workers``) keeps a value for another, or a reference."""

    def left() -> dict[str, dict[str, int]]:
        gc.collect()
        for worker in workers or c.workers:
            worker.references.flush_releases()
        return {w.name: s for w in workers or c.workers if any((s := w.references.statistics()).values())}

    try:
        eventually(left, lambda found: not found)
    except AssertionError:
        faulthandler.dump_traceback(all_threads=True)  # shows where the threads are
        raise


class Value:
    """Something that can be seen to die, and takes calls."""

    def __init__(self, content: Any = None) -> None:
        self.content = content

    def get(self) -> Any:
        """What it holds."""
        return self.content

    def put(self, content: Any) -> None:
        """Hold that."""
        self.content = content


def fetch(rref: rpc.RRef[Any]) -> Any:
    """Runs on some worker: what it refers to."""
    return rref.local_value() if rref.is_owner() else rref.to_here()


def give_back(rref: rpc.RRef[Any]) -> rpc.RRef[Any]:
    """Runs on some worker."""
    return rref


def pass_along(rref: rpc.RRef[Any], way: list[int]) -> Any:
    """From worker to worker, the value at the end."""
    if not way:
        return fetch(rref)
    return rpc.rpc_sync(way[0], pass_along, args=(rref, way[1:]))


def keep(rref: rpc.RRef[Any]) -> None:
    """Keep it on the worker that runs this."""
    current_worker().hooks.extensions.setdefault("kept", []).append(rref)


def use_kept() -> Any:
    """The value of what was kept, which is let go."""
    return fetch(current_worker().hooks.extensions["kept"].pop())


# ---- what an RRef is -------------------------------------------------------------------------------------


def test_owner_and_user(trio: Cluster) -> None:
    own, other = rpc.RRef([1]), rpc.remote(1, list, args=("ab",))
    assert own.is_owner()
    assert not other.is_owner()
    assert own.owner() == rpc.WorkerInfo("worker0", 0)
    assert other.owner_name() == "worker1"
    assert own.local_value() is own.to_here()
    assert other.to_here() == ["a", "b"]
    assert other.confirmed_by_owner()
    with pytest.raises(RRefError, match="worker1"):
        other.local_value()
    assert "OwnerRRef" in str(own)
    assert "UserRRef" in str(other)


def test_an_rref_outside_of_calls_cannot_travel(trio: Cluster) -> None:
    import copy
    import pickle

    rref = rpc.RRef(1)
    for use in (pickle.dumps, copy.deepcopy):
        with pytest.raises(RRefError, match="only be pickled when using RPC"):
            use(rref)


def test_proxies(trio: Cluster) -> None:
    rref = rpc.remote(1, Value, args=(3,))
    rref.rpc_sync().put(torch.ones(2))
    assert rref.rpc_async().get().wait().sum() == 2
    assert rref.remote().get().to_here().sum() == 2
    own = rpc.RRef(Value(5))
    assert own.rpc_sync().get() == own.rpc_async().get().wait() == own.remote().get().to_here() == 5
    with pytest.raises(AttributeError, match="no_such"):
        rref.rpc_sync().no_such()


def test_a_value_that_cannot_be_made_raises_where_it_is_used(trio: Cluster) -> None:
    for to in (0, 1):
        bad = rpc.remote(to, int, args=("x",))
        with pytest.raises(ValueError, match="invalid literal"):
            bad.to_here()
        with pytest.raises(ValueError, match="invalid literal"):
            bad.rpc_sync().bit_length()


# ---- travelling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", [[1], [0], [2], [1, 2], [2, 1], [1, 2, 0], [0, 0], [2, 2, 1, 1], [1, 0, 2, 0, 1]]
)
@pytest.mark.parametrize("owner", [0, 1])
def test_from_worker_to_worker(trio: Cluster, owner: int, way: list[int]) -> None:
    rref = rpc.RRef("value") if owner == 0 else rpc.remote(owner, str, args=("value",))
    assert pass_along(rref, way) == "value"


def test_there_and_back(trio: Cluster) -> None:
    own = rpc.RRef(Value(1))
    back = rpc.rpc_sync(1, give_back, args=(own,))
    assert back.is_owner()
    assert back.local_value() is own.local_value()
    other = rpc.remote(1, Value, args=(2,))
    assert rpc.rpc_sync(2, give_back, args=(other,)).rpc_sync().get() == 2
    assert rpc.rpc_sync(1, give_back, args=(other,)).rpc_sync().get() == 2


def test_a_reference_to_a_reference(trio: Cluster) -> None:
    inner = rpc.remote(1, Value, args=("inner",))
    outer = rpc.remote(2, Value, args=(inner,))
    del inner
    assert outer.rpc_sync().get().rpc_sync().get() == "inner"
    deep = rpc.RRef(rpc.RRef(rpc.RRef(3)))
    assert rpc.rpc_sync(1, lambda r: r.to_here().to_here().to_here(), args=(deep,)) == 3


def test_what_somebody_keeps_stays_and_then_goes(trio: Cluster) -> None:
    value = Value(4)
    gone = weakref.ref(value)
    rref = rpc.RRef(value)
    del value
    rpc.rpc_sync(1, keep, args=(rref,))
    rpc.rpc_sync(2, pass_along, args=(rref, []))
    del rref
    gc.collect()
    assert gone() is not None
    assert rpc.rpc_sync(1, use_kept).content == 4
    assert_nothing_left(trio)
    gc.collect()
    assert gone() is None


def test_a_reference_given_up_before_its_value_is_made(trio: Cluster) -> None:
    with trio.network.hold(MessageType.REMOTE_CALL) as held:
        rref = rpc.remote(1, Value, timeout=0.01)
        held.wait()
        with pytest.raises(RpcTimeoutError):
            rref.to_here(timeout=0.05)
        del rref
        trio.network.wait_sent(MessageType.RREF_USER_DELETE)
        trio.network.wait_quiet()


def test_forks_of_a_call_that_cannot_be_sent(trio: Cluster) -> None:
    own, other = rpc.RRef(1), rpc.remote(1, Value)
    with pytest.raises(PayloadError):
        rpc.rpc_sync(2, print, args=(own, other, threading.Lock()))


class Breaks:
    """Can be sent, and not be rebuilt."""

    def __reduce__(self) -> Any:
        return fail, ()


def fail() -> None:
    """Fails where it is rebuilt."""
    raise ValueError("cannot be rebuilt")


def give(rref: rpc.RRef[Any], broken: bool = False) -> list[Any]:
    """References from everywhere, perhaps behind something that cannot be rebuilt."""
    return [*([Breaks()] if broken else []), rref, rpc.RRef(Value()), rpc.remote(2, Value)]


def test_references_in_answers_that_nobody_reads(trio: Cluster) -> None:
    rref = rpc.RRef(1)
    with trio.network.hold(MessageType.RESULT) as held:
        late = rpc.rpc_async(1, give, args=(rref,))
        held.wait()
        worker = current_worker()
        (call,) = worker.client.pending.all()
        worker.client.cancel(call)
        with pytest.raises(RpcError, match="was given up"):
            late.wait()
    with pytest.raises(PayloadError, match="cannot be rebuilt"):
        rpc.rpc_sync(1, give, args=(rref, True))


def test_references_in_calls_that_cannot_be_rebuilt_or_are_not_run(trio: Cluster) -> None:
    own, other = rpc.RRef(1), rpc.remote(2, Value)
    with pytest.raises(PayloadError, match="cannot be rebuilt"):
        rpc.rpc_sync(1, give, args=(Breaks(), own, other))
    with trio.network.hold(MessageType.CALL) as held:
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync(1, give_back, args=([own, other],), timeout=0.01)
        held.wait()
        with trio.network.hold(MessageType.REMOTE_CALL) as also:
            refused = rpc.remote(1, give_back, args=([own, other],), timeout=0.01)
            also.wait()
            with pytest.raises(RpcTimeoutError):
                refused.to_here(timeout=0.05)
            trio.network.wait_sent(MessageType.CANCEL)
            del refused


# ---- faults ----------------------------------------------------------------------------------------------


def some_life() -> None:
    """References are made, passed in all directions, used and let go."""
    own, other = rpc.RRef(Value(1)), rpc.remote(1, Value, args=(2,))
    for way in ([1, 2], [2, 1, 0], [2, 2]):
        assert pass_along(own, way).content == 1
        assert pass_along(other, way).content == 2
    rpc.rpc_sync(2, keep, args=(other,))
    rpc.rpc_sync(1, keep, args=(own,))
    del own, other
    assert rpc.rpc_sync(2, use_kept).content == 2
    assert rpc.rpc_sync(1, use_kept).content == 1


@pytest.mark.parametrize("fault", ["duplicate", "delay"])
@pytest.mark.parametrize("kind", CONTROL, ids=lambda k: k.name)
def test_each_control_message_repeated_or_late(trio: Cluster, kind: MessageType, fault: str) -> None:
    fault_of: Callable[..., Any] = getattr(trio.network, fault)
    with fault_of(kind, 3):
        some_life()
    assert_nothing_left(trio)


@pytest.mark.parametrize("number", range(4))
def test_everything_out_of_order_and_repeated(trio: Cluster, number: int) -> None:
    with ExitStack() as faults:
        faults.enter_context(trio.network.reorder(number))
        for kind in CONTROL:
            faults.enter_context(trio.network.duplicate(kind, 4))
        some_life()
    assert_nothing_left(trio)


def test_references_of_a_worker_that_is_lost(trio: Cluster) -> None:
    own = rpc.RRef(Value())
    rpc.rpc_sync(1, keep, args=(own,))
    other = rpc.remote(1, Value)
    other.to_here()
    assert trio.workers[0].references.statistics()["forks"] == 1
    lost = trio.workers[1]
    lost.close()
    for worker in (trio.workers[0], trio.workers[2]):
        worker.references.peer_lost(1)
    lost.hooks.extensions.clear()
    eventually(lambda: trio.workers[0].references.statistics(), lambda found: not any(found.values()))


def pass_on(rref: rpc.RRef[Any], to: int) -> None:
    """Runs on some worker: let worker ``to`` keep it."""
    rpc.rpc_sync(to, keep, args=(rref,))


@pytest.mark.parametrize("owner", [0, 2])
def test_a_reference_whose_giver_dies_before_it_is_registered(
    monkeypatch: pytest.MonkeyPatch, owner: int
) -> None:
    """It goes 0 -> 1 -> 3; its request to the owner is late, 0 lets go, 1 dies, and only then it arrives."""
    monkeypatch.setattr(table, "ORPHAN_GRACE_SECONDS", 2.0)
    with cluster(4) as c:
        others = [w for w in c.workers if w.id != 1]
        rref = rpc.RRef("value") if owner == 0 else rpc.remote(owner, str, args=("value",))
        with c.network.hold(MessageType.RREF_FORK_REQUEST, source=3) as held:
            rpc.rpc_sync(1, pass_on, args=(rref, 3))
            held.wait()
            del rref
            for worker in others:
                worker.lose(1, "it fell over")
            for worker in others:
                worker.references.flush_releases()
            c.network.wait_quiet()
        assert rpc.rpc_sync(3, use_kept) == "value"
        assert_nothing_left(c, others)


_gate = threading.Event()


def wait_at_the_gate() -> None:
    """Keeps a thread busy."""
    assert _gate.wait(20)


def pass_on_later(rref: rpc.RRef[Any], to: int) -> None:
    """Runs on some worker: let worker ``to`` keep it, once it has time."""
    rpc.rpc_async(to, keep, args=(rref,))


def test_a_reference_in_a_queued_request_outlives_its_giver(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is registered when it arrives: its request may wait for longer than forks of the lost are kept."""
    _gate.clear()
    with cluster(3, RpcBackendOptions(rpc_timeout=20.0, num_worker_threads=1)) as c:
        rref = rpc.RRef("value")
        busy = rpc.rpc_async(2, wait_at_the_gate)
        rpc.rpc_sync(1, pass_on_later, args=(rref, 2))
        c.network.wait_sent(MessageType.RREF_FORK_REQUEST)
        c.network.wait_quiet()
        del rref
        with c.network.partition(1):
            c.workers[0].lose(1, "it fell over")
            c.network.wait_quiet()
            expired = threading.Event()
            c.workers[0].timer.call_later(2 * table.ORPHAN_GRACE_SECONDS, expired.set)
            assert expired.wait(20)
            _gate.set()
            busy.wait()
            assert rpc.rpc_sync(2, use_kept) == "value"


def test_a_reference_to_what_the_lost_should_have_made(trio: Cluster) -> None:
    own, other = rpc.RRef(Value()), rpc.remote(2, Value)
    trio.workers[0].lose(1, "it fell over")
    trio.network.wait_quiet()
    for args in ((), (own,), (other,)):
        with pytest.raises(PeerLostError, match="worker1"):
            rpc.remote(1, Value, args=args)
    del own, other, args
    assert_nothing_left(trio)  # though nobody will ever confirm the forks that were made for it


@pytest.mark.parametrize("when", ["before", "unconfirmed"])
def test_a_value_goes_though_one_that_got_a_reference_has_lost_its_owner(trio: Cluster, when: str) -> None:
    """The owner lives on for the worker that has sent the reference, and waited for it to be registered."""
    rref = rpc.remote(1, Value)
    rref.to_here()
    with trio.network.drop(MessageType.RREF_FORK_REQUEST):
        if when == "before":
            trio.workers[2].lose(1, "unplugged")
            eventually(lambda: 1 in trio.workers[2].lost)
        rpc.rpc_sync(2, keep, args=(rref,))
        trio.workers[2].lose(1, "unplugged")
        eventually(lambda: 1 in trio.workers[2].lost)
    del rref
    assert_nothing_left(trio)


def test_a_value_goes_though_its_user_is_lost_before_it_is_told(
    trio: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rref = rpc.remote(1, Value)
    rref.to_here()
    owner = trio.workers[1]

    def lost(*_: Any) -> None:
        raise PeerLostError("worker0 is gone")

    monkeypatch.setattr(owner, "reply", lost)
    del rref
    eventually(lambda: owner.references.statistics()["owner_rrefs"], lambda count: count == 0)
    monkeypatch.undo()
    assert "failed" not in caplog.text


@pytest.mark.slow
def test_many_references_made_and_dropped(trio: Cluster) -> None:
    for _ in range(20):
        made = [rpc.remote(1 + n % 2, Value) for n in range(50)]
        torch.futures.wait_all([rpc.rpc_async(2, str, args=(rref,)) for rref in made[::5]])
    del made


def test_a_reference_that_came_and_went_before_its_value_is_made(trio: Cluster) -> None:
    """The owner hears of a grandchild first, and of its end: the maker's own fork is still to come."""
    with trio.network.hold(MessageType.REMOTE_CALL, target=2) as held:
        rref = rpc.remote(2, Value, args=(5,))
        held.wait()
        rpc.rpc_sync(1, str, args=(rref,))
        trio.network.wait_sent(MessageType.RREF_USER_DELETE)
        trio.network.wait_quiet()
    assert rref.to_here().content == 5


def test_a_value_whose_maker_died_before_its_call_came(trio: Cluster) -> None:
    with trio.network.hold(MessageType.REMOTE_CALL, source=0, target=2) as held:
        rref = rpc.remote(2, Value)
        held.wait()
        fetching = rpc.rpc_async(1, fetch, args=(rref,))
        trio.network.wait_sent(MessageType.RREF_FETCH)
        trio.network.wait_quiet()
        trio.workers[2].lose(0, "it fell over")
        with pytest.raises(PeerLostError, match="the call that makes value"):
            fetching.wait()
        trio.workers[0].lose(2, "it does not talk to us")
        trio.workers[1].lose(0, "it fell over")
        del rref, fetching


def test_no_value_is_waited_for_once_its_worker_is_closed(trio: Cluster) -> None:
    """A fetch that was on its way to the table while the table was closed waited for its whole timeout."""
    worker = trio.workers[1]
    worker.close()
    with pytest.raises(RRefError, match="worker1 was shut down"):
        worker.references.value(worker.ids.next(), timeout=20.0)


class Contended(deque[int]):
    """Whoever looks whether something is left is overtaken by another thread, which takes that."""

    def __init__(self, others: deque[int], overtake: Callable[[], object]) -> None:
        super().__init__(others)
        self.overtake: Callable[[], object] | None = overtake

    def __bool__(self) -> bool:
        left = len(self) > 0
        if left and self.overtake is not None:
            overtake, self.overtake = self.overtake, None
            overtake()
        return left


def test_two_threads_may_notify_owners_at_once(trio: Cluster) -> None:
    """The timer, and one that shuts the worker down."""
    references = trio.workers[0].references
    rref = rpc.remote(1, list)
    assert rref.to_here() == []
    references._flush.schedule(math.inf)  # so that the timer does it when the test says so
    del rref
    gc.collect()
    assert len(references._released) == 1
    references._released = Contended(references._released, references.flush_releases)
    references.flush_releases()
    assert not references.busy()


@pytest.mark.parametrize("kind", CONTROL)
def test_a_control_message_that_cannot_be_sent_now_is_sent_later(
    trio: Cluster, monkeypatch: pytest.MonkeyPatch, kind: MessageType
) -> None:
    """For it there was no descriptor. References that it was about stayed for ever."""
    monkeypatch.setattr(core, "RETRY_SECONDS", 0.01)
    refused: list[MessageType] = []

    def refuse_once(send: Callable[..., None]) -> Callable[..., None]:
        def send_or_refuse(peer: int, message: Message, *rest: Any, **named: Any) -> None:
            if kind == message.TYPE and len(refused) < 2:
                refused.append(kind)
                raise TransportError("Too many open files")
            send(peer, message, *rest, **named)

        return send_or_refuse

    for worker in trio.workers:
        monkeypatch.setattr(worker.mailbox, "send", refuse_once(worker.mailbox.send))
    made = rpc.remote(1, Value, args=("content",))
    assert rpc.rpc_sync(2, content_of, args=(made,)) == "content"
    del made
    assert_nothing_left(trio)
    assert refused == [kind, kind]


def content_of(reference: Any) -> Any:
    """Runs on a worker that is neither the owner nor the one that has the reference."""
    return reference.rpc_sync().get()


# ---- ids of others ----------------------------------------------------------------------------------------


def test_a_worker_deletes_no_forks_of_others(trio: Cluster) -> None:
    """Neither those that are registered, nor those of calls that have not arrived."""
    intruder, held = trio.workers[2], rpc.remote("worker1", Value, args=(1,))
    assert held.rpc_sync().get() == 1
    ours = held.handle
    forks = ((ours.rref_id, ours.fork_id), (ours.rref_id + 2, ours.fork_id + 2))
    intruder.wait(intruder.request(1, RRefUserDelete(forks)))
    assert held.rpc_sync().get() == 1
    later = rpc.remote("worker1", Value, args=(2,))
    assert (later.handle.rref_id, later.handle.fork_id) == forks[1]
    assert later.rpc_sync().get() == 2


def test_a_worker_makes_no_value_by_an_id_of_another(trio: Cluster) -> None:
    intruder, held = trio.workers[2], rpc.remote("worker1", Value, args=(1,))
    number = held.handle.rref_id + 2
    reply = intruder.wait(intruder.request(1, RemoteCall("builtins:list", NONE_PAYLOAD, number, 7)))
    assert isinstance(reply.message, ExceptionReply)
    assert "whose id is another worker's" in reply.message.text
    later = rpc.remote("worker1", Value, args=(2,))
    assert later.handle.rref_id == number
    assert later.rpc_sync().get() == 2
