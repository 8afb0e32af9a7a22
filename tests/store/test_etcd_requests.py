"""What becomes of single requests of an EtcdStore: lost, delayed, handled twice, or refused."""

from __future__ import annotations

import json
import secrets
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.support.etcd import EtcdCluster, needs_etcd
from tests.support.waiting import eventually
from zmqgrad.errors import StoreTimeoutError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import EtcdOptions, EtcdStore, watch_cache
from zmqgrad.store.etcd import connection
from zmqgrad.store.etcd.connection import EtcdConnection
from zmqgrad.store.watch import WatchRegistry
from zmqgrad.store.watch_targets import Target

requests = pytest.importorskip("requests")

pytestmark = [pytest.mark.processes, pytest.mark.slow, needs_etcd]

PATIENCE = 20.0
LARGE = b"x" * 100_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster() as made:
        yield made


class Requests:
    """The requests of all stores, but for watches, as they leave this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.before: Callable[[str, str], None] = lambda path, body: None
        """Called with each. What it raises, the store gets instead of a reply."""
        self.after: Callable[[str, str, Any], None] = lambda path, body, reply: None
        """Called with each and the reply. What it raises, the store gets instead."""
        post = requests.Session.post

        def recorded(session: Any, url: str, data: Any = None, json: Any = None, **rest: Any) -> Any:
            body = data if json is None else dumps(json)
            path = url.partition("/v3")[2]
            if path == "/watch":
                return post(session, url, data, json, **rest)
            self.sent.append((url, body.encode()))
            self.before(path, body)
            reply = post(session, url, data, json, **rest)
            self.after(path, body, reply)
            return reply

        monkeypatch.setattr(requests.Session, "post", recorded)

    def arrive_late(self) -> None:
        """Handle again all that were sent, as a member does that stood still after it had received them."""
        for url, body in self.sent:
            with suppress(urllib.error.HTTPError):
                urllib.request.urlopen(url, body, timeout=PATIENCE).close()


dumps = json.dumps


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


@pytest.fixture
def store(cluster: EtcdCluster) -> Iterator[EtcdStore]:
    with EtcdStore(cluster.endpoint, secrets.token_hex(8), PATIENCE) as made:
        yield made


def test_a_late_repetition_changes_nothing(store: EtcdStore, sent: Requests) -> None:
    other = store.clone()
    store.set("large", LARGE)
    store.add("n", 1)
    store.queue_push("q", "item")
    store.delete_key("n")
    sent.arrive_late()
    store.close()
    with other:
        assert other.get("large") == LARGE
        assert other.list_keys() == ["large"]
        assert other.queue_len("q") == 1


def test_a_late_deletion_of_everything_spares_what_came_behind_it(store: EtcdStore, sent: Requests) -> None:
    store.delete_all()
    deletion, sent.sent = sent.sent, []
    store.set("large", LARGE)
    sent.sent = deletion
    sent.arrive_late()
    assert store.get("large") == LARGE


def test_a_lock_that_another_client_holds_is_not_taken_later(store: EtcdStore, sent: Requests) -> None:
    """The request stays in a member, and its repetition fails: it must not be applied any more."""
    other = store.clone()
    store.set("other", "1")

    def overtaken(path: str, body: str) -> None:
        if path == "/kv/txn" and "compare" in body:
            sent.before = lambda path, body: None
            stuck.append(sent.sent[-1])
            other.set("lock", "theirs")
            raise requests.ConnectionError

    stuck: list[tuple[str, bytes]] = []
    sent.before = overtaken
    assert store.compare_set("lock", "", "mine") == b"theirs"
    other.delete_key("lock")
    sent.sent = stuck
    sent.arrive_late()
    with other:
        assert not other.check(["lock"])


def test_everything_is_deleted_while_a_large_value_is_written(store: EtcdStore, sent: Requests) -> None:
    other = store.clone()

    def delete(path: str, body: str) -> None:
        if "ignore_value" in body:
            sent.before = lambda path, body: None
            other.delete_all()

    sent.before = delete
    store.set("large", LARGE)
    with other:
        assert other.get("large") == LARGE


def test_a_reply_is_lost_and_everything_deleted_before_the_repetition(
    store: EtcdStore, sent: Requests
) -> None:
    other = store.clone()

    def lose(path: str, body: str, reply: Any) -> None:
        if "compare" in body:
            sent.after = lambda path, body, reply: None
            other.delete_all()
            raise requests.ConnectionError

    sent.after = lose
    assert store.add("n", 1) == 1
    with other:
        assert not other.check(["n"]), "it was deleted behind the addition"


def test_a_reply_is_lost_and_the_first_lease_ends_before_the_repetition(
    store: EtcdStore, sent: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease is replaced long before it ends, so that each change is recognized while it may be repeated."""
    monkeypatch.setattr(connection, "RENEW_SECONDS", 0)
    leases: list[tuple[str, str]] = []

    def lose(path: str, body: str, reply: Any) -> None:
        if path == "/lease/grant":
            leases.append((reply.url, reply.json()["ID"]))
        elif "compare" in body and len(leases) > 1:
            sent.after = lambda path, body, reply: None
            url, first = leases[0]
            content = dumps({"ID": first}).encode()
            urllib.request.urlopen(url.replace("grant", "revoke"), content, timeout=PATIENCE).close()
            raise requests.ConnectionError

    sent.after = lose
    assert [store.add("n", 1) for _ in range(3)] == [1, 2, 3]
    assert len(leases) > 1


