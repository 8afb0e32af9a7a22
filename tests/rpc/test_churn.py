"""What is made and dropped again and again leaves nothing behind: objects of ours are counted."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.waiting import eventually
from zmqgrad import autograd, rpc
from zmqgrad.errors import PayloadError, RpcTimeoutError, UnknownWorkerError
from zmqgrad.testing import Cluster, cluster

OFTEN = 100


@pytest.fixture
def trio() -> Iterator[Cluster]:
    with cluster(3) as c:
        yield c


def same(value: object) -> object:
    """As it came."""
    return value


def fail() -> None:
    """Raise something."""
    raise ValueError("as ever")


def expect(error: type[Exception], use: Callable[[], object]) -> None:
    """Call ``use``, which raises ``error``."""
    with pytest.raises(error):
        use()


def differentiate() -> None:
    """One backward pass over two workers."""
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync(1, torch.mul, args=(x, 3.0)).sum()])


CHURNS: dict[str, Callable[[], object]] = {
    "call": lambda: rpc.rpc_sync(1, same, args=(torch.ones(3),)),
    "future": lambda: rpc.rpc_async(1, same).wait,
    "chain": lambda: rpc.rpc_async(1, abs, args=(1,)).then(lambda f: f.wait() + 1).wait(),
    "failed future": lambda: expect(ValueError, rpc.rpc_async(1, fail).wait),
    "failed future that nobody looks at": lambda: rpc.rpc_async(1, fail),
    "failed chain": lambda: expect(RuntimeError, rpc.rpc_async(1, abs).then(lambda f: fail()).wait),
    "wait_all": lambda: torch.futures.wait_all([rpc.rpc_async(n, abs, args=(n,)) for n in (0, 1, 2)]),
    "failed wait_all": lambda: expect(
        ValueError, lambda: rpc.wait_all([rpc.rpc_async(n, fail) for n in (0, 1)])
    ),
    "over time": lambda: expect(RpcTimeoutError, lambda: rpc.rpc_sync(1, same, args=(1,), timeout=1e-9)),
    "unknown worker": lambda: expect(UnknownWorkerError, lambda: rpc.rpc_sync("nobody", same)),
    "no payload": lambda: expect(
        PayloadError, lambda: rpc.rpc_sync(1, same, args=(threading.Lock(), rpc.RRef(1)))
    ),
    "reference": lambda: rpc.remote(1, same, args=(1,)),
    "value": lambda: rpc.remote(1, same, args=(1,)).to_here(),
    "failed value": lambda: expect(ValueError, rpc.remote(1, fail).to_here),
    "own reference": lambda: rpc.rpc_sync(1, same, args=(rpc.RRef(1),)),
    "reference to another worker's": lambda: rpc.rpc_sync(2, same, args=(rpc.remote(1, list),)),
    "proxy": lambda: rpc.remote(1, list).rpc_sync().__len__(),
    "broadcast": lambda: rpc.broadcast(None, same, args=(1,)),
    "gradients": differentiate,
}


def census() -> Counter[str]:
    """Objects of our classes, and tensors and errors, by class."""
    gc.collect()
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)  # of some classes of other libraries, __module__ is not a string
        if str(kind.__module__).startswith("zmqgrad") or issubclass(
            kind, (torch.Tensor, Exception, torch._C.Future)
        ):
            found[f"{kind.__module__}.{kind.__qualname__}"] += 1
    return found


@pytest.mark.slow
def test_dropped_values_leave_nothing_behind(trio: Cluster) -> None:
    """Each kind often enough that one object in four would show."""

    def churn() -> None:
        for make in CHURNS.values():
            for _ in range(OFTEN):
                make()

    def grown() -> Counter[str]:
        trio.network.history.clear()  # it keeps the messages
        return Counter({kind: more for kind, more in (census() - before).items() if more >= OFTEN // 4})

    churn()  # what is made once and kept is there from here on
    before = census()
    churn()
    eventually(grown, lambda kinds: not kinds)  # the last objects are still being released
    assert not any(sum(w.references.statistics().values()) for w in trio.workers)
