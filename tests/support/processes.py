"""Real processes: run a function in N of them, as a launcher would, and collect what they return."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tools.ports import free_port

GRACE = 5.0
"""Seconds that the others have to end once one process has failed."""

START = 100.0
"""Seconds that all processes together have to import what they need."""

WHOLE = 150.0
"""Seconds that all of it may take: less than a test's own limit, which ends the run without our words."""

READY, BEGIN = b"ready", b"begin"

STACKS = 5.0
"""Seconds that a process has to write down its stacks."""

# Each process is a fork of one that has imported what is large: a fresh interpreter would take seconds of
# processor time to import torch, what torch's optimizers import, and what its assert_close does.
LARGE = ("cloudpickle", "hypothesis", "msgspec", "pytest", "zmq", "torch._dynamo", "torch.distributed.tensor")
OURS = ("zmqgrad.autograd", "zmqgrad.nn", "zmqgrad.optim", "zmqgrad.rpc")
"""They read the environment when they are used, not when they are imported."""

forkserver = multiprocessing.get_context("forkserver")


def preload() -> None:
    """Have processes be forks of one that has imported all this, not what another module has asked for."""
    forkserver.set_forkserver_preload([*LARGE, *OURS, "tests.support.frozen"])


preload()


class ProcessFailure(AssertionError):
    """A process raised, died, or took too long; the message holds its traceback and what it printed."""


def run_processes(
    fn: Callable[..., Any],
    n: int,
    args: Sequence[Any] = (),
    timeout: float = 40.0,
    env: Mapping[str, str] | None = None,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Run ``fn(rank, *args)`` in ``n`` fresh processes; what they return, by rank.

    All begin ``fn`` together, once each has imported its module: so what a test says of the order of things
    does not depend on how long imports take. Each has MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK and
    WORLD_SIZE, and ``env``, in its environment before ``fn``'s module is imported. ``fn`` must be importable.
    Ranks in ``may_die`` may end in any way; their result is None where they did not return.

    Raises:
        ProcessFailure: if one of the others raised, or ended without a result, or if not all had ended
            within ``timeout`` seconds of the beginning: then all stacks are in the message, and the
            processes are killed.
    """
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(n),
        **(env or {}),
    }
    call = pickle.dumps((fn, tuple(args)))
    with tempfile.TemporaryDirectory(prefix="zg-output-") as directory:
        workers: list[_Worker] = []
        try:
            for rank in range(n):
                workers.append(_Worker(rank, call, common, Path(directory) / f"{rank}"))
            _run_all(workers, timeout, may_die)
            bad = [w for w in workers if not (w.ok or w.rank in may_die)]
            if bad:
                raise ProcessFailure("\n".join(w.report() for w in bad))
            return [w.value for w in workers]
        finally:
            for worker in workers:
                worker.kill()


def _run_all(workers: list[_Worker], timeout: float, may_die: Collection[int]) -> None:
    started = time.monotonic()
    if all(worker.is_ready(started + START - time.monotonic()) for worker in workers):
        for worker in workers:
            worker.begin()
    limit = min(time.monotonic() + timeout, started + WHOLE)
    failed = False
    running = {w.connection: w for w in workers}
    while running and (left := limit - time.monotonic()) > 0:
        for connection in wait(list(running), left):
            worker = running.pop(connection)  # type: ignore[arg-type]
            worker.collect()
            if not failed and not worker.ok and worker.rank not in may_die:
                failed = True
                limit = min(limit, time.monotonic() + GRACE)
    for worker in running.values():
        worker.dump_stacks()
    for worker in workers:
        if worker.connection not in running:
            worker.join(max(1.0, limit - time.monotonic()))


class _Worker:
    """One process, and what came of it."""

    def __init__(self, rank: int, call: bytes, env: dict[str, str], output: Path) -> None:
        self.rank = rank
        self.value: Any = None
        self.ok = False
        self._error = "no result came, and it had not ended: killed"
        self._output = output
        env = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        self.connection, theirs = forkserver.Pipe()
        self._process = forkserver.Process(
            target=_child, args=(theirs, call, env, str(output), list(sys.path)), name=f"rank-{rank}"
        )
        self._process.start()
        theirs.close()

    def is_ready(self, seconds: float) -> bool:
        """Has it imported what it needs, within ``seconds``? (No, if it has died.)"""
        try:
            return self.connection.poll(max(0.0, seconds)) and self.connection.recv_bytes() == READY
        except (EOFError, ConnectionResetError):
            return False

    def begin(self) -> None:
        """Let it call the function."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # died: collect() will say so
            self.connection.send_bytes(BEGIN)

    def collect(self) -> None:
        """Take in what it sent, or note that it ended without."""
        try:
            sent = self.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            self._process.join(GRACE)
            self._error = f"ended without a result, exit code {self._process.exitcode}"
            return
        if sent == READY:
            self._error = f"was not ready to begin within {START:g} s: killed"
            return
        self.ok, answer = pickle.loads(sent)
        if self.ok:
            self.value = answer
        else:
            self._error = answer

    def join(self, seconds: float) -> None:
        """Wait for the process to end after its result; one that does not has left something running."""
        self._process.join(seconds)
        if self._process.is_alive() and self.ok:
            self.ok = False
            self._error = "returned, but the process did not end"
            self.dump_stacks()

    def dump_stacks(self) -> None:
        """Have it write the stacks of all threads to its output."""
        if self._process.pid is None or not self._process.is_alive():
            return
        before = self._said()
        os.kill(self._process.pid, signal.SIGUSR1)
        limit = time.monotonic() + STACKS
        while not self._said()[len(before) :].endswith("in <module>\n") and time.monotonic() < limit:
            self._process.join(0.01)  # nothing tells when it has written all

    def kill(self) -> None:
        """End it, and whatever it started."""
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(GRACE)
        self._process.close()
        self.connection.close()

    def report(self) -> str:
        """What went wrong, and what it printed."""
        return f"--- rank {self.rank}: {self._error}\n--- its output:\n{self._said()}"

    def _said(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""


def _child(connection: Connection, call: bytes, env: dict[str, str], output: str, path: list[str]) -> None:
    os.setpgid(0, 0)  # so that whatever it starts can be ended with it
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = path
    try:
        try:
            fn, args = pickle.loads(call)
        finally:
            connection.send_bytes(READY)
            connection.recv_bytes()
        # Plain pickle: torch would send tensors by shared memory, which ends with this process.
        answer = pickle.dumps((True, fn(int(env["RANK"]), *args)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    sys.stdout.flush()
    connection.send_bytes(answer)
    connection.close()
