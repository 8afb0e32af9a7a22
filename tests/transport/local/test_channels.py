"""Reply channels: replies go to the thread that waits, and to the receiver where that cannot be."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from tests.support.waiting import eventually
from tests.transport.contract import Box, Office, acquire, content, office_of
from tests.transport.test_contract import OverZmq
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport import local
from zmqgrad.transport.base import Inbound, PeerEnd, ReplyChannel
from zmqgrad.transport.local import MAX_PACKET_BYTES, handshake
from zmqgrad.transport.local.channels import MAX_CHANNELS, MAX_NUMBER, channel_endpoint
from zmqgrad.transport.local.listener import ACCEPT_BACKLOG
from zmqgrad.transport.security import local_key
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
    assert acquire(a.mailbox, 1) is None
    a.mailbox.send(1, Hello("x"), 1)
    b.take()
    return a, b


def channel_to(box: Box, peer: int = 1) -> ReplyChannel:
    channel = acquire(box.mailbox, peer)
    assert channel is not None
    return channel


def open_channel(
    a: Box, b: Box, channel: ReplyChannel, events: SimpleQueue[Inbound | PeerEnd] | None = None
) -> None:
    """Send replies by the channel of ``a`` until one arrives there: the first go to the receiver."""

    sent, received = 0, 1

    def arrived() -> bool:
        nonlocal sent
        sent += 1
        b.mailbox.send(0, REPLY, 1, (), channel.number)
        return channel.receive(0.01) is not None

    eventually(arrived, bool)
    while channel.receive(0.0) is not None:
        received += 1
    channel.settle()
    if events is None:
        a.take(sent - received)
    else:
        numbers(events, sent - received)


def stranger_to(box: Box) -> handshake.Hello:
    """The first packet of a process that then sends garbage."""
    return handshake.Hello(handshake.PROTOCOL, box.mailbox.incarnation, 9)


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
    channel.release([channel])


@pytest.mark.parametrize("frames", [[b"re", b"ply"], [bytes(MAX_PACKET_BYTES)], [bytes(1 << 20)]])
def test_a_reply_of_several_frames_arrives_at_the_receiver(office: Office, frames: list[bytes]) -> None:
    a, b = pair(office)
    channel = channel_to(a)
    open_channel(a, b, channel)
    b.mailbox.send(0, REPLY, 3, frames, channel.number)
    (reply,) = a.take()
    assert content(reply) == frames
    assert channel.receive(0.001) is None
    channel.release([channel])


def test_a_large_reply_of_one_frame_arrives_at_the_receiver(office: Office) -> None:
    a, b = pair(office)
    channel = channel_to(a)
    open_channel(a, b, channel)
    message = ExceptionReply("E", "m", "x" * MAX_PACKET_BYTES, "w")
    b.mailbox.send(0, message, 3, (), channel.number)
    (reply,) = a.take()
    assert reply.message == message
    channel.release([channel])


def test_requests_never_travel_by_channels(office: Office) -> None:
    a, b = pair(office)
    channel = channel_to(a)
    open_channel(a, b, channel)
    b.mailbox.send(0, Hello("back"), 3, (), channel.number)
    (request,) = a.take()
    assert request.message == Hello("back")
    assert channel.receive(0.0) is None
    channel.release([channel])


@pytest.mark.parametrize("number", [MAX_CHANNELS + 1, 255])
def test_a_reply_to_an_invalid_channel_arrives_at_the_receiver(office: Office, number: int) -> None:
    a, b = pair(office)
    b.mailbox.send(0, REPLY, 5, [b"x"], number)
    (reply,) = a.take()
    assert reply.envelope.message_id == 5


@pytest.mark.parametrize("fast_path", [True, False])
def test_by_tcp_there_are_no_channels(fast_path: bool) -> None:
    with office_of(OverZmq("tcp", fast_path=fast_path)) as office:
        a, b = office.pair()
        a.mailbox.send(1, Hello("x"), 1)
        b.take()
        assert acquire(a.mailbox, 1) is None


def test_each_thread_has_its_own_and_they_are_few(office: Office) -> None:
    a, _ = pair(office)
    channels = [channel_to(a) for _ in range(MAX_CHANNELS)]
    assert len({channel.number for channel in channels}) == MAX_CHANNELS
    assert acquire(a.mailbox, 1) is None
    channels[3].release([channels[3]])
    assert channel_to(a) is channels[3]
    for channel in channels:
        channel.release([channel])


def test_a_wake_up_ends_a_wait_and_does_no_harm_to_the_next(office: Office) -> None:
    a, b = pair(office)
    channel = channel_to(a)
    threading.Timer(0.01, channel.wake).start()
    assert channel.receive(None) is None
    channel.wake()
    channel.release([channel])
    channel = channel_to(a)
    channel.receive(0.0)
    open_channel(a, b, channel)
    a.mailbox.send(1, Hello("x"), 7, (), channel.number)
    b.take()
    b.mailbox.send(0, REPLY, 7, (), channel.number)
    assert received(channel).envelope.message_id == 7
    channel.release([channel])


def test_time_passes_without_a_reply(office: Office) -> None:
    a, _ = pair(office)
    channel = channel_to(a)
    assert channel.receive(0.0) is None
    assert channel.receive(0.001) is None
    channel.release([channel])


def test_a_late_reply_is_read_by_the_next_user_of_the_channel(office: Office) -> None:
    a, b = pair(office)
    channel = channel_to(a)
    open_channel(a, b, channel)
    channel.release([channel])
    b.mailbox.send(0, REPLY, 8, (), channel.number)
    again = channel_to(a)
    assert again is channel
    assert received(again).envelope.message_id == 8
    again.release([again])


def ending(office: Office, worker_id: int) -> tuple[Box, SimpleQueue[Inbound | PeerEnd]]:
    """A box whose messages and ends are put in one queue, in order."""
    box, events = office.open(worker_id, start=False), SimpleQueue[Inbound | PeerEnd]()
    box.mailbox.start(events.put, office.resolve, on_end=events.put)
    return box, events


def with_ends(office: Office) -> tuple[Box, Box, SimpleQueue[Inbound | PeerEnd]]:
    """As :func:`pair`, with what the first receives, and the ends of its links."""
    a, events = ending(office, 0)
    b = office.open(1)
    a.mailbox.send(1, Hello("x"), 1)
    b.take()
    return a, b, events


def numbers(events: SimpleQueue[Inbound | PeerEnd], count: int) -> list[int]:
    """The ids of the next messages."""
    found = [events.get(timeout=20) for _ in range(count)]
    assert all(isinstance(each, Inbound) for each in found), found
    return [each.envelope.message_id for each in found if isinstance(each, Inbound)]


def the_end(events: SimpleQueue[Inbound | PeerEnd]) -> PeerEnd:
    """The next event, which is an end."""
    end = events.get(timeout=20)
    assert isinstance(end, PeerEnd), end
    return end


def test_what_arrived_at_a_channel_without_an_owner_is_read_before_the_end(office: Office) -> None:
    a, b, events = with_ends(office)
    channel = channel_to(a)
    open_channel(a, b, channel, events)
    channel.release([channel])
    for n in range(5):
        b.mailbox.send(0, REPLY, n, (), channel.number)
    b.mailbox.close("it leaves")
    assert numbers(events, 5) == list(range(5))
    assert the_end(events)[::2] == (1, "it leaves")


def test_a_wake_up_beside_the_end_of_a_connection_is_not_lost(office: Office) -> None:
    """Both are there when the owner looks: one poll reports them."""
    a, b, events = with_ends(office)
    channel = channel_to(a)
    open_channel(a, b, channel, events)
    reading = channel._reading  # type: ignore[attr-defined]  # the owner is about to look
    with ThreadPoolExecutor(1) as threads, reading:
        waiting = threads.submit(channel.receive, 60.0)
        b.mailbox.close()
        assert b.mailbox.join(Deadline.after(20)) == []
        channel.wake()
        reading.release()
        try:
            assert waiting.result(20) is None
        finally:
            channel.wake()
            reading.acquire()
    channel.release([channel])


def test_what_arrived_while_the_owner_is_away_is_read_before_the_end(office: Office) -> None:
    a, b, events = with_ends(office)
    channel = channel_to(a)
    open_channel(a, b, channel, events)  # now it does something else
    for n in range(5):
        b.mailbox.send(0, REPLY, n, (), channel.number)
    a.mailbox.end(1, "lost")
    assert numbers(events, 5) == list(range(5))
    assert the_end(events) == PeerEnd(1, b.mailbox.incarnation, "lost")
    assert channel.receive(0.001) is None
    channel.release([channel])


@pytest.mark.parametrize("finish", ["settle", "release", "receive", "abandon"])
def test_the_end_waits_until_the_owner_has_taken_note_of_its_message(office: Office, finish: str) -> None:
    """Otherwise the owner could not tell whether the reply in its hands came before the end."""
    a, b, events = with_ends(office)
    others = office.open(2)
    channel = channel_to(a)
    open_channel(a, b, channel, events)
    b.mailbox.send(0, REPLY, 7, (), channel.number)
    assert received(channel).envelope.message_id == 7
    b.mailbox.send(0, REPLY, 8, (), channel.number)
    a.mailbox.end(1, "lost")
    others.mailbox.send(0, Hello("x"), 2)  # behind the end, were it not for the owner
    assert numbers(events, 1) == [2]
    others.mailbox.send(0, Hello("x"), 3)
    assert numbers(events, 1) == [3]
    if finish == "settle":
        channel.settle()
        assert numbers(events, 1) == [8]
    elif finish == "release":
        channel.release([channel])
        assert numbers(events, 1) == [8]
    elif finish == "abandon":
        channel.abandon([channel], events.put)
        assert numbers(events, 1) == [8]
    else:
        assert received(channel).envelope.message_id == 8
        assert channel.receive(0.001) is None
    assert the_end(events).reason == "lost"
    if finish in ("settle", "receive"):
        channel.release([channel])


def test_the_end_reaches_an_owner_that_waits(office: Office) -> None:
    a, b, events = with_ends(office)
    channel = channel_to(a)
    open_channel(a, b, channel, events)
    waits = threading.Thread(target=channel.receive, args=(20.0,))
    waits.start()
    b.mailbox.close("it leaves")
    assert the_end(events).reason == "it leaves"
    channel.wake()
    waits.join(20)
    assert not waits.is_alive()
    channel.release([channel])


def test_an_abandoned_channel_hands_over_what_has_arrived(office: Office) -> None:
    """Nothing is lost, whatever has happened to the connection by then; what comes later is received."""
    a, b = pair(office)
    for connected in (True, False):
        channel = channel_to(a)
        if connected:
            open_channel(a, b, channel)
        for n in range(3):
            b.mailbox.send(0, REPLY, n, (), channel.number)
        handed: list[Inbound] = []
        channel.abandon([channel], handed.append)
        for n in range(3, 6):
            b.mailbox.send(0, REPLY, n, (), channel.number)
        late = [inbound.envelope.message_id for inbound in a.take(6 - len(handed))]
        assert sorted([inbound.envelope.message_id for inbound in handed] + late) == list(range(6))
        assert len(handed) == 3 or not connected
        assert a.nothing_more()


def test_threads_that_reply_to_an_abandoned_channel_lose_nothing(office: Office) -> None:
    a, b = pair(office)
    b.mailbox.send(0, Hello("x"), 1)
    a.take()
    for _ in range(20):
        channel, handed = channel_to(a), list[Inbound]()
        start = threading.Barrier(4)

        def reply(i: int, number: int = channel.number, start: threading.Barrier = start) -> None:
            start.wait(20)
            for n in range(10):
                b.mailbox.send(0, REPLY, 10 * i + n, (), number)

        threads = [threading.Thread(target=reply, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        start.wait(20)
        if (first := channel.receive(0.001)) is not None:
            handed.append(first)
        channel.abandon([channel], handed.append)
        for thread in threads:
            thread.join(20)
        handed += a.take(30 - len(handed))
        assert sorted(inbound.envelope.message_id for inbound in handed) == list(range(30))


def test_a_channel_can_be_abandoned_whose_connections_continue_one_another(office: Office) -> None:
    """No worker does that at a channel; but one that did would keep the thread from leaving."""
    a, _ = pair(office)
    channel, key = channel_to(a), local_key(None, b"")
    endpoint = channel_endpoint(a.mailbox.endpoints[0], channel.number)
    connections = []
    for number in range(3):
        hello = handshake.Hello(handshake.PROTOCOL, a.mailbox.incarnation, 9, number=number)
        connections.append(local.connect(endpoint, hello, key, lambda _: None))
        assert channel.receive(0.01) is None  # accepts
    channel.abandon([channel], lambda _: None)
    for connection in connections:
        connection.close()


def test_strangers_at_a_channel_do_not_keep_the_thread_that_reads_in_its_place(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the next one connects while the one before is accepted."""
    a, _ = pair(office)
    channel = channel_to(a)
    name = local.unix_name(channel_endpoint(a.mailbox.endpoints[0], channel.number))
    accept, strangers = socket.socket.accept, 0

    def connect() -> None:
        nonlocal strangers
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(name)
        strangers += 1

    def accept_and_connect(self: socket.socket) -> tuple[socket.socket, object]:
        accepted = accept(self)
        if self.getsockname() == name.encode():
            connect()
            assert strangers <= 2 * ACCEPT_BACKLOG
        return accepted

    monkeypatch.setattr(socket.socket, "accept", accept_and_connect)
    connect()
    channel.take_arrived()
    assert strangers > 1
    channel.release([channel])


