"""What the machine itself can do: a bare round trip over ZeroMQ, and a copy in warm memory."""

from __future__ import annotations

import ctypes

import zmq

from tools.bench.processes import Place
from tools.bench.timing import Budget
from tools.bench.workloads import SIZES, size_name

ROUND_TRIP = "round_trip"
COPIES = {f"copy_{size_name(size)}": size for size in SIZES}


def run_limits(place: Place, endpoint: str, names: list[str], budget: Budget) -> dict[str, float]:
    """In each of two processes: seconds of each limit of ``names``, from the first."""
    if place.rank == 1:
        _answer(place, endpoint)
        return {}
    found = {ROUND_TRIP: _round_trip(place, endpoint, budget)}
    for name, size in COPIES.items():
        if name in names:
            place.say(name)
            found[name] = _copy(size, budget)
    return found


def _answer(place: Place, endpoint: str) -> None:
    """A ROUTER that sends back what comes, until it is told to end."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(endpoint)
        place.together()
        while (frames := router.recv_multipart())[1] != b"end":
            router.send_multipart(frames)


def _round_trip(place: Place, endpoint: str, budget: Budget) -> float:
    place.say(ROUND_TRIP)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        place.together()
        dealer.connect(endpoint)

        def ask() -> None:
            dealer.send(b"x" * 32)
            dealer.recv()

        seconds = budget.median(ask)
        dealer.send(b"end")
        return seconds


def _copy(size: int, budget: Budget) -> float:
    source, target = (ctypes.create_string_buffer(size) for _ in range(2))
    return budget.median(lambda: ctypes.memmove(target, source, size))
