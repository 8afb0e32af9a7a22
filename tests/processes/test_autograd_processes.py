"""Distributed autograd between real processes: drawn programs, and the first program that anybody writes."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import weakref
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch.nn.parallel import DistributedDataParallel

from tests.support.processes import run_processes
from tests.support.programs import Program, assert_same, gradients_here, gradients_over_rpc, programs
from tests.support.waiting import eventually
from tools.ports import free_port
from zmqgrad import rpc
from zmqgrad.autograd import allreduce_gradients, backward, context, describe_context, get_gradients
from zmqgrad.autograd.forwarding import autograd_of
from zmqgrad.optim import DistributedOptimizer
from zmqgrad.rpc import reply_port
from zmqgrad.rpc.current import current_worker
from zmqgrad.testing import cluster

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def drawn(workers: int, count: int, from_seed: int) -> list[Program]:
    """The same ``count`` programs each time."""
    found: list[Program] = []

    @seed(from_seed)
    @settings(
        max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck)
    )
    @given(programs(workers, all_used=False))
    def collect(program: Program) -> None:
        found.append(program)

    collect()
    return found


def run_programs(rank: int, todo: list[Program]) -> list[str]:
    """In each process: drive the programs that it is the driver of; gives what went wrong."""
    rpc.init_rpc(f"worker{rank}")
    wrong = []
    for program, mode in zip(todo, itertools.cycle(["auto", "smart", "auto"]), strict=False):
        if program.driver == rank:
            try:
                assert_same(gradients_over_rpc(program, mode), gradients_here(program))
            except Exception as e:
                wrong.append(f"{program!r}\n{mode}: {type(e).__name__}: {e}")
    rpc.shutdown()
    return wrong


@pytest.mark.timeout(150)  # a minute on a machine that does much else
def test_drawn_programs_have_the_gradients_of_one_process() -> None:
    todo = drawn(workers=3, count=40, from_seed=20)
    wrong = [text for texts in run_processes(run_programs, 3, (todo,), timeout=100) for text in texts]
    assert not wrong, "\n\n".join(wrong)


def random_tensor() -> torch.Tensor:
    return torch.rand((3, 3), requires_grad=True)


def first_program(rank: int) -> float:
    """Two tensors of the other worker are added here; one step of SGD over there lowers the sum."""
    rpc.init_rpc(f"worker{rank}")
    other = f"worker{1 - rank}"
    with context() as context_id:
        rref1, rref2 = rpc.remote(other, random_tensor), rpc.remote(other, random_tensor)
        loss = (rref1.to_here() + rref2.to_here()).sum()
        backward(context_id, [loss])
        DistributedOptimizer(torch.optim.SGD, [rref1, rref2], lr=0.05).step(context_id)
    after = (rref1.to_here() + rref2.to_here()).sum()
    rpc.shutdown()
    return (loss - after).item()


def test_the_first_program() -> None:
    assert run_processes(first_program, 2) == pytest.approx([18 * 0.05] * 2, abs=1e-5)


REPLICAS = (1, 2)
_stage: list[torch.nn.Module] = []


def make_stage() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()


def through_stage(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = _stage[0](x)
    return y


def sum_gradients(context_id: int) -> list[torch.Tensor]:
    params = list(_stage[0].parameters())
    allreduce_gradients(context_id, params, _group[0], average=False)
    gradients = get_gradients(context_id)
    return [gradients[p] for p in params]


_group: list[torch.distributed.ProcessGroup | None] = []


def run_replicas(rank: int, port: int) -> list[list[float]]:
    """Workers 1 and 2 hold the same stage, and are a gloo group; worker 0 gives each half of the batch."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3
    )
    _group.append(torch.distributed.new_group(list(REPLICAS)))
    _stage.append(make_stage())
    rpc.init_rpc(f"worker{rank}")
    found: list[list[float]] = []
    if rank == 0:
        torch.manual_seed(1)
        batch = torch.rand(6, 4, dtype=torch.float64)
        (_stage[0](batch) ** 2).sum().backward()
        found.append([v for p in _stage[0].parameters() for v in p.grad.flatten().tolist()])
        with context() as context_id:
            halves = zip(REPLICAS, batch.split(3), strict=True)
            parts = [rpc.rpc_async(to, through_stage, (half,)) for to, half in halves]
            backward(context_id, [(torch.cat([p.wait() for p in parts]) ** 2).sum()])
            summing = [rpc.rpc_async(to, sum_gradients, (context_id,)) for to in REPLICAS]
            for s in summing:
                found.append([v for g in s.wait() for v in g.flatten().tolist()])
    rpc.shutdown()
    torch.distributed.destroy_process_group()
    return found