def test_a_number_is_used_again_after_all_others(office: Office) -> None:
    """Else a program whose calls time out would lose its channels one after another, for good."""
    a, b = pair(office)
    seen, read = [], list[Inbound]()
    for n in range(MAX_NUMBER + 3):
        channel = channel_to(a)
        seen.append(channel.number)
        b.mailbox.send(0, REPLY, n, (), channel.number)  # the peer connects to it
        channel.abandon([channel], read.append)
    read += a.take(len(seen) - len(read))
    assert seen == [*range(1, MAX_NUMBER + 1), 1, 2, 3]
    assert sorted(inbound.envelope.message_id for inbound in read) == list(range(len(seen)))
    channel = channel_to(a)
    assert channel.number == 4
    open_channel(a, b, channel)
    channel.release([channel])


def test_garbage_at_a_channel_is_counted_and_dropped(office: Office) -> None:
    a, _ = pair(office)
    channel = channel_to(a)
    endpoint = channel_endpoint(a.mailbox.endpoints[0], channel.number)
    stranger = local.connect(endpoint, stranger_to(a), local_key(None, b""), lambda _: None)
    assert channel.receive(0.01) is None  # accepts
    assert stranger.is_ready()
    stranger.send(b"GET / HTTP/1.1")
    assert channel.receive(20) is None
    assert a.mailbox.statistics()["malformed"] == 1
    channel.release([channel])
    stranger.close()


