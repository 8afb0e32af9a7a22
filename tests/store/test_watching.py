"""Prefixes, loops, asyncio and cached reads: what is watched, beyond callbacks of one key."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import eventually
from tools.ports import free_port
from zmqgrad.errors import ConfigurationError, StoreError, StoreTimeoutError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import FileStore, HashStore, PrefixStore, Store, TCPStore, WatchEvent, watch
from zmqgrad.store.contents import MAX_NOTIFICATION_VALUE_BYTES
from zmqgrad.store.effects import Notification
from zmqgrad.store.events import EventBacklog
from zmqgrad.store.server import StoreServer
from zmqgrad.store.state import State
from zmqgrad.store.watch_cache import WatchCache
from zmqgrad.store.watch_targets import INTERNAL_PREFIX
from zmqgrad.wire.messages import PrefixCallbackRegistered, StoreDeleteKey, StoreSet, StoreWatchPrefix

PATIENCE = 20.0

# ---- the cache of a prefix, on a channel that loses what it likes --------------------------------------

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["set", "set", "large", "delete"]),
        st.sampled_from(["p/a", "p/b", "p", "q"]),
        st.sampled_from(["arrives", "arrives", "is lost", "is late", "the connection breaks"]),
    ),
    max_size=40,
)


def look(state: State) -> PrefixCallbackRegistered:
    (reply,) = state.apply(StoreWatchPrefix("p/", "n"), "w", 0.0)
    assert isinstance(reply.message, PrefixCallbackRegistered)
    return reply.message


@given(ACTIONS, st.booleans())
def test_the_last_event_has_the_last_value_whatever_is_lost(
    actions: list[tuple[str, str, str]], looks_late: bool
) -> None:
    """P8 of docs/guarantees.md, for each key: events form a chain, and its end is what the store holds."""
    state, cache = State(), WatchCache()
    events = cache.on_registered(look(state))
    late: list[Any] = []
    for n, (action, key, fate) in enumerate(actions):
        value = b"%d" % n * (MAX_NOTIFICATION_VALUE_BYTES if action == "large" else 1)
        query = StoreDeleteKey(key) if action == "delete" else StoreSet(key, value)
        late += [e.message for e in state.apply(query, "x", 0.0) if isinstance(e, Notification)]
        if fate == "is late":
            continue
        if fate == "the connection breaks":
            cache.invalidate()
        if fate != "arrives":
            late.clear()
        for notification in late:
            events += cache.on_notification(notification)
        late.clear()
        if not cache.live and not looks_late:
            events += cache.on_registered(look(state))
    cache.invalidate()
    events += cache.on_registered(look(state))
    seen: dict[str, bytes | None] = {}
    for event in events:
        assert event.old == seen.get(event.key)
        seen[event.key] = event.new
    found = look(state)
    there = dict(zip(found.keys, found.values, strict=True))
    assert {key: value for key, value in seen.items() if value is not None} == there
    assert [(e.key, e.new) for e in cache.initial_events()] == sorted(there.items())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_a_backlog_is_bounded_and_ends_with_the_last(steps: list[tuple[str, bool]]) -> None:
    backlog, told, seen = EventBacklog(limit=4), {}, {}  # type: ignore[var-annotated]

    def take() -> None:
        event = backlog.pop()
        assert event.old == seen.get(event.key)
        seen[event.key] = event.new

    for n, (key, fetch) in enumerate(steps):
        backlog.add(WatchEvent(key, told.get(key), b"%d" % n, n))
        told[key] = b"%d" % n
        assert len(backlog) <= 4 + 2, "the limit, and as many keys as had none waiting there"
        if fetch:
            take()
    while backlog:
        take()
    assert seen == told


# ---- whole stores -----------------------------------------------------------------------------------------


@pytest.fixture(params=["tcp", "hash", "file", "prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    beneath: Store = HashStore(PATIENCE)
    if request.param == "tcp":
        beneath = TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE)
    elif request.param == "file":
        beneath = FileStore(str(tmp_path / "store"), timeout=PATIENCE)
    with beneath:
        yield PrefixStore("view", beneath) if request.param == "prefix" else beneath


def changes(events: list[WatchEvent]) -> list[tuple[str, bytes | None, bytes | None]]:
    return [event[:3] for event in events]


def test_a_loop_over_a_key(store: Store) -> None:
    with store.watch("k", timeout=PATIENCE) as watch:
        store.set("other", "")
        seen = []
        for change in (
            lambda: store.set("k", "1"),
            lambda: store.delete_key("k"),
            lambda: store.set("k", "2"),
        ):
            change()
            seen.append(next(watch))  # at once, as values that are soon replaced may be missed
    assert changes(seen) == [("k", None, b"1"), ("k", b"1", None), ("k", None, b"2")]
    revisions = [event.revision for event in seen]
    assert revisions == sorted(set(revisions)), "they grow"
    assert list(watch) == [], "the loop over a closed watch ends"


def test_a_prefix(store: Store) -> None:
    seen: list[Any] = []
    done = threading.Event()

    def callback(key: str, old: bytes | None, new: bytes | None) -> None:
        seen.append((key, old, new))
        if key == "w/end":
            done.set()

    def until_seen(count: int) -> None:
        eventually(lambda: list(seen), lambda changes: len(changes) >= count, PATIENCE)

    store.set("w/0", "before")
    store.watch_prefix("w/", callback)
    with store.watch(prefix="w/", timeout=PATIENCE, present=True) as watch:
        fetched = changes([next(watch)])
        store.set("w", "not beneath")
        for change in (
            lambda: store.set("w/1", "a"),
            lambda: store.multi_set(["x", "w/2"], ["", "b"]),
            lambda: store.delete_key("w/1"),
            lambda: store.set(
                "w/0", "after" * MAX_NOTIFICATION_VALUE_BYTES
            ),  # too large for a notification: it is read
            lambda: store.set("w/end", ""),
        ):
            change()
            fetched += changes([next(watch)])
            until_seen(len(fetched) - 1)
        assert done.wait(PATIENCE)
        expected = [
            ("w/1", None, b"a"),
            ("w/2", None, b"b"),
            ("w/1", b"a", None),
            ("w/0", b"before", b"after" * MAX_NOTIFICATION_VALUE_BYTES),
            ("w/end", None, b""),
        ]
    assert fetched[0] == ("w/0", None, b"before")
    for got in (seen, fetched[1:]):
        assert sorted(got, key=str) == sorted(expected, key=str)
        assert [c for c in got if c[0] == "w/1"] == [expected[0], expected[2]]
    store.unwatch_prefix("w/", callback)
    store.set("w/3", "c")
    assert len(seen) == 5


def test_internal_keys_are_hidden_from_prefix_watches(store: Store) -> None:
    hidden = f"{INTERNAL_PREFIX}hidden"
    with store.watch(prefix="", timeout=PATIENCE) as watch:
        store.set(hidden, "")
        store.set("shown", "")
        event = next(watch)
    # A view's prefix comes first, so nothing of its own can be hidden.
    assert event.key == (hidden if isinstance(store, PrefixStore) else "shown")


def test_a_loop_that_waits_ends_with_the_watch_or_the_store(store: Store) -> None:
    watches = [store.watch("k"), store.watch(prefix="k")]
    ended: list[list[WatchEvent]] = []
    loops = [threading.Thread(target=lambda w=w: ended.append(list(w))) for w in watches]  # type: ignore[misc]
    for loop in loops:
        loop.start()
    watches[0].close()
    watches[0].close()
    beneath = store.underlying_store if isinstance(store, PrefixStore) else store
    beneath.close()
    for loop in loops:
        loop.join(PATIENCE)
    assert ended == [[], []]
    with pytest.raises(StoreError):
        store.watch("k")


def test_nothing_changes_in_time(store: Store) -> None:
    with store.watch("k", timeout=0.01) as watch, pytest.raises(StoreTimeoutError, match=r"within 0\.01 s"):
        next(watch)
    for arguments in ({}, {"key": "k", "prefix": "p"}):
        with pytest.raises(ConfigurationError, match="either a key or a prefix"):
            store.watch(**arguments)  # type: ignore[arg-type]


def test_tasks_watch(store: Store) -> None:
    async def follow(watch: Any, count: int, news: asyncio.Queue[bytes | None]) -> None:
        async for event in watch:
            await news.put(event.new)
            count -= 1
            if not count:
                break

    async def main() -> list[Any]:
        with store.watch("k", timeout=PATIENCE) as one, store.watch(prefix="k", timeout=PATIENCE) as two:
            impatient = asyncio.ensure_future(one.__anext__())
            await asyncio.sleep(0)
            impatient.cancel()
            queues: list[asyncio.Queue[Any]] = [asyncio.Queue(), asyncio.Queue()]
            following = asyncio.gather(follow(one, 3, queues[0]), follow(two, 3, queues[1]))
            seen = []
            for n in range(3):
                await asyncio.to_thread(store.set, "k", str(n))
                seen.append([await news.get() for news in queues])
            await following
            return seen

    assert asyncio.run(main()) == [[b"0"] * 2, [b"1"] * 2, [b"2"] * 2]


def test_a_task_waits_no_longer_than_its_timeout(store: Store) -> None:
    async def main() -> None:
        with store.watch("k", timeout=0.01) as watch:
            async for _ in watch:
                pass

    with pytest.raises(StoreTimeoutError, match=r"within 0\.01 s"):
        asyncio.run(main())


def test_an_open_watch_keeps_no_loop_that_has_ended(store: Store) -> None:
    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        for _ in range(2):
            with pytest.raises(StoreTimeoutError):
                await watch.__anext__()
        return weakref.ref(asyncio.get_running_loop())

    with store.watch("k", timeout=0.01) as watch:
        loop = asyncio.run(main())
        gc.collect()
        assert loop() is None


# ---- cached reads -----------------------------------------------------------------------------------------


def test_a_cached_read_follows_the_key(store: Store) -> None:
    store.set("k", "1")
    assert store.get_cached("k") == b"1"
    store.set("k", "2")
    eventually(lambda: store.get_cached("k"), lambda value: value == b"2", PATIENCE)
    store.delete_key("k")
    store.set_timeout(0.02)

    def until_it_is_gone() -> None:
        while True:
            store.get_cached("k")

    with pytest.raises(StoreTimeoutError):
        until_it_is_gone()


def test_a_cached_read_waits_for_the_key(store: Store) -> None:
    writer = threading.Thread(target=store.set, args=("k", "1"))
    writer.start()
    assert store.get_cached("k") == b"1"
    writer.join(PATIENCE)


def test_a_cached_read_whose_watch_is_ended_meanwhile_watches_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked the store again and again instead, for ever."""
    waits, get = threading.Event(), Store.get
    monkeypatch.setattr(Store, "get", lambda self, key: (waits.set(), get(self, key))[1])
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(store.get_cached("k")), daemon=True)
    reader.start()
    assert waits.wait(PATIENCE)
    store.unwatch_key("k")
    store.set("k", "1")
    reader.join(PATIENCE)
    assert found == [b"1"]
    store.set("k", "2")
    eventually(lambda: store.get_cached("k"), lambda value: value == b"2", PATIENCE)