def test_replicas_sum_their_gradients_to_those_of_one_process() -> None:
    expected, *replicas = run_processes(run_replicas, 3, (free_port(),))[0]
    assert len(replicas) == len(REPLICAS)
    for found in replicas:
        assert found == pytest.approx(expected, rel=1e-12)


_may_go_on = threading.Event()


class Held(torch.autograd.Function):
    """Its backward has worker 0 interrupted, and then waits until it may go on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        rpc.rpc_sync(0, interrupt)
        assert _may_go_on.wait(30)
        return gradients[0]


def held(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = Held.apply(x)
    return y


def interrupt() -> None:
    """As Ctrl-C does: in the main thread, whichever runs this."""
    os.kill(os.getpid(), signal.SIGINT)


def go_on() -> None:
    _may_go_on.set()


def leave_after_an_interrupted_pass(rank: int) -> None:
    """The gradient of worker 1 arrives at worker 0 after the pass has failed."""
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        reply_port.DRAIN_SECONDS = 0.0
        with context() as context_id:
            root = rpc.rpc_sync(1, held, (torch.ones(3, requires_grad=True),)).sum()
            with pytest.raises(KeyboardInterrupt):
                backward(context_id, [root])
        worker = current_worker()
        worker.client.sent += 1  # as if the interrupt had come in the middle of sending
        drained = threading.Event()
        worker.timer.call_later(0.01, drained.set)
        assert drained.wait(10)
        rpc.rpc_sync(1, go_on)
    rpc.shutdown()


def test_workers_leave_after_a_pass_that_was_interrupted_while_others_were_at_work() -> None:
    run_processes(leave_after_an_interrupted_pass, 2)


def make_model() -> torch.nn.Module:
    torch.manual_seed(2)
    parts = (torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return torch.nn.Sequential(*parts).double()


class Detour(torch.nn.Module):
    """A model whose middle is on worker 2: its two ends get their gradients at different times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = make_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(rpc.rpc_sync(2, torch.tanh, (self.first(x),)))
        return y


def run_ddp(rank: int, port: int) -> list[float]:
    """Workers 0 and 1 train replicas; how far the gradients in the context are from those of one process."""
    rpc.init_rpc(f"worker{rank}")
    gaps = []
    if rank < 2:
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
        )
        torch.manual_seed(1)
        batch = torch.rand(6, 4, dtype=torch.float64)
        alone = make_model()
        alone(batch).square().mean().backward()
        expected = [p.grad for p in alone.parameters()]
        for as_view in (False, True):
            replica = DistributedDataParallel(Detour(), gradient_as_bucket_view=as_view)
            seen: list[torch.Tensor] = []
            replica.module.last.bias.register_hook(lambda g, seen=seen: seen.append(g))
            for _ in range(2):
                with context() as context_id:
                    loss = replica(batch[3 * rank : 3 * rank + 3]).square().mean()
                    backward(context_id, [loss])
                    gradients = get_gradients(context_id)
                kept = [gradients[p] for p in replica.parameters()]
                gaps += [(g - e).abs().max().item() for g, e in zip(kept, expected, strict=True)]
                assert all(p.grad is None for p in replica.parameters())
            assert len(seen) == 2
        for options in ({"find_unused_parameters": True}, {"static_graph": True}):
            replica = DistributedDataParallel(Fork(), **options)
            halves = [fork_gradients(batch, half) for half in (0, 1)]
            for _ in range(2):
                with context() as context_id:
                    loss = fork_loss(replica, batch, rank)
                    assert "group" in describe_context(context_id)  # which walks over the graph, too
                    backward(context_id, [loss])
                    gradients = get_gradients(context_id)
                for p, *both in zip(replica.parameters(), *halves, strict=True):
                    mean = sum(g for g in both if g is not None) / 2
                    gaps.append((gradients[p] - mean).abs().max().item())
                assert all(p.grad is None for p in replica.parameters())
        torch.distributed.destroy_process_group()
    rpc.shutdown()
    return gaps


