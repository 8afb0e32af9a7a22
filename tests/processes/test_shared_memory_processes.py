"""Shared memory between real processes: what is sent, what is kept, and what a killed reader leaves."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.processes import run_processes
from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients
from zmqgrad.errors import PeerLostError
from zmqgrad.transport.shared_memory.segment import supported

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not supported(), reason="this system has no sealed shared memory"),
]

N = 100_000
"""Elements of a tensor that uses the arena."""

MB = 1 << 20


def join(rank: int) -> None:
    """Join, and see to it that the arena is mapped both ways."""
    rpc.init_rpc(f"worker{rank}", rpc_backend_options=rpc.RpcBackendOptions(arena_limit=256 * MB))
    if rank == 0:
        stats = rpc.get_stats()
        for _ in range(1000):
            rpc.rpc_sync("worker1", echo, args=(torch.zeros(N),))
            stats = rpc.get_stats()
            if stats["sent_by_path"]["arena"] and stats["received_by_path"]["arena"]:
                return
        raise AssertionError(f"nothing uses the arena: {stats}")


def echo(value: Any) -> Any:
    return value


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return x * factor


def overwrite(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(7.0)


def samples() -> list[Any]:
    """One of each kind."""
    base = torch.arange(float(N))
    matrix = torch.rand(400, 400)
    return [
        base,
        [torch.rand(1024) for _ in range(100)],
        {"nested": [(base, {"deep": matrix}), torch.ones(3)], "text": "beside"},
        [base[: N // 2], base[N // 4 :], base],  # windows on one storage
        matrix.t(),
        matrix[:, ::2],
        torch.rand(N, 1).expand(N, 3),
        torch.arange(N).as_strided((N - 9, 10), (1, 1)),  # rows that overlap
        torch.rand(N, dtype=torch.complex64).conj(),
        torch.rand(N).to(torch.bfloat16),
        np.arange(N, dtype=np.float64).reshape(10, -1),
        bytes(N),
    ]


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool((one == other).all())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return bool(one == other)


def check_what_travels() -> None:
    before = rpc.get_stats()["sent_by_path"]["arena"]
    wrong = [i for i, s in enumerate(samples()) if not same(s, rpc.rpc_sync("worker1", echo, args=(s,)))]
    assert wrong == []
    assert rpc.get_stats()["sent_by_path"]["arena"] - before > 40 * N

    x = torch.ones(N)
    assert rpc.rpc_sync("worker1", overwrite, args=(x,)).eq(7.0).all()
    assert x.eq(1.0).all()
    assert rpc.remote("worker1", torch.arange, args=(N,)).to_here().equal(torch.arange(N))


def consume(value: Any) -> None:
    del value


def check_blocks_are_released_with_the_reply() -> None:
    """So the next call finds the same memory, still warm; only what is sent back stays a call longer."""
    back = 0
    for _ in range(20):
        rpc.rpc_sync("worker1", consume, args=(torch.zeros(N),))
        back += rpc.get_stats()["arena"]["blocks_leased"] == 0
    assert back >= 10


def check_gradients() -> None:
    x, factor = (torch.rand(N, requires_grad=True) for _ in range(2))
    with context() as context_id:
        backward(context_id, [rpc.rpc_sync("worker1", scaled, args=(x, factor)).sum()])
        found = get_gradients(context_id)
        assert found[x].equal(factor)
        assert found[factor].equal(x)


def resident() -> int:
    """Bytes of memory that this process has, shared ones included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def check_memory_is_flat() -> None:
    x = torch.rand(MB // 4)

    def some_calls() -> tuple[int, int]:
        for _ in range(200):
            rpc.rpc_sync("worker1", echo, args=(x,))
        return resident(), rpc.rpc_sync("worker1", resident)

    before, after = some_calls(), some_calls()
    assert [b - a < 20 * MB for a, b in zip(before, after, strict=True)] == [True, True], (before, after)


def memory_of_ours() -> list[str]:
    """Shared memory that this process has mapped or open."""
    names = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:zmqgrad" in line]
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # the one that listed them
            continue
        if "memfd:zmqgrad" in name:
            names.append(name)
    return names


def everything(rank: int) -> list[str]:
    """What travels is what was sent; what is kept stays what it is, even after the end; nothing is left."""
    join(rank)
    kept: list[torch.Tensor] = []
    if rank == 0:
        kept = [rpc.rpc_sync("worker1", torch.full, args=((N,), float(i))) for i in range(10)]
        check_what_travels()
        check_gradients()
        check_blocks_are_released_with_the_reply()
        check_memory_is_flat()
        assert all(t.eq(float(i)).all() for i, t in enumerate(kept))
    rpc.shutdown()
    assert all(t.eq(float(i)).all() for i, t in enumerate(kept))
    assert all(t.add_(1.0).eq(float(i + 1)).all() for i, t in enumerate(kept))
    gc.collect()
    assert (memory_of_ours() != []) == (rank == 0)
    kept.clear()
    gc.collect()
    return memory_of_ours()


@pytest.mark.timeout(120)
def test_large_tensors_use_shared_memory_and_nothing_is_left_behind() -> None:
    assert run_processes(everything, 2, timeout=90) == [[], []]


told_to_go = threading.Event()


def go() -> None:
    """Called from elsewhere."""
    told_to_go.set()


held: list[torch.Tensor] = []


def hold_and_die(x: torch.Tensor) -> None:
    """Called at worker1: die with a block in hand, and another on its way."""
    held.append(x)
    os.kill(os.getpid(), signal.SIGKILL)


def a_reader_is_killed(rank: int) -> tuple[int, list[str]]:
    """Worker 1 dies between descriptor and release: its blocks come back, and others see nothing of it."""
    join(rank)
    leased = -1
    if rank == 0:
        kept = [rpc.rpc_sync("worker1", torch.full, args=((N,), float(i))) for i in range(3)]
        futures = [rpc.rpc_async("worker1", hold_and_die, args=(torch.rand(N),)) for _ in range(5)]
        for future in futures:
            with pytest.raises(PeerLostError):
                future.wait()
        assert all(t.eq(float(i)).all() for i, t in enumerate(kept)), (
            "what a dead worker sent stays what it is"
        )
        assert kept[0].add_(9.0).eq(9.0).all()
        kept.clear()
        for i in range(20):
            x = torch.full((N,), float(i))
            assert rpc.rpc_sync("worker2", echo, args=(x,)).equal(x)
        for _ in range(1000):  # what worker 2 has finished with comes back with its next answers
            leased = rpc.get_stats()["arena"]["blocks_leased"]
            if leased == 0:
                break
            rpc.rpc_sync("worker2", echo, args=(1,))
        with suppress(PeerLostError):  # worker 2 may have ended before its answer is here
            rpc.rpc_sync("worker2", go)
    else:
        assert told_to_go.wait(80)
    rpc.shutdown(graceful=False)
    return leased, memory_of_ours()


@pytest.mark.timeout(120)
def test_blocks_of_a_killed_reader_come_back() -> None:
    assert run_processes(a_reader_is_killed, 3, timeout=90, may_die=[1]) == [(0, []), None, (-1, [])]


# ---- too little memory -----------------------------------------------------------------------------------

TOO_LARGE = 200 * MB


def limit_memory(more: int) -> None:
    """Let this process have so many bytes of addresses beyond those that it has (``ulimit -v``)."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + more if more else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def receive_too_much(rank: int, fast_path: bool, as_reply: bool) -> None:
    options = rpc.RpcBackendOptions(rpc_timeout=0, local_fast_path=fast_path, arena_limit=512 * MB)
    rpc.init_rpc(f"worker{rank}", rpc_backend_options=options)
    if rank == 0:
        receiver, sender = (0, 1) if as_reply else (1, 0)
        function, argument = (zeros, TOO_LARGE) if as_reply else (torch.numel, zeros(TOO_LARGE))
        if not fast_path:  # libzmq aborts a process in which it cannot start its threads
            rpc.rpc_sync("worker1", echo, args=(zeros(MB),))
        rpc.rpc_sync(f"worker{receiver}", limit_memory, args=(TOO_LARGE // 2,))
        with pytest.raises(MemoryError, match=f"no memory for {TOO_LARGE} bytes that worker {sender} has"):
            rpc.rpc_sync("worker1", function, args=(argument,))
        assert rpc.rpc_sync("worker1", echo, args=(zeros(MB),)).equal(zeros(MB))
        rpc.rpc_sync(f"worker{receiver}", limit_memory, args=(0,))
        assert rpc.rpc_sync("worker1", echo, args=(zeros(MB),)).equal(zeros(MB))
    rpc.shutdown()


@pytest.mark.parametrize("as_reply", [False, True])
@pytest.mark.parametrize("fast_path", [True, False])
def test_a_tensor_beyond_the_memory_of_its_receiver_fails_its_call_only(
    fast_path: bool, as_reply: bool
) -> None:
    """Without a timeout the call waited for ever (by tcp), or the sender was declared lost (on one host)."""
    run_processes(receive_too_much, 2, args=(fast_path, as_reply))
