"""Reply channels: replies go to the thread that waits, and to the receiver where that cannot be."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.support.waiting import eventually
from tests.transport.contract import Box, Office, content, office_of
from tests.transport.test_contract import OverZmq
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport import local
from zmqgrad.transport.base import Inbound, ReplyChannel
from zmqgrad.transport.local import MAX_PACKET_BYTES
from zmqgrad.transport.local.channels import MAX_CHANNELS, channel_endpoint
from zmqgrad.wire.messages import ExceptionReply, Hello, RRefAck

pytestmark = pytest.mark.skipif(not local.supported(), reason="the fast path is Linux's")

REPLY = RRefAck()


@pytest.fixture
def office() -> Iterator[Office]:
    with office_of(OverZmq("ipc")) as opened:
        yield opened


def pair(office: Office) -> tuple[Box, Box]:
    """Two boxes; the first has sent to the second before, as channels are for peers that are connected."""
    a, b = office.pair()
    assert a.mailbox.acquire_channel(1) is None
    a.mailbox.send(1, Hello("x"), 1)
    b.take()
    return a, b


def channel_to(box: Box, peer: int = 1) -> ReplyChannel:
    channel = box.mailbox.acquire_channel(peer)
    assert channel is not None
    return channel


def open_channel(a: Box, b: Box, channel: ReplyChannel) -> None:
    """Until what ``b`` replies comes by the channel of ``a``: before that is accepted, it comes otherwise."""
    deadline = Deadline.after(20)
    b.mailbox.send(0, REPLY, 1, (), channel.number)
    while True:
        assert not deadline.passed()
        inbound = channel.receive(0.01)
        if inbound is not None:
            break
        a.take()
        b.mailbox.send(0, REPLY, 1, (), channel.number)


def received(channel: ReplyChannel) -> Inbound:
    inbound = channel.receive(20)
    assert inbound is not None
    return inbound


def test_a_reply_arrives_at_the_channel_named_in_the_request(office: Office) -> None:
    a, b = pair(office)
    channel = channel_to(a)
    open_channel(a, b, channel)
    for message_id in range(2, 20):
        a.mailbox.send(1, Hello("x"), message_id, [b"q"], channel.number)
        (request,) = b.take()
        assert request.envelope.channel == channel.number
        b.mailbox.send(0, REPLY, message_id, (), request.envelope.channel)
        assert received(channel).envelope.message_id == message_id
    assert a.nothing_more()
    channel.release()


@pytest.mark.parametrize("frames", [[b"re", b"ply"], [b""], [bytes(MAX_PACKET_BYTES)], [bytes(1 << 20)]])
def test_a_reply_of_several_frames_arrives_at_the_receiver(office: Office, frames: list[bytes]) -> None:
    a, b = pair(office)
    channel = channel_to(a)
    open_channel(a, b, channel)
    b.mailbox.send(0, REPLY, 3, frames, channel.number)
    (reply,) = a.take()
    assert content(reply) == frames
    assert channel.receive(0.0) is None
    channel.release()


def test_a_large_reply_of_one_frame_arrives_at_the_receiver(office: Office) -> None:
    a, b = pair(office)
    channel = channel_to(a)
    open_channel(a, b, channel)
    message = ExceptionReply("E", "m", "x" * MAX_PACKET_BYTES, "w")
    b.mailbox.send(0, message, 3, (), channel.number)
    (reply,) = a.take()
    assert reply.message == message
    channel.release()


def test_requests_never_travel_by_channels(office: Office) -> None:
    a, b = pair(office)
    channel = channel_to(a)
    open_channel(a, b, channel)
    b.mailbox.send(0, Hello("back"), 3, (), channel.number)
    (request,) = a.take()
    assert request.message == Hello("back")
    assert channel.receive(0.0) is None
    channel.release()


@pytest.mark.parametrize("number", [MAX_CHANNELS + 1, 255])
def test_a_reply_to_an_invalid_channel_arrives_at_the_receiver(office: Office, number: int) -> None:
    a, b = pair(office)
    b.mailbox.send(0, REPLY, 5, [b"x"], number)
    (reply,) = a.take()
    assert reply.envelope.message_id == 5


@pytest.mark.parametrize("kind", ["tcp", "ipc without fast path"])
def test_without_the_fast_path_there_are_no_channels(kind: str) -> None:
    with office_of(OverZmq("tcp") if kind == "tcp" else OverZmq("ipc", fast_path=False)) as office:
        a, b = office.pair()
        a.mailbox.send(1, Hello("x"), 1)
        b.take()
        assert a.mailbox.acquire_channel(1) is None


def test_a_peer_without_the_fast_path_is_reached_by_zeromq() -> None:
    """One worker of a job may have it off: it neither listens by it nor connects."""
    with office_of(OverZmq("ipc")) as office:
        a = office.open(0)
        with_it, office.kind = office.kind, OverZmq("ipc", fast_path=False)
        b = office.open(1)
        for message_id in range(20):
            a.mailbox.send(1, Hello("x"), message_id)
            b.mailbox.send(0, Hello("x"), message_id)
        for box in (a, b):
            assert [i.envelope.message_id for i in box.take(20)] == list(range(20))
        office.kind.close()
        office.kind = with_it


def test_each_thread_has_its_own_and_they_are_few(office: Office) -> None:
    a, _ = pair(office)
    channels = [channel_to(a) for _ in range(MAX_CHANNELS)]
    assert len({channel.number for channel in channels}) == MAX_CHANNELS
    assert a.mailbox.acquire_channel(1) is None
    channels[3].release()
    assert channel_to(a) is channels[3]
    for channel in channels:
        channel.release()


def test_a_wake_up_ends_a_wait_and_does_no_harm_to_the_next(office: Office) -> None:
    a, b = pair(office)
    channel = channel_to(a)
    threading.Timer(0.01, channel.wake).start()
    assert channel.receive(None) is None
    channel.wake()
    channel.release()
    channel = channel_to(a)
    channel.receive(0.0)
    open_channel(a, b, channel)
    a.mailbox.send(1, Hello("x"), 7, (), channel.number)
    b.take()
    b.mailbox.send(0, REPLY, 7, (), channel.number)
    assert received(channel).envelope.message_id == 7
    channel.release()


def test_time_passes_without_a_reply(office: Office) -> None:
    a, _ = pair(office)
    channel = channel_to(a)
    assert channel.receive(0.0) is None
    assert channel.receive(0.001) is None
    channel.release()


def test_a_late_reply_is_read_by_the_next_user_of_the_channel(office: Office) -> None:
    a, b = pair(office)
    channel = channel_to(a)
    open_channel(a, b, channel)
    channel.release()
    b.mailbox.send(0, REPLY, 8, (), channel.number)
    (again,) = a.mailbox.acquire_idle_channels()
    assert a.mailbox.acquire_idle_channels() == []
    assert received(again).envelope.message_id == 8
    again.release()


def test_garbage_at_a_channel_is_counted_and_dropped(office: Office) -> None:
    a, _ = pair(office)
    channel = channel_to(a)
    endpoint = channel_endpoint(a.mailbox.endpoints[0], channel.number)
    stranger = local.connect(endpoint, b"", a.mailbox.incarnation, lambda _: None)
    assert channel.receive(0.01) is None  # accepts
    assert stranger.is_ready()
    stranger.send(b"GET / HTTP/1.1")
    assert channel.receive(20) is None
    assert a.mailbox.statistics()["malformed"] == 1
    channel.release()
    stranger.close()


def test_garbage_at_the_receiver_is_counted_and_dropped(office: Office) -> None:
    a, b = pair(office)
    endpoint = channel_endpoint(a.mailbox.endpoints[0])
    stranger = local.connect(endpoint, b"", a.mailbox.incarnation, lambda _: None)
    eventually(stranger.is_ready)
    stranger.send(b"GET / HTTP/1.1")
    b.mailbox.send(0, Hello("after"), 1)
    a.take()
    eventually(lambda: a.mailbox.statistics()["malformed"])
    stranger.close()


def test_a_channel_that_is_held_outlasts_close_until_it_is_released(office: Office) -> None:
    a, _ = pair(office)
    channel = channel_to(a)
    a.mailbox.close()
    assert a.mailbox.acquire_channel(1) is None
    assert a.mailbox.join(Deadline.after(0.05)) == ["w0-channels"]
    channel.wake()
    assert channel.receive(20) is None
    channel.release()
    channel.wake()  # of one that is closed
    assert a.mailbox.join(Deadline.after(20)) == []


def test_a_peer_that_is_forgotten_is_found_again(office: Office) -> None:
    a, b = pair(office)
    channel = channel_to(a)
    for _ in range(2):
        open_channel(a, b, channel)
        b.mailbox.forget(0)
    channel.release()


def test_small_and_large_messages_all_arrive(office: Office) -> None:
    a, b = office.pair()
    count = 500
    for message_id in range(1, count + 1):
        b.mailbox.send(0, Hello("x"), message_id, [b"by ZeroMQ"] if message_id % 2 else ())
    arrived = a.take(count)
    assert sorted(i.envelope.message_id for i in arrived) == list(range(1, count + 1))
    assert all(content(i) == ([b"by ZeroMQ"] if i.envelope.message_id % 2 else []) for i in arrived)


def test_a_slow_reader_gets_all_in_order(office: Office) -> None:
    """Small messages wait behind a writer, and none jumps to ZeroMQ while earlier ones wait."""
    go, got = threading.Event(), list[int]()
    done = threading.Event()

    def handler(inbound: Inbound) -> None:
        go.wait(20)
        got.append(inbound.envelope.message_id)
        if len(got) == 5000:
            done.set()

    a = office.open(0)
    office.open(1, handler)
    a.mailbox.send(1, Hello("x"), 0)
    deadline = Deadline.after(20)
    connection = threading.Event()
    for message_id in range(1, 5000):
        a.mailbox.send(1, Hello("x"), message_id)
        if message_id == 1:
            connection.wait(0.05)
    go.set()
    assert done.wait(deadline.left())
    assert sorted(got) == list(range(5000))
    assert got[100:] == sorted(got[100:])
