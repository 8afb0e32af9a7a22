"""The store in etcd, while members of its cluster are killed, stand still, or are cut off."""

from __future__ import annotations

import os
import random
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import quote

import pytest

from tests.store.histories import PATIENCE, check, run_programs
from tests.store.test_linearizability import random_program
from tests.support.etcd import EtcdCluster, needs_etcd
from tests.support.relay import at_random, passes
from tests.support.waiting import eventually
from zmqgrad.errors import ConfigurationError, StoreError, StoreTimeoutError
from zmqgrad.store import EtcdOptions, EtcdStore
from zmqgrad.store.etcd import cluster as members
from zmqgrad.store.etcd import connection, contents
from zmqgrad.store.etcd.cluster import after_prefix, decode, encode
from zmqgrad.store.etcd.store import parse_members

pytestmark = [pytest.mark.processes, pytest.mark.slow, needs_etcd]

SIZE = 3
CLIENTS = 3
LENGTH = 50
SEEDS = int(os.environ.get("ZMQGRAD_ETCD_SEEDS", "4"))


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster(SIZE, relays=True) as made:
        yield made


@pytest.fixture
def store(cluster: EtcdCluster) -> Iterator[EtcdStore]:
    with EtcdStore(cluster.endpoint, secrets.token_hex(8), PATIENCE) as made:
        yield made
        made.delete_all()


def places(cluster: EtcdCluster, store: EtcdStore) -> list[bytes]:
    """All keys of etcd that belong to ``store``."""
    base = f"zmqgrad/store/{quote(store.prefix, safe='')}/".encode()
    asked = {"key": encode(base), "range_end": encode(after_prefix(base)), "keys_only": True}
    direct = members.EtcdCluster([("127.0.0.1", port) for port in cluster.ports])
    try:
        found = direct.post("/kv/range", asked, connection.Deadline.after(PATIENCE)).get("kvs", [])
        return [decode(kv["key"]).removeprefix(base) for kv in found]
    finally:
        direct.close()


def strikes(cluster: EtcdCluster, rng: random.Random) -> list[Callable[[], None]]:
    """A fault of one member, and its end: a majority is left all the time."""
    victim = rng.randrange(SIZE)
    if rng.random() < 0.4:
        return [lambda: cluster.kill(victim), lambda: cluster.start(victim)]
    if rng.random() < 0.5:
        return [lambda: cluster.freeze(victim), lambda: cluster.freeze(victim, False)]
    relay = cluster.from_members[victim]
    return [relay.stall, relay.resume]


