"""The end of a peer is its last message: replies that have arrived are never overtaken by it.

The callee sends all replies and ends at once, while the caller can run nothing: its main thread is inside a C
function that holds the interpreter lock. So the replies and all signs of the end arrive together.
"""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.processes import run_processes
from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.rpc.current import current_worker
from zmqgrad.store import FileStore

HOLD_SECONDS = 2.0
CALLS = 600
FLOOD = 6000
WAITERS = 6

_gate = threading.Event()
_waiting = threading.Semaphore(0)


def at_the_gate(size: int) -> torch.Tensor:
    """Replies once all calls have arrived."""
    _waiting.release()
    assert _gate.wait(60)
    return torch.full((size,), 2.0)


_promised: dict[int, torch.futures.Future[bytes]] = {}


@rpc.functions.async_execution
def promised(number: int) -> torch.futures.Future[bytes]:
    """Replies when the process ends."""
    future = _promised[number] = torch.futures.Future()
    return future


def keep_promises_and_end(path: str) -> None:
    eventually(lambda: len(_promised), lambda n: n == FLOOD, 60)
    signs = FileStore(path)
    signs.set("all wait", "")
    signs.wait(["held"], 60)
    for number, future in _promised.items():
        future.set_result(number.to_bytes(4, "big") + bytes(20_000))
    eventually(lambda: len(current_worker().server.in_flight), lambda n: n <= 1, 30)
    os._exit(0)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def reply_and_end(calls: int, path: str) -> None:
    """Opens the gate when ``calls`` wait there, and ends this process when all replies were sent."""
    for _ in range(calls):
        assert _waiting.acquire(timeout=60)
    signs = FileStore(path)
    signs.set("all wait", "")
    signs.wait(["held"], 60)
    _gate.set()
    eventually(lambda: len(current_worker().server.in_flight), lambda n: n <= 1, 30)
    os._exit(0)


def hold_the_lock(path: str) -> None:
    """Lets the callee go on, and runs no Python until it has ended."""
    store = FileStore(path)
    store.wait(["all wait"], 60)
    store.set("held", "")
    ctypes.PyDLL(None).usleep(int(HOLD_SECONDS * 1e6))


def wait_by_futures(path: str) -> int:
    futures = [rpc.rpc_async("worker1", at_the_gate, args=(5000,)) for _ in range(WAITERS)]
    many = [rpc.rpc_async("worker1", double, args=(torch.ones(5000),)) for _ in range(CALLS)]
    rpc.rpc_async("worker1", reply_and_end, args=(WAITERS, path))
    hold_the_lock(path)
    return sum(int(future.wait()[0] == 2) for future in futures + many)


def wait_for_a_flood(path: str) -> int:
    """More replies than the kernel accepts from one connection."""
    futures = [rpc.rpc_async("worker1", promised, args=(number,)) for number in range(FLOOD)]
    rpc.rpc_async("worker1", keep_promises_and_end, args=(path,))
    hold_the_lock(path)
    return sum(future.wait()[:4] == number.to_bytes(4, "big") for number, future in enumerate(futures))


def wait_in_threads(path: str) -> int:
    with ThreadPoolExecutor(WAITERS) as threads:
        futures = [
            threads.submit(rpc.rpc_sync, "worker1", at_the_gate, (5000 if n % 2 else 10,))
            for n in range(WAITERS)
        ]
        rpc.rpc_async("worker1", reply_and_end, args=(WAITERS, path))
        hold_the_lock(path)
        return sum(int(future.result(60)[0] == 2) for future in futures)


WAITS = {
    "futures": (wait_by_futures, WAITERS + CALLS),
    "a flood": (wait_for_a_flood, FLOOD),
    "threads": (wait_in_threads, WAITERS),
}


def replies_of_one_that_ends(rank: int, how: str, path: str) -> int:
    options = rpc.RpcBackendOptions(num_worker_threads=2 * WAITERS, rpc_timeout=90)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 1:
        threading.Event().wait(90)
    assert rpc.rpc_sync("worker1", os.getpid) > 0
    arrived = WAITS[how][0](path)
    rpc.shutdown(graceful=False)
    return arrived


@pytest.mark.processes
@pytest.mark.parametrize("how", WAITS)
def test_no_reply_is_overtaken_by_the_end_of_its_sender(tmp_path: Path, how: str) -> None:
    arrived, _ = run_processes(replies_of_one_that_ends, 2, args=(how, str(tmp_path / "signs")), may_die=[1])
    assert arrived == WAITS[how][1]
