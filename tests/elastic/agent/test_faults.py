"""Agents, workers, members of etcd and the network fail at any moment: the job goes on, one round at a time.

Each worker appends its round to a file, all the time. If the lines are sorted by round, no two groups of
workers have run at the same time.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.elastic.agent.nodes import WAIT_SECONDS, Job, Node
from tests.support.etcd import EtcdCluster, needs_etcd
from tests.support.namespaces import Hosts, hosts
from tests.support.waiting import eventually
from zmqgrad.store import TCPStore

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for processes that are not its children"),
]

__all__ = ["hosts"]

NODES = 3

WRITER = """
import time
place = " ".join(os.environ[name] for name in ("ZMQGRAD_ROUND", "WORLD_SIZE"))
log = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
while True:
    os.write(log, f"{{place}} {{os.getpid()}}\\n".encode())
    time.sleep(0.005)
"""


class Line(NamedTuple):
    """What a worker has written."""

    round: int
    world_size: int
    pid: int


class Log:
    """The file that all workers write to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.code = WRITER.format(path=str(path))

    def lines(self) -> list[Line]:
        """All lines, in the order in which they were written."""
        text = self._path.read_text() if self._path.exists() else ""
        return [Line(*map(int, line.split())) for line in text.splitlines()]

    def wait_for_round(self, world_size: int, after: int = -1) -> int:
        """Wait until all workers of a round later than ``after``, of ``world_size``, write. Returns it."""

        def found() -> set[int]:
            by_round: dict[int, set[int]] = {}
            for line in self.lines()[-500:]:
                if line.world_size == world_size and line.round > after:
                    by_round.setdefault(line.round, set()).add(line.pid)
            return {number for number, pids in by_round.items() if len(pids) == world_size}

        return max(eventually(found, bool, WAIT_SECONDS))

    def check(self) -> None:
        """No worker wrote after one of a later round."""
        rounds = [line.round for line in self.lines()]
        assert rounds == sorted(rounds)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:
        made = Job(f"127.0.0.1:{store.port}", tmp_path / "worker.py")
        yield made
        made.close()


@pytest.mark.parametrize("seed", range(3))
def test_workers_and_agents_are_killed_at_any_moment(job: Job, log: Log, seed: int) -> None:
    chance = random.Random(seed)

    def start() -> Node:
        return job.start(log.code, nodes=f"1:{NODES}", restarts=100)

    nodes = [start() for _ in range(NODES)]
    last = log.wait_for_round(NODES)
    for _ in range(6):
        time.sleep(chance.random() * 1.5)  # any step of a round: joins, starts, runs, stops
        if chance.random() < 0.5:
            with suppress(ProcessLookupError):  # it died meanwhile
                os.kill(log.lines()[-1].pid, signal.SIGKILL)
        else:
            nodes.pop(chance.randrange(NODES)).process.kill()
            nodes.append(start())
        last = log.lines()[-1].round
    log.wait_for_round(NODES, after=last - 1)
    log.check()


@needs_etcd
def test_with_etcd_no_host_is_needed(tmp_path: Path, log: Log) -> None:
    """A member of etcd is killed, then the agent of rank 0, which serves the store of the round."""
    with EtcdCluster(3) as cluster:
        job = Job(cluster.endpoint, tmp_path / "worker.py")
        try:
            nodes = [
                job.start(log.code, "--rdzv-backend", "etcd", nodes=f"1:{NODES}", restarts=3)
                for _ in range(NODES)
            ]
            last = log.wait_for_round(NODES)
            cluster.kill(0)
            first = [node for node in nodes if "node 0 of 3" in node.text]
            first[0].process.kill()
            last = log.wait_for_round(NODES - 1, after=last)
            job.start(log.code, "--rdzv-backend", "etcd", nodes=f"1:{NODES}", restarts=3)
            log.wait_for_round(NODES, after=last)
            log.check()
        finally:
            job.close()


def test_a_host_that_is_cut_off_and_returns(hosts: Hosts, tmp_path: Path, log: Log) -> None:
    """It kills its workers before the other host goes on alone, and tries to join until the path is back."""
    job = Job(f"{hosts.addresses[0]}:29400", tmp_path / "worker.py")
    try:
        for name in hosts.names:
            within, secret = ("ip", "netns", "exec", name), hosts.environment()["ZMQGRAD_SECRET"]
            node = job.start(log.code, nodes="1:2", restarts=3, within=within, ZMQGRAD_SECRET=secret)
        together = log.wait_for_round(2)
        with hosts.link_down():
            alone = log.wait_for_round(1, after=together)
            node.find(r"^zmqgrad run: .*no store answered.* Trying again, for up to \d+ s \(join_timeout\)$")
        log.wait_for_round(2, after=alone)
        log.check()
    finally:
        job.close()