@pytest.mark.timeout(60 + 60 * SEEDS)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_clients_see_one_order_while_members_fail(
    cluster: EtcdCluster, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies are lost, too: nothing may be done twice."""
    monkeypatch.setattr(connection, "LATE_SECONDS", PATIENCE)
    rng = random.Random(seed)
    programs: list[list[Any]] = [list(random_program(seed * CLIENTS + n, LENGTH)) for n in range(CLIENTS)]
    begin, end = strikes(cluster, rng)
    first = rng.randrange(LENGTH // 2)
    programs[0][first:first] = [begin]
    programs[0][first + LENGTH // 3 : first + LENGTH // 3] = [end]
    for n, relay in enumerate(cluster.from_clients):
        relay.fate = at_random(0.02, SIZE * seed + n)
    prefix = secrets.token_hex(8)
    try:
        with ExitStack() as stack:
            stores = [
                stack.enter_context(EtcdStore(cluster.endpoint, prefix, PATIENCE)) for _ in range(CLIENTS)
            ]
            check(run_programs(stores, programs))
            stores[0].delete_all()
    finally:
        for relay in cluster.from_clients:
            relay.fate = passes


def test_every_add_counts_once_though_replies_are_lost(cluster: EtcdCluster, store: EtcdStore) -> None:
    for n, relay in enumerate(cluster.from_clients):
        relay.fate = at_random(0.1, n)
    try:
        sums = [store.add("n", 1) for _ in range(60)]
    finally:
        for relay in cluster.from_clients:
            relay.fate = passes
    assert sums == list(range(1, 61))


def test_waits_and_watches_continue_with_another_member(cluster: EtcdCluster, store: EtcdStore) -> None:
    seen: list[bytes | None] = []
    store.watch_key("k", lambda old, new: seen.append(new))
    store.watch_prefix("p/", lambda key, old, new: seen.append(new))
    waiter = threading.Thread(target=store.wait, args=(["later"],))
    waiter.start()
    with EtcdStore(cluster.endpoint, store.prefix, PATIENCE) as other:
        for victim in range(SIZE):
            cluster.kill(victim)
            other.set("k", str(victim))
            other.set("p/x", f"x{victim}")
            expected = {b"%d" % victim, b"x%d" % victim}
            eventually(lambda: set(seen[-2:]), expected.__eq__, PATIENCE)
            cluster.start(victim)
            cluster.await_health(victim)
        other.set("later", "")
    waiter.join(PATIENCE)
    assert not waiter.is_alive()


def test_a_watch_of_a_prefix_sees_what_one_query_sets_together(store: EtcdStore) -> None:
    seen: dict[str, bytes | None] = {}
    store.watch_prefix("p/", lambda key, old, new: seen.update({key: new}))
    keys = [f"p/{n}" for n in range(200)]
    store.multi_set(keys, [key.encode() for key in keys])
    eventually(lambda: seen, lambda found: found == {key: key.encode() for key in keys})


def test_a_watch_goes_on_behind_revisions_that_etcd_has_dropped(
    cluster: EtcdCluster, store: EtcdStore
) -> None:
    seen: list[bytes | None] = []
    store.watch_key("k", lambda old, new: seen.append(new))
    for relay in cluster.from_clients:
        relay.stall()
    try:
        direct = EtcdStore([("127.0.0.1", cluster.ports[0])], store.prefix, PATIENCE)
        with direct:
            for n in range(5):
                direct.set("k", str(n))
            cluster.compact()
    finally:
        for relay in cluster.from_clients:
            relay.cut()
            relay.resume()
    eventually(lambda: seen, lambda found: found[-1:] == [b"4"], PATIENCE)


def test_large_values_are_switched_at_once_and_leave_nothing(cluster: EtcdCluster, store: EtcdStore) -> None:
    values = [bytes([n]) * (3 * contents.PART_BYTES + n) for n in range(4)]
    store.set("k", values[0])
    wrong: list[int] = []
    done = threading.Event()

    def read() -> None:
        with store.clone() as reader:
            while not done.is_set():
                found = reader.get("k")
                if found not in values:
                    wrong.append(len(found))

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(2):
        for value in values:
            store.set("k", value)
    done.set()
    thread.join(PATIENCE)
    assert not wrong
    store.queue_push("q", values[1])
    store.append("k", "end")
    assert store.get("k") == values[-1] + b"end"
    assert store.queue_pop("q") == values[1]
    store.delete_key("k")
    assert [place for place in places(cluster, store) if place[:1] in b"ckq"] == []


def test_many_values_are_one_transaction(store: EtcdStore) -> None:
    keys = [f"k{n}" for n in range(500)]
    store.multi_set(keys, [b"%d" % n * 2000 for n in range(500)])
    assert store.multi_get(keys) == [b"%d" % n * 2000 for n in range(500)]
    assert store.num_keys() == 500
    keys = [f"k{n}" for n in range(2500)]
    store.multi_set(keys, [b"x" * 1000] * 2500)  # most of them have to be in parts
    assert store.multi_get(keys[::100]) == [b"x" * 1000] * 25
    with pytest.raises(StoreError, match=r"2501 changes in one query \(at most 2500\)"):
        store.multi_set([str(n) for n in range(2501)], [""] * 2501)
    assert store.num_keys() == 2500


def test_what_a_client_leaves_is_its_keys(cluster: EtcdCluster) -> None:
    with EtcdStore(cluster.endpoint, "left/behind", PATIENCE) as store:
        store.set("k", "1")
        found = places(cluster, store)
        assert len([place for place in found if place.startswith(b"r/")]) == 1
    assert places(cluster, store) == [b"k/k"]
    with EtcdStore(cluster.endpoint, "left", PATIENCE) as other:
        assert other.num_keys() == 0, "no prefix is part of another"
    with EtcdStore(cluster.endpoint, "left/behind", PATIENCE) as again:
        assert again.get("k") == b"1"
        again.delete_all()
        assert again.num_keys() == 0


def test_closing_ends_what_waits(cluster: EtcdCluster) -> None:
    store = EtcdStore(cluster.endpoint, "closing", PATIENCE)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            store.get("never")
        except StoreError as e:
            errors.append(e)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: store.statistics()["parked"] == 1)
    store.watch_key("k", lambda old, new: None)
    store.close()
    thread.join(PATIENCE)
    assert "closed" in str(errors[0])
    with pytest.raises(StoreError, match="closed"):
        store.delete_all()


def test_two_of_three_members_are_away_for_a_while(cluster: EtcdCluster, store: EtcdStore) -> None:
    store.set("k", "1")
    for victim in (0, 1):
        cluster.kill(victim)
    try:
        with store.clone() as hasty:
            hasty.set_timeout(1.0)
            with pytest.raises(StoreTimeoutError, match="no member of etcd could be used"):
                hasty.set("k", "2")
        back = threading.Timer(3.0, cluster.start, (0,))
        back.start()
        store.set("k", "3")
        back.join()
    finally:
        cluster.start(1)
    assert store.get("k") == b"3"


def test_a_database_that_is_full_refuses_changes_at_once() -> None:
    """Until an operator has made room: no call waits for that until its timeout."""
    with (
        EtcdCluster(1, ["--quota-backend-bytes", "2000000"]) as full,
        EtcdStore(full.endpoint, "job", PATIENCE) as store,
    ):
        store.set("small", "1")
        with pytest.raises(StoreError, match=r"refused: .*database space exceeded.*alarm disarm"):
            [store.set(f"large {n}", secrets.token_bytes(500_000)) for n in range(20)]
        assert store.get("small") == b"1"


def test_nothing_replies(cluster: EtcdCluster) -> None:
    with (
        EtcdStore("127.0.0.1:9", "job", 0.5) as store,
        pytest.raises(StoreTimeoutError, match=r"<EtcdStore 'job'>.*127.0.0.1:9"),
    ):
        store.set("k", "1")


def test_invalid_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_members("a,b:1,[::1]:2,[::1]") == (("a", 2379), ("b", 1), ("::1", 2), ("::1", 2379))
    for text in ("", "a,,b", "a:x", "a:99999", "http://a:1", "a/b", "me:pw@a"):
        with pytest.raises(ConfigurationError, match="a member of etcd is"):
            EtcdStore(text, "job")
    with pytest.raises(ConfigurationError, match="etcd has no members"):
        EtcdStore([], "job")
    for timeout in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigurationError, match="it must be a positive number"):
            EtcdStore("a", "job", options=EtcdOptions(timeout))
    for name in ("ca_cert", "ssl_cert", "ssl_cert_key"):
        with pytest.raises(ConfigurationError, match=f"'{name}' of etcd names '/missing'"):
            EtcdStore("a", "job", options=EtcdOptions(protocol="https", **{name: "/missing"}))
    with pytest.raises(ConfigurationError, match="it must name the job"):
        EtcdStore("a", "")
    monkeypatch.delenv("ZMQGRAD_ALLOW_INSECURE", raising=False)
    with pytest.raises(ConfigurationError, match="needs protocol=https"):
        EtcdStore("a.example", "job", options=EtcdOptions(user="me", password="secret"))
