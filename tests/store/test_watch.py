"""Following keys: the cache alone against a faulty channel, then real watches over real stores."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.interpreter import run_python
from tools.ports import free_port
from zmqgrad.errors import StoreError, StoreTimeoutError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import HashStore, PrefixStore, Store, TCPStore, service, watch
from zmqgrad.store.contents import MAX_NOTIFICATION_VALUE_BYTES
from zmqgrad.store.effects import Notification
from zmqgrad.store.events import MAX_PENDING_EVENTS, KeyCallbackAdapter, WatchEvent
from zmqgrad.store.state import State
from zmqgrad.store.watch import WatchRegistry
from zmqgrad.store.watch_cache import WatchCache
from zmqgrad.store.watch_iterator import EventQueue
from zmqgrad.transport.query.subscriber import Subscriber
from zmqgrad.wire.messages import (
    KeyCallbackRegistered,
    KeyUpdated,
    StoreDeleteKey,
    StoreSet,
    StoreWatchKey,
)

Change = tuple[bytes | None, bytes | None]

PATIENCE = 20.0

# ---- the cache, on a channel that loses what it likes --------------------------------------------------

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["set", "set", "set", "large", "delete", "other"]),
        st.sampled_from(["arrives", "arrives", "is lost", "is late", "the connection breaks"]),
    ),
    max_size=40,
)


def look(state: State, key: str = "k") -> KeyCallbackRegistered:
    (reply,) = state.apply(StoreWatchKey(key, "n"), "w", 0.0)
    assert isinstance(reply.message, KeyCallbackRegistered)
    return reply.message


@given(ACTIONS, st.booleans())
def test_the_last_event_has_the_last_value_whatever_is_lost(
    actions: list[tuple[str, str]], looks_late: bool
) -> None:
    """P8: changes form one chain, and once the connection works again its end is the store's value."""
    state, cache = State(), WatchCache()
    changes: list[WatchEvent] = []
    late: list[Any] = []
    changes += cache.on_registered(look(state))
    for n, (action, fate) in enumerate(actions):
        query = {
            "set": StoreSet("k", b"%d" % n),
            "large": StoreSet("k", b"%d" % n * MAX_NOTIFICATION_VALUE_BYTES),
            "delete": StoreDeleteKey("k"),
            "other": StoreSet("other", b""),
        }[action]
        late += [e.message for e in state.apply(query, "x", 0.0) if isinstance(e, Notification)]
        if fate == "is late":
            continue
        if fate == "the connection breaks":
            late.clear()
            cache.invalidate()
        elif fate == "is lost":
            late.clear()
        for notification in late:
            changes += cache.on_notification(notification)
        late.clear()
        if not cache.live and not looks_late:
            changes += cache.on_registered(look(state))
    cache.invalidate()  # the last word of a broken channel: it is made anew
    changes += cache.on_registered(look(state))
    for before, after in itertools.pairwise(changes):
        assert before.new == after.old
    assert cache.live
    held = look(state).value
    assert cache.values.get("k") == held
    assert (changes[-1].new if changes else None) == held


def test_a_lost_notification_is_detected_at_the_next_one() -> None:
    state, cache = State(), WatchCache()
    cache.on_registered(look(state))
    for value in (b"1", b"2"):
        (notification, _) = state.apply(StoreSet("k", value), "x", 0.0)
    assert cache.on_notification(notification.message) == []  # type: ignore[arg-type]
    assert not cache.live
    assert cache.on_registered(look(state)) == [WatchEvent("k", None, b"2", 2)]


def test_notifications_before_the_registration_are_kept() -> None:
    state, cache = State(), WatchCache()
    found = look(state)
    (notification, _) = state.apply(StoreSet("k", b"1"), "x", 0.0)
    assert cache.on_notification(notification.message) == []  # type: ignore[arg-type]
    assert cache.on_registered(found) == [WatchEvent("k", None, b"1", 1)]
    assert cache.on_registered(found) == [], "a look from before that tells nothing new"
    assert cache.values == {"k": b"1"}


