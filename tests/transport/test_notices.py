"""Notices over real sockets: subscriptions that are known to be in place, breaks, moves, garbage."""

from __future__ import annotations

import logging
import queue
import select
import threading
from collections.abc import Iterator

import pytest
import zmq

from zmqgrad.errors import ClosedError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.notices import NoticePublisher, NoticeSubscriber
from zmqgrad.wire.codec import encode
from zmqgrad.wire.messages import KeyCreated, KeyDeleted, Message

PATIENCE = 20.0
LOOPBACK = "tcp://127.0.0.1:*"


class Publishing:
    """A publisher in the test's own thread."""

    def __init__(self, address: str = LOOPBACK) -> None:
        self.abandoned: list[bytes] = []
        self.publisher = NoticePublisher(address, 1, self.abandoned.append)

    def until(self, condition: object) -> None:
        """Take subscriptions until ``condition()`` holds."""
        deadline = Deadline.after(PATIENCE)
        while not condition():  # type: ignore[operator]
            assert not deadline.passed(), f"subscribed: {self.publisher.topics}"
            select.select([self.publisher.fd], [], [], 0.02)
            self.publisher.take_subscriptions()

    def close(self) -> None:
        self.publisher.close()


class Listening:
    """A subscriber, and what it heard."""

    def __init__(self, address: str) -> None:
        self.heard: queue.Queue[Message] = queue.Queue()
        self.breaks = threading.Semaphore(0)
        self.subscriber = NoticeSubscriber("test", address, self.heard.put, self.breaks.release)

    def close(self) -> None:
        self.subscriber.close()
        self.subscriber.close()
        assert self.subscriber.join(Deadline.after(PATIENCE)) == []


@pytest.fixture
def publishing() -> Iterator[Publishing]:
    made = Publishing()
    yield made
    made.close()


@pytest.fixture
def listening(publishing: Publishing) -> Iterator[Listening]:
    made = Listening(publishing.publisher.endpoint)
    yield made
    made.close()


def notice(n: int) -> KeyCreated:
    return KeyCreated("k", n, n - 1, b"")


def test_a_one_time_topic_proves_those_before_it(publishing: Publishing, listening: Listening) -> None:
    """DESIGN 16.1: what is published once it is seen arrives, the first notice included."""
    for n in range(1, 51):
        topic, sync, seen = b"topic%d" % n, b"sync%d" % n, []
        listening.subscriber.subscribe(topic)
        listening.subscriber.subscribe(sync)
        publishing.publisher.when_subscribed(sync, lambda seen=seen: seen.append(1))  # type: ignore[misc]
        publishing.until(lambda seen=seen: seen)  # type: ignore[misc]
        assert not publishing.publisher.expect_no_more(sync)
        publishing.publisher.publish(topic, notice(n))
        assert listening.heard.get(timeout=PATIENCE) == notice(n)
        listening.subscriber.unsubscribe(sync)


def test_a_subscription_that_came_first_counts(publishing: Publishing, listening: Listening) -> None:
    listening.subscriber.subscribe(b"sync")
    publishing.until(lambda: b"sync" in publishing.publisher.topics)
    seen: list[int] = []
    publishing.publisher.when_subscribed(b"sync", lambda: seen.append(1))
    assert seen == [1]


def test_what_is_expected_no_more_is_not_done(publishing: Publishing, listening: Listening) -> None:
    publishing.publisher.when_subscribed(b"sync", lambda: pytest.fail("it was given up"))
    assert publishing.publisher.expect_no_more(b"sync") is True
    assert publishing.publisher.expect_no_more(b"sync") is False
    listening.subscriber.subscribe(b"sync")
    publishing.until(lambda: b"sync" in publishing.publisher.topics)


def test_the_last_subscriber_to_go_abandons_a_topic(publishing: Publishing, listening: Listening) -> None:
    other = Listening(publishing.publisher.endpoint)
    for who, sync in ((listening, b"1"), (other, b"2")):
        who.subscriber.subscribe(b"topic")
        who.subscriber.subscribe(b"topic")  # twice is as once
        who.subscriber.subscribe(sync)
        publishing.until(lambda sync=sync: sync in publishing.publisher.topics)  # type: ignore[misc]
    other.close()
    publishing.until(lambda: b"2" in publishing.abandoned)
    assert b"topic" not in publishing.abandoned
    listening.subscriber.unsubscribe(b"topic")
    publishing.until(lambda: b"topic" in publishing.abandoned)
    assert publishing.publisher.topics == {b"1"}


def test_a_break_is_told_and_the_connection_made_anew() -> None:
    first = Publishing()
    listening = Listening(first.publisher.endpoint)
    listening.subscriber.subscribe(b"topic")
    first.until(lambda: b"topic" in first.publisher.topics)
    first.close()
    assert listening.breaks.acquire(timeout=PATIENCE)
    second = Publishing(first.publisher.endpoint)
    second.until(lambda: b"topic" in second.publisher.topics)
    second.publisher.publish(b"topic", notice(1))
    assert listening.heard.get(timeout=PATIENCE) == notice(1)
    listening.close()
    second.close()


def test_a_subscriber_moves_with_its_subscriptions(publishing: Publishing, listening: Listening) -> None:
    elsewhere = Publishing()
    listening.subscriber.subscribe(b"topic")
    publishing.until(lambda: b"topic" in publishing.publisher.topics)
    listening.subscriber.move(elsewhere.publisher.endpoint)
    elsewhere.until(lambda: b"topic" in elsewhere.publisher.topics)
    publishing.until(lambda: publishing.abandoned == [b"topic"])
    elsewhere.publisher.publish(b"topic", notice(1))
    assert listening.heard.get(timeout=PATIENCE) == notice(1)
    elsewhere.close()


def test_garbage_is_dropped_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """(P5)."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.linger = 0
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        listening = Listening(f"tcp://127.0.0.1:{port}")
        listening.subscriber.subscribe(b"topic")
        publisher.recv()
        with caplog.at_level(logging.WARNING, "zmqgrad.transport.notices"):
            publisher.send_multipart([b"topic"])
            publisher.send_multipart([b"topic", b"what?"])
            publisher.send_multipart([b"topic", b"", b""])
            publisher.send_multipart([b"topic", bytes(encode(KeyDeleted("k", 1, 0, None), 0, 1, 0))])
            assert listening.heard.get(timeout=PATIENCE) == KeyDeleted("k", 1, 0, None)
        assert listening.subscriber.malformed == 3
        assert caplog.text.count("dropped a malformed notice") == 1
        listening.close()


def test_what_a_subscriber_sends_upstream_is_dropped(publishing: Publishing) -> None:
    with zmq.Context() as context, context.socket(zmq.XSUB) as stranger:
        stranger.linger = 0
        stranger.connect(publishing.publisher.endpoint)
        for upstream in (b"", b"\x07garbage", b"\x01topic"):
            stranger.send(upstream)
        publishing.until(lambda: publishing.publisher.topics)
        assert publishing.publisher.topics == {b"topic"}


def test_a_closed_subscriber_takes_no_orders(publishing: Publishing) -> None:
    listening = Listening(publishing.publisher.endpoint)
    listening.close()
    with pytest.raises(ClosedError):
        listening.subscriber.subscribe(b"topic")
