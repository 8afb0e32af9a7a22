"""Looking ends when something is found, when its time is over, or when others work."""

from __future__ import annotations

from zmqgrad.runtime.clock import ManualClock
from zmqgrad.transport.looking import MOST_LUCK, PATIENCE, SECONDS, Eyes, Look


class Place:
    """Where something is found at the ``at``-th look; each look takes a tenth of the time that there is."""

    def __init__(self, at: int | None = None) -> None:
        self.clock = ManualClock()
        self.eyes = Eyes()
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
