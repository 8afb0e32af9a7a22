"""The memory network: what it records, and its faults, each of which does what it says and no more."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.transport.contract import Box, Office, office_of
from tests.transport.test_contract import InMemory
from zmqgrad.errors import UnknownPeerError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.testing.network import MemoryNetwork
from zmqgrad.transport.base import PeerAddress
from zmqgrad.wire.messages import Goodbye, Hello, Message, MessageType

HELLO, GOODBYE = Hello("x"), Goodbye()


@pytest.fixture
def office() -> Iterator[Office]:
    with office_of(InMemory()) as office:
        yield office


@pytest.fixture
def network(office: Office) -> MemoryNetwork:
    assert isinstance(office.kind, InMemory)
    return office.kind.network


def say(box: Box, peer: int, *ids: int, message: Message = HELLO) -> None:
    """Send one message for each id."""
    for i in ids:
        box.mailbox.send(peer, message, i, [b"%d" % i])


def heard(network: MemoryNetwork, box: Box) -> list[int]:
    """The ids of what has arrived, once nothing is on its way."""
    network.wait_quiet()
    return [box.take()[0].envelope.message_id for _ in range(box.arrived.qsize())]


def test_drop_loses_so_many_of_that_type(office: Office, network: MemoryNetwork) -> None:
    a, b = office.pair()
    with network.drop(MessageType.HELLO, times=2) as dropped:
        say(a, 1, 1, 2, 3)
        say(a, 1, 4, message=GOODBYE)
    say(a, 1, 5)
    assert heard(network, b) == [3, 4, 5]
    assert [p.envelope.message_id for p in dropped.caught] == [1, 2]


def test_drop_without_a_number_loses_all_until_it_ends(office: Office, network: MemoryNetwork) -> None:
    a, b = office.pair()
    with network.drop():
        say(a, 1, 1, 2)
        say(a, 1, 3, message=GOODBYE)
    say(a, 1, 4)
    assert heard(network, b) == [4]


def test_a_fault_applies_to_its_source_and_target(office: Office, network: MemoryNetwork) -> None:
    a, b, c = office.open(0), office.open(1), office.open(2)
    with network.drop(source=0, target=1), network.drop(source=(1, 2), target={0}):
        for box, name in ((a, 1), (b, 2), (c, 3)):
            for peer in range(3):
                say(box, peer, name * 10 + peer)
        assert [heard(network, box) for box in (a, b, c)] == [[10], [21, 31], [12, 22, 32]]


def test_duplicate_brings_it_twice_in_memory_of_its_own(office: Office, network: MemoryNetwork) -> None:
    a, b = office.pair()
    with network.duplicate(MessageType.HELLO, times=1):
        say(a, 1, 1, 2)
    first, second, other = b.take(3)
    assert [x.envelope.message_id for x in (first, second, other)] == [1, 1, 2]
    memoryview(first.frames[0])[:] = b"?"
    assert bytes(second.frames[0]) == b"1"


def test_hold_freezes_a_step_until_released(office: Office, network: MemoryNetwork) -> None:
    a, b = office.pair()
    with network.hold(MessageType.HELLO) as held:
        sender = threading.Thread(target=say, args=(a, 1, 1, 2, 3))
        sender.start()
        held.wait(3)
        sender.join(10)
        say(a, 1, 4, message=GOODBYE)
        assert heard(network, b) == [4]
        held.release(1)
        assert heard(network, b) == [1]
        held.release()
        assert heard(network, b) == [2, 3]
        say(a, 1, 5)
        assert heard(network, b) == []
    assert heard(network, b) == [5]


def test_hold_lets_go_when_the_test_fails_too(office: Office, network: MemoryNetwork) -> None:
    a, b = office.pair()
    with pytest.raises(UnknownPeerError), network.hold():  # noqa: PT012
        say(a, 1, 1)
        say(a, 7, 1)
    assert heard(network, b) == [1]


def test_waiting_for_messages_times_out(network: MemoryNetwork) -> None:
    with (
        network.hold(MessageType.HELLO) as held,
        pytest.raises(TimeoutError, match="Hold of HELLO: caught 0"),
    ):
        held.wait(timeout=0.01)
    with pytest.raises(TimeoutError, match="nothing"):
        network.wait_sent(MessageType.HELLO, timeout=0.01)


def test_delay_lets_others_go_past(office: Office, network: MemoryNetwork) -> None:
    a, b = office.pair()
    with network.delay(MessageType.HELLO, times=1, by=2):
        say(a, 1, 1, 2, 3, 4)
        assert heard(network, b) == [2, 3, 1, 4]
    with network.delay(MessageType.GOODBYE, by=2):
        say(a, 1, 5, 6, message=GOODBYE)
        say(a, 1, 7)
        assert heard(network, b) == [7]
        say(a, 1, 8)
        assert heard(network, b) == [8, 5, 6]
        say(a, 1, 9, message=GOODBYE)
    assert heard(network, b) == [9]


def test_a_partition_drops_both_directions_and_ends(office: Office, network: MemoryNetwork) -> None:
    a, b, c = office.open(0), office.open(1), office.open(2)
    with network.partition(0, 1):
        say(a, 1, 1)
        say(b, 0, 2)
        say(a, 2, 3)
        say(c, 1, 4)
        say(a, 0, 5)
        assert [heard(network, box) for box in (a, b, c)] == [[5], [4], [3]]
    with network.partition([0, 1]) as cut:  # from everybody else
        say(a, 1, 6)
        say(a, 2, 7)
        say(c, 0, 8)
        say(a, 0, 9)
        say(c, 2, 10)
        assert [heard(network, box) for box in (a, b, c)] == [[9], [6], [10]]
        assert [p.envelope.message_id for p in cut.caught] == [7, 8]
    say(a, 1, 11)
    assert heard(network, b) == [11]


def test_reorder_is_drawn_from_its_seed_and_loses_nothing(office: Office, network: MemoryNetwork) -> None:
    a, b = office.pair()
    orders: list[list[int]] = []
    for seed in (1, 1, 2):
        with network.reorder(seed, window=4), network.hold() as held:
            say(a, 1, *range(20))
            held.release()
            orders.append(heard(network, b))
    assert orders[0] == orders[1] != orders[2]
    for order in orders:
        assert sorted(order) == list(range(20)) != order
        # A window of four: what arrives as the i-th was at most the (i+4)-th sent.
        assert all(message < place + 4 for place, message in enumerate(order))
    say(a, 1, *range(20))
    assert heard(network, b) == list(range(20))


def test_faults_work_together_in_the_order_they_began(office: Office, network: MemoryNetwork) -> None:
    a, b = office.pair()
    with network.duplicate(), network.drop(times=1):
        say(a, 1, 1)
        assert heard(network, b) == [1]
    with network.drop(times=1), network.duplicate():
        say(a, 1, 2, 3)
        assert heard(network, b) == [3, 3]


def test_history_lists_delivered_and_lost_messages(office: Office, network: MemoryNetwork) -> None:
    a, _ = office.pair()
    with network.drop(times=1):
        say(a, 1, 1, 2)
    say(a, 1, 3, message=GOODBYE)
    network.wait_sent(MessageType.HELLO, 2)
    assert [str(p) for p in network.history] == [
        "0 -> 1 HELLO #1 68 B",
        "0 -> 1 HELLO #2 68 B",
        "0 -> 1 GOODBYE #3 67 B",
    ]
    assert [p.message for p in network.history] == [HELLO, HELLO, GOODBYE]
    assert repr(network).endswith("GOODBYE #3 67 B>")


def test_the_record_is_bounded_and_holds_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmqgrad.testing.network.HISTORY_MESSAGES", 5)
    with office_of(InMemory()) as office:
        a, b = office.pair()
        say(a, 1, *range(12))
        b.take(12)
        assert isinstance(office.kind, InMemory)
        history = office.kind.network.history
        assert [(p.envelope.message_id, p.frames) for p in history] == [(i, ()) for i in range(7, 12)]


def test_messages_to_closed_mailboxes_are_counted(office: Office, network: MemoryNetwork) -> None:
    a, b = office.pair()
    say(a, 1, 1)
    b.take()
    b.mailbox.close()
    assert b.mailbox.join(Deadline.after(10)) == []
    say(a, 1, 2, 3)
    assert network.statistics() == {"open": 1, "lost": 2}


def test_quiet_means_that_handlers_have_ended_too(office: Office, network: MemoryNetwork) -> None:
    entered, go = threading.Event(), threading.Event()
    a = office.open(0)
    office.open(1, lambda _: (entered.set(), go.wait(10), None)[-1])
    say(a, 1, 1)
    assert entered.wait(10)
    with pytest.raises(TimeoutError):
        network.wait_quiet(timeout=0.01)
    go.set()
    network.wait_quiet()


def test_an_address_of_another_kind_is_of_no_use(office: Office) -> None:
    a = office.open(0, start=False)
    a.mailbox.start(lambda _: None, lambda _: PeerAddress(["tcp://127.0.0.1:1", "memory://99"]))
    with pytest.raises(UnknownPeerError, match=r"memory://99.* of worker 1"):
        say(a, 1, 1)


def test_repr_shows_the_state(office: Office) -> None:
    a = office.open(3)
    assert repr(a.mailbox) == "<MemoryMailbox w3 id=3 at memory://0: 0 waiting>"
    a.mailbox.close()
    assert repr(a.mailbox) == "<MemoryMailbox w3 id=3 at memory://0: closed>"
