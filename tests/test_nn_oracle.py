"""RemoteModule against torch's own, by the same steps over torch's RPC and over this library's."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx, nn
from torch.nn.modules import module as module_hooks

from tests.support.processes import run_processes

pytestmark = [pytest.mark.processes, pytest.mark.slow]


class Library(NamedTuple):
    """The modules of one of the two libraries."""

    rpc: Any
    autograd: Any
    optim: Any
    remote_module: Any

    def layer(self, on: str = "worker1/cpu") -> Any:
        """A RemoteModule of :class:`Layer`."""
        return self.remote_module.RemoteModule(on, Layer, (3.0,), {"extra": 1})


def library(root: str) -> Library:
    """The library whose modules are below ``root``."""
    names = "rpc", "autograd", "optim", "nn.api.remote_module"
    return Library(*(importlib.import_module(f"{root}.{name}") for name in names))


class Layer(nn.Module):
    """A module with a parameter, a submodule and a keyword argument."""

    def __init__(self, start: float, extra: int = 0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((2,), start))
        self.inner = nn.Linear(2, 2 + extra)

    def forward(self, x: torch.Tensor, power: int = 1) -> torch.Tensor:
        """Scaled ``x``."""
        if power < 0:
            raise ArithmeticError("negative power")
        return (x * self.factor) ** power


class Hybrid(nn.Module):
    """A local module with a RemoteModule in it."""

    def __init__(self, remote: Any) -> None:
        super().__init__()
        self.first = remote
        self.second = remote

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both, one after the other."""
        result: torch.Tensor = self.second(self.first(x), power=2)
        return result


# ---- steps: each returns plain data ----------------------------------------------------------------------

X = torch.tensor([1.0, 2.0])


def calls(lib: Library) -> Any:
    """All ways to call it."""
    layer = lib.layer()
    ways = layer(X, 2), layer(X, power=2), layer.forward(X, 2), layer.forward_async(X, power=2).wait()
    return [result.tolist() for result in ways]


def places(lib: Library) -> Any:
    """The formats of ``remote_device``."""
    places = "worker1/cpu", "worker1", "rank:1/cpu", "rank:1"
    made = [lib.layer(on) for on in places]
    return [
        (m.on, m.device, m.get_module_rref().owner_name(), m.is_device_map_set, m.is_scriptable) for m in made
    ]


def module_state(lib: Library) -> Any:
    """The attributes of an nn.Module."""
    layer = lib.layer()
    names = sorted(vars(layer).keys() & vars(nn.Module()).keys())
    return names, isinstance(layer, nn.Module), dict(layer._parameters), dict(layer._modules), layer.training


class LeafTracer(fx.Tracer):
    """A tracer that records remote modules as leaves."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """All below the root."""
        return not isinstance(m, Hybrid)


def traced(lib: Library) -> Any:
    """The graph of torch.fx, with the two patches that a library needs for torch's class."""
    kind = lib.remote_module.RemoteModule
    before = kind.named_modules, kind.named_children
    try:
        kind.named_modules, kind.named_children = nn.Module.named_modules, nn.Module.named_children
        graph = LeafTracer().trace(Hybrid(lib.layer()))
    finally:
        kind.named_modules, kind.named_children = before
    return [(n.op, str(n.target), str(n.args), str(n.kwargs)) for n in graph.nodes]


def global_hooks(lib: Library) -> Any:
    """Hooks of all modules run around the call of a RemoteModule."""
    layer, seen = lib.layer(), []
    before = module_hooks.register_module_forward_pre_hook(
        lambda m, args: seen.append(("before", len(args), m is layer)) or (args[0] + 1,)
    )
    after = module_hooks.register_module_forward_hook(
        lambda m, args, result: seen.append(("after", result.tolist(), m is layer)) or result * 10
    )
    try:
        return layer(X).tolist(), seen
    finally:
        before.remove()
        after.remove()


def full_backward_hook(lib: Library) -> Any:
    """A backward hook, which torch's class does not refuse."""
    layer, seen = lib.layer(), []
    layer.register_full_backward_hook(lambda m, grads, outputs: seen.append(outputs[0].tolist()))
    x = X.clone().requires_grad_()
    with lib.autograd.context() as context_id:
        lib.autograd.backward(context_id, [layer(x, 2).sum()])
        grads = lib.autograd.get_gradients(context_id)
        return grads[x].tolist(), seen