def test_a_registration_that_was_overtaken_does_not_go_back() -> None:
    cache = WatchCache()
    cache.on_registered(KeyCallbackRegistered("k", 1, b"1"))
    cache.on_notification(KeyUpdated("k", 2, 1, b"1", b"2"))
    cache.on_notification(KeyUpdated("k", 4, 3, b"3", b"4"))  # one before it was lost
    assert cache.on_registered(KeyCallbackRegistered("k", 1, b"1")) == []
    assert not cache.live
    assert cache.values == {"k": b"2"}
    assert cache.on_registered(KeyCallbackRegistered("k", 4, b"4")) == [WatchEvent("k", b"2", b"4", 4)]
    cache.invalidate()  # perhaps the server has restarted, and counts anew
    assert cache.on_registered(KeyCallbackRegistered("k", 1, b"new")) == [WatchEvent("k", b"4", b"new", 1)]


# ---- the registry: callbacks
# ----------------------------------------------------------------------------------


@pytest.fixture
def registry() -> Iterator[WatchRegistry]:
    made = WatchRegistry("test", lambda key: KeyCallbackRegistered(key, 0, None))
    yield made
    made.close()


def update(n: int, key: str = "k") -> KeyUpdated:
    return KeyUpdated(key, n, n - 1, None, b"%d" % n)


@pytest.mark.slow
def test_a_slow_callback_of_one_key_does_not_hold_up_another(registry: WatchRegistry) -> None:
    go, seen = threading.Event(), queue.Queue[bytes | None]()
    for i in range(8):  # more than there are threads at first
        registry.add(f"slow{i}", KeyCallbackAdapter(lambda old, new: go.wait(PATIENCE) and None))
        registry.on_notification(update(1, f"slow{i}"))
    registry.add("quick", KeyCallbackAdapter(lambda old, new: seen.put(new)))
    registry.on_notification(update(1, "quick"))
    try:
        assert seen.get(timeout=PATIENCE) == b"1"
    finally:
        go.set()


def test_callbacks_of_a_key_run_one_at_a_time_in_order(registry: WatchRegistry) -> None:
    seen, inside, done = [], threading.Lock(), threading.Event()

    def callback(old: bytes | None, new: bytes | None) -> None:
        if not inside.acquire(blocking=False):
            pytest.fail("two at a time")
        seen.append((old, new))
        inside.release()
        if new == b"500":
            done.set()

    registry.add("k", KeyCallbackAdapter(callback))
    for n in range(1, 501):
        registry.on_notification(update(n))
    assert done.wait(PATIENCE)
    assert seen == [(None if n == 1 else b"%d" % (n - 1), b"%d" % n) for n in range(1, 501)]


def test_a_callback_far_behind_misses_some_but_not_the_last(registry: WatchRegistry) -> None:
    go, entered, done, seen = threading.Event(), threading.Event(), threading.Event(), []
    last = 3 * MAX_PENDING_EVENTS

    def callback(old: bytes | None, new: bytes | None) -> None:
        entered.set()
        go.wait(PATIENCE)
        seen.append((old, new))
        if new == b"%d" % last:
            done.set()

    registry.add("k", KeyCallbackAdapter(callback))
    registry.on_notification(update(1))
    assert entered.wait(PATIENCE)
    for n in range(2, last + 1):
        registry.on_notification(update(n))
    go.set()
    assert done.wait(PATIENCE)
    assert len(seen) == MAX_PENDING_EVENTS + 1
    assert all(before[1] == after[0] for before, after in itertools.pairwise(seen))


@pytest.mark.slow
def test_a_slow_callback_does_not_hold_up_others_of_its_key(registry: WatchRegistry) -> None:
    go, seen, slow = threading.Event(), queue.Queue[bytes | None](), queue.Queue[bytes | None]()
    for _ in range(4):  # more than there are threads at first
        registry.add("k", KeyCallbackAdapter(lambda old, new: slow.put(go.wait(PATIENCE) and new)))
    registry.add("k", KeyCallbackAdapter(lambda old, new: seen.put(new)))
    for n in range(1, 4):
        registry.on_notification(update(n))
    try:
        assert [seen.get(timeout=PATIENCE) for _ in range(3)] == [b"1", b"2", b"3"]
    finally:
        go.set()
    late = sorted(slow.get(timeout=PATIENCE) for _ in range(12))
    assert late == sorted([b"1", b"2", b"3"] * 4), "they miss nothing either"


