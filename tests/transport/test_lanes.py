"""Lanes: answers go to the thread that waits, and to the ROUTER where that cannot be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from tests.transport.contract import Box, Office, content, office_of
from tests.transport.test_contract import OverZmq
from zmqgrad.runtime.clock import Deadline, ManualClock
from zmqgrad.transport.base import Inbound, Lane
from zmqgrad.transport.direct import LARGEST
from zmqgrad.transport.lanes import MAX_LANES
from zmqgrad.transport.looking import Look
from zmqgrad.wire.messages import ExceptionReply, Hello, RRefAck

ANSWER = RRefAck()


@pytest.fixture
def office() -> Iterator[Office]:
    with office_of(OverZmq("ipc")) as opened:
        yield opened


def pair(office: Office) -> tuple[Box, Box]:
    """Two boxes; the first has sent to the second before, as lanes are for peers whose way is known."""
    a, b = office.pair()
    assert a.mailbox.take_lane(1) is None
    a.mailbox.send(1, Hello("x"), 1)
    b.take()
    return a, b


def lane_to(box: Box, peer: int = 1) -> Lane:
    lane = box.mailbox.take_lane(peer)
    assert lane is not None
    return lane


def open_lane(a: Box, b: Box, lane: Lane) -> None:
    """Let ``b`` write to the lane of ``a``: what it answers before the lane is ready goes to the ROUTER."""
    ways, at_router = b.mailbox._ways._to_lanes, -1  # type: ignore[attr-defined]
    before = ways[0, lane.number].messages if (0, lane.number) in ways else 0
    while (0, lane.number) not in ways or ways[0, lane.number].messages == before:
        assert lane.receive(0.01) is None  # lets b in
        b.mailbox.send(0, ANSWER, 1, (), lane.number)
        at_router += 1
    received(lane)
    a.take(at_router)


def received(lane: Lane) -> Inbound:
    inbound = lane.receive(20)
    assert inbound is not None
    return inbound


def test_an_answer_comes_by_the_lane_that_the_request_names(office: Office) -> None:
    a, b = pair(office)
    lane = lane_to(a)
    open_lane(a, b, lane)
    for message_id in range(2, 20):
        a.mailbox.send(1, Hello("x"), message_id, [b"q"], lane.number)
        (request,) = b.take()
        assert request.envelope.lane == lane.number
        b.mailbox.send(0, ANSWER, message_id, (), request.envelope.lane)
        assert received(lane).envelope.message_id == message_id
    assert a.nothing_more()
    lane.give_back()


@pytest.mark.parametrize("frames", [[b"an", b"swer"], [b""], [bytes(LARGEST)], [bytes(1 << 20)]])
def test_an_answer_of_several_frames_comes_in_at_the_router(office: Office, frames: list[bytes]) -> None:
    a, b = pair(office)
    lane = lane_to(a)
    open_lane(a, b, lane)
    b.mailbox.send(0, ANSWER, 3, frames, lane.number)
    (answer,) = a.take()
    assert content(answer) == frames
    assert lane.receive(0.0) is None
    lane.give_back()


def test_a_large_answer_of_one_frame_comes_in_at_the_router(office: Office) -> None:
    a, b = pair(office)
    lane = lane_to(a)
    open_lane(a, b, lane)
    message = ExceptionReply("E", "m", "x" * LARGEST, "w")
    b.mailbox.send(0, message, 3, (), lane.number)
    (answer,) = a.take()
    assert answer.message == message
    lane.give_back()


def test_requests_never_travel_by_lanes(office: Office) -> None:
    a, b = pair(office)
    a.mailbox.send(1, Hello("x"), 2, (), 1)
    b.take()
    lane = lane_to(b) if b.mailbox.take_lane(0) else None
    assert lane is None
    b.mailbox.send(0, Hello("back"), 3, (), 1)
    (request,) = a.take()
    assert request.message == Hello("back")


@pytest.mark.parametrize("number", [MAX_LANES + 1, 255])
def test_an_answer_for_a_lane_that_there_cannot_be_comes_in_at_the_router(
    office: Office, number: int
) -> None:
    a, b = pair(office)
    b.mailbox.send(0, ANSWER, 5, [b"x"], number)
    (answer,) = a.take()
    assert answer.envelope.message_id == 5


def test_without_an_ipc_address_answers_come_in_at_the_router() -> None:
    with office_of(OverZmq("tcp")) as office:
        a, b = office.pair()
        a.mailbox.send(1, Hello("x"), 1)
        b.take()
        assert a.mailbox.take_lane(1) is None
        b.mailbox.send(0, ANSWER, 1, (), 1)
        a.take()


def test_each_thread_has_its_own_and_they_end(office: Office) -> None:
    a, _ = pair(office)
    lanes = [lane_to(a) for _ in range(MAX_LANES)]
    assert len({lane.number for lane in lanes}) == MAX_LANES
    assert a.mailbox.take_lane(1) is None
    lanes[3].give_back()
    assert lane_to(a) is lanes[3]
    for lane in lanes:
        lane.give_back()


def test_a_poke_ends_a_wait_and_does_no_harm_to_the_next(office: Office) -> None:
    a, b = pair(office)
    lane = lane_to(a)
    threading.Timer(0.01, lane.poke).start()
    assert lane.receive(None) is None
    lane.poke()
    lane.give_back()
    lane = lane_to(a)
    open_lane(a, b, lane)
    a.mailbox.send(1, Hello("x"), 7, (), lane.number)
    b.take()
    b.mailbox.send(0, ANSWER, 7, (), lane.number)
    while (answer := lane.receive(20)) is None:
        pass
    assert answer.envelope.message_id == 7
    lane.give_back()


def test_time_passes_without_an_answer(office: Office) -> None:
    a, _ = pair(office)
    lane = lane_to(a)
    assert lane.receive(0.0) is None
    assert lane.receive(0.001) is None
    lane.give_back()


def test_a_late_answer_is_found_by_whoever_waits_next(office: Office) -> None:
    a, b = pair(office)
    lane = lane_to(a)
    open_lane(a, b, lane)
    a.mailbox.send(1, Hello("x"), 8, (), lane.number)
    b.take()
    lane.give_back()
    b.mailbox.send(0, ANSWER, 8, (), lane.number)
    again = lane_to(a)
    assert received(again).envelope.message_id == 8
    again.give_back()


def test_garbage_at_a_lane_is_counted_and_dropped(office: Office) -> None:
    a, b = pair(office)
    lane = lane_to(a)
    open_lane(a, b, lane)
    way = b.mailbox._ways._to_lanes[0, lane.number]  # type: ignore[attr-defined]
    way.direct.send(b"GET / HTTP/1.1")
    assert lane.receive(20) is None
    assert a.mailbox.statistics()["malformed"] == 1
    lane.give_back()


def test_a_lane_that_is_held_outlasts_close_until_it_is_given_back(office: Office) -> None:
    a, _ = pair(office)
    lane = lane_to(a)
    a.mailbox.close()
    assert a.mailbox.take_lane(1) is None
    assert a.mailbox.join(Deadline.after(0.05)) == ["w0-lanes"]
    lane.poke()
    assert lane.receive(20) is None
    lane.give_back()
    lane.poke()  # of one that is closed
    assert a.mailbox.join(Deadline.after(20)) == []


def test_a_peer_that_is_forgotten_is_found_again(office: Office) -> None:
    a, b = pair(office)
    lane = lane_to(a)
    for _ in range(2):
        open_lane(a, b, lane)
        b.mailbox.forget(0)
    lane.give_back()


class Polled:
    """In the place of a lane's poll: nothing ever comes; ``meanwhile`` happens at the fifth look."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.meanwhile = meanwhile
        self.looks = 0
        self.slept = False

    def poll(self, milliseconds: int) -> list[tuple[int, int]]:
        if milliseconds:
            self.slept = True
            return []
        self.looks += 1
        if self.looks == 5:
            self.meanwhile()
        return []


def looked(lane: Lane, meanwhile: Callable[[], object]) -> int:
    """How often ``lane`` looks, for whom no time passes, before it sleeps."""
    polled = Polled(meanwhile)
    lane._look = Look(lane._look._eyes, ManualClock())  # type: ignore[attr-defined]
    lane._poll = polled  # type: ignore[attr-defined]
    assert lane.receive(1) is None
    assert polled.slept
    return polled.looks


def test_who_waits_does_not_look_while_another_thread_works_or_looks(office: Office) -> None:
    a, b = pair(office)
    first, second = lane_to(a), lane_to(a)
    eyes = a.mailbox._eyes  # type: ignore[attr-defined]
    assert looked(first, lambda: looked(second, eyes.look_away)) == 5
    first.give_back()
    second.give_back()

    ran: SimpleQueue[Inbound] = SimpleQueue()
    at_work = office.open(2, lambda inbound: lambda: ran.put(inbound))  # type: ignore[arg-type, return-value]
    at_work.mailbox.send(1, Hello("x"), 1)
    b.take()

    def give_work() -> None:
        b.mailbox.send(2, Hello("x"), 2)
        ran.get(timeout=20)

    lane = lane_to(at_work)
    assert looked(lane, give_work) == 5
    lane.give_back()
