"""The state machine alone, against a dict that is looked through from end to end at each step."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from zmqgrad.store.contents import MAX_NOTIFICATION_VALUE_BYTES
from zmqgrad.store.effects import Notification, Reply
from zmqgrad.store.state import State
from zmqgrad.store.watch_targets import INTERNAL_PREFIX
from zmqgrad.wire.messages import (
    Call,
    KeyCallbackRegistered,
    KeyCreated,
    KeyDeleted,
    KeyUpdated,
    Message,
    Refusal,
    StoreAdd,
    StoreAppend,
    StoreCheck,
    StoreCompareSet,
    StoreDeleteKey,
    StoreDone,
    StoreGet,
    StoreGetNumKeys,
    StoreKeys,
    StoreListKeys,
    StoreMultiGet,
    StoreMultiSet,
    StoreNumber,
    StoreQueueLen,
    StoreQueuePop,
    StoreQueuePush,
    StoreRefused,
    StoreSet,
    StoreUnwatchKey,
    StoreValue,
    StoreValues,
    StoreWait,
    StoreWatchKey,
)

# ---- an oracle that is slow and plain ---------------------------------------------------------------------


@dataclass
class Model:
    """What the store should do, with no cleverness: every waiter is looked at after every command."""

    values: dict[str, bytes] = field(default_factory=dict)
    queues: dict[str, list[bytes]] = field(default_factory=dict)
    waiting: list[tuple[int, Any, float]] = field(default_factory=list)

    def answer(self, query: Any) -> Any:
        """What ``query`` gets now; None if it must wait."""
        match query:
            case StoreSet(key, value):
                self.values[key] = value
                return "done"
            case StoreMultiSet(keys, values):
                self.values.update(zip(keys, values, strict=True))
                return "done"
            case StoreCompareSet(key, expected, desired):
                if self.values.get(key, b"") == expected:
                    self.values[key] = desired
                return self.values.get(key, expected)
            case StoreAdd(key, amount):
                if not self.values.get(key, b"0").lstrip(b"-").isdigit():
                    return Refusal.INVALID
                self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
                return int(self.values[key])
            case StoreAppend(key, value):
                self.values[key] = self.values.get(key, b"") + value
                return "done"
            case StoreDeleteKey(key):
                return int(self.values.pop(key, None) is not None)
            case StoreCheck(keys):
                return int(self.exist(keys))
            case StoreGetNumKeys():
                return len(self.values)
            case StoreListKeys(prefix):
                return sorted(k for k in self.values if k.startswith(prefix))
            case StoreQueuePush(key, value):
                self.queues.setdefault(key, []).append(value)
                return "done"
            case StoreQueueLen(key):
                return len(self.queues.get(key, []))
            case StoreGet(key):
                return self.values.get(key)
            case StoreWait(keys):
                return "done" if self.exist(keys) else None
            case StoreMultiGet(keys):
                return [self.values[k] for k in keys] if self.values.keys() >= set(keys) else None
            case StoreQueuePop(key, block):
                if self.queues.get(key):
                    return self.queues[key].pop(0)
                return None if block else Refusal.MISSING
        raise AssertionError(query)

    def exist(self, keys: tuple[str, ...]) -> bool:
        return self.values.keys() | {key for key, queue in self.queues.items() if queue} >= set(keys)

    def shorten(self, index: int, deadline: float) -> None:
        requester, query, before = self.waiting[index]
        self.waiting[index] = requester, query, min(before, deadline)

    def apply(self, requester: int, query: Any, now: float) -> Counter[Any]:
        said: Counter[Any] = Counter()
        for other, _, deadline in list(self.waiting):
            if deadline <= now:
                said[other, repr(Refusal.TIMEOUT)] += 1
        self.waiting = [w for w in self.waiting if w[2] > now]
        answer = self.answer(query)
        if answer is None and query.timeout <= 0:
            # It waits until the next look at the clock, which is now.
            said[requester, repr(Refusal.TIMEOUT)] += 1
        elif answer is None:
            self.waiting.append((requester, query, now + query.timeout))
        else:
            said[requester, repr(answer)] += 1
        # Pops first: what is pushed while one waits is never in the queue.
        for entry in sorted(self.waiting, key=lambda w: not isinstance(w[1], StoreQueuePop)):
            answer = self.answer(entry[1])
            if answer is not None:
                self.waiting.remove(entry)
                said[entry[0], repr(answer)] += 1
        return said


def plain(message: Message) -> Any:
    """A reply in the model's words."""
    match message:
        case StoreDone():
            return "done"
        case StoreValue(value):
            return value
        case StoreNumber(number):
            return number
        case StoreValues(values):
            return list(values)
        case StoreKeys(keys):
            return list(keys)
        case StoreRefused(reason):
            return reason
    raise AssertionError(message)