def test_a_later_watch_sees_later_changes_only(registry: WatchRegistry) -> None:
    """Not of events that still waited for someone slow when it came."""
    go, entered, seen = threading.Event(), threading.Event(), queue.Queue[tuple[bytes | None, bytes | None]]()
    registry.add("k", KeyCallbackAdapter(lambda old, new: entered.set() or (go.wait(PATIENCE) and None)))
    registry.on_notification(update(1))
    registry.on_notification(update(2))
    assert entered.wait(PATIENCE)
    registry.add("k", KeyCallbackAdapter(lambda old, new: seen.put((old, new))))
    go.set()
    registry.on_notification(update(3))
    assert seen.get(timeout=PATIENCE) == (b"2", b"3")
    registry.remove("k", None)
    registry.on_notification(update(4))
    assert seen.empty()


def test_a_watch_of_present_keys_begins_with_them() -> None:
    """Not with events that arrived while it was being registered, which would be told twice and go back."""

    def register(key: Any) -> KeyCallbackRegistered:
        for n in (6, 7):
            registry.on_notification(KeyUpdated("k", n, n - 1, b"%d" % (n - 1), b"%d" % n))
        return KeyCallbackRegistered("k", 5, b"5")

    registry, events = WatchRegistry("test", register), EventQueue()
    try:
        registry.add("k", events, present=True)
        registry.on_notification(KeyUpdated("k", 8, 7, b"7", b"8"))
        seen = [events.wait(Deadline.after(PATIENCE)) for _ in range(2)]
    finally:
        registry.close()
    assert seen == [WatchEvent("k", None, b"7", 7), WatchEvent("k", b"7", b"8", 8)]


def test_a_registration_of_an_earlier_connection_does_not_go_back() -> None:
    replies = queue.Queue[KeyCallbackRegistered]()
    calls = itertools.count()
    seen = queue.Queue[bytes | None]()

    def register(key: Any) -> KeyCallbackRegistered:
        found = replies.get(timeout=PATIENCE)
        if next(calls) == 1:  # this reply is on its way while the connection is lost twice
            registry.on_disconnect()
            replies.put(KeyCallbackRegistered("k", 8, b"8"))
            assert seen.get(timeout=PATIENCE) == b"8"
            registry.on_disconnect()
        return found

    registry = WatchRegistry("test", register)
    try:
        replies.put(KeyCallbackRegistered("k", 1, b"1"))
        registry.add("k", KeyCallbackAdapter(lambda old, new: seen.put(new)))
        replies.put(KeyCallbackRegistered("k", 5, b"5"))
        registry.refresh("k")
        replies.put(KeyCallbackRegistered("k", 9, b"9"))
        assert seen.get(timeout=PATIENCE) == b"9"
    finally:
        registry.close()


