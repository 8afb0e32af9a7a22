"""Races of links: one thread is stopped at a step, and what others do meanwhile must not be lost."""

from __future__ import annotations

import errno
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.support.waiting import eventually
from tests.transport.contract import HELLO, Box, Office, acquire, office_of
from tests.transport.test_contract import OverArena, OverZmq
from zmqgrad.errors import ProtocolError, TransportError
from zmqgrad.runtime.clock import MONOTONIC, Deadline
from zmqgrad.runtime.polling import Wakeup
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.transport import links, local
from zmqgrad.transport.base import Inbound, PeerAddress, PeerEnd, ReplyChannel
from zmqgrad.transport.endpoint import PROCESS_ENDED, Endpoint
from zmqgrad.transport.links import Links
from zmqgrad.transport.local import LocalConnection
from zmqgrad.transport.local import connection as local_connection
from zmqgrad.transport.local.channels import ReplyChannel as Channel
from zmqgrad.transport.local.channels import channel_endpoint
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.transport.sealed.transport import ChannelSocket
from zmqgrad.transport.security import ZapAuthenticator, load_keys
from zmqgrad.transport.session_socket import SessionSocket
from zmqgrad.transport.sockets import DISCONNECTED, SocketEvent
from zmqgrad.wire.codec import decode_all
from zmqgrad.wire.messages import Chunk, ExceptionReply, Hello, RRefAck, StoreSet

pytestmark = pytest.mark.skipif(not local.supported(), reason="the fast path is Linux's")


@pytest.fixture
def office() -> Iterator[Office]:
    with office_of(OverZmq("ipc")) as opened:
        yield opened


def connection_of(box: Box, peer: int) -> LocalConnection:
    """The connection by which ``box`` sends to ``peer``."""
    assert isinstance(box.mailbox, ZmqMailbox)
    connection = box.mailbox._links.to(peer).local
    assert connection is not None
    return connection


class Gate:
    """A handler that stops the reading thread of its mailbox while it is closed."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)
        self.ids: list[int] = []

    def __call__(self, inbound: Inbound) -> None:
        self.entered.release()
        assert self.opened.wait(20)
        self.ids.append(inbound.envelope.message_id)


def test_what_is_queued_while_the_last_of_the_queue_leaves_is_sent(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that has sent the queue must not then register that nothing waits."""
    monkeypatch.setattr(links, "MAX_AHEAD", 0)  # it queues at once, rather than to continue
    a, gate = office.open(0), Gate()
    office.open(1, gate)
    sent = 0

    def fill() -> None:
        nonlocal sent
        gate.opened.clear()
        while True:
            a.mailbox.send(1, Hello("x"), sent)
            sent += 1
            if sent > 1 and connection.backlog() > 1:
                return

    a.mailbox.send(1, Hello("x"), sent)
    sent += 1
    connection = connection_of(a, 1)
    flush, filled = LocalConnection.flush, threading.Event()

    def flush_and_fill(self: LocalConnection, *args: object) -> bool:
        flushed = flush(self, *args)  # type: ignore[arg-type]
        if self is connection and flushed and not filled.is_set():
            fill()
            filled.set()
        return flushed

    fill()
    monkeypatch.setattr(LocalConnection, "flush", flush_and_fill)
    gate.opened.set()
    assert filled.wait(20)
    gate.opened.set()
    eventually(lambda: len(gate.ids), lambda count: count == sent)
    assert gate.ids == list(range(sent))


