"""Fresh processes for one piece of a benchmark: run a function in each, hear how far it is, collect results.

They are forks of one process that has imported torch and zmqgrad and done nothing else: what is measured
begins after imports, and twenty-four workers start in a second.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Hear = Callable[[str], None]

LARGE = (
    "torch._dynamo",
    "torch.distributed.rpc",
    "torch.optim",
    "zmqgrad.autograd",
    "zmqgrad.optim",
    "zmqgrad.rpc",
)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(LARGE))


class PieceFailed(Exception):
    """A process raised, died, or took too long; the message says which, and how."""


@dataclass(frozen=True)
class Place:
    """Where a function runs: as number ``rank`` of ``count``."""

    rank: int
    count: int
    _barrier: Barrier
    _connection: Connection

    def together(self) -> float:
        """Wait until all have called this; gives the moment."""
        self._barrier.wait()
        return time.perf_counter()

    def say(self, text: str) -> None:
        """Tell the starter what happens now."""
        self._connection.send(("says", text))


def run_together(
    function: Callable[Concatenate[Place, P], T], count: int, seconds: float, hear: Hear,
    *args: P.args, **kwargs: P.kwargs,
) -> list[T]:  # fmt: skip
    """Run ``function(place, ...)`` in ``count`` processes; what they return, by rank.

    Raises:
        PieceFailed: if one of them raises or dies, or they take more than ``seconds``.
    """
    barrier = _context.Barrier(count)
    processes, connections = [], {}
    try:
        for rank in range(count):
            ours, theirs = _context.Pipe(duplex=False)
            arguments = (rank, count, barrier, theirs, dict(os.environ), function, args, kwargs)
            process = _context.Process(target=_child, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections[ours] = rank
        results = _collect(dict(connections), time.monotonic() + seconds, hear)
        for process in processes:
            process.join(10.0)
        return [results[rank] for rank in range(count)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(connections: dict[Connection, int], deadline: float, hear: Hear) -> dict[int, Any]:
    results: dict[int, Any] = {}
    while connections:
        ready = wait(list(connections), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise PieceFailed(f"ranks {sorted(connections.values())} did not end in time")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = connections[connection]
            try:
                kind, content = connection.recv()
            except EOFError:
                raise PieceFailed(f"rank {rank} died") from None
            if kind == "says":
                hear(content)
                continue
            del connections[connection]
            if kind == "failed":
                raise PieceFailed(f"rank {rank}:\n{content}")
            results[rank] = content
    return results


def _say_nothing(*args: object, **kwargs: object) -> None:
    pass


def _end_with_starter(connection: Connection) -> None:
    """Ends this process with the one that hears it: what is left over would disturb what comes next."""
    poll = select.poll()
    poll.register(connection, 0)
    poll.poll()  # an error: nobody reads it any more
    os._exit(1)


def _child(
    rank: int,
    count: int,
    barrier: Barrier,
    connection: Connection,
    environ: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the starter, which ends us
    threading.Thread(target=_end_with_starter, args=(connection,), daemon=True).start()
    warnings.showwarning = (
        _say_nothing  # torch's RPC and its optimizer warn of themselves, whatever the filters
    )
    os.environ.update(environ, RANK=str(rank), WORLD_SIZE=str(count), TORCH_CPP_LOG_LEVEL="ERROR")
    try:
        result = function(Place(rank, count, barrier, connection), *args, **kwargs)
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        sys.exit(1)
    connection.send(("done", result))
