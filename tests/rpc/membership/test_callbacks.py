"""A graceful shutdown includes the calls that callbacks make, as torch's does, whichever comes first."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from zmqgrad import rpc
from zmqgrad.testing.simulation import simulate

followed: list[int] = []
all_called, begun = threading.Event(), threading.Event()


def note(number: int) -> int:
    """The call of a callback."""
    followed.append(number)
    if len(followed) == 6:
        all_called.set()
    return number


def follow(_: object) -> Any:
    """A callback that takes its time and makes a call, whose callback makes another one."""
    time.sleep(0.1)
    return rpc.rpc_async("worker0", note, args=(1,)).then(lambda _: rpc.rpc_async("worker0", note, args=(2,)))


def follow_late(future: object) -> Any:
    """As :func:`follow`, when nothing else runs any more."""
    time.sleep(1)
    return follow(future)


def call_and_leave() -> None:
    """Leave while callbacks are due: of a call, of one for which a thread waits, and of two, from C++."""
    first, second = [rpc.rpc_async("worker0", abs, args=(n,)) for n in range(2)]
    first.then(follow)
    second.then(lambda _: begun.set())
    second.then(follow_late)
    waiting = threading.Thread(target=second.wait)
    waiting.start()
    torch.futures.collect_all([rpc.rpc_async("worker0", abs, args=(n,)) for n in range(2)]).then(follow)
    begun.wait()
    rpc.shutdown()
    waiting.join()


def in_a_fixed_group(rank: int) -> list[int]:
    """All leave at once."""
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank:
        call_and_leave()
    else:
        rpc.shutdown()
    return followed


def in_a_dynamic_group(rank: int) -> list[int]:
    """The callee leaves last."""
    del os.environ["WORLD_SIZE"]
    rpc.init_rpc(f"worker{rank}", rank=rank)
    if rank:
        rpc.wait_for_workers(["worker0"], timeout=0)
        call_and_leave()
    else:
        all_called.wait(60)
        rpc.shutdown()
    return followed


@pytest.mark.timeout(240)
@pytest.mark.parametrize("program", [in_a_fixed_group, in_a_dynamic_group])
def test_calls_of_callbacks_are_made_before_a_worker_leaves(program: Callable[[int], list[int]]) -> None:
    for run in simulate(program, workers=2, seeds=20):
        assert sorted(run.values[0]) == [1, 1, 1, 2, 2, 2]