def in_a_local_module(lib: Library) -> Any:
    """A local module calls it, and lists it among its children."""
    hybrid = Hybrid(lib.layer())
    return hybrid(X).tolist(), [name for name, _ in hybrid.named_children()]


def parameters_of_a_parent(lib: Library) -> Any:
    """Refused."""
    return list(Hybrid(lib.layer()).parameters())


def state_of_a_parent(lib: Library) -> Any:
    """Refused."""
    return Hybrid(lib.layer()).state_dict()


def remote_parameters(lib: Library) -> Any:
    """References to parameters."""
    layer = lib.layer()
    return [
        [(list(p.to_here().shape), p.owner_name()) for p in layer.remote_parameters(recurse)]
        for recurse in (True, False)
    ]


def training_step(lib: Library) -> Any:
    """Three steps of a distributed optimizer."""
    layer = lib.layer()
    optimizer = lib.optim.DistributedOptimizer(torch.optim.SGD, layer.remote_parameters(False), lr=0.1)
    for _ in range(3):
        with lib.autograd.context() as context_id:
            lib.autograd.backward(context_id, [layer(X).square().sum()])
            optimizer.step(context_id)
    return layer.remote_parameters(False)[0].to_here().tolist()


def use_there(remote: Any) -> Any:
    """Runs on a third worker: the attributes that arrived, in order, and results."""
    names = list(vars(remote))
    return (
        names,
        remote.on,
        remote.device,
        remote.forward(X, 2).tolist(),
        remote.forward_async(X).wait().tolist(),
    )


def sent_to_another_worker(lib: Library) -> Any:
    """A new attribute is not sent."""
    layer = lib.layer()
    layer.note = "not sent"
    return lib.rpc.rpc_sync("worker2", use_there, (layer,)), layer.note


def call_there(remote: Any) -> Any:
    """Runs on a third worker."""
    return remote(X, 2).tolist(), remote.training


def called_on_another_worker(lib: Library) -> Any:
    """Called there, not by ``forward``."""
    return lib.rpc.rpc_sync("worker2", call_there, (lib.layer(),))


def from_a_reference(lib: Library) -> Any:
    """A second RemoteModule for one module."""
    layer = lib.layer()
    second = lib.remote_module.RemoteModule.init_from_module_rref("worker1/cpu", layer.get_module_rref())
    return second.forward(X).tolist(), second.on, second.device


def from_a_reference_called(lib: Library) -> Any:
    """The same, called, not by ``forward``."""
    layer = lib.layer()
    second = lib.remote_module.RemoteModule.init_from_module_rref("worker1/cpu", layer.get_module_rref())
    return second(X).tolist()


def evaluation_mode(lib: Library) -> Any:
    """``train(False)`` there and here."""
    layer = lib.layer()
    layer.train(False)
    return lib.rpc.rpc_sync("worker1", mode_of, (layer.get_module_rref(),))


def mode_of(module_rref: Any) -> bool:
    """Runs on the worker of the module."""
    training: bool = module_rref.local_value().training
    return training


def pickled(lib: Library) -> Any:
    """Refused."""
    return pickle.dumps(lib.layer())


def copied(lib: Library) -> Any:
    """Refused."""
    return copy.deepcopy(lib.layer())


def raised_in_forward(lib: Library) -> Any:
    """The exception of ``forward``."""
    return lib.layer()(X, power=-1)


class NoModule:
    """Not a module."""


def no_module(lib: Library) -> Any:
    """``module_cls`` returns something else."""
    return lib.remote_module.RemoteModule("worker1", NoModule)(X)


def unknown_worker(lib: Library) -> Any:
    """A name that no worker has."""
    return lib.layer("nobody/cpu")


def malformed_place(lib: Library) -> Any:
    """Too many parts."""
    return lib.layer("a/b/c")


