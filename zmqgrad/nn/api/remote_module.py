"""RemoteModule: a module on another worker, as in ``torch.distributed.nn`` (DESIGN section 11).

    layer = RemoteModule("worker1/cpu", nn.Linear, args=(20, 30))
    y = layer(x)                    # or layer.forward_async(x).wait()
    params = layer.remote_parameters()   # for DistributedOptimizer

A RemoteModule holds a reference to the module. Sending it to another worker sends that reference, never the
parameters. Inside a distributed autograd context, gradients accumulate on the worker of the module.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn

from zmqgrad.errors import ArgumentTypeError, ConfigurationError, NotInitializedError
from zmqgrad.rpc import RRef, rpc_async, rpc_sync
from zmqgrad.rpc import remote as create_remotely
from zmqgrad.rpc.current import current_worker, current_worker_or_none
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT
from zmqgrad.rpc.serialization.context import RpcSerializable

__all__ = ["RemoteModule"]

logger = logging.getLogger(__name__)

_SERIALIZED = ("on", "device", "is_device_map_set", "is_scriptable", "generated_methods", "module_rref")
"""The attributes that are serialized, named as in torch's RemoteModule."""

_NOT_SERIALIZED = frozenset(vars(nn.Module())) | {"forward_async", "forward"}
"""The attributes that need not be serialized."""

# fmt: off
_UNSUPPORTED = (
    "register_buffer", "register_parameter", "add_module", "apply", "cuda", "ipu", "xpu", "cpu", "type",
    "float", "double", "half", "bfloat16", "to", "register_backward_hook", "register_forward_pre_hook",
    "register_forward_hook", "state_dict", "load_state_dict", "named_parameters", "buffers",
    "named_buffers", "children", "named_children", "modules", "named_modules", "requires_grad_",
    "zero_grad", "share_memory", "extra_repr",
)
# fmt: on
"""Methods of ``nn.Module`` that are not supported remotely, as in torch."""


