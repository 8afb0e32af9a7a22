"""The scheduler: the same seed takes the same way, time jumps, and a deadlock is named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zmqgrad.testing.simulation.scheduler import Failure, Scheduler
from zmqgrad.testing.simulation.threads import forwarding, standard_copy, thread_module, time_module


def simulated() -> Any:
    scheduler = Scheduler()
    clock = time_module(scheduler)
    system = forwarding(os)
    vars(system)["register_at_fork"] = lambda **hooks: None
    instead: dict[str, ModuleType] = {
        "_thread": thread_module(scheduler, None),
        "time": clock,
        "os": system,
    }
    threading = standard_copy("threading", instead)
    queue = standard_copy("queue", {"threading": threading, "time": clock})
    return SimpleNamespace(scheduler=scheduler, threading=threading, queue=queue, time=clock)


def run(sim: Any, program: Callable[[], object], seed: int = 0, limit: float = 1000.0) -> None:
    def main() -> None:
        program()
        sim.scheduler.finish()

    sim.scheduler.seed(seed, limit)
    sim.scheduler.spawn(main, "main", None)
    sim.scheduler.run()


def three_producers(seed: int) -> tuple[list[tuple[int, int]], int]:
    sim = simulated()
    taken: list[tuple[int, int]] = []

    def program() -> None:
        queue = sim.queue.Queue(2)

        def produce(number: int) -> None:
            for item in range(3):
                queue.put((number, item))

        threads = [sim.threading.Thread(target=produce, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        taken.extend(queue.get() for _ in range(9))
        for thread in threads:
            thread.join()

    run(sim, program, seed)
    return taken, sim.scheduler.digest


def test_a_seed_takes_the_same_way_each_time_and_seeds_differ() -> None:
    ways = [three_producers(seed) for seed in range(20)]
    assert ways == [three_producers(seed) for seed in range(20)]
    assert len({digest for _, digest in ways}) > 10
    assert all(sorted(taken) == [(i, k) for i in range(3) for k in range(3)] for taken, _ in ways)


def test_time_jumps_when_all_wait() -> None:
    sim = simulated()
    woke: list[float] = []

    def program() -> None:
        began = sim.time.monotonic()
        assert not sim.threading.Event().wait(900)
        woke.append(sim.time.monotonic() - began)

    real = time.monotonic()
    run(sim, program)
    assert woke == [pytest.approx(900, abs=0.1)]
    assert time.monotonic() - real < 5


def test_a_deadlock_is_named_with_all_stacks() -> None:
    sim = simulated()

    def program() -> None:
        first, second = sim.threading.Lock(), sim.threading.Lock()

        def other_way() -> None:
            with second:
                sim.time.sleep(1)
                first.acquire()

        sim.threading.Thread(target=other_way, name="the-other").start()
        with first:
            sim.time.sleep(1)
            second.acquire()

    with pytest.raises(Failure, match=r"deadlock(?s:.)*first.acquire(?s:.)*") as failure:
        run(sim, program)
    assert "the-other" in str(failure.value)
    assert "second.acquire" in str(failure.value)


def test_a_lost_update_is_found_by_a_seed() -> None:
    def survives(seed: int) -> bool:
        sim = simulated()
        counter = [0]

        def program() -> None:
            def add() -> None:
                value = counter[0]
                sim.time.monotonic()  # a point between the read and the write
                counter[0] = value + 1

            threads = [sim.threading.Thread(target=add) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        run(sim, program, seed)
        return counter[0] == 2

    results = [survives(seed) for seed in range(100)]
    assert True in results
    assert False in results


def test_a_job_that_goes_on_for_ever_ends_at_the_limit() -> None:
    sim = simulated()

    def program() -> None:
        while True:
            sim.time.sleep(1)

    with pytest.raises(Failure, match="has not ended within 50 simulated seconds"):
        run(sim, program, limit=50)
