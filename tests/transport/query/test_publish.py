"""Notifications over real sockets: none is lost once the subscription is proved, breaks are told."""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.relay import Relay
from tests.transport.query.echo import LOOPBACK, OURS, PATIENCE, THEIRS
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.thread_pool import Task, ThreadPool
from zmqgrad.transport.query.publisher import MAX_SUBSCRIPTION_BYTES, NONCE, Publisher
from zmqgrad.transport.query.server import QueryServer, Route
from zmqgrad.transport.query.subscriber import Subscriber
from zmqgrad.transport.security import Keys
from zmqgrad.wire.messages import KeyCreated, Message

TOPIC = b"\x01k\0"


class Publishing:
    """A server that publishes what it is told to, and nothing else."""

    def __init__(self, keys: Keys | None) -> None:
        self.nonces: queue.Queue[str] = queue.Queue()
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._server = QueryServer("publishing", LOOPBACK, keys=keys)
        server = self._server
        self.publisher = Publisher(
            server.context, server.incarnation, LOOPBACK, keys, self.nonces.put, server.reader
        )
        self._thread = threading.Thread(target=self._server.serve, args=(self,), daemon=True)
        self._thread.start()

    def publish(self, *messages: Message) -> None:
        for message in messages:
            self._orders.put(message)

    def handle(self, route: Route, client: int, number: int, query: Message) -> None:
        pass

    def settle(self) -> None:
        self.publisher.read_if_unread()
        self._server.wake_by(self._server._clock.now() + 0.002)

    def do_due(self, now: float) -> float:
        while not self._orders.empty():
            self.publisher.publish(TOPIC, self._orders.get())
        return now + 0.002

    def stopping(self) -> None:
        pass

    def stopped(self) -> None:
        self.publisher.close()

    def stop(self) -> None:
        self._server.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


class Subscribed:
    """A subscriber, and what it has received."""

    def __init__(self, endpoint: str, keys: Keys | None) -> None:
        self.received: queue.Queue[Message] = queue.Queue()
        self.breaks = threading.Semaphore(0)
        self._pool = ThreadPool("test", 2)
        self.subscriber = Subscriber("test", self._take, self.breaks.release, self._pool.serve_from)
        self.subscriber.connect(endpoint, keys)

    def _take(self, message: Message) -> list[Task]:
        return [lambda: self.received.put(message)]

    def next(self, count: int) -> list[KeyCreated]:
        """What has arrived, by its revisions: several threads of the pool put it there."""
        received: list[Any] = [self.received.get(timeout=PATIENCE) for _ in range(count)]
        return sorted(received, key=lambda each: each.revision)

    def prove(self, publishing: Publishing) -> None:
        """Subscribe, and return when that is in place."""
        nonce = secrets.token_hex(8)
        self.subscriber.subscribe(TOPIC, NONCE + nonce.encode())
        assert publishing.nonces.get(timeout=PATIENCE) == nonce
        self.subscriber.unsubscribe(NONCE + nonce.encode())

    def close(self) -> None:
        self.subscriber.close()
        self.subscriber.close()
        self._pool.close()
        assert self.subscriber.join(Deadline.after(PATIENCE)) == []
        assert self._pool.join(Deadline.after(PATIENCE)) == []


def created(n: int) -> KeyCreated:
    return KeyCreated("k", n + 1, n, b"")


@pytest.fixture(params=[None, OURS], ids=["plain", "keyed"])
def keys(request: pytest.FixtureRequest) -> Keys | None:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def publishing(keys: Keys | None) -> Iterator[Publishing]:
    made = Publishing(keys)
    yield made
    made.stop()


@pytest.fixture
def endpoint(publishing: Publishing) -> str:
    return publishing.publisher.endpoint


def test_no_notification_is_lost_once_the_subscription_is_proved(
    publishing: Publishing, keys: Keys | None, endpoint: str
) -> None:
    """Not even the first notification after the nonce was seen."""
    for _ in range(20):
        each = Subscribed(endpoint, keys)
        each.prove(publishing)
        publishing.publish(*map(created, range(3)))
        assert each.next(3) == [*map(created, range(3))]
        each.close()


def test_thousands_arrive_in_order(publishing: Publishing, keys: Keys | None, endpoint: str) -> None:
    each = Subscribed(endpoint, keys)
    each.prove(publishing)
    for start in range(0, 3000, 500):  # fewer at a time than libzmq keeps for one who is slow
        publishing.publish(*map(created, range(start, start + 500)))
        assert each.next(500) == [*map(created, range(start, start + 500))]
    each.close()


def test_a_broken_subscription_is_reported_and_proved_again(
    publishing: Publishing, keys: Keys | None
) -> None:
    with Relay(publishing.publisher.port) as relay:
        each = Subscribed(f"tcp://127.0.0.1:{relay.port}", keys)
        for n in range(3):
            each.prove(publishing)
            publishing.publish(created(n))
            assert each.received.get(timeout=PATIENCE) == created(n)
            relay.cut()
            assert each.breaks.acquire(timeout=PATIENCE)
        each.prove(publishing)
        each.close()


def test_a_long_topic_ends_the_connection_of_its_subscriber_alone(
    publishing: Publishing, keys: Keys | None, endpoint: str
) -> None:
    other, each = Subscribed(endpoint, keys), Subscribed(endpoint, keys)
    other.prove(publishing)
    each.prove(publishing)
    each.subscriber.subscribe(b"\x01" + bytes(MAX_SUBSCRIPTION_BYTES))
    assert each.breaks.acquire(timeout=PATIENCE)
    publishing.publish(created(0))
    assert other.received.get(timeout=PATIENCE) == created(0)
    each.close()
    other.close()


def test_a_subscriber_can_move(keys: Keys | None, publishing: Publishing, endpoint: str) -> None:
    second = Publishing(keys)
    each = Subscribed(endpoint, keys)
    each.prove(publishing)
    each.subscriber.connect(f"tcp://127.0.0.1:{second.publisher.port}", keys)
    each.prove(second)
    publishing.publish(created(1))
    second.publish(created(2))
    assert each.received.get(timeout=PATIENCE) == created(2)
    assert each.received.empty()
    each.close()
    second.stop()


@pytest.mark.parametrize("theirs", [None, THEIRS], ids=["without a secret", "with another one"])
def test_subscribers_without_the_secret_receive_nothing(theirs: Keys | None) -> None:
    publishing = Publishing(OURS)
    endpoint = f"tcp://127.0.0.1:{publishing.publisher.port}"
    stranger, ours = Subscribed(endpoint, theirs), Subscribed(endpoint, OURS)
    stranger.subscriber.subscribe(TOPIC)
    ours.prove(publishing)
    publishing.publish(created(1))
    assert ours.received.get(timeout=PATIENCE) == created(1)
    assert stranger.received.empty()
    for each in (stranger, ours):
        each.close()
    publishing.stop()
