"""Looking ends when something is found, when its time is over, or when others work."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from tests.support.waiting import eventually
from tests.transport.contract import acquire, office_of
from tests.transport.test_contract import OverZmq
from zmqgrad.errors import ConfigurationError
from zmqgrad.rpc import RpcBackendOptions, reply_port
from zmqgrad.rpc.reply_port import ReplyPorts
from zmqgrad.runtime import spinning
from zmqgrad.runtime.clock import MONOTONIC, ManualClock
from zmqgrad.runtime.spinning import (
    COOLDOWN_WAITS,
    CROWDED_SECONDS,
    MAX_CREDIT,
    SPIN_SECONDS,
    SpinBudget,
    Spinner,
)
from zmqgrad.transport import local
from zmqgrad.transport.base import Mailbox
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.wire.messages import Hello


class Spinning(OverZmq):
    """Mailboxes of this host that spin for so long."""

    def __init__(self, seconds: float) -> None:
        super().__init__("ipc")
        self._seconds = seconds

    def open(self, name: str, worker_id: int) -> Mailbox:
        return ZmqMailbox(name, worker_id, tcp_host=None, spin_seconds=self._seconds)


LOOK = CROWDED_SECONDS / 2
"""What a look takes, on a core that nobody else needs."""

LOOKS = 10
"""There is time for so many."""


class Place:
    """Where something is found at the ``at``-th look."""

    def __init__(self, at: int | None = None, seconds: float = LOOKS * LOOK) -> None:
        self.clock = ManualClock()
        self.budget = SpinBudget(seconds)
        self.spinner = Spinner(self.budget, self.clock)
        self.at = at
        self.looks = 0
        self.crowded = -1
        """The look during which others run on this core."""

    def poll(self, seconds: float) -> list[int]:
        assert seconds == 0
        self.clock.advance(2.1 * CROWDED_SECONDS if self.looks == self.crowded else LOOK)
        self.looks += 1
        return [7] if self.looks == self.at else []

    def wait(self) -> int:
        """So many looks a wait takes that finds nothing."""
        self.looks = 0
        assert self.spinner.spin(self.poll) == []
        return self.looks


def test_an_early_event_is_found() -> None:
    place = Place(at=3)
    assert place.spinner.spin(place.poll) == [7]
    assert place.looks == 3


def test_spinning_ends_at_its_time_limit() -> None:
    assert Place().wait() == LOOKS


def test_spin_duration_is_configurable() -> None:
    assert Place(seconds=LOOKS * LOOK / 2).wait() == 5


def test_unsolicited_messages_have_a_shorter_limit() -> None:
    place = Place()
    place.spinner = Spinner(place.budget, place.clock, at_most=2 * LOOK)
    assert place.wait() == 2
    place.budget.seconds = LOOK
    assert place.wait() == 1


def test_a_budget_of_zero_never_spins() -> None:
    place = Place(at=1, seconds=0.0)
    assert [place.wait() for _ in range(2 * COOLDOWN_WAITS)] == [0] * (2 * COOLDOWN_WAITS)


def test_unsuccessful_spins_start_a_cooldown() -> None:
    place = Place()
    looked = [bool(place.wait()) for _ in range(MAX_CREDIT // 2 + COOLDOWN_WAITS + 2)]
    assert looked == [True] * (MAX_CREDIT // 2) + [False] * (COOLDOWN_WAITS + 1) + [True]


def test_successful_spins_restore_the_credit() -> None:
    place = Place()
    for _ in range(MAX_CREDIT // 2 - 1):
        place.wait()
    place.at = 1
    for _ in range(MAX_CREDIT):
        place.looks = 0
        assert place.spinner.spin(place.poll) == [7]
    place.at = None
    assert all(place.wait() for _ in range(MAX_CREDIT // 2))
    assert not place.wait()


def test_only_the_last_spinner_continues() -> None:
    first = Place()
    second = Spinner(first.budget, first.clock)

    def poll(seconds: float) -> list[int]:
        if first.looks == 3:
            second.spin(lambda _: [1])
        return first.poll(seconds)

    assert first.spinner.spin(poll) == []
    assert first.looks == 4


def test_a_working_thread_ends_spinning() -> None:
    place = Place()

    def poll(seconds: float) -> list[int]:
        place.budget.yield_cpu()
        return place.poll(seconds)

    assert place.spinner.spin(poll) == []
    assert place.looks == 1
    assert place.wait() == LOOKS  # it was not in vain: it was ended


def test_none_spins_on_a_core_that_others_need() -> None:
    place = Place()
    place.crowded = 3
    assert place.wait() == 4
    assert all(place.wait() == 4 for _ in range(MAX_CREDIT))  # nor was it in vain


def test_what_the_others_have_sent_is_found() -> None:
    place = Place(at=4)
    place.crowded = 3
    assert place.spinner.spin(place.poll) == [7]


def test_options_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZMQGRAD_SPIN_US", raising=False)
    assert RpcBackendOptions().spin_seconds() == SPIN_SECONDS
    monkeypatch.setenv("ZMQGRAD_SPIN_US", "250")
    assert RpcBackendOptions().spin_seconds() == 250e-6
    assert RpcBackendOptions(spin_us=0).spin_seconds() == 0


@pytest.mark.parametrize("microseconds", [-1, 0.5, True, "100", 1_000_001])
def test_times_that_cannot_be(microseconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="spin_us must be a number of microseconds from 0"):
        RpcBackendOptions(spin_us=microseconds)


@pytest.mark.skipif(not local.supported(), reason="reply channels are Linux's")
def test_a_worker_spins_for_the_configured_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spinning, "CROWDED_SECONDS", math.inf)  # other tests may need the cores

    def time_to_receive_nothing(seconds: float) -> tuple[float, float]:
        """How long that takes, and how much of a processor."""
        with office_of(Spinning(seconds)) as office:
            a, b = office.pair()
            a.mailbox.send(1, Hello("x"), 1)
            b.take()
            channel = acquire(a.mailbox, 1)
            assert channel is not None
            began, used = time.perf_counter(), time.thread_time()
            assert channel.receive(0.0) is None
            taken = time.perf_counter() - began, time.thread_time() - used
            channel.release([channel])
            return taken

    # Another thread that begins to spin or to work ends a spin early.
    eventually(lambda: time_to_receive_nothing(0.1), lambda times: times[0] >= 0.1)
    assert time_to_receive_nothing(0.0)[1] < 0.1


@pytest.mark.skipif(not local.supported(), reason="reply channels are Linux's")
def test_none_spins_while_as_many_peers_as_cores_may_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spinning, "CROWDED_SECONDS", math.inf)
    monkeypatch.setattr(reply_port, "CORES", 2)
    with office_of(Spinning(0.1)) as office:
        a, b = office.pair()
        a.mailbox.send(1, Hello("x"), 1)
        b.take()
        ports = ReplyPorts(a.mailbox, MONOTONIC)

        def spent(*peers: int) -> tuple[float, float]:
            """The time, and that of a processor, in which nothing arrives from any of ``peers``."""
            port = ports.acquire_any(peers)
            promise = port.promise()
            began, used = time.perf_counter(), time.thread_time()
            assert port.receive(promise, MONOTONIC.now()) is None
            taken = time.perf_counter() - began, time.thread_time() - used
            promise.set_result(None)
            port.release()
            return taken

        assert spent(1, 2)[1] < 0.1
        eventually(lambda: spent(1), lambda times: times[0] >= 0.1)  # the channel is the same