def test_cached_reads_send_no_query_and_never_go_back() -> None:
    with (
        TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE) as master,
        TCPStore("127.0.0.1", master.port, timeout=PATIENCE) as client,
    ):
        master.set("n", "0")
        client.get_cached("n")
        before = master.statistics()["requests"]
        for _ in range(1000):
            client.get_cached("n")
        assert master.statistics()["requests"] == before
        deadline = Deadline.after(PATIENCE)
        writer = threading.Thread(target=lambda: [master.add("n", 1) for _ in range(500)])
        writer.start()
        seen = [0]
        while seen[-1] < 500:
            assert not deadline.passed(), seen[-1]
            seen.append(int(client.get_cached("n")))
            time.sleep(0)  # the writer and the thread of notifications need the interpreter, too
        writer.join(PATIENCE)
        assert seen == sorted(seen)


# ---- trouble ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_thousand_updates_and_restarts_end_with_the_last_value(tmp_path: Path) -> None:
    """P8, with three servers in turn over one journal, a slow and a failing callback, and two loops."""
    address, path = f"tcp://127.0.0.1:{free_port()}", tmp_path / "journal"
    server = StoreServer(address, journal=path)
    last, slow_saw, go, ended = "9999", [], threading.Event(), threading.Event()

    def slow(old: bytes | None, new: bytes | None) -> None:
        go.wait(PATIENCE)
        slow_saw.append((old, new))
        if new == last.encode():
            ended.set()

    def failing(old: bytes | None, new: bytes | None) -> None:
        raise LookupError("a fault of the user's")

    writer = TCPStore("127.0.0.1", server.port, timeout=PATIENCE)
    with writer, TCPStore("127.0.0.1", server.port, timeout=PATIENCE) as store:
        store.watch_key("slow", slow)
        store.watch_key("failing", failing)
        with (
            store.watch("k", timeout=PATIENCE) as one,
            store.watch(prefix="k", timeout=PATIENCE) as all_of_it,
        ):
            for n in range(10_000):
                if n in (3000, 6000):
                    server.close()
                    server = StoreServer(address, journal=path)
                keys = ["k", "slow", "failing"] if n % 100 == 99 else ["k"]
                writer.multi_set(keys, [str(n)] * len(keys))
            go.set()
            for loop in (one, all_of_it):
                old = None
                for event in loop:
                    assert event.old == old
                    old = event.new
                    if old == last.encode():
                        break
        assert ended.wait(PATIENCE)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(slow_saw))
    server.close()


def only_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system refuse to start other threads."""
    start = threading.Thread.start

    def start_or_refuse(self: threading.Thread) -> None:
        if not self.name.endswith("-service"):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)


def test_a_change_reaches_others_though_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "RETRY_SECONDS", 0.01)
    seen: list[bytes | None] = []
    with HashStore() as store, ThreadPoolExecutor(1) as threads:
        store.watch_key("key", lambda old, new: seen.append(new))
        waiting = threads.submit(store.get, "key")
        eventually(lambda: store.statistics()["parked"])
        with monkeypatch.context() as without:
            only_services(without)
            store.set("key", "1")
            assert waiting.result(20.0) == b"1"
            assert not seen
        eventually(lambda: seen == [b"1"])


def test_a_file_is_watched_once_there_is_a_thread_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes | None] = []

    def begin() -> None:
        store.watch_key("key", lambda old, new: seen.append(new))

    with FileStore(str(tmp_path / "store")) as store:
        with monkeypatch.context() as without:
            only_services(without)
            with pytest.raises(RuntimeError, match="can't start"):
                begin()
        begin()
        store.set("key", "1")
        eventually(lambda: seen and seen[-1] == b"1")