def unknown_device(lib: Library) -> Any:
    """A device that does not exist."""
    return lib.layer("worker1/nowhere")


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("cuda", "ipu", "xpu", "cpu", "float", "double", "half", "bfloat16", "to"), ()),
    **dict.fromkeys(("state_dict", "parameters", "named_parameters", "buffers", "named_buffers"), ()),
    **dict.fromkeys(("children", "named_children", "modules", "named_modules", "requires_grad_"), ()),
    **dict.fromkeys(("zero_grad", "share_memory", "extra_repr"), ()),
    **dict.fromkeys(("register_buffer", "register_parameter", "add_module"), ("name", None)),
    **dict.fromkeys(("register_backward_hook", "register_forward_pre_hook", "register_forward_hook"), (len,)),
    "apply": (len,),
    "type": (torch.float64,),
    "load_state_dict": ({},),
}


def refused_methods(lib: Library) -> Any:
    """The texts of all methods that are not supported."""
    layer, texts = lib.layer(), {}
    for name, args in ARGUMENTS.items():
        with pytest.raises(ValueError, match="not supported for RemoteModule") as raised:
            getattr(layer, name)(*args)
        texts[name] = str(raised.value)
    return texts


STEPS: list[Callable[[Library], Any]] = [
    *(calls, places, module_state, traced, global_hooks, full_backward_hook, in_a_local_module),
    *(parameters_of_a_parent, state_of_a_parent, remote_parameters, training_step, sent_to_another_worker),
    *(called_on_another_worker, from_a_reference, from_a_reference_called, evaluation_mode, pickled, copied),
    *(raised_in_forward, no_module, unknown_worker, malformed_place, unknown_device, refused_methods),
]


class Raised(NamedTuple):
    """What a step raised: its classes, without those of the library, and its text."""

    kinds: list[str]
    text: str


def run_steps(rank: int, root: str) -> dict[str, Any]:
    """On worker 0: the result of each step, or what it raised."""
    lib = library(root)
    lib.rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    results: dict[str, Any] = {}
    for step in STEPS if rank == 0 else ():
        try:
            results[step.__name__] = step(lib)
        except Exception as e:
            kinds = [each.__name__ for each in inspect.getmro(type(e)) if each.__module__ == "builtins"]
            results[step.__name__] = Raised(kinds, str(e))
    lib.rpc.shutdown()
    return results


DIFFERENT: dict[str, Any] = {
    # Torch knows the exception by its name only, in the text of a RuntimeError.
    "raised_in_forward": Raised(["ArithmeticError"], "negative power"),
    # Torch raises the RuntimeError of torch.device.
    "unknown_device": Raised(["ValueError"], "Could not parse remote_device: worker1/nowhere"),
    # Torch raises AttributeError: a RemoteModule made in these ways lacks the state of an nn.Module.
    "called_on_another_worker": ([9.0, 36.0], True),
    "from_a_reference_called": [3.0, 6.0],
    # Torch ignores the argument of ``train``.
    "evaluation_mode": False,
}
"""Our results where they differ on purpose."""


def test_remote_module_is_as_torchs() -> None:
    wanted = run_processes(run_steps, 3, args=("torch.distributed",))[0]
    ours = run_processes(run_steps, 3, args=("zmqgrad",))[0]
    differences = []
    for step in STEPS:
        name = step.__name__
        same = agree(ours[name], wanted[name])
        if name in DIFFERENT:
            same = not same and agree(ours[name], DIFFERENT[name])
        if not same:
            differences.append(f"{name}: torch {wanted[name]!r}, zmqgrad {ours[name]!r}")
    assert not differences, "\n".join(differences)


def agree(ours: Any, wanted: Any) -> bool:
    """Whether two results are equal, or our exception is of the wanted class and its text has those words."""
    if isinstance(ours, Raised) and isinstance(wanted, Raised):
        return wanted.kinds[0] in ours.kinds and words(wanted.text) in ours.text
    return bool(ours == wanted)


def words(text: str) -> str:
    """The words of an error of torch: those of its innermost cause, up to a full stop or parenthesis."""
    inner = text.rpartition("Error: ")[2]
    return inner.partition("\n")[0].partition(" (")[0].partition(". ")[0].rstrip(".")
