"""Sessions under a network that loses, repeats, delays and reorders: exactly once and in order."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zmqgrad.transport.session import (
    ACK_BYTES,
    ACK_MESSAGES,
    ACK_SECONDS,
    BURST_BYTES,
    BURST_MESSAGES,
    MAX_RESEND_SECONDS,
    RESEND_BYTES_PER_SECOND,
    RESEND_SECONDS,
    Incoming,
    Outgoing,
)


class Sessions(RuleBasedStateMachine):
    """A sender and a receiver; ``wire`` and ``acks`` are what is on its way between them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.sent = 0
        self.sizes: dict[int, int] = {}
        self.outgoing: Outgoing[int] = Outgoing()
        self.incoming = Incoming()
        self.wire: list[tuple[int, int, int]] = []  # sequence, message, size
        self.acks: list[int] = []
        self.delivered: list[int] = []

    @rule(size=st.integers(1, ACK_BYTES), connected=st.booleans())
    def send(self, size: int, connected: bool) -> None:
        self.sent += 1
        self.sizes[self.sent] = size
        behind = self.outgoing.behind
        sequence = self.outgoing.add(self.sent, size, self.now)
        if connected and not behind:
            self.wire.append((sequence, self.sent, size))

    def put(self) -> None:
        """Put on the wire what is to be sent."""
        self.wire += [
            (sequence, message, self.sizes[message]) for sequence, message in self.outgoing.to_send()
        ]

    @precondition(lambda self: self.wire)
    @rule(data=st.data(), repeated=st.booleans())
    def arrive(self, data: st.DataObject, repeated: bool) -> None:
        at = data.draw(st.integers(0, len(self.wire) - 1))
        sequence, message, size = self.wire[at] if repeated else self.wire.pop(at)
        if self.incoming.receive(sequence, size, self.now):
            self.delivered.append(message)

    @rule(fraction=st.floats(0, 1))
    def lose(self, fraction: float) -> None:
        del self.wire[int(fraction * len(self.wire)) :]

    @rule()
    def reconnect(self) -> None:
        self.outgoing.reconnect(self.now)
        self.put()

    @rule()
    def acknowledge(self) -> None:
        self.acks.append(self.incoming.acknowledgement())

    @precondition(lambda self: self.acks)
    @rule(data=st.data(), lost=st.booleans())
    def hear(self, data: st.DataObject, lost: bool) -> None:
        sequence = self.acks.pop(data.draw(st.integers(0, len(self.acks) - 1)))
        if not lost:
            self.outgoing.acknowledge(sequence, self.now)
            self.put()

    @rule(seconds=st.floats(0, 2 * MAX_RESEND_SECONDS))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def in_order_and_once(self) -> None:
        assert self.delivered == list(range(1, len(self.delivered) + 1))

    @invariant()
    def what_is_acknowledged_has_arrived(self) -> None:
        assert len(self.delivered) >= self.outgoing.acknowledged
        assert len(self.outgoing) == self.sent - self.outgoing.acknowledged

    def teardown(self) -> None:
        """Once the network is well again, everything arrives."""
        self.wire.clear()
        self.reconnect()
        while self.wire:
            for sequence, message, size in self.wire:
                if self.incoming.receive(sequence, size, self.now):
                    self.delivered.append(message)
            self.wire.clear()
            self.outgoing.acknowledge(self.incoming.acknowledgement(), self.now)
            self.put()
        self.outgoing.acknowledge(self.incoming.acknowledgement(), self.now)
        self.in_order_and_once()
        assert len(self.delivered) == self.sent
        assert len(self.outgoing) == self.outgoing.size == 0
        assert self.outgoing.due == self.incoming.due == math.inf


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_an_acknowledgement_waits_for_the_next_message() -> None:
    incoming = Incoming()
    assert incoming.due == math.inf
    incoming.receive(1, 10, 100.0)
    incoming.receive(2, 10, 100.01)
    assert incoming.due == 100.0 + ACK_SECONDS
    assert incoming.acknowledgement() == 2
    assert incoming.due == math.inf


def test_many_messages_or_bytes_are_acknowledged_at_once() -> None:
    incoming = Incoming()
    for n in range(1, ACK_MESSAGES):
        incoming.receive(n, 1, 5.0)
        assert incoming.due == 5.0 + ACK_SECONDS
    incoming.receive(ACK_MESSAGES, 1, 5.0)
    assert incoming.due == 5.0
    assert incoming.acknowledgement() == ACK_MESSAGES
    incoming.receive(ACK_MESSAGES + 1, ACK_BYTES, 6.0)
    assert incoming.due == 6.0


def test_a_duplicate_is_acknowledged_at_once_and_a_gap_never() -> None:
    incoming = Incoming()
    incoming.receive(1, 1, 0.0)
    incoming.acknowledgement()
    assert not incoming.receive(3, 1, 1.0)
    assert incoming.due == math.inf
    assert not incoming.receive(1, 1, 2.0)
    assert incoming.due == 2.0
    assert (incoming.gaps, incoming.duplicates) == (1, 1)


@given(st.integers(1, 1 << 30))
def test_the_retransmission_timer_doubles_and_allows_for_large_messages(size: int) -> None:
    outgoing: Outgoing[str] = Outgoing()
    outgoing.add("m", size, 10.0)
    transfer = size / RESEND_BYTES_PER_SECOND
    now, pauses = 10.0, []
    for _ in range(6):
        due = outgoing.due
        assert not outgoing.is_overdue(math.nextafter(due, 0))
        assert outgoing.is_overdue(due)
        pauses.append(due - now - transfer)
        now = due
    expected = [min(RESEND_SECONDS * 2**n, MAX_RESEND_SECONDS) for n in range(6)]
    assert all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(pauses, expected, strict=True))
    assert outgoing.acknowledge(1, now)
    outgoing.add("n", 1, now)
    assert math.isclose(outgoing.due - now, RESEND_SECONDS, abs_tol=1e-6)


@given(st.lists(st.integers(1, BURST_BYTES), max_size=3 * BURST_MESSAGES))
def test_resends_are_sent_in_bursts(sizes: list[int]) -> None:
    outgoing: Outgoing[int] = Outgoing()
    for n, size in enumerate(sizes, 1):
        outgoing.add(n, size, 0.0)
        assert not outgoing.behind
    outgoing.reconnect(0.0)
    sent: list[int] = []
    while burst := outgoing.to_send():
        sent += [message for _, message in burst]
        assert len(burst) <= BURST_MESSAGES
        assert sum(sizes[message - 1] for _, message in burst) <= 2 * BURST_BYTES
        outgoing.acknowledge(sent[-1], 0.0)
    assert sent == list(range(1, len(sizes) + 1))


def test_an_acknowledgement_of_unsent_messages_is_ignored() -> None:
    outgoing: Outgoing[str] = Outgoing()
    outgoing.add("m", 1, 0.0)
    assert not outgoing.acknowledge(2, 0.0)
    assert not outgoing.acknowledge(0, 0.0)
    assert len(outgoing) == 1
    assert outgoing.acknowledge(1, 0.0)
    assert not outgoing.acknowledge(1, 0.0), "an old one"
