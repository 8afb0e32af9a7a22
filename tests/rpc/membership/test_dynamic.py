"""Workers that join, leave, die and come back, over the memory transport and a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, NoReturn

import pytest
import torch

from tests.support.waiting import eventually
from zmqgrad import autograd, rpc
from zmqgrad.errors import (
    ArgumentTypeError,
    ConfigurationError,
    DuplicateNameError,
    DuplicateWorkerError,
    GroupError,
    NotInitializedError,
    PeerLostError,
    RendezvousError,
    RpcError,
    RpcTimeoutError,
    StoreTimeoutError,
    UnknownWorkerError,
)
from zmqgrad.rpc.current import current_worker, reset_current_worker, set_current_worker
from zmqgrad.rpc.membership import dynamic, registry
from zmqgrad.rpc.membership.dynamic import DynamicGroup
from zmqgrad.rpc.membership.group import make_worker
from zmqgrad.rpc.membership.membership import LEFT
from zmqgrad.rpc.membership.registry import Registry, allocate_id
from zmqgrad.rpc.membership.worker_info import WorkerRecord
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import HashStore, PrefixStore
from zmqgrad.testing.mailbox import MemoryMailbox
from zmqgrad.testing.network import MemoryNetwork
from zmqgrad.transport.base import PeerEnd

OPTIONS = RpcBackendOptions(rpc_timeout=20.0, num_worker_threads=2)

WAIT = 20.0


class Town:
    """Where workers come and go."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.store = HashStore(timeout=WAIT)
        self.groups: list[DynamicGroup] = []
        self.dead: set[str] = set()
        self.examined: list[str] = []

    def lives(self, record: WorkerRecord) -> bool:
        """What the system would say."""
        self.examined.append(record.name)
        return record.endpoints[0] not in self.dead

    def make(self, name: str, rank: int | None = None, served: Any = None) -> DynamicGroup:
        """A worker that has not joined yet; ``served``, if given, stands for the store that it serves."""
        store = PrefixStore("d", self.store)
        number = allocate_id(store, name, rank)
        mailbox = MemoryMailbox(self.network, name, number)
        worker = make_worker(name, number, 0, mailbox, OPTIONS)
        group = DynamicGroup(worker, store, served, is_alive=self.lives)
        self.groups.append(group)
        return group

    def join(self, name: str, rank: int | None = None, served: Any = None) -> DynamicGroup:
        """A worker that takes part."""
        group = self.make(name, rank, served)
        group.join(Deadline.after(WAIT))
        group.worker.server.serve()
        return group

    def kill(self, group: DynamicGroup) -> None:
        """It ends without a word; who watches it (here: those before it in the order of ids) is told."""
        self.dead.add(group.worker.membership.own.endpoints[0])
        group.close()

    def close(self) -> None:
        """The end of all."""
        for group in self.groups:
            group.close()
        self.store.close()


@pytest.fixture
def town() -> Iterator[Town]:
    made = Town()
    try:
        yield made
    finally:
        made.close()


@contextmanager
def acting(group: DynamicGroup) -> Iterator[None]:
    """The calling thread acts for that worker."""
    token = set_current_worker(group.worker)
    try:
        yield
    finally:
        reset_current_worker(token)


def names_known_to(group: DynamicGroup) -> list[str]:
    """Who takes part, as far as it knows."""
    with acting(group):
        return [info.name for info in rpc.get_worker_infos()]


def ids_known_to(group: DynamicGroup) -> list[int]:
    """The same by their ids."""
    with acting(group):
        return [info.id for info in rpc.get_worker_infos()]


def where() -> str:
    """Who runs this?"""
    return current_worker().name


def there_and_back(other: str) -> str:
    """Call another worker."""
    return rpc.rpc_sync(other, where)


# ---- ids and names ---------------------------------------------------------------------------------------


def test_ids_are_allocated_once(town: Town) -> None:
    store = PrefixStore("d", town.store)
    assert [allocate_id(store, "a", rank) for rank in (None, 2, None, None, 2, None)] == [0, 2, 1, 3, 4, 5]


