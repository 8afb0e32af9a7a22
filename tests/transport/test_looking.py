"""Looking ends when something is found, when its time is over, or when others work."""

from __future__ import annotations

from typing import Any

import pytest

from zmqgrad.errors import ConfigurationError
from zmqgrad.rpc import RpcBackendOptions
from zmqgrad.runtime.clock import Deadline, ManualClock
from zmqgrad.transport.looking import MOST_LUCK, PATIENCE, SECONDS, Eyes, Look
from zmqgrad.transport.mailbox import ZmqMailbox


class Place:
    """Where something is found at the ``at``-th look; each look takes a tenth of the time that there is."""

    def __init__(self, at: int | None = None, seconds: float = SECONDS) -> None:
        self.clock = ManualClock()
        self.eyes = Eyes(seconds)
        self.look = Look(self.eyes, self.clock)
        self.at = at
        self.looks = 0

    def poll(self, seconds: float) -> list[int]:
        assert seconds == 0
        self.clock.advance(SECONDS / 10)
        self.looks += 1
        return [7] if self.looks == self.at else []

    def wait(self) -> int:
        """So many looks a wait takes that finds nothing."""
        self.looks = 0
        assert self.look.at(self.poll) == []
        return self.looks


def test_what_comes_soon_is_found() -> None:
    place = Place(at=3)
    assert place.look.at(place.poll) == [7]
    assert place.looks == 3


def test_looking_ends_when_its_time_is_over() -> None:
    assert Place().wait() == 10


def test_it_lasts_as_long_as_is_said() -> None:
    assert Place(seconds=SECONDS / 2).wait() == 5


def test_what_nobody_asked_for_is_not_looked_for_as_long() -> None:
    place = Place()
    place.look = Look(place.eyes, place.clock, at_most=SECONDS / 5)
    assert place.wait() == 2
    place.eyes.seconds = SECONDS / 10
    assert place.wait() == 1


def test_whose_time_is_nothing_never_looks() -> None:
    place = Place(at=1, seconds=0.0)
    assert [place.wait() for _ in range(2 * PATIENCE)] == [0] * (2 * PATIENCE)


def test_who_looks_in_vain_too_often_sleeps_for_a_while() -> None:
    place = Place()
    looked = [bool(place.wait()) for _ in range(MOST_LUCK // 2 + PATIENCE + 2)]
    assert looked == [True] * (MOST_LUCK // 2) + [False] * (PATIENCE + 1) + [True]


def test_luck_comes_back() -> None:
    place = Place()
    for _ in range(MOST_LUCK // 2 - 1):
        place.wait()
    place.at = 1
    for _ in range(MOST_LUCK):
        place.looks = 0
        assert place.look.at(place.poll) == [7]
    place.at = None
    assert all(place.wait() for _ in range(MOST_LUCK // 2))
    assert not place.wait()


def test_of_two_the_one_that_began_last_looks_on() -> None:
    first = Place()
    second = Look(first.eyes, first.clock)

    def poll(seconds: float) -> list[int]:
        if first.looks == 3:
            second.at(lambda _: [1])
        return first.poll(seconds)

    assert first.look.at(poll) == []
    assert first.looks == 4


def test_nobody_looks_on_beside_one_that_works() -> None:
    place = Place()

    def poll(seconds: float) -> list[int]:
        place.eyes.look_away()
        return place.poll(seconds)

    assert place.look.at(poll) == []
    assert place.looks == 1
    assert place.wait() == 10  # it was not in vain: it was ended


def test_options_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZMQGRAD_LOOK_US", raising=False)
    assert RpcBackendOptions().look() == SECONDS
    monkeypatch.setenv("ZMQGRAD_LOOK_US", "250")
    assert RpcBackendOptions().look() == 250e-6
    assert RpcBackendOptions(look_us=0).look() == 0


@pytest.mark.parametrize("microseconds", [-1, 0.5, True, "100", 1_000_001])
def test_times_that_cannot_be(microseconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="look_us must be a number of microseconds from 0"):
        RpcBackendOptions(look_us=microseconds)


def test_a_worker_looks_as_long_as_it_is_told() -> None:
    mailbox = ZmqMailbox("w0", 0, tcp_host=None, look=0.0)
    try:
        assert mailbox._eyes.seconds == 0
    finally:
        mailbox.close()
        assert mailbox.join(Deadline.after(10.0)) == []
