"""Tensors on GPUs between real processes: they arrive on the mapped device, in the order of streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.processes import run_processes
from zmqgrad import rpc
from zmqgrad.autograd import backward, context, get_gradients

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

N = 1 << 20
"""Elements of a large tensor."""


def echo(value: Any) -> Any:
    return value


def total(x: torch.Tensor) -> float:
    return x.sum().item()


def device_of(x: torch.Tensor) -> str:
    return str(x.device)


def join(rank: int, there: str = "cuda:0", **options: Any) -> None:
    """Join; the tensors of our GPU go to ``there``."""
    made = rpc.TensorPipeRpcBackendOptions(rpc_timeout=30, **options)
    made.set_device_map(
        f"worker{1 - rank}", {"cuda:0" if rank == 0 else there: there if rank == 0 else "cuda:0"}
    )
    torch.zeros(1, device="cuda:0")  # CUDA takes seconds to begin
    rpc.init_rpc(f"worker{rank}", rpc_backend_options=made)


def all_that_travels(rank: int) -> None:
    join(rank)
    if rank == 0:
        base = torch.rand(1000, 1000, device="cuda:0")
        samples = [
            base,
            base.t(),
            base[:, ::3],
            [base[:500], base[250:]],
            base.to(torch.bfloat16),
            torch.rand(N, dtype=torch.complex64, device="cuda:0").conj(),
            base > 0.5,
            {"gpu": base, "cpu": torch.rand(100_000), "small": torch.ones(3, device="cuda:0"), "n": 1},
            [torch.rand(20_000, device="cuda:0") for _ in range(50)],
            base.to_sparse(),
        ]
        for sample in samples:
            back = rpc.rpc_sync("worker1", echo, args=(sample,))
            torch.testing.assert_close(back, sample, rtol=0, atol=0)
        rref = rpc.remote("worker1", echo, args=(base,))
        assert torch.equal(rref.to_here(), base)
    rpc.shutdown()


def test_tensors_of_every_kind_arrive_and_come_back() -> None:
    run_processes(all_that_travels, 2, timeout=120)


def in_order(rank: int) -> None:
    join(rank)
    if rank == 0:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = torch.zeros(N, device="cuda:0")
            for _ in range(300):
                x += 1
            future = rpc.rpc_async("worker1", total, args=(x,))
            x.fill_(-1)  # it has been copied, or will be before
            assert future.wait() == 300 * N
            for n in range(20):
                x = torch.full((N,), float(n), device="cuda:0")
                futures = [rpc.rpc_async("worker1", torch.mul, args=(x, k)) for k in range(4)]
                x.zero_()
                assert [f.wait().sum().item() for f in futures] == [n * k * N for k in range(4)]
        w = torch.rand(N, device="cuda:0", requires_grad=True)
        with context() as context_id:
            y = rpc.rpc_sync("worker1", torch.mul, args=(w, w))
            backward(context_id, [y.sum()])
            torch.testing.assert_close(get_gradients(context_id)[w], 2 * w.detach())
    rpc.shutdown()


def test_work_is_done_in_the_order_of_the_streams() -> None:
    run_processes(in_order, 2, timeout=120)


def to_the_second(rank: int) -> None:
    join(rank, there="cuda:1")
    if rank == 0:
        x = torch.rand(N, device="cuda:0")
        assert rpc.rpc_sync("worker1", device_of, args=(x,)) == "cuda:1"
        back = rpc.rpc_sync("worker1", torch.add, args=(x, 1))
        assert back.device == x.device
        assert torch.equal(back, x + 1)
    rpc.shutdown()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")
def test_from_one_device_to_another() -> None:
    run_processes(to_the_second, 2, timeout=120)