@pytest.mark.parametrize("size", [0, 20_000], ids=["small", "large"])
@pytest.mark.parametrize("how", ["it ends", "it leaves", "it is declared lost"])
def test_what_was_sent_to_one_that_did_not_read_arrives_before_the_end(
    office: Office, size: int, how: str
) -> None:
    """More than the kernel accepts from one connection, and sent by several threads."""
    opened, count = threading.Event(), 4000 if size else 40_000

    def gated(inbound: Inbound) -> None:
        assert opened.wait(60)
        b.events.put(inbound)

    a, b = office.open(0), office.open(1, gated, ends=True)
    a.mailbox.send(1, StoreSet("key", bytes(size)), 0)

    def send(first: int) -> None:
        for n in range(first, count, 2):
            a.mailbox.send(1, StoreSet("key", bytes(size)), n)

    threads = [threading.Thread(target=send, args=(first,)) for first in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if how == "it is declared lost":
        b.mailbox.end(0, "lost")
    else:
        a.mailbox.close("farewell" if how == "it leaves" else "")
        assert a.mailbox.join(Deadline.after(20)) == []
    opened.set()
    ids, reason = b.take_until_end(0)
    assert reason == {"it ends": PROCESS_ENDED, "it leaves": "farewell"}.get(how, "lost")
    assert sorted(ids) == list(range(count))
    assert [n for n in ids if n % 2] == list(range(1, count, 2)), "in the order of each thread"


def test_an_event_of_another_connection_with_the_same_descriptor_does_no_harm(office: Office) -> None:
    """The service thread may handle an event after its descriptor was closed, and used again."""
    a, b = office.pair()
    a.mailbox.send(1, Hello("x"), 1)
    b.take()
    assert isinstance(a.mailbox, ZmqMailbox)
    links, connection = a.mailbox._links, connection_of(a, 1)
    link = links.to(1)
    links._on_event(link, connection, select.POLLHUP)
    assert not link.end_reason
    fd, connection.fd = connection.fd, -1  # as when another thread has closed it since
    links._on_event(link, connection, select.POLLHUP)
    connection.fd = fd
    assert fd in links.service._handlers
    a.mailbox.send(1, Hello("x"), 2)
    assert b.take()[0].envelope.message_id == 2
    assert not link.end_reason


class Ends(Box):
    """A box that collects the ends of links as well."""

    def __init__(self, office: Office, worker_id: int, handler: Gate | None = None) -> None:
        opened = office.open(worker_id, start=False)
        super().__init__(opened.mailbox)
        self.ends: SimpleQueue[PeerEnd] = SimpleQueue()
        self.mailbox.start(handler or self.arrived.put, office.resolve, on_end=self.ends.put)


def connect(a: Box, b: Box) -> LocalConnection:
    """A connection from ``a`` that ``b``, whose reading thread is stopped, has not accepted yet."""
    assert isinstance(a.mailbox, ZmqMailbox)
    links = a.mailbox._links
    links.open(links.to(b.mailbox.worker_id))
    return connection_of(a, b.mailbox.worker_id)


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_connection_of_a_peer_that_is_lost_is_refused(office: Office, has_ended: bool) -> None:
    """Accepted, it would delay the end of the link while the peer lives, or deliver messages after it."""
    gate = Gate()
    a, b, c = Ends(office, 0, gate), Ends(office, 1), office.open(2)
    if not has_ended:
        c.mailbox.send(0, Hello("x"), 1)
        gate.entered.acquire()
        a.mailbox.end(1, "lost")
        connect(b, a)
        b.mailbox.send(0, Hello("x"), 2)
        gate.opened.set()
    else:
        gate.opened.set()
        a.mailbox.end(1, "lost")
    assert a.ends.get(timeout=20) == PeerEnd(1, 0, "lost")
    if has_ended:
        connect(b, a)
        b.mailbox.send(0, Hello("x"), 2)
    assert b.ends.get(timeout=20).peer == 0
    c.mailbox.send(0, Hello("x"), 3)
    eventually(lambda: gate.ids, lambda ids: ids and ids[-1] == 3)
    assert (2 in gate.ids) is not has_ended  # what had arrived when the link began to end is delivered


@pytest.fixture
def tcp_office() -> Iterator[Office]:
    with office_of(OverZmq("tcp")) as opened:
        yield opened


def endpoint_of(box: Box) -> Endpoint:
    assert isinstance(box.mailbox, ZmqMailbox)
    return box.mailbox._endpoint


def stop_reading(box: Box) -> threading.Event:
    """Stop the reading thread of ``box``, which is idle, until the event is set."""
    stopped, goes_on = threading.Event(), threading.Event()

    def stop() -> None:
        stopped.set()
        assert goes_on.wait(20)

    endpoint_of(box).reader.post(stop)
    assert stopped.wait(20)
    return goes_on


def send_last(b: Box, *ids: int) -> None:
    """Send to worker 0 by tcp, and close the connection behind that, as a process that is killed does."""
    for n in ids:
        b.mailbox.send(0, Hello("x"), n)
    assert isinstance(b.mailbox, ZmqMailbox)
    session = b.mailbox._links.to(0).session
    assert session is not None
    eventually(lambda: session._ready)
    with session.lock:
        session.close(linger=10_000)


def wait_for_disconnect(box: Box) -> None:
    """Wait until libzmq has reported the end of a connection, which the reader, stopped now, finds next."""
    listener = endpoint_of(box)._listener
    assert listener is not None
    read = listener._monitor.read
    found: list[SocketEvent] = []
    eventually(lambda: found.extend(read()) or any(event.kind == DISCONNECTED for event in found))
    batches = [found]
    listener._monitor.read = lambda: batches.pop() if batches else read()  # type: ignore[method-assign]


@pytest.mark.parametrize("disconnects", [False, True])
def test_the_first_message_by_tcp_is_read_before_the_end(tcp_office: Office, disconnects: bool) -> None:
    """Even if the reader learns first that the connection was closed, or that the process has ended."""
    a, b = Ends(tcp_office, 0), tcp_office.open(1)
    goes_on = stop_reading(a)
    if not disconnects:
        endpoint_of(a).end(1, "lost")
    send_last(b, 1, 2)
    wait_for_disconnect(a)
    listener = endpoint_of(a)._listener
    assert listener is not None
    endpoint_of(a).reader._posted.append(listener.read)  # as the next step of the reader
    if disconnects:
        endpoint_of(a).end(1, "its process has ended", disconnects=True)
    goes_on.set()
    assert [inbound.envelope.message_id for inbound in a.take(2)] == [1, 2]
    assert a.ends.get(timeout=20).peer == 1
    assert a.nothing_more()


def test_a_new_connection_by_tcp_does_not_delay_the_end(tcp_office: Office) -> None:
    a, b = Ends(tcp_office, 0), tcp_office.open(1)
    b.mailbox.send(0, Hello("x"), 1)
    a.take()
    goes_on = stop_reading(a)
    endpoint_of(a).end(1, "lost", disconnects=True)  # which waits until the first connection is closed
    assert isinstance(b.mailbox, ZmqMailbox)
    session = b.mailbox._links.to(0).session
    assert session is not None
    with session.lock:
        session._close_socket()
        session._try_to_open(MONOTONIC.now())
    eventually(lambda: session._ready)
    b.mailbox.send(0, Hello("x"), 2)
    goes_on.set()
    assert a.ends.get(timeout=20).peer == 1


# ---- credit ----------------------------------------------------------------------------------------------


def in_flight(box: Box) -> dict[int, int]:
    """Bytes for which ``box`` expects credit, by peer."""
    found: dict[int, int] = box.mailbox.statistics()["inflight"]["bytes"]
    return found


def replied(a: Box, b: Box) -> int:
    """The number of a reply channel of ``a``, for which ``b`` can use it."""
    a.mailbox.send(1, Hello("x"), 1)
    b.take()
    channel = acquire(a.mailbox, 1)
    assert channel is not None
    channel.release([channel])
    return channel.number


def test_a_reply_reaches_the_receiver_if_there_is_no_descriptor_for_its_channel(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = office.pair()
    number = replied(a, b)
    b.mailbox.send(0, Hello("x"), 2)
    a.take()

    def refuse(*args: object, **options: object) -> LocalConnection:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(local, "connect", refuse)
        b.mailbox.send(0, ExceptionReply("w1", "kind", "x" * 4000, ""), 3, (), number)
    assert a.take()[0].envelope.message_id == 3
    channel = acquire(a.mailbox, 1)
    assert channel is not None
    assert channel.number == number

    def goes_by_the_channel() -> bool:
        b.mailbox.send(0, RRefAck(), 4, (), number)  # to the receiver, until the channel has been opened
        return channel.receive(0.1) is not None

    eventually(goes_by_the_channel)
    channel.release([channel])


@pytest.mark.parametrize("size", [2000, 20_000])
def test_a_message_that_cannot_be_sent_keeps_no_credit(
    office: Office, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = office.pair()
    a.mailbox.send(1, Hello("x"), 1)
    b.take()

    def fail(*args: object) -> None:
        raise TransportError("no")

    with monkeypatch.context() as patched:
        for name in ("send_packet", "send_local"):
            patched.setattr(Links, name, fail)
        with pytest.raises(TransportError):
            a.mailbox.send(1, StoreSet("key", bytes(size)), 2)
    assert in_flight(a) == {}


def test_a_message_that_fails_behind_its_wait_keeps_no_credit(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = office.pair()
    a.mailbox.send(1, Hello("x"), 1)
    b.take()
    assert isinstance(a.mailbox, ZmqMailbox)
    plane = a.mailbox._plane
    prepare = plane.prepare

    def interrupted(*args: object) -> object:
        raise KeyboardInterrupt

    def refuse(*args: object, **kwargs: object) -> bool:
        monkeypatch.setattr(plane, "prepare", interrupted)
        return False

    monkeypatch.setattr(plane.send_window, "try_reserve", refuse)
    with pytest.raises(KeyboardInterrupt):
        a.mailbox.send(1, StoreSet("key", b""), 2, [bytes(5000)])
    monkeypatch.setattr(plane, "prepare", prepare)
    assert in_flight(a) == {}


@pytest.mark.parametrize("in_frame", [True, False])
def test_a_message_that_lacks_a_chunk_counts_as_consumed(
    office: Office, in_frame: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its sender would lack that credit for ever."""
    a, b = office.pair()

    def no_memory(*args: object) -> None:
        raise ProtocolError("no memory")

    assert isinstance(b.mailbox, ZmqMailbox)
    with monkeypatch.context() as patched:
        patched.setattr(b.mailbox._plane.reassembler, "reserve", no_memory)
        a.mailbox.send(1, StoreSet("key", b"" if in_frame else bytes(50_000)), 1, [bytes(50_000)] * in_frame)
        a.mailbox.send(1, Hello("x"), 2)
        assert b.take()[0].envelope.message_id == 2
    assert in_flight(a)[1] > 50_000
    b.mailbox.send(0, Hello("x"), 1)  # carries the credit
    a.take()
    assert not in_flight(a).get(1)


# ---- reply channels --------------------------------------------------------------------------------------


def opened_channel(a: Box, b: Box) -> ReplyChannel:
    """A reply channel of ``a`` by which ``b`` has replied."""
    a.mailbox.send(1, Hello("x"), 1)
    b.take()
    channel = acquire(a.mailbox, 1)
    assert channel is not None
    sent = 0

    def arrived() -> bool:  # the first go to the receiver, until the channel has accepted the connection
        nonlocal sent
        sent += 1
        b.mailbox.send(0, RRefAck(), 1, (), channel.number)
        return channel.receive(0.01) is not None

    eventually(arrived, bool)
    received = 1
    while channel.receive(0.0) is not None:
        received += 1
    channel.settle()
    a.take(sent - received)
    return channel


def test_an_end_that_begins_while_the_owner_is_just_woken_is_delivered(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner may do something else then, such as wait for that peer by another port."""
    a, b = Ends(office, 0), office.open(1)
    channel = opened_channel(a, b)
    woken, goes_on = threading.Event(), threading.Event()
    results: SimpleQueue[Inbound | None] = SimpleQueue()
    owner = threading.Thread(target=lambda: results.put(channel.receive(None)))
    clear = Wakeup.clear

    def clear_and_stop(self: Wakeup) -> None:
        clear(self)
        if threading.current_thread() is owner:
            woken.set()
            assert goes_on.wait(20)

    monkeypatch.setattr(Wakeup, "clear", clear_and_stop)
    owner.start()
    channel.wake()
    assert woken.wait(20)
    endpoint_of(a).end(1, "lost")
    stop_reading(a).set()  # behind the end
    goes_on.set()
    assert results.get(timeout=20) is None
    assert a.ends.get(timeout=20).peer == 1
    owner.join()
    channel.release([channel])


def test_an_owner_that_waits_reads_again_once_there_are_descriptors(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its poll does not see a descriptor that another thread adds meanwhile."""
    a, b = office.pair()
    channel = opened_channel(a, b)
    assert isinstance(channel, Channel)
    (connection,) = channel._listener.connections.values()
    later: SimpleQueue[Callable[[], None]] = SimpleQueue()
    monkeypatch.setattr(channel._listener, "_call_later", lambda _, job: later.put(job))
    receive, results = connection.receive, SimpleQueue[Inbound | None]()

    def refuse(*args: object) -> bytes:
        connection.receive = receive
        raise OSError(errno.EMFILE, "Too many open files")

    connection.receive = refuse
    b.mailbox.send(0, RRefAck(), 2, (), channel.number)

    channel._spinner._credit = -math.inf  # it blocks at once

    def own() -> None:
        while (inbound := channel.receive(20)) is None:
            pass
        results.put(inbound)

    owner = threading.Thread(target=own)
    owner.start()
    resume = later.get(timeout=20)
    state = Path(f"/proc/self/task/{owner.native_id}/stat")
    eventually(lambda: state.read_text().split()[2] == "S")
    resume()
    inbound = results.get(timeout=10)
    assert inbound is not None
    assert inbound.envelope.message_id == 2
    owner.join()
    channel.release([channel])


def test_a_channel_is_abandoned_without_descriptors(office: Office) -> None:
    a, b = office.pair()
    channel = opened_channel(a, b)
    assert isinstance(channel, Channel)
    (connection,) = channel._listener.connections.values()

    def refuse(*args: object) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    connection.receive = refuse
    channel._listener.read(connection.fd)
    channel.abandon([channel], a.arrived.put)
    assert connection.fd == -1


# ---- interrupts ------------------------------------------------------------------------------------------


def test_a_block_of_an_interrupted_send_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt is raised when the message has left, so the peer will read it."""
    with office_of(OverArena()) as office:
        a, b = office.pair()
        a.mailbox.send(1, StoreSet("key", b""), 1, [bytes(5000)])
        b.take()
        send_local = Links.send_local

        def interrupted(*args: Any) -> None:
            send_local(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Links, "send_local", interrupted)
            with pytest.raises(KeyboardInterrupt):
                a.mailbox.send(1, StoreSet("key", b""), 2, [b"x" * 5000])
        a.mailbox.send(1, StoreSet("key", b""), 3, [b"y" * 5000])
        first, second = b.take(2)
        assert bytes(first.frames[0]) == b"x" * 5000
        assert bytes(second.frames[0]) == b"y" * 5000
        assert in_flight(a) == {}
        del first, second


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="of the main thread")
def test_an_interrupt_loses_nothing_that_was_sent_before(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to the main thread while another connection takes over what the kernel did not accept."""
    a, gate = office.open(0), Gate()
    office.open(1, handler=gate)
    adopt, sent = LocalConnection.adopt, list(range(1000))

    def interrupted(self: LocalConnection, queued: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        adopt(self, queued)

    monkeypatch.setattr(LocalConnection, "adopt", interrupted)
    with monkeypatch.context() as patched:
        patched.setattr(links, "MAX_AHEAD", 0)  # they wait here
        for number in sent:
            a.mailbox.send(1, StoreSet("key", bytes(10_000)), number)
    with suppress(KeyboardInterrupt):
        a.mailbox.send(1, StoreSet("key", bytes(10_000)), len(sent))
    gate.opened.set()
    eventually(lambda: len(gate.ids), lambda count: count >= len(sent))
    assert gate.ids[: len(sent)] == sent


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_an_interrupted_send_leaves_nothing_with_the_receiver(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a frame of which only parts were sent."""
    size, parts = 4 << 20, 3
    with office_of(OverZmq(scheme)) as office:
        a, b = office.pair()
        a.mailbox.send(1, HELLO, 1)
        b.take()

        def interrupts(where: type, name: str) -> None:
            """As it sends the third part, by whichever way."""
            real = getattr(where, name)

            def interrupted(self: Any, message: Any, *more: Any) -> Any:
                nonlocal parts
                first = bytes(message[0] if isinstance(message, tuple) else message)
                with suppress(ProtocolError):  # it is none, but sealed
                    parts -= isinstance(decode_all(first)[2], Chunk)
                    if not parts:
                        parts = -1
                        raise KeyboardInterrupt
                return real(self, message, *more)

            patched.setattr(where, name, interrupted)

        with monkeypatch.context() as patched:
            interrupts(ChannelSocket, "seal_and_send")
            interrupts(SessionSocket, "send")
            interrupts(LocalConnection, "_put")
            with pytest.raises(KeyboardInterrupt):
                a.mailbox.send(1, StoreSet("key", b""), 2, [bytes(size)])
        eventually(lambda: b.mailbox.statistics()["kept_warm"], lambda kept: kept == size)
        assert in_flight(a) == {}
        a.mailbox.send(1, StoreSet("key", b""), 3, [b"x" * size])
        (whole,) = b.take()
        assert bytes(whole.frames[0]) == b"x" * size
        assert b.mailbox.statistics()["malformed"] == 0
        del whole


# ---- the end ---------------------------------------------------------------------------------------------


def test_a_message_that_is_sent_while_its_link_ends_keeps_nothing() -> None:
    with office_of(OverArena()) as office:
        a, b = Ends(office, 0), office.open(1)
        a.mailbox.send(1, StoreSet("key", b""), 1, [bytes(5000)])
        b.take()
        assert isinstance(a.mailbox, ZmqMailbox)
        prepare = a.mailbox._plane.prepare

        def late(*args: Any) -> Any:
            a.mailbox.end(1, "lost")
            assert a.ends.get(timeout=20).peer == 1
            stop_reading(a).set()  # what belongs to the link is dropped
            return prepare(*args)

        a.mailbox._plane.prepare = late
        a.mailbox.send(1, StoreSet("key", bytes(2000)), 2, [b"x" * 5000])
        a.mailbox._plane.prepare = prepare
        stop_reading(a).set()
        assert in_flight(a) == {}
        b.mailbox.close()
        b.mailbox.join(Deadline.after(20))
        a.mailbox._plane.shared_memory._arena.reclaim()
        assert a.mailbox.statistics()["arena"]["blocks_leased"] == 0


def test_an_end_that_cannot_be_handled_does_not_end_the_reading(office: Office) -> None:
    a, b = office.open(0, start=False), office.open(1)
    failed = threading.Event()

    def fail(end: PeerEnd) -> None:
        failed.set()
        raise RuntimeError("no")

    a.mailbox.start(a.arrived.put, office.resolve, on_end=fail)
    b.mailbox.send(0, Hello("x"), 1)
    a.take()
    b.mailbox.close()
    assert failed.wait(20)
    c = office.open(2)
    c.mailbox.send(0, Hello("x"), 2)
    assert a.take()[0].envelope.message_id == 2


def test_a_forgotten_port_is_released_whatever_its_thread_does(office: Office) -> None:
    """Its finalizer may run while the same thread acquires another channel."""
    a, b = office.pair()
    channel = opened_channel(a, b)
    assert isinstance(a.mailbox, ZmqMailbox)
    done = threading.Event()

    def finalize() -> None:
        with a.mailbox._channels._lock:  # type: ignore[attr-defined]
            channel.release([channel])
        done.set()

    threading.Thread(target=finalize, daemon=True).start()
    assert done.wait(20)


# ---- closing ---------------------------------------------------------------------------------------------


def test_the_authenticator_is_not_closed_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ZeroMQ socket that two threads use at a time crashes the process."""
    service = ServiceThread("w0")
    service.start()
    reading, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    close = ZapAuthenticator.close

    def read(self: ZapAuthenticator) -> None:
        reading.set()
        assert go_on.wait(20)
        assert not closed.is_set()

    def note_and_close(self: ZapAuthenticator) -> None:
        closed.set()
        close(self)

    monkeypatch.setattr(ZapAuthenticator, "read", read)
    monkeypatch.setattr(ZapAuthenticator, "close", note_and_close)
    mailbox = ZmqMailbox("w0", 0, keys=load_keys("the secret of this job, of 33 bytes"))
    mailbox.start(lambda inbound: None, lambda peer: PeerAddress((), 0), service=service)
    assert reading.wait(20)
    mailbox.close()
    assert mailbox.join(Deadline.after(0.1)) == ["w0-receiver"]
    assert not closed.is_set()
    go_on.set()
    assert mailbox.join(Deadline.after(20)) == []
    assert closed.is_set()
    service.close()
    assert service.join(Deadline.after(20)) == []


@contextmanager
def crowd_at(box: Box) -> Iterator[None]:
    """As many processes connect to a mailbox, which does not read, as the kernel lets wait."""
    with ExitStack() as others:
        name = local.unix_name(channel_endpoint(box.mailbox.endpoints[0]))
        error = 0
        while not error:
            other = others.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            other.setblocking(False)
            error = other.connect_ex(name)
        assert error == errno.EAGAIN
        yield


def test_no_send_waits_for_a_receiver_that_accepts_no_connection(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped, to which many connect. Each send waited until its attempt to continue by
    another connection had failed, for 5 s.
    """
    monkeypatch.setattr(local_connection, "SEND_BUFFER_BYTES", 1)
    a, b = office.open(0), office.open(1, start=False)
    a.mailbox.send(1, Hello("x"), 0)
    with crowd_at(b):
        connection, sent, began = connection_of(a, 1), 1, time.monotonic()
        while connection.backlog() < 3:
            a.mailbox.send(1, Hello("x"), sent)
            sent += 1
        assert time.monotonic() - began < local_connection.CONNECT_SECONDS
    b.mailbox.start(b.arrived.put, office.resolve)
    assert [inbound.envelope.message_id for inbound in b.take(sent)] == list(range(sent))


def test_a_mailbox_closes_in_time_though_a_peer_accepts_no_connection(office: Office) -> None:
    """It has never sent anything to that peer, and tells it that it leaves. It waited for 5 s."""
    a, gate, c = office.open(0), Gate(), office.open(2)
    b = office.open(1, gate)
    c.mailbox.send(1, HELLO, 1)
    assert gate.entered.acquire(timeout=20)
    b.mailbox.send(0, HELLO, 1)
    a.take()
    with crowd_at(b):
        began = time.monotonic()
        a.mailbox.close("it has finished")
        assert time.monotonic() - began < local_connection.CONNECT_SECONDS / 2
    gate.opened.set()


def test_a_goodbye_reaches_a_process_of_another_namespace(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two containers on the network of their host. The kernel tells neither the number of the other, so
    nothing may be sent before the receiver has accepted the connection.
    """
    monkeypatch.setattr(local_connection, "process_of", lambda connected: 0)
    a, b = office.open(0, ends=True), office.open(1, ends=True)
    a.mailbox.send(1, HELLO, 1)
    assert isinstance(b.events.get(timeout=20), Inbound)
    b.mailbox.close("it has finished")
    assert a.take_until_end(1) == ([], "it has finished")


def test_what_is_read_while_a_mailbox_closes_is_not_malformed() -> None:
    """1. Many messages are queued. 2. The reading thread has a message of a burst in hand.
    3. The mailbox is closed. 4. The reading thread goes on with the rest of the burst.
    """
    reached, closed, arrived = threading.Event(), threading.Event(), 0

    def handle(_: Inbound) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == 10:
            reached.set()
            assert closed.wait(20)

    with office_of(OverArena()) as office:
        a, gate = office.open(0), Gate()
        b = office.open(1, lambda inbound: handle(inbound) if gate.opened.is_set() else gate(inbound))
        a.mailbox.send(1, HELLO, 0)
        assert gate.entered.acquire(timeout=20)
        for number in range(1, 33):
            a.mailbox.send(1, HELLO, number, [bytes(20 << 10)])
        gate.opened.set()
        assert reached.wait(20)
        b.mailbox.close()
        closed.set()
        assert b.mailbox.join(Deadline.after(20)) == []
        assert b.mailbox.statistics()["malformed"] == 0