KEYS = st.sampled_from(["a", "b", "c", "ab"])
SOME_KEYS = st.lists(KEYS, max_size=4).map(tuple)
VALUES = st.sampled_from([b"", b"x", b"yz", b"1", b"-7"])
TIMEOUTS = st.sampled_from([0.0, 1.0, 2.5, 60.0])

QUERIES = st.one_of(
    st.builds(StoreSet, KEYS, VALUES),
    st.lists(st.tuples(KEYS, VALUES), max_size=4).map(
        lambda pairs: StoreMultiSet(tuple(k for k, _ in pairs), tuple(v for _, v in pairs))
    ),
    st.builds(StoreCompareSet, KEYS, VALUES, VALUES),
    st.builds(StoreAdd, KEYS, st.integers(-100, 100)),
    st.builds(StoreAppend, KEYS, VALUES),
    st.builds(StoreDeleteKey, KEYS),
    st.builds(StoreGet, KEYS, TIMEOUTS),
    st.builds(StoreWait, SOME_KEYS, TIMEOUTS),
    st.builds(StoreMultiGet, SOME_KEYS, TIMEOUTS),
    st.builds(StoreCheck, SOME_KEYS),
    st.builds(StoreGetNumKeys),
    st.builds(StoreListKeys, st.sampled_from(["", "a", "b"])),
    st.builds(StoreQueuePush, KEYS, VALUES),
    st.builds(StoreQueuePop, KEYS, st.booleans(), TIMEOUTS),
    st.builds(StoreQueueLen, KEYS),
)


REPEATED = st.none() | st.tuples(st.integers(0, 60), TIMEOUTS)
"""Which of the blocked queries is repeated, and with what timeout."""


@given(st.lists(st.tuples(QUERIES, st.sampled_from([0.0, 0.5, 1.0, 3.0]), REPEATED), max_size=60))
def test_the_state_machine_equals_a_dict(
    commands: list[tuple[Message, float, tuple[int, float] | None]],
) -> None:
    """(S1), (S2), (S3): the same replies, to the same askers, at the same step."""
    state, model, now = State(), Model(), 0.0
    for requester, (query, pause, repeated) in enumerate(commands):
        now += pause
        if repeated is not None and model.waiting:
            index, timeout = repeated[0] % len(model.waiting), repeated[1]
            blocked, waits_with, _ = model.waiting[index]
            state.repeat(replace(waits_with, timeout=timeout), blocked, now)
            model.shorten(index, now + timeout)
        effects = state.expire(now) + state.apply(query, requester, now) + state.expire(now)
        said = Counter((e.requester, repr(plain(e.message))) for e in effects if isinstance(e, Reply))
        assert said == model.apply(requester, query, now)
        assert state.statistics()["parked"] == len(model.waiting)
        if model.waiting:
            assert state.next_deadline() <= min(deadline for _, _, deadline in model.waiting)
    left = Counter(e.requester for e in state.close())
    assert left == Counter(requester for requester, _, _ in model.waiting)
    assert state.statistics()["parked"] == 0
    assert state.next_deadline() == math.inf