def test_closing_leaves_no_lease(cluster: EtcdCluster, store: EtcdStore, sent: Requests) -> None:
    """Though its first changes, in several threads, have each asked for one."""
    granted: set[str] = set()
    together = threading.Barrier(4)

    def note(path: str, body: str, reply: Any) -> None:
        if path == "/lease/grant":
            granted.add(reply.json()["ID"])
            together.wait(PATIENCE)

    sent.after = note
    threads = [threading.Thread(target=store.set, args=(str(n), "")) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    url = f"http://127.0.0.1:{cluster.ports[0]}/v3/lease/leases"
    with urllib.request.urlopen(url, b"{}", timeout=PATIENCE) as reply:
        left = {each["ID"] for each in json.load(reply).get("leases", ())}
    assert len(granted) == 4
    assert not left & granted


def test_a_member_that_stands_still_holds_no_call_beyond_its_time(
    cluster: EtcdCluster, store: EtcdStore
) -> None:
    store.set("k", "1")
    store.set_timeout(1.0)
    limit = Deadline.after(5.0)  # less than the 9 s that a member has by default
    cluster.freeze(0)
    try:
        with pytest.raises(StoreTimeoutError, match="Read timed out"):
            store.set("k", "2")
        store.close()
        assert not limit.passed()
    finally:
        cluster.freeze(0, False)


def test_closing_does_not_wait_for_a_watch_that_reads_again(store: EtcdStore, sent: Requests) -> None:
    reading = threading.Event()

    def fail(path: str, body: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            reading.set()
            raise requests.ConnectionError

    store.watch_key("k", lambda old, new: None)
    sent.before = fail
    store.set("k", LARGE)  # a watch reads it
    assert reading.wait(PATIENCE)
    limit = Deadline.after(4.0)
    store.close()
    assert not limit.passed()


def test_a_user_logs_in_when_a_member_has_forgotten_that(sent: Requests) -> None:
    """Threads that log in do not disturb each other; and so does a watch, which nothing else wakes."""
    with EtcdCluster() as cluster:
        for path, body in [
            ("user/add", {"name": "root", "password": "pw"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ]:
            url = f"http://127.0.0.1:{cluster.ports[0]}/v3/auth/{path}"
            urllib.request.urlopen(url, dumps(body).encode(), timeout=PATIENCE).close()
        options = EtcdOptions(user="root", password="pw")
        with (
            EtcdStore(cluster.endpoint, "job", PATIENCE, options=options) as store,
            EtcdStore(cluster.endpoint, "job", PATIENCE, options=options) as other,
        ):
            logging_in = threading.Barrier(2)

            def meet(path: str, body: str, reply: Any) -> None:
                if path == "/auth/authenticate":
                    logging_in.wait(PATIENCE)

            sent.after = meet
            sums: list[int] = []
            threads = [
                threading.Thread(target=lambda: sums.append(store.add("n", 1)), name=f"{n}") for n in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(sums) == [1, 2]
            sent.after = lambda path, body, reply: None
            seen: list[bytes | None] = []
            store.watch_key("k", lambda old, new: seen.append(new))
            cluster.kill(0)  # forgets its tokens
            cluster.start(0)
            cluster.await_health(0)
            other.set("k", "1")
            eventually(lambda: seen, [b"1"].__eq__, PATIENCE)


def ignore(old: bytes | None, new: bytes | None) -> None:
    """A callback that does nothing."""


def streams() -> int:
    """How many watches are under way, by the threads that read them."""
    return sum(thread.name.endswith("-watch") and thread.daemon for thread in threading.enumerate())


def test_a_watch_that_is_read_again_after_its_end_leaves_no_thread(
    store: EtcdStore, sent: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.watch_key("other", ignore)  # starts the threads that all watches share
    shared = streams()
    store.watch_key("k", ignore)
    start = EtcdConnection.start_watching
    started = threading.Event()

    def end_before(connection: EtcdConnection, target: Target, revision: int) -> None:
        store.unwatch_key("k")
        start(connection, target, revision)
        started.set()

    monkeypatch.setattr(EtcdConnection, "start_watching", end_before)
    store.set("k", LARGE)  # the watch reads it
    assert started.wait(PATIENCE)
    eventually(streams, shared.__eq__, PATIENCE)


def test_a_watch_that_begins_while_another_ends_misses_nothing(
    store: EtcdStore, sent: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the cluster cannot be used at that moment."""
    store.watch_key("k", ignore)
    seen: list[bytes | None] = []
    stop = EtcdConnection.stop_watching

    def begin(connection: EtcdConnection, target: Target) -> None:
        monkeypatch.setattr(EtcdConnection, "stop_watching", stop)
        store.watch_key("k", lambda old, new: seen.append(new))
        store.set_timeout(0.3)
        sent.before = fail
        stop(connection, target)

    def fail(path: str, body: str) -> None:
        raise requests.ConnectionError

    monkeypatch.setattr(EtcdConnection, "stop_watching", begin)
    with suppress(StoreTimeoutError):
        store.unwatch_key("k", ignore)
    sent.before = lambda path, body: None
    store.set_timeout(PATIENCE)
    store.set("k", "1")
    eventually(lambda: seen, [b"1"].__eq__, PATIENCE)


def test_notifications_that_had_to_be_dropped_are_missed(
    store: EtcdStore, sent: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many came while the watch was read again: it is read once more."""
    monkeypatch.setattr(watch_cache, "MAX_EARLY_NOTIFICATIONS", 2)
    seen: dict[str, bytes | None] = {}
    store.watch_prefix("p/", lambda key, old, new: seen.update({key: new}))
    notify = WatchRegistry.on_notification
    notified: list[int] = []

    def count(registry: WatchRegistry, notification: Any) -> None:
        notify(registry, notification)
        notified.append(notification.revision)

    monkeypatch.setattr(WatchRegistry, "on_notification", count)
    other = store.clone()

    def overtake(path: str, body: str, reply: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            sent.after = lambda path, body, reply: None
            for key in ("p/a", "p/b", "p/c"):
                other.set(key, key)
            eventually(lambda: notified, lambda found: len(found) == 4, PATIENCE)

    sent.after = overtake
    with other:
        store.set("p/large", LARGE)  # the watch reads it
        expected = {"p/a": b"p/a", "p/b": b"p/b", "p/c": b"p/c", "p/large": LARGE}
        eventually(lambda: seen, expected.__eq__, PATIENCE)