class RemoteModule(nn.Module, RpcSerializable):
    """A module on another worker. It is used like a local one; ``forward`` runs on that worker.

    Args:
        remote_device: "<worker>/<device>" or "rank:<rank>/<device>". The default device is "cpu", the default
            worker this one.
        module_cls: creates the module, which must be an ``nn.Module``, on that worker. What it raises is
            raised by the first use of the module.
        args, kwargs: for ``module_cls``.

    Raises:
        NotInitializedError: before ``init_rpc``.
        ConfigurationError: if ``remote_device`` is malformed.
        UnknownWorkerError: if the worker does not exist.
    """

    on: str | int
    device: str
    module_rref: RRef[nn.Module]
    forward_async: _Forward
    forward: _Forward
    training = True

    def __init__(
        self,
        remote_device: str | torch.device,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__()
        _refuse_interface(_module_interface_cls)
        on, device = _parse_remote_device(remote_device)
        content = (module_cls, tuple(args or ()), dict(kwargs or {}), device)
        self._initialize(on, device, create_remotely(on, _create_module, content))
        signature = _signature_of(module_cls)
        self.forward_async.__signature__ = self.forward.__signature__ = signature

    @staticmethod
    def init_from_module_rref(
        remote_device: str | torch.device, module_rref: RRef[nn.Module], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Make a RemoteModule for a module that exists already. A module can have several."""
        _refuse_interface(_module_interface_cls)
        module = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(module)
        module._initialize(*_parse_remote_device(remote_device), module_rref)
        return module

    def _initialize(self, on: str | int, device: str, module_rref: RRef[nn.Module]) -> None:
        self.on = on
        self.device = device
        self.is_device_map_set = False
        self.is_scriptable = False
        self.generated_methods = ("forward_async", "forward")
        self.module_rref = module_rref
        self._add_forward_methods()

    def _add_forward_methods(self) -> None:
        # They refer to the RRef, not to self: a reference cycle would outlive the last use of this module.
        vars(self)["forward_async"] = _Forward(self.module_rref, self.device, is_sync=False)
        vars(self)["forward"] = _Forward(self.module_rref, self.device, is_sync=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward``. Hooks of the module run on its worker."""
        return self.forward(*args, **kwargs)

    def with_timeout(self, seconds: float) -> RemoteModule:
        """The same module with a timeout for ``forward`` and ``forward_async`` (0: no limit)."""
        module = RemoteModule.init_from_module_rref(
            f"{_worker_text(self.on)}/{self.device}", self.module_rref
        )
        for mine, theirs in ((self.forward, module.forward), (self.forward_async, module.forward_async)):
            theirs.__signature__ = mine.__signature__
            theirs.timeout = seconds
        return module

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """References to the parameters of the module; with ``recurse=False`` without those of submodules."""
        return cast("list[RRef[nn.Parameter]]", rpc_sync(self.on, _parameters, (self.module_rref, recurse)))

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the reference to the module."""
        return self.module_rref

    def train(self, mode: bool = True) -> RemoteModule:
        """Set the training mode of the module on its worker."""
        rpc_sync(self.module_rref.owner(), _train, (self.module_rref, mode))
        self.training = mode
        return self

    def eval(self) -> RemoteModule:
        """Set the module to evaluation mode on its worker."""
        return self.train(False)

    def reduce_for_rpc(self) -> tuple[Any, ...]:
        """Serialize for a call: a function that rebuilds the module, and its arguments."""
        for name in vars(self).keys() - _NOT_SERIALIZED - set(_SERIALIZED):
            logger.warning("attribute %s of a RemoteModule is not serialized", name)
        return _deserialize, tuple(getattr(self, name) for name in _SERIALIZED)

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by ``torch.jit.script``."""
        raise ConfigurationError(
            "TorchScript cannot compile a RemoteModule; module_cls may create a compiled module on its worker"
        )

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
        )

    def __setstate__(self, state: Any) -> NoReturn:
        raise RuntimeError(
            "Cannot unpickle RemoteModule in python pickler. "
            "RemoteModule can only be unpickled when using RPC"
        )

    def __repr__(self) -> str:
        return f"RemoteModule({_worker_text(self.on)}/{self.device}, {self.module_rref!r})"


class _Forward:
    """The method ``forward`` of a remote module, with its signature if that is known."""

    def __init__(self, module_rref: RRef[nn.Module], device: str, is_sync: bool) -> None:
        self._rref = module_rref
        self._device = device
        self._is_sync = is_sync
        self.timeout = UNSET_RPC_TIMEOUT
        self.__signature__: inspect.Signature | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rref = self._rref
        if torch.device(self._device).type != "cpu":
            call = rpc_sync if self._is_sync else rpc_async
            return call(
                rref.owner(), _forward_on_device, (rref, self._device, args, kwargs), timeout=self.timeout
            )
        proxy = rref.rpc_sync(self.timeout) if self._is_sync else rref.rpc_async(self.timeout)
        return proxy.forward(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _Forward, (self._rref, self._device, self._is_sync)


def _unsupported(name: str, hint: str = "") -> Callable[..., NoReturn]:
    def method(self: RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule{hint}")

    method.__name__, method.__qualname__ = name, f"RemoteModule.{name}"
    method.__doc__ = f"Not supported{hint or ': call a function on the worker of the module instead'}."
    return method


for _name in _UNSUPPORTED:
    setattr(RemoteModule, _name, _unsupported(_name))
RemoteModule.parameters = _unsupported(  # type: ignore[method-assign]
    "parameters", ". Please use ``remote_parameters`` instead."
)


# ---- on the caller --------------------------------------------------------------------------------------


def _parse_remote_device(remote_device: str | torch.device) -> tuple[str | int, str]:
    """Parse ``remote_device`` into worker and device.

    Raises:
        NotInitializedError: before ``init_rpc``.
        ArgumentTypeError: if it is neither a string nor a device.
        ConfigurationError: if it is malformed.
    """
    if current_worker_or_none() is None:
        raise NotInitializedError("RemoteModule only works in RPC: call init_rpc first")
    if not isinstance(remote_device, (str, torch.device)):
        raise ArgumentTypeError(f"Invalid type for remote_device: {type(remote_device)}")
    worker, slash, device = str(remote_device).rpartition("/")
    if not slash:
        worker, device = ("", device) if _is_device(device) else (device, "cpu")
    rank = worker.removeprefix("rank:")
    if "/" in worker or not remote_device or (slash and not worker) or not _is_device(device):
        raise ConfigurationError(
            f"Could not parse remote_device: {remote_device}. The valid format is '<workername>/<device>' or "
            f"'rank:<rank>/<device>' or '<device>'"
        )
    if rank != worker and rank.isdecimal():
        return int(rank), device
    return worker or current_worker().name, device


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _worker_text(on: str | int) -> str:
    return f"rank:{on}" if isinstance(on, int) else on


def _refuse_interface(interface: Any) -> None:
    if interface is not None:
        raise ConfigurationError("TorchScript is not supported: leave _module_interface_cls out")


def _signature_of(module_cls: Callable[..., nn.Module]) -> inspect.Signature | None:
    """The signature of its ``forward`` without ``self``; None if ``module_cls`` is not a module class."""
    if not isinstance(module_cls, type) or not issubclass(module_cls, nn.Module):
        return None
    whole = inspect.signature(module_cls.forward)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


# ---- on the worker of the module, or of a deserialized RemoteModule --------------------------------------


def _create_module(module_cls: Callable[..., Any], args: Any, kwargs: Any, device: str) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    return module.to(device)


def _parameters(module_rref: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def _train(module_rref: RRef[nn.Module], mode: bool) -> None:
    module_rref.local_value().train(mode)


def _forward_on_device(module_rref: RRef[nn.Module], device: str, args: Any, kwargs: Any) -> Any:
    """Run ``forward`` of a module on a device. Arguments and results are sent as tensors of the CPU."""
    result = module_rref.local_value().forward(
        *(_to_device(a, device) for a in args), **{name: _to_device(a, device) for name, a in kwargs.items()}
    )
    if isinstance(result, tuple):
        return tuple(_to_device(r, "cpu") for r in result)
    return _to_device(result, "cpu")


def _to_device(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _deserialize(*values: Any) -> RemoteModule:
    module = RemoteModule.__new__(RemoteModule)
    vars(module).update(zip(_SERIALIZED, values, strict=True))
    module._add_forward_methods()
    return module
