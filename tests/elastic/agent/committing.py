"""Nodes of a job on this host that train and commit, to be killed.

Agents and workers are forks of a process that has imported torch: what is of interest is what happens after
a kill, and each import takes seconds of processor time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from multiprocessing import reduction
from pathlib import Path
from typing import IO, Any

import torch

from tests.elastic.agent.nodes import Node
from tests.support.namespaces import Hosts, enter
from tests.support.processes import forkserver
from zmqgrad.elastic import LaunchConfig, Sharded, State, launch

ROWS = 12

SETTINGS = {"last_call_timeout": "1", "join_timeout": "60"}
"""Heartbeats have their usual time, so that no agent is taken for dead on a loaded machine: on one host, the
death of one is noticed without them."""

BETWEEN_HOSTS = {**SETTINGS, "keep_alive_interval": "1"}


class Training:
    """A model that is the same on all ranks, and rows of which each has its own."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        model = torch.nn.Linear(4, 2)
        self.rank, self.size = rank, size
        self.state = State(
            model=model,
            optimizer=torch.optim.Adam(model.parameters()),
            step=0,
            rows=Sharded(torch.zeros(ROWS, dtype=torch.long).tensor_split(size)[rank]),
        )

    def train(self) -> None:
        """One step."""
        state = self.state
        state.optimizer.zero_grad()
        state.model(torch.full((1, 4), float(state.step % 7))).square().sum().backward()
        state.optimizer.step()
        state.rows += torch.arange(ROWS).tensor_split(self.size)[self.rank] * (1 + state.step % 3)
        state.step += 1

    def values(self) -> str:
        """All that has been computed, without spaces."""
        state = self.state
        return _shown(self.rank, self.size, state.step, state.rows, state.model.weight)


def _shown(rank: int, size: int, step: int, rows: torch.Tensor, weight: torch.Tensor) -> str:
    return repr([rank, size, step, rows.tolist(), weight.flatten().tolist()]).replace(" ", "")


class WithoutKills:
    """The same training in this process, as far as it was asked for."""

    def __init__(self) -> None:
        self._training = Training()
        self._steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def values(self, step: int, rank: int, size: int) -> str:
        """What :meth:`Training.values` of ``rank`` is after ``step`` steps."""
        state = self._training.state
        while len(self._steps) <= step:
            self._steps.append((state.rows.clone(), state.model.weight.detach().clone()))
            self._training.train()
        rows, weight = self._steps[step]
        return _shown(rank, size, step, rows.tensor_split(size)[rank], weight)


def start(saved: Path | None = None) -> Training:
    """Begin in a worker: restore, and print what it has now."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    say("worker", os.getpid(), "has", rank, size, os.environ["TORCHELASTIC_RESTART_COUNT"])
    training = Training(rank, size)
    assert training.state.outlives_the_process
    training.state.restore(saved)
    say("restored", os.environ["ZMQGRAD_ROUND"], training.values())
    return training


def say(*words: object) -> None:
    """Print a line, in one piece: the workers of a node have one output."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def go_on(training: Training, steps: int) -> None:
    """Train and commit for some steps, and print what it has now."""
    for _ in range(steps):
        training.train()
        training.state.commit()
    training.state.wait()
    say("reached", training.values())


def five_steps() -> None:
    """A program: five steps, then nothing."""
    go_on(start(), 5)
    signal.pause()


class _Agent:
    """A process that launches ``program``, with what a Popen has for :class:`Node`."""

    def __init__(
        self,
        config: LaunchConfig,
        program: Callable[..., None],
        args: Any,
        directory: Path,
        hosts: Hosts | None,
        host: int,
    ) -> None:
        read, write = os.pipe()
        self.stdout: IO[bytes] | None = os.fdopen(read, "rb")
        environ, place = dict(os.environ), None
        if hosts is not None:
            environ, place = environ | hosts.environment(), host
        try:
            self._process = forkserver.Process(
                target=_run_agent, args=(_Output(write), environ, place, directory, config, program, args)
            )
            self._process.start()
        finally:
            os.close(write)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, sig: int, /) -> None:
        os.kill(self.pid, sig)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("launch", timeout or 0.0)
        return self._process.exitcode


def _run_agent(
    output: _Output,
    environ: dict[str, str],
    host: int | None,
    directory: Path,
    config: LaunchConfig,
    program: Callable[..., None],
    args: Any,
) -> None:
    for stream in (1, 2):
        os.dup2(output.fd, stream)
    os.close(output.fd)
    os.environ.clear()
    os.environ.update(environ)
    if host is not None:
        enter(host)
    tempfile.tempdir = str(directory)  # an agent that is killed cannot remove its temporary directory
    launch(program, config)(*args)


class _Output:
    """A file descriptor that is passed to a new process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.fd),)


def _received(duplicate: Any) -> _Output:
    return _Output(duplicate.detach())


class CommittingJob:
    """The nodes of one job.

    Args:
        endpoint: of its rendezvous.
        directory: for temporary files.
        hosts: where nodes can be; None: all are on this host.
    """

    def __init__(self, endpoint: str, directory: Path, hosts: Hosts | None = None) -> None:
        self._endpoint = endpoint
        self._directory = directory
        self._hosts = hosts
        self.nodes: list[Node] = []

    def start(
        self,
        program: Callable[..., None],
        *args: Any,
        nodes: tuple[int, int],
        workers: int = 1,
        restarts: int = 0,
        host: int = 0,
    ) -> Node:
        """Start a node, on ``host``, whose workers call ``program(*args)``."""
        config = LaunchConfig(
            *nodes,
            nproc_per_node=workers,
            run_id="job",
            rdzv_endpoint=self._endpoint,
            rdzv_configs=SETTINGS if self._hosts is None else BETWEEN_HOSTS,
            max_restarts=restarts,
            start_method="fork",
        )
        node = Node(_Agent(config, program, args, self._directory, self._hosts, host))
        self.nodes.append(node)
        return node

    def close(self) -> None:
        """Kill all nodes."""
        for node in self.nodes:
            node.close()
