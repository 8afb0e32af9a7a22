"""Memory of devices between two mailboxes over sockets: beside the arena, beside bytes, and alone."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from tests.transport.devices.stand_in import MB, StandIn, StandInFrame
from zmqgrad.errors import UnknownPeerError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.timekeeper import Timekeeper
from zmqgrad.transport.arena.segment import supported
from zmqgrad.transport.arena.settings import OFF, ArenaSettings
from zmqgrad.transport.base import Inbound
from zmqgrad.transport.devices.borrowings import Block
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.wire.messages import RRefAck

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no sealed shared memory")

LIMIT = 20.0
ASKS = RRefAck()


class Worker:
    """A mailbox with stand-in devices, and what came to it."""

    known: dict[int, Worker] = {}

    def __init__(self, number: int, arena: ArenaSettings, devices: bool = True) -> None:
        self.number = number
        self.port = StandIn()
        self.time = Timekeeper(f"w{number}")
        self.mailbox = ZmqMailbox(
            f"w{number}", number, tcp_host=None, arena=arena, devices=self.port if devices else None
        )
        self.arrived: SimpleQueue[Inbound] = SimpleQueue()
        self.known[number] = self

    def start(self) -> None:
        self.time.start()
        self.mailbox.start(self.arrived.put, self._resolve, timer=self.time)

    def _resolve(self, peer: int) -> tuple[str, ...]:
        if peer not in self.known:
            raise UnknownPeerError(f"no worker {peer}")
        return self.known[peer].mailbox.endpoints

    def pass_on(self, other: Worker, frames: list[Any]) -> list[Any]:
        """Send ``frames``; what came of them."""
        self.mailbox.send(other.number, ASKS, 1, frames)
        return list(other.arrived.get(timeout=LIMIT).frames)

    def warm(self, other: Worker) -> None:
        """Go on until ``other`` has opened our memory."""
        for _ in range(10_000):
            if isinstance(self.pass_on(other, [StandInFrame(b"warm")])[0], Block):
                return
        raise AssertionError(f"never from device to device: {self.mailbox.statistics()}")

    def close(self) -> None:
        self.mailbox.close()
        self.time.close()
        deadline = Deadline.after(LIMIT)
        assert self.mailbox.join(deadline) + self.time.join(deadline) == []


@pytest.fixture(params=["arena", "sockets"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Worker, Worker]]:
    arena = ArenaSettings(64 * MB, threshold=1) if request.param == "arena" else OFF
    made = Worker(0, arena), Worker(1, arena)
    for each in made:
        each.start()
    yield made
    for each in made:
        each.close()
    Worker.known.clear()
    gc.collect()


def copied(frame: Any) -> bytes:
    if not isinstance(frame, Block):
        return bytes(frame)
    tensor = bytearray(len(frame))
    frame.copy_to(tensor)
    return bytes(tensor)


def test_frames_on_devices_travel_beside_others_and_go_back(pair: tuple[Worker, Worker]) -> None:
    a, b = pair
    a.warm(b)
    b.warm(a)
    data = [os.urandom(n) for n in (50_000, 99, 40 * MB, 7, 300_000)]
    for on_device in ([1, 3], [0, 4], [0, 1, 3, 4], [], [4]):
        sent = [StandInFrame(d) if n in on_device else d for n, d in enumerate(data)]
        got = a.pass_on(b, sent)
        assert [n for n, frame in enumerate(got) if isinstance(frame, Block)] == on_device
        assert [copied(frame) for frame in got] == data
        got.clear()
    stats = a.mailbox.statistics()
    assert stats["sent_by_path"]["cuda_ipc"] > sum(map(len, data)) - 40 * MB
    assert b.mailbox.statistics()["received_by_path"]["cuda_ipc"] == stats["sent_by_path"]["cuda_ipc"]
    assert stats["malformed"] == 0
    a.mailbox.finish_copies(Deadline.after(LIMIT))  # by themselves, or with what is said next
    assert a.mailbox.statistics()["devices"]["lent"]["gpu:0"]["blocks_lent"] == 0


def test_what_cannot_be_sent_is_lent_to_nobody(pair: tuple[Worker, Worker]) -> None:
    a, b = pair
    a.warm(b)
    a.mailbox.finish_copies(Deadline.after(LIMIT))
    with pytest.raises(UnknownPeerError):
        a.mailbox.send(9, ASKS, 1, [StandInFrame(bytes(99))])
    a.port.broken = True
    with pytest.raises(RuntimeError, match="misaligned"):
        a.mailbox.send(1, ASKS, 1, [bytes(5000), StandInFrame(bytes(99))])
    stats = a.mailbox.statistics()
    assert stats["devices"]["lent"]["gpu:0"]["blocks_lent"] == 0
    assert stats["arena"].get("blocks_lent", 0) == b.mailbox.statistics()["arena"]["blocks_in_use"]


def test_who_has_no_devices_gets_bytes() -> None:
    a, b = Worker(0, OFF), Worker(1, OFF, devices=False)
    for each in (a, b):
        each.start()
    try:
        for _ in range(50):
            assert a.pass_on(b, [StandInFrame(b"bytes")]) == [b"bytes"]
        b.mailbox.send(0, ASKS, 1)  # what b has answered came before this
        a.arrived.get(timeout=LIMIT)
        assert a.pass_on(b, [StandInFrame(b"bytes")]) == [b"bytes"]
        refused = a.mailbox.statistics()["devices"]["refused_by"]
        assert refused == {"gpu:0": {1: "no memory of devices is taken here"}}
    finally:
        for each in (a, b):
            each.close()
        Worker.known.clear()


def test_a_lost_peer_s_blocks_come_back(pair: tuple[Worker, Worker]) -> None:
    a, b = pair
    a.warm(b)
    got = a.pass_on(b, [StandInFrame(bytes(99))])
    a.mailbox.forget(1)
    assert a.mailbox.statistics()["devices"]["lent"]["gpu:0"]["blocks_lent"] >= 1  # it lives, and may read
    assert copied(got[0]) == bytes(99)
    got.clear()
    b.mailbox.finish_copies()
    b.mailbox.forget(0)
    gc.collect()
    a.warm(b)  # asked anew; and what is free of the old comes back
    a.mailbox.finish_copies(Deadline.after(LIMIT))
    assert a.mailbox.statistics()["devices"]["lent"]["gpu:0"]["blocks_lent"] == 0