@pytest.mark.parametrize("error", [LookupError, SystemExit])
def test_a_failing_callback_is_logged_and_stops_nothing(
    registry: WatchRegistry, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    seen = queue.Queue[bytes | None]()

    failing = queue.Queue[bytes | None]()

    def fails(old: bytes | None, new: bytes | None) -> None:
        failing.put(new)
        raise error("what the user did wrong")

    registry.add("k", KeyCallbackAdapter(fails))
    registry.add("k", KeyCallbackAdapter(lambda old, new: seen.put(new)))
    with caplog.at_level(logging.ERROR, "zmqgrad.store.watch"):
        for n in (1, 2):
            registry.on_notification(update(n))
            assert seen.get(timeout=PATIENCE) == failing.get(timeout=PATIENCE) == b"%d" % n
        registry.close()  # which waits for callbacks that run
    assert caplog.text.count(f"{error.__name__}: what the user did wrong") == 2
    assert "'k'" in caplog.text


def test_a_watch_that_cannot_be_registered_is_removed() -> None:
    def look(key: str) -> KeyCallbackRegistered:
        raise StoreTimeoutError("nobody there")

    registry = WatchRegistry("test", look)
    with pytest.raises(StoreTimeoutError):
        registry.add("k", KeyCallbackAdapter(print))
    assert not registry.is_watched("k")
    registry.close()


def test_a_registration_from_before_a_broken_connection_is_ignored() -> None:
    """What was registered on the old connection says nothing of the new one: it looks once more."""
    looks, change = queue.Queue[int](), queue.Queue[Change]()
    during_look: list[Any] = []
    values = iter([None, b"old", b"new"])

    def look(key: str) -> KeyCallbackRegistered:
        looks.put(1)
        found = KeyCallbackRegistered(key, 1, next(values))
        for action in during_look:
            action()
        return found

    registry = WatchRegistry("test", look)
    try:
        registry.add("k", KeyCallbackAdapter(lambda old, new: change.put((old, new))))
        during_look.append(lambda: (during_look.clear(), registry.on_disconnect()))
        registry.on_disconnect()
        assert change.get(timeout=PATIENCE) == (None, b"new")
        assert looks.qsize() == 3
    finally:
        registry.close()


# ---- whole stores -----------------------------------------------------------------------------------------


@pytest.fixture(params=["tcp", "hash", "prefix"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    beneath: Store = HashStore(PATIENCE)
    if request.param == "tcp":
        beneath = TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE)
    with beneath:
        yield PrefixStore("p", beneath) if request.param == "prefix" else beneath


def test_created_updated_deleted(store: Store) -> None:
    seen = queue.Queue[Change]()
    store.watch_key("k", lambda old, new: seen.put((old, new)))
    store.set("k", "1")
    store.add("k", 1)
    store.append("k", "0")
    store.compare_set("k", "20", "")
    store.multi_set(["other", "k"], ["x", "3"])
    store.delete_key("k")
    store.delete_key("k")
    store.set("k", "4")
    values = [None, b"1", b"2", b"20", b"", b"3", None, b"4"]
    expected = list(itertools.pairwise(values))
    assert [seen.get(timeout=PATIENCE) for _ in expected] == expected


def test_an_empty_value_is_not_a_missing_key(store: Store) -> None:
    seen = queue.Queue[Change]()
    store.watch_key("k", lambda old, new: seen.put((old, new)))
    store.set("k", "")
    store.delete_key("k")
    assert [seen.get(timeout=PATIENCE) for _ in range(2)] == [(None, b""), (b"", None)]


def test_large_values_come_whole(store: Store) -> None:
    seen, large = queue.Queue[Change](), b"v" * (3 * MAX_NOTIFICATION_VALUE_BYTES)
    store.watch_key("k", lambda old, new: seen.put((old, new)))
    store.set("k", large)
    assert seen.get(timeout=PATIENCE) == (None, large)
    store.set("k", "small")
    assert seen.get(timeout=PATIENCE) == (large, b"small")


def test_unwatch(store: Store) -> None:
    kept, dropped = queue.Queue[Change](), queue.Queue[Change]()

    def unwanted(old: bytes | None, new: bytes | None) -> None:
        dropped.put((old, new))

    store.watch_key("k", unwanted)
    store.watch_key("k", lambda old, new: kept.put((old, new)))
    store.set("k", "1")
    assert kept.get(timeout=PATIENCE) == dropped.get(timeout=PATIENCE) == (None, b"1")
    store.unwatch_key("k", unwanted)
    store.set("k", "2")
    assert kept.get(timeout=PATIENCE) == (b"1", b"2")
    store.unwatch_key("k")
    store.unwatch_key("k")
    store.set("k", "3")
    store.watch_key("k", lambda old, new: kept.put((old, new)))
    store.set("k", "4")
    assert kept.get(timeout=PATIENCE) == (b"3", b"4"), "a new watch tells nothing of before"
    assert dropped.empty()


def test_a_callback_may_use_its_store(store: Store) -> None:
    done = queue.Queue[bytes]()

    def callback(old: bytes | None, new: bytes | None) -> None:
        store.set("copy", store.get("k"))
        store.watch_key("again", lambda old, new: done.put(store.get("copy")))
        store.set("again", "")

    store.watch_key("k", callback)
    store.set("k", "1")
    assert done.get(timeout=PATIENCE) == b"1"


@pytest.mark.slow
def test_a_slow_callback_does_not_delay_the_receiver(store: Store) -> None:
    """Though the thread that has read a notification calls the callback: others read on."""
    go, seen = threading.Event(), queue.Queue[bytes | None]()
    store.set("cached", "0")
    assert store.get_cached("cached") == b"0"
    for key in "abcd":  # more than there are threads at first
        store.watch_key(key, lambda old, new: go.wait(PATIENCE) and None)
    for key in ("quick", "cached"):
        store.watch_key(key, lambda old, new: seen.put(new))
    store.multi_set(["a", "b", "c", "d", "quick"], ["1"] * 5)  # which come in one piece
    store.set("cached", "2")
    try:
        assert {seen.get(timeout=PATIENCE) for _ in range(2)} == {b"1", b"2"}
        assert store.get_cached("cached") == b"2"
    finally:
        go.set()


def test_a_callback_may_close_its_store() -> None:
    """With more notifications at hand, and while others come."""
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE) as master:
        client = TCPStore("127.0.0.1", master.port, timeout=PATIENCE)
        closed = threading.Event()

        def close(key: str, old: bytes | None, new: bytes | None) -> None:
            client.close()
            closed.set()

        client.watch_prefix("k", close)
        client.watch_key("k1", lambda old, new: None)
        master.multi_set([f"k{n}" for n in range(50)], ["1"] * 50)
        assert closed.wait(PATIENCE)
        with pytest.raises(StoreError):
            client.get("k1")


def test_a_local_store_that_closes_ends_its_watches_and_no_others() -> None:
    seen = queue.Queue[Change]()
    with HashStore(PATIENCE) as store:
        store.watch_key("both", lambda old, new: seen.put((old, new)))
        with store.clone() as clone:
            for key in ("both", "its own"):
                clone.watch_key(key, lambda old, new: None)
            assert store.statistics()["watched"] == 2
        assert store.statistics()["watched"] == 1
        store.set("both", "1")
        assert seen.get(timeout=PATIENCE) == (None, b"1")


def test_closed_stores_refuse_watches(store: Store) -> None:
    beneath = store.underlying_store if isinstance(store, PrefixStore) else store
    beneath.close()
    with pytest.raises(StoreError):
        store.watch_key("k", print)


# ---- over the network -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_first_notification_is_never_lost() -> None:
    """In 100 of 100 tries, each with a fresh subscriber, the change made by another client."""
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE) as master:
        for n in range(100):
            seen = queue.Queue[Change]()
            with TCPStore("127.0.0.1", master.port, timeout=PATIENCE) as client:
                client.watch_key(f"k{n}", lambda old, new, seen=seen: seen.put((old, new)))  # type: ignore[misc]
                master.set(f"k{n}", "1")
                assert seen.get(timeout=PATIENCE) == (None, b"1")