@given(st.lists(QUERIES, max_size=60))
def test_notifications_report_each_change_and_the_previous_revision(queries: list[Message]) -> None:
    """(S4): replaying the notifications of a key gives its value, and their revisions form a chain."""
    state, seen, last = State(), {}, {"a": 0, "b": 0}
    for key in last:
        state.apply(StoreWatchKey(key, "n"), "watcher", 0.0)
    for requester, query in enumerate(queries):
        before = state.revision
        effects = state.apply(query, requester, 0.0)
        notifications = [e.message for e in effects if isinstance(e, Notification)]
        assert len(notifications) <= state.revision - before
        for notification in notifications:
            assert notification.previous == last[notification.key] < notification.revision <= state.revision
            last[notification.key] = notification.revision
            if not isinstance(notification, KeyCreated):
                assert notification.old == seen[notification.key]
            else:
                assert notification.key not in seen
            if isinstance(notification, KeyDeleted):
                del seen[notification.key]
            else:
                seen[notification.key] = notification.new
        for key in last:
            (reply,) = state.apply(StoreWatchKey(key, "n"), "watcher", 0.0)
            assert reply.message == KeyCallbackRegistered(key, state.revision, seen.get(key))


# ---- what is hard to see in the above ---------------------------------------------------------------------


def replies(effects: list[Any]) -> list[tuple[Any, Any]]:
    return [(e.requester, plain(e.message)) for e in effects if isinstance(e, Reply)]


def test_a_wait_needs_all_keys_at_one_moment() -> None:
    """(S2): a key that went again before the last one came counts as missing."""
    state = State()
    assert state.apply(StoreWait(("a", "b"), 10.0), "w", 0.0) == []
    state.apply(StoreSet("a", b"1"), "x", 0.0)
    state.apply(StoreDeleteKey("a"), "x", 0.0)
    assert replies(state.apply(StoreSet("b", b"2"), "x", 0.0)) == [("x", "done")]
    assert ("w", "done") in replies(state.apply(StoreSet("a", b"3"), "x", 0.0))


def test_blocked_pops_are_served_in_order() -> None:
    """(S3)."""
    state = State()
    for name in ("first", "second", "third"):
        assert state.apply(StoreQueuePop("q", True, 10.0 if name != "second" else 1.0), name, 0.0) == []
    assert replies(state.expire(1.0)) == [("second", Refusal.TIMEOUT)]
    assert ("first", b"1") in replies(state.apply(StoreQueuePush("q", b"1"), "x", 1.0))
    assert ("third", b"2") in replies(state.apply(StoreQueuePush("q", b"2"), "x", 1.0))
    assert replies(state.apply(StoreQueueLen("q"), "x", 1.0)) == [("x", 0)]


def test_a_refusal_names_missing_keys() -> None:
    state = State()
    state.apply(StoreSet("there", b""), "x", 0.0)
    state.apply(StoreWait(("there", *(f"k{i}" for i in range(8))), 1.0), "w", 0.0)
    state.apply(StoreQueuePop("line", True, 1.0), "p", 0.0)
    texts = {e.requester: e.message.text for e in state.expire(1.0)}
    assert texts["w"] == "missing: 'k0', 'k1', 'k2', 'k3', 'k4' and 3 more"
    assert "'line'" in texts["p"]


def test_a_queue_is_there_for_a_wait_but_not_for_a_get() -> None:
    state = State()
    for query in (StoreGet("q", 10.0), StoreWait(("q",), 10.0), StoreMultiGet(("q",), 10.0)):
        assert state.apply(query, type(query).__name__, 0.0) == []
    told = replies(state.apply(StoreQueuePush("q", b"1"), "x", 0.0))
    assert sorted(told) == [("StoreWait", "done"), ("x", "done")]