def test_garbage_at_the_receiver_is_counted_and_dropped(office: Office) -> None:
    a, b = pair(office)
    endpoint = channel_endpoint(a.mailbox.endpoints[0])
    stranger = local.connect(endpoint, stranger_to(a), local_key(None, b""), lambda _: None)
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
    assert acquire(a.mailbox, 1) is None
    assert a.mailbox.join(Deadline.after(0.05)) == ["w0-channels"]
    channel.wake()
    assert channel.receive(20) is None
    channel.release([channel])
    channel.wake()  # of one that is closed
    assert a.mailbox.join(Deadline.after(20)) == []


def test_small_and_large_messages_all_arrive(office: Office) -> None:
    a, b = office.pair()
    count = 500
    for message_id in range(1, count + 1):
        b.mailbox.send(0, Hello("x"), message_id, [b"in chunks"] if message_id % 2 else ())
    arrived = a.take(count)
    assert sorted(i.envelope.message_id for i in arrived) == list(range(1, count + 1))
    assert all(content(i) == ([b"in chunks"] if i.envelope.message_id % 2 else []) for i in arrived)


def test_a_slow_reader_gets_all_in_order(office: Office) -> None:
    """The kernel accepts no more at some time, and what waits is sent before what comes later."""
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
    for message_id in range(1, 5000):
        frames = [b"x" * 20_000] if message_id % 100 == 0 else ()
        a.mailbox.send(1, Hello("x"), message_id, frames)
    go.set()
    assert done.wait(20)
    assert got == list(range(5000))


def test_a_peer_that_ends_while_messages_wait_for_it_does_not_delay_others(office: Office) -> None:
    go, got, last = threading.Event(), list[int](), threading.Event()

    def slow(inbound: Inbound) -> None:
        go.wait(20)

    def handler(inbound: Inbound) -> None:
        go.wait(20)
        got.append(inbound.envelope.message_id)
        if len(got) == 3000:
            last.set()

    a, gone = office.open(0), office.open(1, slow)
    office.open(2, handler)
    for message_id in range(3000):
        a.mailbox.send(1, Hello("x"), message_id)
        a.mailbox.send(2, Hello("x"), message_id)
    gone.mailbox.close()
    a.mailbox.end(1, "lost")
    go.set()
    assert last.wait(20)
    assert got == list(range(3000))
