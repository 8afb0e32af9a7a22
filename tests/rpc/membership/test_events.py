"""The order in which a worker tells its callbacks of joins and losses."""

from __future__ import annotations

import threading

import pytest

from zmqgrad.rpc.membership.events import Events
from zmqgrad.rpc.membership.worker_info import WorkerInfo
from zmqgrad.testing.simulation import simulate


def lose_one_and_let_another_join(_: int) -> list[tuple[str, int]]:
    """Two threads of a worker learn at once that worker 4 is lost, and that worker 5 has its name now."""
    old, new = WorkerInfo("worker2", 4), WorkerInfo("worker2", 5)
    told: list[tuple[str, int]] = []
    events = Events(lambda task: task())
    events.on_join(lambda info: told.append(("join", info.id)))
    events.on_loss(lambda info, _: told.append(("loss", info.id)))
    losing = threading.Thread(target=events.lost, args=(old.id, old, "it has left"))
    losing.start()
    events.joined(new, old.id)
    losing.join()
    return told


@pytest.mark.timeout(120)
def test_the_loss_of_a_worker_is_told_before_another_takes_its_name() -> None:
    """Whichever thread comes first, and wherever one goes on for the other."""
    runs = simulate(lose_one_and_let_another_join, workers=1, seeds=60)
    assert len({run.digest for run in runs}) > 5
    assert {str(run.values[0]) for run in runs} == {"[('loss', 4), ('join', 5)]"}