def test_a_finished_wait_leaves_nothing_behind() -> None:
    """Waits with long timeouts that were answered soon must not pile up until their time."""
    state = State()
    for i in range(5000):
        state.apply(StoreGet(f"k{i}", 1e6), i, 0.0)
        state.apply(StoreSet(f"k{i}", b""), "x", 0.0)
        state.apply(StoreDeleteKey(f"k{i}"), "x", 0.0)
    assert len(state.wait_queue._deadlines) < 200
    assert state.wait_queue.by_condition == {}


@pytest.mark.parametrize("value", [b"", b"x", b"1_0", b" 1", b"+1", b"--1", b"1.0", b"9" * 30, b"\xd9\xa1"])
def test_add_to_a_value_that_is_not_a_number_is_refused(value: bytes) -> None:
    state = State()
    state.apply(StoreSet("n", value), "x", 0.0)
    (reply,) = state.apply(StoreAdd("n", 1), "x", 0.0)
    assert plain(reply.message) is Refusal.INVALID
    assert "'n'" in reply.message.text
    assert replies(state.apply(StoreGet("n", 0.0), "x", 0.0)) == [("x", value)]


def test_add_ends_at_64_bits() -> None:
    state = State()
    state.apply(StoreSet("n", str((1 << 63) - 1).encode()), "x", 0.0)
    assert replies(state.apply(StoreAdd("n", 1), "x", 0.0)) == [("x", Refusal.LIMIT)]
    assert replies(state.apply(StoreAdd("n", -1), "x", 0.0)) == [("x", (1 << 63) - 2)]


def test_hidden_keys_are_neither_counted_nor_listed() -> None:
    state = State()
    state.apply(StoreSet(f"{INTERNAL_PREFIX}own", b"1"), "x", 0.0)
    state.apply(StoreSet("k", b"1"), "x", 0.0)
    assert replies(state.apply(StoreGetNumKeys(), "x", 0.0)) == [("x", 1)]
    assert replies(state.apply(StoreListKeys(""), "x", 0.0)) == [("x", ["k"])]
    state.apply(StoreDeleteKey(f"{INTERNAL_PREFIX}own"), "x", 0.0)
    assert replies(state.apply(StoreGetNumKeys(), "x", 0.0)) == [("x", 1)]


def test_large_values_are_omitted_from_notifications() -> None:
    state, large = State(), b"v" * (MAX_NOTIFICATION_VALUE_BYTES + 1)
    state.apply(StoreWatchKey("k", "n"), "w", 0.0)
    (notification, _) = state.apply(StoreSet("k", large), "x", 0.0)
    assert notification == Notification("k", KeyCreated("k", 1, 0, None))
    (notification, _) = state.apply(StoreSet("k", b"small"), "x", 0.0)
    assert notification == Notification("k", KeyUpdated("k", 2, 1, None, b"small"))


def test_unwatched_keys_make_no_notifications() -> None:
    state = State()
    state.apply(StoreWatchKey("k", "n"), "w", 0.0)
    state.apply(StoreUnwatchKey("k"), "w", 0.0)
    assert len(state.apply(StoreSet("k", b"1"), "x", 0.0)) == 2, "another may watch: the shell knows"
    state.unwatch("k")
    assert len(state.apply(StoreSet("k", b"1"), "x", 0.0)) == 1


def test_a_message_that_is_not_a_query_is_refused() -> None:
    ((requester, reason),) = replies(State().apply(Call("f", StoreDone()), "x", 0.0))  # type: ignore[arg-type]
    assert (requester, reason) == ("x", Refusal.INVALID)


def test_multi_set_with_unequal_lengths_changes_nothing() -> None:
    state = State()
    assert replies(state.apply(StoreMultiSet(("a", "b"), (b"1",)), "x", 0.0)) == [("x", Refusal.INVALID)]
    assert state.revision == 0
