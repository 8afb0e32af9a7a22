"""Committed state with agents: training goes on from the last commit after workers and nodes were killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.elastic.agent.committing import CommittingJob, WithoutKills, five_steps, go_on, say, start
from tests.elastic.agent.nodes import Node
from tests.support.namespaces import Hosts, hosts
from zmqgrad.elastic import State
from zmqgrad.errors import CommitError
from zmqgrad.store import TCPStore

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for processes that are not its children"),
]

__all__ = ["hosts"]

expected = WithoutKills().values


@contextmanager
def new_job(tmp_path: Path) -> Iterator[CommittingJob]:
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:
        made = CommittingJob(f"127.0.0.1:{store.port}", tmp_path)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[CommittingJob]:
    with new_job(tmp_path) as made:
        yield made


def find(node: Node, what: str, step: int, rank: int, size: int) -> None:
    """Wait until ``node`` prints that ``rank`` has the values of ``step``."""
    node.find(rf"^{what} .*{re.escape(expected(step, rank, size))}$")


def find_rank(node: Node, what: str, step: int, size: int) -> int:
    """The rank of the only worker of ``node``, once it prints that it has the values of ``step``."""
    rank = int(node.find(rf"^{what} .*\[(\d),{size},{step},")[1])
    assert expected(step, rank, size) in node.text
    return rank


def test_a_killed_worker_goes_on_from_its_last_commit(job: CommittingJob) -> None:
    node = job.start(five_steps, nodes=(1, 1), workers=2, restarts=1)
    workers = node.find_workers(2, world_size=2)
    assert {find_rank(node, "reached", 5, 2) for _ in range(2)} == {0, 1}
    os.kill(workers[1], signal.SIGKILL)
    assert {find_rank(node, "restored", 5, 2) for _ in range(2)} == {0, 1}
    assert {find_rank(node, "reached", 10, 2) for _ in range(2)} == {0, 1}


def test_a_killed_node_and_its_shards_come_back_from_the_other_host(job: CommittingJob) -> None:
    """Of two nodes one is killed; the other goes on alone, with the shards of both, cut for one rank."""
    first = job.start(five_steps, nodes=(1, 2))
    find(first, "reached", 5, 0, 1)  # alone, as the other may take longer to start than the round waits
    other = job.start(five_steps, nodes=(1, 2))
    for node in (first, other):
        find_rank(node, "reached", 10, 2)
    other.process.kill()
    find(first, "restored", 10, 0, 1)
    find(first, "reached", 15, 0, 1)
    joined = job.start(five_steps, nodes=(1, 2))
    for node in (first, joined):
        rank = find_rank(node, "restored", 15, 2)
        find(node, "reached", 20, rank, 2)


def test_a_host_that_is_switched_off_leaves_its_shards_on_another(hosts: Hosts, tmp_path: Path) -> None:
    """Between hosts shards travel encrypted; of one that loses its power nobody hears any more."""
    job = CommittingJob(f"{hosts.addresses[0]}:29400", tmp_path, hosts)
    try:
        nodes = [job.start(five_steps, nodes=(1, 2), host=host) for host in range(2)]
        for node in nodes:
            find_rank(node, "reached", 5, 2)
        with hosts.link_down():
            find(nodes[0], "restored", 5, 0, 1)
            find(nodes[0], "reached", 10, 0, 1)
            nodes[1].process.kill()
    finally:
        job.close()


def test_a_spare_gets_the_state_of_the_node_whose_place_it_takes(job: CommittingJob) -> None:
    nodes = [job.start(five_steps, nodes=(2, 2)) for _ in range(2)]
    ranks = [find_rank(node, "reached", 5, 2) for node in nodes]
    spare = job.start(five_steps, nodes=(2, 2))
    spare.find("spare 1 of 1")
    nodes[0].process.kill()
    for node, rank in zip((spare, nodes[1]), ranks, strict=True):
        find(node, "restored", 5, rank, 2)
        find(node, "reached", 10, rank, 2)


def two_states() -> None:
    """Make another state beside the first, and commit by both."""
    first, second = start().state, State(step=7)
    second.restore()
    second.commit()
    with pytest.raises(CommitError) as refused:
        first.commit()
    say("refused:", refused.value)


def test_a_second_state_of_a_process_is_not_mixed_with_the_first(job: CommittingJob) -> None:
    node = job.start(two_states, nodes=(1, 1))
    node.find("refused: .*the process has made another State")
    assert node.wait() == 0


def ahead() -> None:
    """Rank 0 makes a commit that the others do not make, in the first round."""
    training = start()
    go_on(training, 3)
    if training.rank == 0 and os.environ["ZMQGRAD_ROUND"] == "0":
        training.train()
        training.state.commit()
        say("ahead")
    signal.pause()


def test_a_commit_that_not_all_ranks_have_made_is_not_restored(job: CommittingJob) -> None:
    nodes = [job.start(ahead, nodes=(2, 2), restarts=1) for _ in range(2)]
    workers = {rank: pid for node in nodes for rank, pid in node.find_workers(1, world_size=2).items()}
    first = next(node for node in nodes if f"worker {workers[0]} " in node.text)
    first.find("ahead")
    os.kill(workers[1], signal.SIGKILL)
    for node in nodes:
        find_rank(node, "restored", 3, 2)


def three_saved_steps(path: Path, ends: bool) -> None:
    """Go on from what was saved, for three steps, which are saved as well."""
    training = start(path)
    go_on(training, 3)
    training.state.save(path)
    say("saved", training.values())
    if not ends:
        signal.pause()


def test_the_last_commit_survives_all_agents_on_disk(job: CommittingJob, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    first = job.start(three_saved_steps, path, False, nodes=(1, 2))
    find(first, "saved", 3, 0, 1)  # alone
    nodes = [first, job.start(three_saved_steps, path, False, nodes=(1, 2))]
    for node in nodes:
        find_rank(node, "restored", 3, 2)
        find_rank(node, "saved", 6, 2)
    job.close()
    with new_job(tmp_path) as another:
        alone = another.start(three_saved_steps, path, True, nodes=(1, 2))
        find(alone, "restored", 6, 0, 1)
        assert alone.wait() == 0
