"""Backends that a program registers choose options, take part in joining, and leave the rest to ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed.rpc as torch_rpc

import zmqgrad.rpc as rpc
from tools.ports import free_port
from zmqgrad.errors import ArgumentTypeError, ConfigurationError

registry = rpc.backend_registry


def options_for(rpc_timeout: float, init_method: str, **others: Any) -> rpc.TensorPipeRpcBackendOptions:
    return rpc.TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **others)


@pytest.mark.usefixtures("registries")
def test_a_backend_of_ones_own() -> None:
    seen: list[dict[str, Any]] = []

    def join(**given: Any) -> Any:
        seen.append(given)
        return registry.init_backend(registry.BackendType["ZMQ"], **given)

    name = "own"
    assert not registry.backend_registered(name)
    backend = rpc.register_backend(name, options_for, join)
    assert registry.backend_registered(name)
    assert backend is registry.BackendType[name]
    assert repr(backend) == f"BackendType.{name}"
    assert {"ZMQ", "TENSORPIPE"} <= set(registry.BackendType.__members__), "what was there stays"
    with pytest.raises(RuntimeError, match=r"^RPC backend .+: already registered$"):
        rpc.register_backend(name, options_for, join)

    url = f"tcp://127.0.0.1:{free_port()}"
    options = rpc.construct_rpc_backend_options(backend, 17, url, num_worker_threads=2)
    assert (options.rpc_timeout, options.init_method, options.num_worker_threads) == (17.0, url, 2)
    for _ in range(2):
        rpc.init_rpc("alone", backend, rank=0, world_size=1, rpc_backend_options=options)
        assert rpc.rpc_sync("alone", len, ("abc",)) == 3
        assert rpc.get_rpc_timeout() == 17.0
        rpc.shutdown()
    assert [(s["name"], s["rank"], s["world_size"], s["rpc_backend_options"]) for s in seen] == [
        ("alone", 0, 1, options)
    ] * 2


@pytest.mark.parametrize(
    "kind", [rpc.BackendType.ZMQ, rpc.BackendType.TENSORPIPE, torch_rpc.BackendType.TENSORPIPE]
)
def test_ours_by_all_its_names(kind: Any) -> None:
    options = rpc.construct_rpc_backend_options(kind, init_method=f"tcp://127.0.0.1:{free_port()}")
    rpc.init_rpc("alone", kind, rank=0, world_size=1, rpc_backend_options=options)
    assert rpc.rpc_sync("alone", len, ("abc",)) == 3
    rpc.shutdown()


@pytest.mark.usefixtures("registries")
def test_what_cannot_be() -> None:
    def nothing(**given: Any) -> None:
        given["store"].set("used", b"1")

    def fails(**given: Any) -> None:
        raise KeyError("not today")

    url = f"tcp://127.0.0.1:{free_port()}"
    for name, handler, error in (("nothing", nothing, ArgumentTypeError), ("fails", fails, KeyError)):
        backend = rpc.register_backend(name, options_for, handler)
        options = rpc.construct_rpc_backend_options(backend, 20, url)
        with pytest.raises(error, match=r"init_backend_handler|not today"):
            rpc.init_rpc("alone", backend, rank=0, world_size=1, rpc_backend_options=options)
    backend = rpc.register_backend("given", lambda **given: given, fails)
    with pytest.raises(TypeError, match="must be an instance of RpcBackendOptions"):
        rpc.init_rpc("alone", backend, rank=0, world_size=1)
    for name in (3, "mro"):
        with pytest.raises(ConfigurationError):
            rpc.register_backend(name, options_for, nothing)  # type: ignore[arg-type]
        assert not rpc.backend_registered(name)  # type: ignore[arg-type]
    rpc.register_backend("after_these", options_for, nothing)
    for none in ("ZMQ", 3, object()):
        with pytest.raises(TypeError, match="Argument backend must be a member of BackendType"):
            rpc.construct_rpc_backend_options(none)
    # Nothing is left that would be in the way.
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=url))
    rpc.shutdown()
