"""Arguments of a wrong type or value raise the library's own errors, at once, from every public function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from zmqgrad import autograd, elastic, nn, optim, rpc, store
from zmqgrad.errors import ConfigurationError, PayloadError
from zmqgrad.testing import cluster

HUGE = 10**400  # no float


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with cluster(1):
        yield


def weight() -> rpc.RRef[torch.Tensor]:
    return rpc.RRef(torch.ones(2, requires_grad=True))


def sgd(**options: Any) -> optim.DistributedOptimizer:
    return optim.DistributedOptimizer(torch.optim.SGD, [weight()], lr=0.1, **options)


def wait_for_version(**arguments: Any) -> None:
    rpc.publish("weights", {"a": torch.ones(1)})
    with rpc.subscribe("weights") as subscription:
        subscription.wait(**arguments)


def reduced(params: Any) -> None:
    with autograd.context() as context_id:
        autograd.allreduce_gradients(context_id, params)


def clipped(**arguments: Any) -> None:
    with autograd.context() as context_id:
        optim.clip_grad_norm(context_id, [weight()], **{"max_norm": 1.0, **arguments})


def handler(**arguments: Any) -> None:
    backend = {
        "backend": "zmqgrad",
        "endpoint": "127.0.0.1:0",
        "run_id": "job",
        "min_nodes": 1,
        "max_nodes": 1,
    }
    elastic.create_handler(**{**backend, **arguments}).close()


WRONG_TYPES: list[tuple[str, Callable[[Any], object]]] = [
    ("args", lambda _: rpc.group(0).map(pow, 5)),  # type: ignore[arg-type]
    ("RRefs", lambda _: rpc.RRefGroup(5)),  # type: ignore[arg-type]
    ("names of tensors", lambda _: rpc.publish("w", {"a": torch.ones(1)}, changed=5)),  # type: ignore[arg-type]
    ("names of tensors", lambda _: rpc.publish("w", {"a": torch.ones(1)}, changed=[5])),  # type: ignore[list-item]
    ("newer_than", lambda _: wait_for_version(newer_than="x")),
    ("name of a worker", lambda _: rpc.RpcBackendOptions().set_device_map([], {})),  # type: ignore[arg-type]
    ("max_staleness", lambda _: sgd(versions=True, max_staleness="x")),
    ("optimizer_class", lambda _: optim.DistributedOptimizer(5, [weight()])),  # type: ignore[arg-type]
    ("closure", lambda _: sgd().step(0, 5)),  # type: ignore[arg-type]
    ("DistributedOptimizer", lambda _: optim.DistributedLRScheduler(5, print)),  # type: ignore[arg-type]
    ("make", lambda _: optim.DistributedLRScheduler(sgd(), 5)),  # type: ignore[arg-type]
    ("numbers", lambda _: clipped(max_norm=None)),
    ("numbers", lambda _: clipped(norm_type="x")),
    ("list of tensors", lambda _: reduced(5)),
    ("list of tensors", lambda _: reduced([5])),
    ("list of tensors", lambda _: reduced([[]])),
    ("list of keys", lambda _: store.HashStore().check(5)),  # type: ignore[arg-type]
    ("list of values", lambda _: store.HashStore().multi_set(["k"], 5)),  # type: ignore[arg-type]
    ("world size", lambda path: store.FileStore(str(path), world_size="x")),  # type: ignore[arg-type]
    ("world size", lambda _: store.TCPStore("127.0.0.1", 0, "x", True)),  # type: ignore[arg-type]
    ("address", lambda _: store.StoreServer(5)),  # type: ignore[arg-type]
    ("endpoint", lambda _: handler(endpoint=5)),
    ("local_addr", lambda _: handler(local_addr=5)),
    ("fn", lambda _: elastic.launch(elastic.LaunchConfig(), print)),  # type: ignore[arg-type]
    ("config", lambda _: elastic.launch(print, print)),  # type: ignore[arg-type]
    ("rdzv_endpoint", lambda _: elastic.LaunchConfig(rdzv_endpoint=5)),  # type: ignore[arg-type]
    ("env", lambda _: elastic.LaunchConfig(env=5)),  # type: ignore[arg-type]
    ("name of a file", lambda _: store.StoreServer("tcp://127.0.0.1:*", journal=True)),  # type: ignore[arg-type]
    ("port", lambda _: store.StoreServer("tcp://127.0.0.1:*", watch_port="x")),  # type: ignore[arg-type]
    ("callback", lambda _: store.HashStore().watch_key("k", 5)),  # type: ignore[arg-type]
    ("callback", lambda _: store.HashStore().watch_prefix("k", None)),  # type: ignore[arg-type]
    ("RRefs", lambda _: rpc.RRefGroup(torch.tensor(1))),  # type: ignore[arg-type]
    ("futures", lambda _: rpc.wait_all(torch.tensor(1))),  # type: ignore[arg-type]
]

WRONG_VALUES: list[tuple[str, Callable[[], object]]] = [
    ("seconds", lambda: rpc.rpc_sync(0, abs, args=(1,), timeout=HUGE)),
    ("seconds", lambda: rpc.set_rpc_timeout(math.nan)),
    ("seconds", lambda: rpc.wait_all([], timeout=torch.ones(2))),  # type: ignore[arg-type]
    ("seconds", lambda: rpc.rpc_sync(0, abs, args=(1,), timeout=torch.ones(2))),  # type: ignore[arg-type]
    ("seconds", lambda: rpc.rpc_sync(0, abs, args=(1,), timeout=timedelta(seconds=-1))),  # type: ignore[arg-type]
    ("too long", lambda: store.HashStore(timeout=HUGE)),
    ("max_clients", lambda: store.StoreServer("tcp://127.0.0.1:*", max_clients="x")),  # type: ignore[arg-type]
    ("max_waiting", lambda: store.StoreServer("tcp://127.0.0.1:*", max_waiting=-1)),
    ("descriptor -1", lambda: store.StoreServer("tcp://127.0.0.1:*", listen_fd=-1)),
    ("no name of a file", lambda: store.StoreServer("tcp://127.0.0.1:*", journal="a\0b")),
    ("no name of a file", lambda: store.FileStore("\ud800")),
    ("no name of a file", lambda: store.FileStore("")),
    ("no Unicode text", lambda: store.StoreServer("tcp://127.0.0.1:*", secret="\ud800")),
    ("no number", lambda: store.HashStore().wait(["k"], math.nan)),
    ("no Unicode text", lambda: store.HashStore().set("k", "\ud800")),
    ("host name", lambda: store.TCPStore("host..example", 1)),
    ("it must be host or host:port", lambda: handler(endpoint="host..example")),
    ("'x'", lambda: handler(min_nodes="x")),
    ("no rendezvous backend", lambda: handler(backend=[])),
    ("local_addr", lambda: handler(local_addr="host..example")),
    ("local_addr", lambda: elastic.LaunchConfig(local_addr=5)),  # type: ignore[arg-type]
    ("cannot hold 5 as 'a'", lambda: elastic.LaunchConfig(env={"a": 5})),  # type: ignore[dict-item]
    ("'a=b'", lambda: elastic.LaunchConfig(env={"a=b": "c"})),
    ("'role'", lambda: elastic.LaunchConfig(role="a\0b")),
    ("'role'", lambda: elastic.LaunchConfig(role="\ud800")),
    ("log_dir", lambda: elastic.launch(print, elastic.LaunchConfig(log_dir=Path("/dev/null/logs")))()),
    ("log_dir", lambda: elastic.launch(print, elastic.LaunchConfig(log_dir=Path("a\0b")))()),
    ("join_timeout", lambda: handler(join_timeout=HUGE)),
    ("keep_alive_max_attempt", lambda: handler(keep_alive_max_attempt=math.inf)),
    ("monitor_interval", lambda: elastic.LaunchConfig(monitor_interval="x")),  # type: ignore[arg-type]
    ("output streams", lambda: elastic.Streams.from_str(5)),  # type: ignore[arg-type]
    ("timeout", lambda: elastic.State(step=0).restore(timeout="x")),  # type: ignore[arg-type]
    ("timeout", lambda: elastic.State(step=0).commit(timeout=math.nan)),
    ("timeout", lambda: elastic.State(step=0).wait(timeout=HUGE)),
]


@pytest.mark.parametrize(("words", "call"), WRONG_TYPES)
def test_a_wrong_type(words: str, call: Callable[[Any], object], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        call(tmp_path / "store")
    assert isinstance(caught.value, TypeError), "as Python and torch have it"


@pytest.mark.parametrize(("words", "call"), WRONG_VALUES)
def test_a_wrong_value(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError, match=words):
        call()


@pytest.mark.parametrize("wrong", [{"args": 5}, {"kwargs": 5}])
def test_arguments_of_a_remote_module(wrong: dict[str, Any]) -> None:
    with pytest.raises(PayloadError, match="must be a"):
        nn.RemoteModule("worker0", torch.nn.Linear, **{"args": (1, 1), **wrong})
