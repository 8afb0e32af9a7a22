"""RemoteModule against the same module in this process."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from zmqgrad import autograd, rpc
from zmqgrad.errors import (
    ArgumentTypeError,
    ConfigurationError,
    NotInitializedError,
    RpcTimeoutError,
    UnknownWorkerError,
)
from zmqgrad.nn import RemoteModule
from zmqgrad.nn.api.remote_module import _UNSUPPORTED, _forward_on_device
from zmqgrad.optim import DistributedOptimizer
from zmqgrad.testing import Cluster, cluster


@pytest.fixture
def trio() -> Iterator[Cluster]:
    with cluster(3) as c:
        yield c


class Scale(nn.Module):
    """A module with a parameter, a submodule and a keyword."""

    def __init__(self, start: float, extra: int = 0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((2,), start))
        self.inner = nn.Linear(2, 2 + extra)

    def forward(self, x: torch.Tensor, word: str = "plain") -> tuple[str, torch.Tensor]:
        """Scale ``x``."""
        return word, x * self.factor


def scale(on: str = "worker1/cpu") -> RemoteModule:
    """A RemoteModule whose factor starts at 3."""
    return RemoteModule(on, Scale, args=(3.0,), kwargs={"extra": 1})


@pytest.mark.parametrize("on", ["worker1/cpu", "worker1", "rank:1/cpu", "rank:1", "worker0", "cpu"])
def test_forward_runs_on_the_worker_of_the_module(trio: Cluster, on: str) -> None:
    module = scale(on)
    x = torch.ones(2)
    for result in (
        module(x, "w"),
        module.forward(x, word="w"),
        module.forward_async(x, "w").wait(),
        module.with_timeout(5)(x, "w"),
    ):
        assert result[0] == "w"
        assert torch.equal(result[1], torch.full((2,), 3.0))
    where = "worker1" if "1" in on else "worker0"
    assert module.get_module_rref().owner_name() == where
    assert module.module_rref is module.get_module_rref()
    assert f"{module.device}, " in repr(module)


def test_the_signature_is_the_modules(trio: Cluster) -> None:
    module = scale()
    wanted = inspect.signature(Scale(1.0).forward)
    assert inspect.signature(module.forward) == inspect.signature(module.forward_async) == wanted
    made_by_function = RemoteModule("worker1", make_scale)
    assert torch.equal(made_by_function(torch.ones(2))[1], torch.full((2,), 2.0))


def make_scale() -> Scale:
    """A function that returns a module."""
    return Scale(2.0)


class Scripted(torch.jit.ScriptModule):
    """Compiled when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((2,), 3.0))

    @torch.jit.script_method
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale ``x``."""
        return x * self.factor


class Static(nn.Module):
    """Its forward has no ``self``."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        """Scale ``x``."""
        return x * 3


@pytest.mark.parametrize("module_cls", [Scripted, Static])
def test_forward_need_not_be_a_function_with_self(trio: Cluster, module_cls: type[nn.Module]) -> None:
    module = RemoteModule("worker1", module_cls)
    assert module(torch.ones(2)).tolist() == [3.0, 3.0]
    assert "kwargs" in inspect.signature(module.forward).parameters


def test_parameters_are_references(trio: Cluster) -> None:
    module = scale()
    reference = Scale(3.0, extra=1)
    shapes = [p.to_here().shape for p in module.remote_parameters()]
    assert shapes == [p.shape for p in reference.parameters()]
    assert len(module.remote_parameters(recurse=False)) == 1
    assert all(p.owner_name() == "worker1" for p in module.remote_parameters())


def test_it_trains_as_a_local_module_does(trio: Cluster) -> None:
    module = scale()
    local = Scale(3.0, extra=1)
    x = torch.tensor([1.0, 2.0])
    optimizer = torch.optim.SGD([local.factor], lr=0.1)
    distributed = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(recurse=False), lr=0.1)
    for _ in range(3):
        with autograd.context() as context_id:
            autograd.backward(context_id, [module(x)[1].square().sum()])
            distributed.step(context_id)
        optimizer.zero_grad()
        local(x)[1].square().sum().backward()
        optimizer.step()
    assert torch.equal(module.remote_parameters(recurse=False)[0].to_here(), local.factor)


def training_mode(module_rref: Any) -> tuple[bool, bool]:
    """Training mode of the module and of its submodule."""
    return module_rref.local_value().training, module_rref.local_value().inner.training


def test_train_and_eval(trio: Cluster) -> None:
    module = scale()
    for change, wanted in ((module.eval, False), (module.train, True), (lambda: module.train(False), False)):
        assert change() is module
        assert rpc.rpc_sync(1, training_mode, (module.module_rref,)) == (wanted, wanted)
        assert module.training is wanted


def use(module: RemoteModule, x: torch.Tensor) -> Any:
    """Runs on a third worker."""
    assert isinstance(module, RemoteModule)
    return module(x), module.forward(x), module.forward_async(x).wait(), repr(module), vars(module).keys()


def give_back(module: RemoteModule) -> RemoteModule:
    """Return it unchanged."""
    return module


def test_it_is_serialized_in_calls_only(trio: Cluster) -> None:
    module = scale()
    module.note = "mine"
    *results, text, names = rpc.rpc_sync(2, use, (module, torch.ones(2)))
    for result in results:
        assert torch.equal(result[1], torch.full((2,), 3.0))
    assert "worker1/cpu" in text
    assert "note" not in names
    back = rpc.rpc_sync(2, give_back, (rpc.rpc_sync(2, give_back, (module,)),))
    assert torch.equal(back(torch.ones(2))[1], torch.full((2,), 3.0))
    for copy_it in (pickle.dumps, copy.deepcopy):
        with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler"):
            copy_it(module)
    with pytest.raises(RuntimeError, match="Cannot unpickle RemoteModule in python pickler"):
        module.__setstate__({})


def test_remote_modules_can_share_a_module(trio: Cluster) -> None:
    module = scale()
    other = rpc.rpc_sync(2, RemoteModule.init_from_module_rref, ("worker1", module.module_rref))
    with pytest.raises(ArgumentTypeError, match="module_rref must be an RRef, not"):
        RemoteModule.init_from_module_rref("worker1", module)
    rpc.rpc_sync(1, double, (module.module_rref,))
    assert torch.equal(other(torch.ones(2))[1], torch.full((2,), 6.0))


def double(module_rref: Any) -> None:
    """Double the parameter, on the worker of the module."""
    with torch.no_grad():
        module_rref.local_value().factor.mul_(2)


class NoModule:
    """Not a module."""


def raises() -> nn.Module:
    """Raise."""
    raise KeyError("not today")


def test_invalid_arguments(trio: Cluster) -> None:
    with pytest.raises(ValueError, match=r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of"):
        RemoteModule("worker1", NoModule)()  # type: ignore[type-var]
    with pytest.raises(KeyError, match="not today"):
        RemoteModule("worker1", raises)()
    with pytest.raises(UnknownWorkerError):
        scale("nobody/cpu")
    for device in ("worker1/nowhere", "/cpu", "a/b/c", ""):
        with pytest.raises(ConfigurationError, match=f"Could not parse remote_device: {device}"):
            scale(device)
    with pytest.raises(TypeError, match="remote_device"):
        scale(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="TorchScript"):
        RemoteModule("worker1", Scale, (1.0,), _module_interface_cls=Scale)
    with pytest.raises(ConfigurationError, match="TorchScript"):
        torch.jit.script(scale())
    assert rpc.rpc_sync(1, len, ("abc",)) == 3


def test_before_init() -> None:
    with pytest.raises(NotInitializedError, match="RemoteModule only works in RPC"):
        scale()


@pytest.mark.parametrize("name", ["parameters", *_UNSUPPORTED])
def test_unsupported_methods_raise(trio: Cluster, name: str) -> None:
    with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
        getattr(scale(), name)()


class Scaled(nn.Module):
    """A local module around a remote one."""

    def __init__(self, inner: RemoteModule) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        """Twice the tensor of ``inner``."""
        return self.inner(x, word="w")[1] * 2


class LeafTracer(torch.fx.Tracer):
    """Records remote modules as leaves."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """All but the root."""
        return isinstance(m, RemoteModule)


def test_fx_records_it_as_a_leaf(trio: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tracer lists the modules of the root, which RemoteModule refuses as torch's does.
    for name in "named_modules", "named_children":
        monkeypatch.setattr(RemoteModule, name, getattr(nn.Module, name))
    root = Scaled(scale())
    graph = LeafTracer().trace(root)
    assert [(n.op, n.target) for n in graph.nodes if n.op == "call_module"] == [("call_module", "inner")]
    traced = torch.fx.GraphModule({"inner": root.inner}, graph)
    assert torch.equal(traced(torch.ones(2)), torch.full((2,), 6.0))


def test_a_received_module_has_the_state_of_a_module(trio: Cluster) -> None:
    assert rpc.rpc_sync(2, state_of, (scale(),)) == ({}, {}, True, sorted(vars(nn.Module())))
    with pytest.raises(AttributeError, match="nowhere"):
        _ = scale().nowhere


def state_of(module: RemoteModule) -> Any:
    """Parameters, submodules, mode; and all attributes of a module, after use."""
    assert not vars(module).keys() & vars(nn.Module()).keys()
    state = module._parameters, module._modules, module.training
    return *state, sorted(vars(module).keys() & vars(nn.Module()).keys())


def test_results_stay_on_their_device_if_there_is_a_device_map(trio: Cluster) -> None:
    module_rref: Any = rpc.RRef(nn.Linear(2, 2, device="meta"))
    args = (torch.ones(1, 2),)
    assert _forward_on_device(module_rref, "meta", True, args, {}).device == torch.device("meta")
    with pytest.raises(NotImplementedError, match="meta"):  # meta tensors cannot be moved: it tried
        _forward_on_device(module_rref, "meta", False, args, {})


def test_the_device_map_is_noted() -> None:
    options = rpc.TensorPipeRpcBackendOptions(device_maps={"worker1": {"cuda:0": "cuda:0"}})
    with cluster(2, options) as c, c.acting(0):
        assert scale("worker0/cpu").is_device_map_set is False
        assert scale("worker1/cpu").is_device_map_set is True


class Slow(nn.Module):
    """Waits for a call that never returns."""

    def forward(self, x: Any) -> Any:
        """Wait for the result of :func:`never`."""
        return rpc.rpc_async(0, never).wait()


@rpc.functions.async_execution
def never() -> Any:
    """Return a future that is never set."""
    return torch.futures.Future()


def test_with_timeout(trio: Cluster) -> None:
    module = RemoteModule("worker1", Slow).with_timeout(0.05)
    with pytest.raises(RpcTimeoutError):
        module(1)
    with pytest.raises(RpcTimeoutError):
        module.forward_async(1).wait()