def test_keys_with_a_common_prefix_are_distinguished() -> None:
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE) as store:
        seen = queue.Queue[tuple[str, Change]]()
        for key in ("a", "ab", "a\0b"):
            store.watch_key(key, lambda old, new, key=key: seen.put((key, (old, new))))  # type: ignore[misc]
        for key in ("a\0b", "ab", "a"):
            store.set(key, key)
        got = {seen.get(timeout=PATIENCE) for _ in range(3)}
        assert got == {(key, (None, key.encode())) for key in ("a", "ab", "a\0b")}
        store.set("a", "end")
        assert seen.get(timeout=PATIENCE) == ("a", (b"a", b"end"))


def test_the_longest_key_and_prefix_can_be_watched() -> None:
    """In a process of its own: libzmq overflowed the stack when the client closed, and ended the process."""
    shown = run_python(
        """
import queue
from zmqgrad.store import TCPStore
from zmqgrad.wire.messages import MAX_KEY
longest = "\U0001f525" * MAX_KEY
other = longest[:-1] + "a"
seen = queue.Queue()
with TCPStore("127.0.0.1", 0, is_master=True) as store, TCPStore("127.0.0.1", store.port) as client:
    client.watch_key(longest, lambda old, new: seen.put(("key", new)))
    client.watch_prefix(longest[:-1], lambda key, old, new: seen.put((key == longest, new)))
    store.set(other, "of the prefix alone")
    print(*seen.get(timeout=20))
    store.set(longest, "of both")
    print(*sorted((seen.get(timeout=20) for _ in range(2)), key=str))
    client.unwatch_key(longest)
    store.set(longest, "later")
    print(*seen.get(timeout=20), seen.empty())
"""
    )
    assert shown.splitlines() == [
        "False b'of the prefix alone'",
        "('key', b'of both') (True, b'of both')",
        "True b'later' True",
    ]


