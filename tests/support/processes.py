"""Real processes: run a function in N of them, as a launcher would, and collect what they return."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE = 5.0
"""Seconds that the others have to end once one process has failed."""

_spawn = multiprocessing.get_context("spawn")


class ProcessFailure(AssertionError):
    """A process raised, died, or took too long; the message holds its traceback and what it printed."""


def run_processes(
    fn: Callable[..., Any],
    n: int,
    args: Sequence[Any] = (),
    timeout: float = 50.0,
    env: Mapping[str, str] | None = None,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Run ``fn(rank, *args)`` in ``n`` fresh processes; what they return, by rank.

    Each has MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK and WORLD_SIZE, and ``env``, in its environment
    before ``fn``'s module is imported. ``fn`` must be importable. Ranks in ``may_die`` may end in any way;
    their result is None where they did not return.

    Raises:
        ProcessFailure: if one of the others raised, or ended without a result, or if not all had ended
            within ``timeout`` seconds: then all stacks are in the message, and the processes are killed.
    """
    common = {
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


def free_port() -> int:
    """A port on which nobody listens just now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _run_all(workers: list[_Worker], timeout: float, may_die: Collection[int]) -> None:
    limit = time.monotonic() + timeout
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
        self.connection, theirs = _spawn.Pipe(duplex=False)
        self._process = _spawn.Process(
            target=_child, args=(theirs, call, env, str(output), list(sys.path)), name=f"rank-{rank}"
        )
        self._process.start()
        theirs.close()

    def collect(self) -> None:
        """Take in what it sent, or note that it ended without."""
        try:
            self.ok, answer = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self._process.join(GRACE)
            self._error = f"ended without a result, exit code {self._process.exitcode}"
            return
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
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGUSR1)
            self._process.join(0.5)  # the time to write

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
        said = self._output.read_text(errors="replace") if self._output.exists() else ""
        return f"--- rank {self.rank}: {self._error}\n--- its output:\n{said}"


def _child(connection: Connection, call: bytes, env: dict[str, str], output: str, path: list[str]) -> None:
    os.setpgid(0, 0)  # so that whatever it starts can be ended with it
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.update(env)
    sys.path[:] = path
    try:
        fn, args = pickle.loads(call)
        # Plain pickle: torch would send tensors by shared memory, which ends with this process.
        answer = pickle.dumps((True, fn(int(env["RANK"]), *args)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    sys.stdout.flush()
    connection.send_bytes(answer)
    connection.close()