@pytest.mark.parametrize("rank", [-1, 1 << 16, "0", True])
def test_ranks_that_cannot_be(town: Town, rank: Any) -> None:
    with pytest.raises(ConfigurationError, match="rank"):
        allocate_id(town.store, "a", rank)


def test_ids_are_used_up_at_some_time(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_WORKER", 1)
    assert [allocate_id(town.store, "a", None) for _ in range(2)] == [0, 1]
    with pytest.raises(RendezvousError, match="all 2 worker ids have been used"):
        allocate_id(town.store, "a", None)


def test_two_workers_of_one_name_are_refused_while_the_older_lives(town: Town) -> None:
    first = town.join("a")
    second = town.make("a")
    with pytest.raises(DuplicateWorkerError, match=r"'a' is not unique: worker 0 .process \d+ of"):
        second.join(Deadline.after(WAIT))
    assert names_known_to(first) == ["a"]
    town.kill(first)
    third = town.join("a")
    assert [i.id for i in (r.info for r in third.worker.membership.all())] == [2]


def test_ctrl_c_ends_a_join_though_the_store_does_not_reply_any_more(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = town.make("a")
    timeouts: list[float] = []

    def ask(*args: object) -> NoReturn:
        timeouts.append(group.store.timeout.total_seconds())
        raise StoreTimeoutError("no store answered")

    def interrupt(*args: object) -> NoReturn:
        monkeypatch.setattr(group.store, "compare_set", ask)
        raise KeyboardInterrupt

    monkeypatch.setattr(group.store, "watch_prefix", interrupt)
    with pytest.raises(KeyboardInterrupt):
        group.join(Deadline.after(WAIT))
    assert max(timeouts) <= 1.0, "not as long as others may take to join"


def test_many_workers_join_at_once(town: Town) -> None:
    made = [town.make(f"w{n}") for n in range(8)]
    twins = [town.make("twin") for _ in range(3)]
    refused: list[str] = []

    def join(group: DynamicGroup) -> None:
        try:
            group.join(Deadline.after(WAIT))
        except DuplicateWorkerError as e:
            refused.append(str(e))

    threads = [threading.Thread(target=join, args=(g,)) for g in (*made, *twins)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(WAIT)
    assert len(refused) == 2
    everybody = sorted([*(f"w{n}" for n in range(8)), "twin"])
    for group in made:
        eventually(lambda group=group: sorted(names_known_to(group)), lambda names: names == everybody)


# ---- joining and leaving ---------------------------------------------------------------------------------


def test_a_new_member_can_call_and_be_called_immediately(town: Town) -> None:
    a = town.join("a")
    for n in range(3):
        b = town.join(f"b{n}")
        with acting(b):
            assert rpc.rpc_sync("a", there_and_back, args=(f"b{n}",)) == f"b{n}"
        with acting(a):
            assert rpc.rpc_sync(f"b{n}", there_and_back, args=("a",)) == "a"
    with acting(a):
        assert rpc.get_worker_info("b1").id == 2
        with pytest.raises(UnknownWorkerError, match="could not find destination name c"):
            rpc.rpc_sync("c", where)


def test_a_worker_that_rejoins_has_a_new_id(town: Town) -> None:
    a, b = town.join("a"), town.join("b")
    with acting(a):
        rref = rpc.remote("b", list, args=((1, 2),))
        assert rref.to_here() == [1, 2]
        b.leave(True, Deadline.after(WAIT))
        with pytest.raises(PeerLostError, match=r"b .worker 1. is gone: it has left the group"):
            rpc.rpc_sync("b", where)
        again = town.join("b")
        assert rpc.rpc_sync("b", where) == "b"
        assert rpc.get_worker_info("b").id == 2
        with pytest.raises(
            PeerLostError, match=r"lost with b .worker 1.*the b that runs now .worker 2. is a new one"
        ):
            rref.to_here()
        with pytest.raises(PeerLostError, match="is a new one"):
            rref.rpc_sync().copy()
        with pytest.raises(PeerLostError, match="is a new one"):
            rpc.rpc_sync("b", len, args=(rref,))
        assert rpc.remote("b", list, args=((1,),)).to_here() == [1]
    assert names_known_to(a) == names_known_to(again) == ["a", "b"]


def meet(*groups: DynamicGroup) -> list[Any]:
    """Let these workers meet at a barrier. What each of them raised, or None."""
    names, raised = [group.worker.name for group in groups], [None] * len(groups)

    def arrive(number: int) -> None:
        with acting(groups[number]):
            try:
                rpc.barrier(names, timeout=WAIT)
            except RpcError as e:
                raised[number] = e

    threads = [threading.Thread(target=arrive, args=(number,)) for number in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT)
    return raised


@pytest.mark.parametrize("name", ["a", "c"], ids=["which gathers", "which does not"])
def test_a_barrier_with_a_worker_that_has_the_name_of_a_former_one(town: Town, name: str) -> None:
    b, first = town.join("b"), town.join(name)
    assert meet(b, first) == meet(b, first) == [None, None]
    first.leave(True, Deadline.after(WAIT))
    second = town.join(name)
    eventually(lambda: ids_known_to(b), lambda ids: ids == [b.worker.id, second.worker.id])
    assert meet(b, second) == [None, None]


def test_the_loss_of_a_worker_fails_no_barrier_of_the_next_one_of_its_name(town: Town) -> None:
    a, first = town.join("a"), town.join("c")
    assert meet(a, first) == [None, None]
    town.kill(first)
    arrived, second = [], town.join("c")

    def arrive() -> None:
        with acting(second):
            arrived.append(rpc.barrier(["a", "c"], timeout=WAIT))

    waiting = threading.Thread(target=arrive)
    waiting.start()
    eventually(lambda: a.worker.server.in_flight.all())
    a.worker.lose(first.worker.id, "its process has ended")
    eventually(lambda: first.worker.id in a.worker.lost)
    with acting(a):
        rpc.barrier(["a", "c"], timeout=WAIT)
    waiting.join(WAIT)
    assert arrived == [None]


def test_a_group_by_pattern_follows_joins_and_losses(town: Town) -> None:
    a = town.join("a")
    with acting(a):
        group, fixed = rpc.group("b*"), rpc.group("a*")[:]
        with pytest.raises(UnknownWorkerError, match="has no members"):
            group.call(where)
        town.join("b1")
        assert group.call(where) == ["b1"]
        b2 = town.join("b2")
        rpc.wait_for_workers(["b2"])
        assert group.call(where) == ["b1", "b2"]
        joined = group[:]
        b2.leave(True, Deadline.after(WAIT))
        assert town.join("b2").worker.id == 3
        rpc.wait_for_workers(["b2"])
        assert [info.id for info in group] == [1, 3]
        assert group.call(where) == ["b1", "b2"]
        with pytest.raises(GroupError, match=r"b2 .worker 2. is gone: it has left the group"):
            joined.call(where)
        assert fixed.call(where) == ["a"]


def test_a_dead_worker_is_evicted_for_all(town: Town) -> None:
    a, b, c = (town.join(name) for name in "abc")
    eventually(lambda: (names_known_to(a), names_known_to(b)), lambda both: both == (["a", "b", "c"],) * 2)
    with acting(c):
        kept = rpc.remote("b", list)
        kept.to_here()
    town.kill(b)
    a.worker.lose(1, "its process has ended")
    eventually(lambda: names_known_to(c), lambda names: names == ["a", "c"])
    with acting(c), pytest.raises(PeerLostError, match="its process has ended"):
        rpc.rpc_sync("b", where)
    eventually(lambda: 1 in c.worker.lost)  # of which c is told behind what has arrived from it
    with acting(c), pytest.raises(PeerLostError, match="lost with b"):
        kept.to_here()
    b = town.join("b")
    with acting(c):
        assert rpc.rpc_sync("b", where) == "b"


def test_a_worker_out_of_reach_of_one_is_not_struck_off_for_others(town: Town) -> None:
    a, b, c = (town.join(name) for name in "abc")
    a.worker.lose(1, "its host is out of reach")
    assert a.worker.pool.wait_idle(Deadline.after(WAIT))
    assert town.store.check(["d/worker/1"])
    with acting(c):
        assert rpc.rpc_sync("b", where) == "b"
    # It is told so by both the store and the link, in any order.
    with (
        acting(b),
        pytest.raises(PeerLostError, match="a has declared worker 1 lost: its host is out of"),
    ):
        rpc.rpc_sync("a", where)


def make_and_lose(town: Town) -> tuple[DynamicGroup, DynamicGroup, DynamicGroup]:
    """Three workers, of which b has a named object, and a has lost b."""
    a, b, c = (town.join(name) for name in "abc")
    eventually(lambda: names_known_to(a), lambda names: names == ["a", "b", "c"])
    with acting(b):
        rpc.remote("b", list, args=([1],), name="kept").to_here()
        rpc.publish("weights", {"w": torch.ones(1)})
    a.worker.lose(1, "its host is out of reach")
    eventually(lambda: 1 in a.worker.lost)
    return a, b, c


def test_an_object_keeps_its_name_though_another_worker_has_lost_its_owner(town: Town) -> None:
    """It was taken for dead, and others found the second object of that name."""
    a, _, c = make_and_lose(town)
    with acting(a):
        with pytest.raises(DuplicateNameError, match="the name 'kept' is taken: b"):
            rpc.remote("c", list, args=([2],), name="kept")
        with pytest.raises(DuplicateNameError, match="publishes 'weights'"):
            rpc.publish("weights", {"w": torch.zeros(1)})
    with acting(c):
        assert rpc.get_ref("kept").to_here() == [1]


def test_a_name_is_free_once_the_group_has_lost_its_owner(town: Town) -> None:
    a, b, c = make_and_lose(town)
    town.kill(b)
    c.worker.lose(1, "its process has ended")
    with acting(a):
        assert rpc.remote("c", list, args=([2],), name="kept").to_here() == [2]
        assert rpc.publish("weights", {"w": torch.zeros(1)}) == 2


def test_a_name_stays_with_a_worker_that_has_accused_the_one_that_wants_it(town: Town) -> None:
    a, b, _ = (town.join(name) for name in "abc")
    eventually(lambda: (names_known_to(a), names_known_to(b)), lambda both: both == (["a", "b", "c"],) * 2)
    with acting(b):
        rpc.remote("b", list, name="kept").to_here()
    b.worker.lose(0, "its host is out of reach")
    eventually(lambda: 1 in a.worker.lost)
    with acting(a), pytest.raises(DuplicateNameError, match="the name 'kept' is taken: b"):
        rpc.remote("c", list, name="kept")


def test_a_call_of_a_member_that_the_store_cannot_confirm_is_served_later(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notice of its join is late, and the store does not reply. Such calls were dropped: their callers
    waited until the timeout, or for ever.
    """
    monkeypatch.setattr(dynamic, "STORE_RETRY_SECONDS", 0.1)
    a = town.join("a")
    read, asked, replies = a._registry.read, threading.Event(), threading.Event()

    def read_if_it_replies(known: Iterable[int]) -> tuple[set[int], list[WorkerRecord]]:
        asked.set()
        if not replies.is_set():
            raise StoreTimeoutError("the store does not reply")
        return read(known)

    monkeypatch.setattr(a._registry, "read", read_if_it_replies)
    monkeypatch.setattr(a, "_on_joined", lambda record: None)
    b = town.join("b")
    with acting(b):
        call = rpc.rpc_async("a", where, timeout=0)
        assert asked.wait(WAIT)
        eventually(lambda: a.worker.pool.busy(), lambda busy: not busy)
        assert not call.done()
        replies.set()
        assert rpc.wait_all([call], timeout=WAIT) == ["a"]


def test_losing_an_unknown_worker(town: Town) -> None:
    """It had sent something, and was dead before its name was."""
    a = town.join("a")
    with acting(a):
        heard: list[int] = []
        rpc.on_loss(lambda info, why: heard.append(info.id))
        a.worker.lose(7, "its process has ended")
        a.worker.lose(7, "again")
        assert names_known_to(a) == ["a"]
        b = town.join("b")
        eventually(lambda: names_known_to(a), lambda names: names == ["a", "b"])
        b.leave(True, Deadline.after(WAIT))
        eventually(lambda: list(heard), lambda calls: calls == [1])


def test_a_worker_that_is_lost_before_its_join_is_known_is_evicted(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's notice comes late. Callbacks hear of both events or of neither."""
    a = town.join("a")
    heard: list[str] = []
    with acting(a):
        rpc.on_join(lambda info: heard.append(f"joined: {info.name}"))
        rpc.on_loss(lambda info, why: heard.append(f"lost: {info.name}"))
    may_hear, on_joined = threading.Event(), a._on_joined

    def hear_late(record: WorkerRecord) -> None:
        may_hear.wait(WAIT)
        on_joined(record)

    monkeypatch.setattr(a, "_on_joined", hear_late)
    b = town.join("b")
    town.kill(b)
    assert isinstance(a.worker.mailbox, MemoryMailbox)
    a.worker.mailbox._told.add(b.worker.id)  # a process that has ended cannot be told that it is lost
    a.worker.lose(b.worker.id, "its process has ended")
    eventually(lambda: b.worker.id in a.worker.lost, bool)
    may_hear.set()
    eventually(lambda: list(a._registry.ids()), lambda ids: ids == [a.worker.id])
    a.leave(True, Deadline.after(WAIT))
    assert heard in ([], ["joined: b", "lost: b"])


def test_the_loss_of_a_worker_comes_before_the_next_one_of_its_name(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = town.join("a"), town.join("b")
    eventually(lambda: names_known_to(a), lambda names: names == ["a", "b"])
    heard: list[tuple[str, int]] = []
    with acting(a):
        rpc.on_join(lambda info: heard.append(("joined", info.id)))
        rpc.on_loss(lambda info, why: heard.append(("lost", info.id)))
    may_end, on_end = threading.Event(), a.worker._on_end

    def end_late(end: PeerEnd) -> None:
        may_end.wait(WAIT)
        on_end(end)

    monkeypatch.setattr(a.worker.mailbox, "_on_end", end_late)
    b.leave(True, Deadline.after(WAIT))
    second = town.join("b")
    eventually(lambda: a.worker.membership.find_known(second.worker.id) is not None, bool)
    may_end.set()
    eventually(lambda: len(heard), lambda calls: calls == 2)
    assert heard == [("lost", b.worker.id), ("joined", second.worker.id)]


def test_a_worker_that_leaves_at_once_is_told_of_no_loss(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others end their links to it when the store says that it has left."""
    a, b = town.join("a"), town.join("b")
    heard: list[str] = []
    with acting(b):
        rpc.on_loss(lambda info, why: heard.append(why))
        rpc.rpc_sync("a", where)
    remove, told = b._registry.remove, threading.Event()

    def remove_slowly(number: int, reason: str) -> None:
        remove(number, reason)
        eventually(lambda: a.worker.id in b.worker.lost, bool)
        b.worker.submit(told.set)  # behind the callbacks
        assert told.wait(WAIT)

    monkeypatch.setattr(b._registry, "remove", remove_slowly)
    b.leave(False, Deadline.after(WAIT))
    assert heard == []


_owed: list[torch.futures.Future[int]] = []
_is_owed = threading.Event()


@rpc.functions.async_execution
def owe() -> torch.futures.Future[int]:
    """Replies when the test says so."""
    _owed.append(torch.futures.Future())
    _is_owed.set()
    return _owed[-1]


def test_a_worker_that_owes_a_reply_leaves_when_it_was_sent(town: Town) -> None:
    a, b = town.join("a"), town.join("b")
    _is_owed.clear()
    with acting(a):
        reply = rpc.rpc_async("b", owe)
    assert _is_owed.wait(WAIT)
    assert b.worker.pool.wait_idle(Deadline.after(WAIT))
    leaving = threading.Thread(target=lambda: b.leave(True, Deadline.after(WAIT)))
    leaving.start()
    eventually(lambda: b.worker.server.in_flight.waiters, bool)
    _owed.pop().set_result(7)
    assert reply.wait() == 7
    leaving.join(WAIT)
    assert not leaving.is_alive()


def test_messages_of_an_older_incarnation_are_refused(town: Town) -> None:
    a, b = town.join("a"), town.join("b")
    with acting(b), town.network.hold(source=1, target=0) as held:
        old = rpc.rpc_async("a", where)
        held.wait()
        a.worker.lose(1, "it has died, as far as a can tell")
        eventually(lambda: 1 in a.worker.lost, bool)
        ran = a.worker.counts()[1]
    with acting(b), pytest.raises(PeerLostError, match="as far as a can tell"):
        old.wait()
    assert a.worker.counts()[1] == ran


def test_calls_continue_after_the_store_has_ended(town: Town) -> None:
    a, _ = town.join("a"), town.join("b")
    with acting(a):
        assert rpc.rpc_sync("b", where) == "b"
        town.store.close()
        assert rpc.rpc_sync("b", where) == "b"
        for _ in range(3):
            with pytest.raises(UnknownWorkerError, match="could not find destination name c"):
                rpc.rpc_sync("c", where)


def test_a_look_up_is_bounded_by_the_timeout_of_its_call(town: Town) -> None:
    """A store that takes its time keeps no caller for longer; one look serves all who wait."""
    a, _ = town.join("a"), town.join("b")
    eventually(lambda: names_known_to(a), lambda names: names == ["a", "b"])
    answer, looks = threading.Event(), threading.Semaphore(0)

    def list_keys_late(prefix: str = "") -> list[str]:
        looks.release()
        assert answer.wait(WAIT)
        return PrefixStore.list_keys(a.store, prefix)  # type: ignore[arg-type]

    a.store.list_keys = list_keys_late  # type: ignore[method-assign]
    asks: list[Callable[..., Any]] = [rpc.rpc_sync, rpc.rpc_async, rpc.remote]
    with acting(a):
        for ask in asks:
            with pytest.raises(RpcTimeoutError, match="a does not know 'c', and the store did not"):
                ask("c", where, timeout=0.02)
        with pytest.raises(RpcTimeoutError, match="does not know 'c'"):
            rpc.broadcast(["b", "c"], where, timeout=0.02)
        assert rpc.rpc_sync("b", where, timeout=5) == "b", "who is known is not looked up"
        patient = [
            threading.Thread(target=copy_context().run, args=(rpc.rpc_sync, "c", where)) for _ in range(5)
        ]
        for thread in patient:
            thread.start()
        town.join("c")
        answer.set()
        for thread in patient:
            thread.join(WAIT)
        assert rpc.rpc_sync("c", where) == "c"
    found = 0
    while looks.acquire(blocking=False):
        found += 1
    assert found <= 5, "one under way, one for all who came later; and one or two for c itself"


class Served:
    """Stands for the store that a worker serves."""

    def __init__(self) -> None:
        self.open = True

    def refuse_newcomers(self) -> None:
        """It is about to close."""
        self.open = False


def test_nobody_examines_whether_a_worker_lives_that_has_left(town: Town) -> None:
    """On another host that takes seconds, for which shutdown would wait for the threads."""
    a, b = town.join("a"), town.join("b")
    eventually(lambda: names_known_to(a), lambda names: names == ["a", "b"])
    b.leave(True, Deadline.after(WAIT))
    eventually(lambda: names_known_to(a), lambda names: names == ["a"])
    eventually(lambda: 1 in a.worker.lost, bool)
    a.leave(True, Deadline.after(WAIT))  # its threads have ended
    assert town.examined == []


def test_the_worker_that_serves_the_store_leaves_last(town: Town) -> None:
    served = Served()
    a, b, c = town.join("a", served=served), town.join("b"), town.join("c")
    eventually(lambda: names_known_to(a), lambda names: names == ["a", "b", "c"])
    town.kill(c)
    leaving = threading.Thread(target=lambda: a.leave(True, Deadline.after(WAIT)))
    leaving.start()
    eventually(lambda: town.store.check(["d/worker/0"]), lambda present: not present)
    assert served.open
    b.leave(True, Deadline.after(WAIT))
    leaving.join(WAIT)
    assert not served.open


def test_the_worker_that_serves_the_store_waits_for_no_dead_one_that_joined_meanwhile(town: Town) -> None:
    served = Served()
    a, b = town.join("a", served=served), town.join("b")
    leaving = threading.Thread(target=lambda: a.leave(True, Deadline.after(WAIT)))
    leaving.start()
    eventually(lambda: town.store.check(["d/worker/0"]), lambda present: not present)
    c = town.join("c")
    b.leave(True, Deadline.after(WAIT))
    town.kill(c)  # nobody is left to evict it
    leaving.join(WAIT)
    assert not served.open


def test_the_worker_that_serves_the_store_waits_with_a_limit(town: Town) -> None:
    a, _ = town.join("a", served=Served()), town.join("b")
    eventually(lambda: names_known_to(a), lambda names: names == ["a", "b"])
    with pytest.raises(RpcTimeoutError, match="a, which serves the store, gave up waiting for b to leave"):
        a.leave(True, Deadline.after(0.05))


def test_leaving_waits_for_running_calls(town: Town) -> None:
    a, b = town.join("a"), town.join("b")
    with acting(a), town.network.hold(target=0) as held:
        answer = rpc.rpc_async("b", where)
        held.wait()
        with pytest.raises(RpcTimeoutError, match="a: shutdown gave up waiting for b to finish"):
            a.leave(True, Deadline.after(0.05))
        with pytest.raises(RpcError, match="shut down"):
            answer.wait()
    assert names_known_to(b) == ["a", "b"], "it gave up before it withdrew"


# ---- waiting and being told ------------------------------------------------------------------------------


def test_waiting_for_workers(town: Town) -> None:
    a = town.join("a")
    with acting(a):
        assert [i.name for i in rpc.wait_for_workers(["a"])] == ["a"]
        with pytest.raises(RpcTimeoutError, match="a: these workers did not join in time: b, c"):
            rpc.wait_for_workers(["a", "b", "c"], timeout=0.01)
        with pytest.raises(ArgumentTypeError, match="a list of names"):
            rpc.wait_for_workers("b")
        thread = threading.Thread(target=lambda: [town.join(name) for name in "bc"])
        thread.start()
        assert [i.name for i in rpc.wait_for_workers(["c", "b"])] == ["c", "b"]
        thread.join(WAIT)


def test_waiting_ends_with_the_worker(town: Town) -> None:
    a = town.join("a")
    waiting = threading.Event()
    told: list[str] = []

    def wait() -> None:
        with acting(a):
            waiting.set()
            with pytest.raises(NotInitializedError) as caught:
                rpc.wait_for_workers(["b"], timeout=0)
            told.append(str(caught.value))

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(WAIT)
    a.close()
    thread.join(WAIT)
    assert told == ["worker a was shut down while it waited for others"]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_callbacks_get_each_event_once_and_may_make_calls(town: Town, error: type[BaseException]) -> None:
    a, b = town.join("a"), town.join("b")
    eventually(lambda: names_known_to(a), lambda names: names == ["a", "b"])
    heard: list[Any] = []

    def greet(info: rpc.WorkerInfo) -> None:
        heard.append((info.name, rpc.rpc_sync(info, where)))

    def mourn(info: rpc.WorkerInfo, why: str) -> None:
        heard.append((info.name, why))

    def fail(*_: Any) -> None:
        raise error("a callback's own fault")

    with acting(a):
        rpc.on_join(fail)
        rpc.on_join(greet)
        rpc.on_loss(fail)
        rpc.on_loss(mourn)
    town.join("c")
    eventually(lambda: list(heard), lambda infos: len(infos) == 1)
    b.leave(True, Deadline.after(WAIT))
    eventually(lambda: list(heard), lambda infos: len(infos) == 2)
    assert heard == [("c", "c"), ("b", "it has left the group")]


# ---- while all call each other ---------------------------------------------------------------------------


def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Something to differentiate."""
    return x * y


def test_gradients_go_on_while_others_come_and_go(town: Town) -> None:
    a, _ = town.join("a"), town.join("b")
    x = torch.ones(3, requires_grad=True)
    for n in range(3):
        other = town.join("c")
        with acting(a), autograd.context() as context_id:
            y = rpc.rpc_sync("b", multiply, args=(x, x * 2))
            y = y + rpc.rpc_sync("c", multiply, args=(x, x))
            autograd.backward(context_id, [y.sum()])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 6.0))
        if n % 2:
            other.leave(True, Deadline.after(WAIT))
        else:
            town.kill(other)
            a.worker.lose(other.worker.id, "its process has ended")


hold = threading.Event()


def held() -> str:
    """As `where`, once the test lets it."""
    assert hold.wait(WAIT)
    return where()


def test_a_name_is_free_after_its_holder_has_left(town: Town) -> None:
    a, first = town.join("a"), town.join("c")
    eventually(lambda: ids_known_to(a), lambda ids: ids == [a.worker.id, first.worker.id])
    members = Registry(first.store, first.worker.membership.own)
    members.release_name()
    members.remove(first.worker.id, LEFT)
    eventually(lambda: ids_known_to(a), lambda ids: ids == [a.worker.id])
    second = town.join("c")
    with acting(a):
        assert rpc.rpc_sync("c", rpc.get_worker_info).id == second.worker.id


@pytest.mark.slow
def test_a_worker_joins_and_leaves_while_others_call_each_other(town: Town) -> None:
    steady = [town.join(name) for name in "ab"]
    stop = threading.Event()
    failed: list[BaseException] = []
    calls = [0, 0]

    def work(n: int) -> None:
        with acting(steady[n]):
            while not stop.is_set():
                try:
                    assert rpc.rpc_sync("ba"[n], where) == "ba"[n]
                    calls[n] += 1
                    rref = rpc.remote("c", list, args=((n,),))
                    assert rref.to_here() == [n]
                    assert rpc.rpc_sync("ba"[n], len, args=(rref.to_here(),)) == 1
                except (PeerLostError, UnknownWorkerError):
                    pass  # c is away
                except BaseException as e:
                    failed.append(e)
                    return

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for t in threads:
        t.start()
    try:
        for n in range(10):
            guest = town.join("c")
            for group in steady:  # else they may call the last c, of whose end they have not heard yet
                new = guest.worker.id
                eventually(lambda group=group: ids_known_to(group), lambda ids, new=new: new in ids)
            with acting(guest):
                for name in "ab":
                    assert rpc.rpc_sync(name, there_and_back, args=("c",)) == "c"
            if n % 2:
                guest.leave(True, Deadline.after(WAIT))
            else:
                town.kill(guest)
                steady[0].worker.lose(guest.worker.id, "its process has ended")
    finally:
        stop.set()
        for t in threads:
            t.join(WAIT)
    assert not failed
    assert all(calls)
    for group in steady:
        eventually(lambda group=group: names_known_to(group), lambda names: names == ["a", "b"])