class Fork(torch.nn.Module):
    """A model with a layer that replica 1 does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.spare = make_model(), make_model()

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        y: torch.Tensor = self.model(x)
        return y * self.spare(x) if spare else y


def fork_loss(model: torch.nn.Module, batch: torch.Tensor, half: int) -> torch.Tensor:
    y = model(batch[3 * half : 3 * half + 3], half == 0)
    return rpc.rpc_sync(2, torch.tanh, (y,)).square().mean()


def fork_gradients(batch: torch.Tensor, half: int) -> list[torch.Tensor | None]:
    """Those of one half, without any replica."""
    model = Fork()
    with context() as context_id:
        backward(context_id, [fork_loss(model, batch, half)])
        gradients = get_gradients(context_id)
    return [gradients.get(p) for p in model.parameters()]


_replica: list[DistributedDataParallel] = []


def serve_replica(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = _replica[0](x)
    return y


def gradients_of_replica(context_id: int) -> list[torch.Tensor]:
    return list(map(get_gradients(context_id).__getitem__, _replica[0].parameters()))


def run_served_ddp(rank: int, port: int, options: dict[str, bool]) -> list[float]:
    """Worker 2 calls the replicas of workers 0 and 1, three times each, checkpointed; as :func:`run_ddp`."""
    if rank < 2:
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
        )
        _replica.append(DistributedDataParallel(make_model(), **options))
    rpc.init_rpc(f"worker{rank}")
    gaps = []
    if rank == 2:
        torch.manual_seed(1)
        batches = torch.rand(6, 3, 4, dtype=torch.float64)
        alone = make_model()
        alone(batches).square().sum().backward()
        for _ in range(2):
            with context() as context_id:
                results = [rpc.checkpoint_async(i % 2, serve_replica, x) for i, x in enumerate(batches)]
                backward(context_id, [sum(y.wait().square().sum() for y in results)])  # type: ignore[list-item]
                for to in (0, 1):
                    found = rpc.rpc_sync(to, gradients_of_replica, (context_id,))
                    pairs = zip(found, alone.parameters(), strict=True)
                    gaps += [(g - p.grad / 2).abs().max().item() for g, p in pairs]  # type: ignore[operator]
    rpc.shutdown()
    return gaps


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
def test_checkpointed_calls_of_data_parallel_replicas(option: str) -> None:
    gaps = run_processes(run_served_ddp, 3, (free_port(), {option: True}))[2]
    assert len(gaps) == 2 * 2 * 4
    assert max(gaps) < 1e-13


def test_distributed_data_parallel_averages_gradients_of_contexts() -> None:
    gaps = run_processes(run_ddp, 3, (free_port(),))
    assert len(gaps[0]) == len(gaps[1]) == 2 * 2 * 4 + 2 * 2 * 8
    assert max(gaps[0] + gaps[1]) < 1e-14


def deep_graph(x: torch.Tensor, nodes: int) -> list[torch.Tensor]:
    y = x * 1
    for _ in range(nodes // 2):
        y = y + 1
    z = y
    for _ in range(nodes // 2):
        z = z + 1
    return [y, z, z + y]


def free_deep_graph(rank: int) -> int:
    """What a worker has of a context is freed when that ends."""
    x = torch.ones(1, requires_grad=True)
    with cluster(2) as c:
        for mode in ("fast", "auto"):
            with context() as context_id:
                results = rpc.rpc_sync(1, deep_graph, (x, 120_000))
                backward(context_id, [results[0 if mode == "auto" else 2].sum()], mode=mode)
                graph = weakref.ref(autograd_of(c.workers[1]).contexts.live()[0])
            del results
            eventually(graph, lambda found: found is None)
    return 1


def test_a_deep_graph_is_freed_without_overflowing_the_stack() -> None:
    assert run_processes(free_deep_graph, 1) == [1]