def test_the_server_drops_watches_of_dead_clients() -> None:
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE) as master:
        with TCPStore("127.0.0.1", master.port, timeout=PATIENCE) as client:
            client.watch_key("k", print)
            assert master.statistics()["watched"] == 1
            client.unwatch_key("k")
        seen = queue.Queue[Change]()
        # Subscriptions are looked at when somebody watches, in the order in which they came and went.
        limit = threading.Event()
        for n in range(1000):
            master.watch_key(f"other{n}", lambda old, new: seen.put((old, new)))
            if master.statistics()["watched"] == n + 1:
                return
            limit.wait(0.001)
        pytest.fail("the key of the client that went is watched still")


@pytest.mark.slow
def test_a_late_subscription_costs_other_watches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """P8: the client connects anew, so the others read at once what they miss, not at the next renewal."""
    monkeypatch.setattr(watch, "RENEW_SECONDS", 1e6)
    monkeypatch.setattr(service, "SUBSCRIBE_SECONDS", 0.01)
    subscribe, lost = Subscriber.subscribe, threading.Event()

    def subscribe_without_proof(subscriber: Subscriber, *topics: bytes) -> None:
        if b"late" in topics[0] and not lost.is_set():
            lost.set()
            topics = ()
        subscribe(subscriber, *topics)

    monkeypatch.setattr(Subscriber, "subscribe", subscribe_without_proof)
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE) as store:
        seen: queue.Queue[bytes | None] = queue.Queue()
        store.watch_key("k", lambda old, new: seen.put(new))
        store.watch_key("late", lambda old, new: seen.put(new))
        assert lost.is_set()
        for value in (b"1", b"2"):
            store.set("k", value)
            assert seen.get(timeout=PATIENCE) == value
        store.set("late", "3")
        assert seen.get(timeout=PATIENCE) == b"3"


@pytest.mark.slow
def test_watches_resume_when_the_server_restarts() -> None:
    """P8: what changed while the connection was down arrives as one update."""
    port, seen = free_port(), queue.Queue[Change]()
    master = TCPStore("127.0.0.1", port, is_master=True, timeout=PATIENCE)
    with TCPStore("127.0.0.1", port, timeout=PATIENCE) as client:
        client.watch_key("k", lambda old, new: seen.put((old, new)))
        master.set("k", "1")
        assert seen.get(timeout=PATIENCE) == (None, b"1")
        master.close()
        with TCPStore("127.0.0.1", port, is_master=True, timeout=PATIENCE) as again:
            again.multi_set(["x", "k"], ["", "2"])
            change = seen.get(timeout=PATIENCE)
            if change == (b"1", None):  # it looked before the new server had the key
                change = (b"1", seen.get(timeout=PATIENCE)[1])
            assert change == (b"1", b"2")
            again.set("k", "3")
            assert seen.get(timeout=PATIENCE) == (b"2", b"3")
