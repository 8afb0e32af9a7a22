"""Committed state with agents: training goes on from the last commit after workers and nodes were killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.agent.nodes import Job
from zmqgrad.store import TCPStore

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for processes that are not its children"),
]

TRAIN = """
import torch
import zmqgrad.elastic as elastic
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters())
rows = torch.zeros(12).tensor_split(size)[rank]
state = elastic.State(model=model, optimizer=optimizer, step=0, rows=elastic.Sharded(rows))
assert state.outlives_the_process
print("restored", rank, state.restore(), state.step, state.rows.tolist(), flush=True)
def train():
    optimizer.zero_grad()
    model(torch.full((1, 4), float(state.step))).sum().backward()
    optimizer.step()
    state.step += 1
    state.rows += torch.arange(12.).tensor_split(size)[rank]
def stop(*_):
    sys.exit()
signal.signal(signal.SIGUSR1, stop)
def go_on(until):
    while state.step < until:
        train()
        state.commit()
    state.wait()
    print("reached", rank, state.step, repr(model.weight.sum().item()), flush=True)
"""
PAUSE = TRAIN + "go_on(state.step + 5); signal.pause()\n"


@pytest.fixture
def store() -> Iterator[TCPStore]:
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as served:
        yield served


@pytest.fixture
def job(store: TCPStore, tmp_path: Path) -> Iterator[Job]:
    made = Job(f"127.0.0.1:{store.port}", tmp_path / "worker.py")
    yield made
    made.close()


def rows(step: int, rank: int, size: int) -> str:
    count = 12 // size
    values = [float(index * step) for index in range(12)]
    return str(values[rank * count : (rank + 1) * count]).replace("[", r"\[").replace("]", r"\]")


def test_a_killed_worker_goes_on_from_its_last_commit(job: Job) -> None:
    node = job.start(PAUSE, "--nproc-per-node", 2, nodes="1", restarts=2)
    workers = node.find_workers(2, world_size=2)
    for _ in range(2):
        node.find(r"restored \d False 0 ")
    for _ in range(2):
        node.find(r"reached \d 5 ")
    os.kill(workers[1], signal.SIGKILL)
    workers = node.find_workers(2, world_size=2, restarts=1)
    for _ in range(2):
        rank = int(node.find(r"restored (\d) True 5 ")[1])
        assert f"restored {rank} True 5 {rows(5, rank, 2)}".replace("\\", "") in node.text
    for _ in range(2):
        node.find(r"reached \d 10 ")


def test_a_killed_node_and_its_shards_come_back_from_the_other_host(job: Job) -> None:
    """Of two nodes one is killed; the other goes on alone, with the shards of both, cut for one rank."""
    first = job.start(PAUSE, nodes="1:2")
    first.find(r"reached 0 5 ")  # alone, as the other may take longer to start than the round waits
    other = job.start(PAUSE, nodes="1:2")
    for node in (first, other):
        node.find(r"reached \d 10 -?[\d.e-]+$")
    other.process.kill()
    first.find(rf"restored 0 True 10 {rows(10, 0, 1)}")
    first.find(r"reached 0 15 ")
    joined = job.start(PAUSE, nodes="1:2")
    for node in (first, joined):
        rank = int(node.find(r"restored (\d) True 15 ")[1])
        assert f"restored {rank} True 15 {rows(15, rank, 2)}".replace("\\", "") in node.text
        node.find(rf"reached {rank} 20 ")


def test_a_spare_gets_the_state_of_the_node_whose_place_it_takes(job: Job) -> None:
    nodes = [job.start(PAUSE, nodes="2") for _ in range(2)]
    for node in nodes:
        node.find(r"reached \d 5 ")
    spare = job.start(PAUSE, nodes="2")
    spare.find("spare 1 of 1")
    rank = int(nodes[0].text.split("restored ")[1][0])
    nodes[0].process.kill()
    spare.find(rf"restored {rank} True 5 {rows(5, rank, 2)}")
    nodes[1].find(rf"restored {1 - rank} True 5 {rows(5, 1 - rank, 2)}")
    assert spare.find(rf"reached {rank} 10 (.*)$")[1] == nodes[1].find(r"reached \d 10 (.*)$")[1]


def test_a_commit_that_not_all_ranks_have_made_is_not_restored(job: Job) -> None:
    code = (
        TRAIN
        + "go_on(3)\nif rank == 0 and size == 2:\n    train(); state.commit(); print('ahead', flush=True)\n"
    )
    nodes = [job.start(code + "signal.pause()\n", nodes="2", restarts=1) for _ in range(2)]
    workers = {rank: pid for node in nodes for rank, pid in node.find_workers(1, world_size=2).items()}
    first = next(node for node in nodes if "worker" in node.text and "has 0 2" in node.text)
    first.find("ahead")
    os.kill(workers[1], signal.SIGKILL)
    for node in nodes:
        node.find(r"restored \d True 3 ")


def test_the_last_commit_survives_all_agents_on_disk(job: Job, tmp_path: Path) -> None:
    path = repr(str(tmp_path / "saved"))
    saves = TRAIN.replace("state.restore()", f"state.restore({path})")
    code = (
        saves + f"go_on(state.step + 3); state.save({path}); print('saved', rank, state.step, flush=True)\n"
    )
    first = job.start(code + "signal.pause()\n", nodes="1:2")
    first.find("saved")  # alone
    nodes = [first, job.start(code + "signal.pause()\n", nodes="1:2")]
    for node in nodes:
        node.find(r"restored \d True 3 ")
        node.find(r"saved \d 6")
    for node in nodes:
        node.process.kill()
    alone = job.start(code + "sys.exit()\n", nodes="1:2")
    alone.find(rf"restored 0 True 6 {rows(6, 0, 1)}")
    assert alone.wait() == 0
