"""How long launchers take to restart workers, and to admit a node: agents and workers are real processes.

A worker sends a datagram with the time of its first line. Times are of the system's monotonic clock, which
all processes of a host share.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tools.bench.processes import PieceFailed
from tools.ports import free_port

_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

LAUNCHERS = {
    "zmqgrad": (sys.executable, "-m", "zmqgrad", "run"),
    "torchrun-zmqgrad": (*_TORCHRUN, "--rdzv-backend=zmqgrad"),
    "torchrun-c10d": (*_TORCHRUN, "--rdzv-backend=c10d"),
}

WORKER = """
import time; {extra}began = time.monotonic()
import json, os, signal, socket
report = {{name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")}}
report |= {{"pid": os.getpid(), "agent": os.getppid(), "began": began}}
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
    s.sendto(json.dumps(report).encode(), {path!r})
signal.pause()
"""

ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, agents of torch 2.13 with c10d hang when a node joins later."""

LIMIT_SECONDS = 60.0
"""For the workers of one round to begin."""

END_SECONDS = 30.0

SPARE_SECONDS = 6.0
"""For a third agent to start, and to wait as a spare: that of torch says nothing then."""

Report = dict[str, Any]


class Job:
    """Agents of one job on this host, and what their workers report."""

    def __init__(self, launcher: str, nodes: str, workers: int, directory: Path, extra: str) -> None:
        path = str(directory / "reports")
        self._reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._reports.bind(path)
        script = directory / "worker.py"
        script.write_text(WORKER.format(path=path, extra=extra))
        self._port = free_port()
        self._command = [
            *LAUNCHERS[launcher],
            *(f"--nnodes={nodes}", f"--nproc-per-node={workers}", "--max-restarts=3", "--rdzv-id=bench"),
            *(f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-conf=last_call_timeout=1"),
            *("--local-addr=127.0.0.1", str(script)),
        ]
        self._log = directory / "log"
        self._agents: list[subprocess.Popen[bytes]] = []

    def start_agent(self) -> None:
        """Start the agent of another node."""
        with self._log.open("ab") as log:
            self._agents.append(
                subprocess.Popen(self._command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log)
            )

    def wait_for_store(self) -> None:
        """Wait until an agent serves the store: agents that start later only connect to it.

        Raises:
            PieceFailed: if none does within ``LIMIT_SECONDS``.
        """
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
            except ConnectionRefusedError:
                time.sleep(0.05)
        raise PieceFailed(f"no agent serves the store:\n{self._log.read_text()}")

    def kill_agent(self, number: int, reports: list[Report]) -> float:
        """Kill an agent, and its worker, by SIGKILL, as if its host failed. Returns when."""
        agent = self._agents[number]
        killed = time.monotonic()
        agent.kill()
        for report in reports:
            if report["agent"] == agent.pid:
                with suppress(ProcessLookupError):  # it died with its agent
                    os.kill(report["pid"], signal.SIGKILL)
        return killed

    def wait_for_round(self, world_size: int, after: float) -> list[Report]:
        """Wait until all workers of a round of ``world_size`` have begun, after that time.

        Raises:
            PieceFailed: if they have not within ``LIMIT_SECONDS``.
        """
        begun: dict[int, Report] = {}
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(begun) < world_size:
            self._reports.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                report: Report = json.loads(self._reports.recv(1 << 16))
            except TimeoutError:
                raise PieceFailed(f"no round of {world_size} workers:\n{self._log.read_text()}") from None
            if report["WORLD_SIZE"] == world_size and report["began"] > after:
                begun[report["RANK"]] = report
        return list(begun.values())

    def end(self) -> None:
        """End the agents, which end their workers."""
        self._reports.close()
        for agent in self._agents:
            agent.terminate()
        for agent in self._agents:
            try:
                agent.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


@contextmanager
def _job(launcher: str, nodes: str, workers: int, extra: str = "") -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as directory:
        job = Job(launcher, nodes, workers, Path(directory), extra)
        try:
            job.start_agent()
            yield job
        finally:
            job.end()


def last_begin(reports: list[Report]) -> float:
    """When the last of the workers executed its first line."""
    return max(float(report["began"]) for report in reports)


def restart(launcher: str, extra: str = "") -> float:
    """Seconds from the death of one of two workers to the last first line of the next round."""
    with _job(launcher, "1", 2, extra) as job:
        victim = job.wait_for_round(2, 0.0)[0]
        killed = time.monotonic()
        os.kill(victim["pid"], signal.SIGKILL)
        return last_begin(job.wait_for_round(2, killed)) - killed


def restart_with_torch(launcher: str) -> float:
    """As :func:`restart`; the first line comes after ``import torch``."""
    return restart(launcher, "import torch; ")


def join(launcher: str) -> float:
    """Seconds from the start of a second agent to the last first line of the round of both."""
    with _job(launcher, "1:2", 1) as job:
        job.wait_for_round(1, 0.0)
        began = time.monotonic()
        job.start_agent()
        return last_begin(job.wait_for_round(2, began)) - began


def spare(launcher: str) -> float:
    """Seconds from the death of one of two nodes to the last first line of the round with a spare."""
    with _job(launcher, "2", 1) as job:
        job.wait_for_store()
        job.start_agent()
        begun = job.wait_for_round(2, 0.0)
        job.start_agent()
        time.sleep(SPARE_SECONDS)
        killed = job.kill_agent(1, begun)
        return last_begin(job.wait_for_round(2, killed)) - killed
