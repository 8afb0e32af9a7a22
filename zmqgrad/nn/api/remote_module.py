"""RemoteModule: a module on another worker, as in ``torch.distributed.nn.api.remote_module``.

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
from typing import Any, NoReturn

import torch
from torch import nn

from zmqgrad.errors import ArgumentTypeError, ConfigurationError, NotInitializedError
from zmqgrad.rpc import RRef, rpc_async, rpc_sync
from zmqgrad.rpc import remote as create_remotely
from zmqgrad.rpc.current import current_worker, current_worker_or_none
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT
from zmqgrad.rpc.serialization.context import RpcSerializable
from zmqgrad.rpc.serialization.serializer import to_args, to_kwargs

__all__ = ["RemoteModule"]

logger = logging.getLogger(__name__)

_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
"""The attributes that are serialized, named as in torch's RemoteModule."""

_MODULE_STATE = frozenset(vars(nn.Module()))
"""The attributes that ``nn.Module.__init__`` sets."""

_NOT_SERIALIZED = _MODULE_STATE | {"forward_async", "forward"}
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
    """A module on another worker. It is called like a local module; ``forward`` runs on that worker.

    Hooks of the module on its worker do not run, since only its ``forward`` is called, and hooks cannot be
    registered here; global module hooks of the caller run around the call, as for any module. ``torch.fx``
    records a call of a RemoteModule if the tracer declares it a leaf.

    If ``remote_device`` is not the CPU, tensors among the arguments are moved to it, and tensors of the
    result back to the CPU, unless this worker has a device map for the worker of the module.

    Args:
        remote_device: ``"<worker>/<device>"`` or ``"rank:<rank>/<device>"``. The default device is "cpu", the
            default worker this one.
        module_cls: a class or function that returns the module, an ``nn.Module``; it is called on that
            worker. The first use of the module raises its exceptions.
        args, kwargs: the arguments of ``module_cls``.
        _module_interface_cls: not supported; it must be None.
        checkpoint: whether calls are checkpointed (:func:`zmqgrad.rpc.checkpoint`).

    Raises:
        NotInitializedError: before ``init_rpc``.
        ConfigurationError: if ``remote_device`` is malformed.
        UnknownWorkerError: if the worker does not exist.

    Example:
        >>> layer = RemoteModule("worker1/cpu", torch.nn.Linear, args=(3, 2))
        >>> layer(torch.ones(4, 3)).shape
        torch.Size([4, 2])
        >>> len(layer.remote_parameters())
        2
    """

    on: str | int
    device: str
    module_rref: RRef[nn.Module]
    forward_async: _Forward
    forward: _Forward

    def __init__(
        self,
        remote_device: str | torch.device,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
        *,
        checkpoint: bool = False,
    ) -> None:
        super().__init__()
        _refuse_interface(_module_interface_cls)
        on, device = _parse_remote_device(remote_device)
        content = (module_cls, to_args(args), to_kwargs(kwargs or {}), device)
        self._initialize(on, device, create_remotely(on, _create_module, content), checkpoint)
        signature = _signature_of(module_cls)
        self.forward_async.__signature__ = self.forward.__signature__ = signature

    @staticmethod
    def init_from_module_rref(
        remote_device: str | torch.device,
        module_rref: RRef[nn.Module],
        _module_interface_cls: Any = None,
        *,
        checkpoint: bool = False,
    ) -> RemoteModule:
        """Return a RemoteModule for an existing module. Several of them can share one module.

        Args:
            remote_device: the worker and the device of the module, as for the constructor.
            module_rref: a reference to the module.
            _module_interface_cls: not supported; it must be None.
            checkpoint: as for the constructor. The others of the module may differ.

        Raises:
            NotInitializedError, ConfigurationError: as the constructor.
        """
        _refuse_interface(_module_interface_cls)
        if not isinstance(module_rref, RRef):
            raise ArgumentTypeError(f"module_rref must be an RRef, not {module_rref!r}")
        module = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(module)
        module._initialize(*_parse_remote_device(remote_device), module_rref, checkpoint)
        return module

    def _initialize(self, on: str | int, device: str, module_rref: RRef[nn.Module], checkpoint: bool) -> None:
        self.on = on
        self.device = device
        self.is_device_map_set = _has_device_map(on)
        self.is_scriptable = False
        self.generated_methods = ("forward_async", "forward")
        self.module_rref = module_rref
        self._add_forward_methods(checkpoint)

    def _add_forward_methods(self, checkpoint: bool) -> None:
        # They refer to the RRef, not to self: a reference cycle would outlive the last use of this module.
        place = self.module_rref, self.device, self.is_device_map_set
        vars(self)["forward_async"] = _Forward(*place, is_sync=False, checkpoint=checkpoint)
        vars(self)["forward"] = _Forward(*place, is_sync=True, checkpoint=checkpoint)

    def __getattr__(self, name: str) -> Any:
        # A RemoteModule that arrived in a message has the serialized attributes only, as with torch; the
        # others, which nn.Module.__call__ reads, are created on first use.
        if name in _MODULE_STATE:
            for each, value in vars(nn.Module()).items():
                vars(self).setdefault(each, value)
            return vars(self)[name]
        return super().__getattr__(name)

    @property
    def checkpoint(self) -> bool:
        """Whether calls are checkpointed."""
        forward: _Forward = vars(self)["forward"]
        return forward.checkpoint

    def with_timeout(self, seconds: float) -> RemoteModule:
        """Return a RemoteModule for the same module whose ``forward`` and ``forward_async`` have a timeout.

        Args:
            seconds: the timeout of one call; 0: no limit.
        """
        module = RemoteModule.init_from_module_rref(
            f"{_worker_text(self.on)}/{self.device}", self.module_rref, checkpoint=self.checkpoint
        )
        for mine, theirs in ((self.forward, module.forward), (self.forward_async, module.forward_async)):
            theirs.__signature__ = mine.__signature__
            theirs.timeout = seconds
        return module

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return references to the parameters of the module, for ``DistributedOptimizer``.

        Args:
            recurse: include the parameters of submodules.
        """
        return rpc_sync(self.on, _parameters, (self.module_rref, recurse))

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the reference to the module on its worker."""
        return self.module_rref

    def train(self, mode: bool = True) -> RemoteModule:
        """Set the mode of the module on its worker.

        Args:
            mode: True for training, False for evaluation.

        Returns:
            This module.
        """
        rpc_sync(self.module_rref.owner(), _train, (self.module_rref, mode))
        self.training = mode
        return self

    def eval(self) -> RemoteModule:
        """Set the module to evaluation mode on its worker. Returns this module."""
        return self.train(False)

    def reduce_for_rpc(self) -> tuple[Any, ...]:
        """Serialize for a call. Returns a function that rebuilds the module, and its arguments."""
        for name in vars(self).keys() - _NOT_SERIALIZED - set(_REMOTE_MODULE_PICKLED_ATTRIBUTES):
            logger.warning("attribute %s of a RemoteModule is not serialized", name)
        values = tuple(getattr(self, name) for name in _REMOTE_MODULE_PICKLED_ATTRIBUTES)
        return _deserialize, (self.checkpoint, *values)

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
    """The method ``forward`` or ``forward_async`` of a RemoteModule, with its signature if that is known.

    Args:
        module_rref: a reference to the module.
        device: the device of the module.
        keeps_device: tensors of the result stay on that device until a device map moves them.
        is_sync: wait for the result instead of returning a future.
        checkpoint: whether calls are checkpointed.
    """

    def __init__(
        self,
        module_rref: RRef[nn.Module],
        device: str,
        keeps_device: bool,
        is_sync: bool,
        checkpoint: bool = False,
    ) -> None:
        self._rref = module_rref
        self._device = device
        self._keeps_device = keeps_device
        self._is_sync = is_sync
        self.checkpoint = checkpoint
        self.timeout = UNSET_RPC_TIMEOUT
        self.__signature__: inspect.Signature | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.checkpoint:
            return self._call(self._is_sync, args, kwargs)
        with current_worker().hooks.checkpointing():
            future = self._call(False, args, kwargs)
        return future.wait() if self._is_sync else future

    def _call(self, is_sync: bool, args: Any, kwargs: Any) -> Any:
        rref = self._rref
        if torch.device(self._device).type != "cpu":
            call = rpc_sync if is_sync else rpc_async
            return call(
                rref.owner(),
                _forward_on_device,
                (rref, self._device, self._keeps_device, args, kwargs),
                timeout=self.timeout,
            )
        proxy = rref.rpc_sync(self.timeout) if is_sync else rref.rpc_async(self.timeout)
        return proxy.forward(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _Forward, (self._rref, self._device, self._keeps_device, self._is_sync, self.checkpoint)


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


def _has_device_map(on: str | int) -> bool:
    """Whether this worker has a device map for worker ``on``."""
    membership = current_worker().membership
    maps = membership.own.device_maps
    return bool(maps) and bool(maps.get(membership.find(on).name))


def _worker_text(on: str | int) -> str:
    return f"rank:{on}" if isinstance(on, int) else on


def _refuse_interface(interface: Any) -> None:
    if interface is not None:
        raise ConfigurationError("TorchScript is not supported: leave _module_interface_cls out")


def _signature_of(module_cls: Callable[..., nn.Module]) -> inspect.Signature | None:
    """The signature of ``forward`` without ``self``; None if only TorchScript knows it, for example."""
    forward = inspect.getattr_static(module_cls, "forward", None) if isinstance(module_cls, type) else None
    if not inspect.isfunction(forward) or not issubclass(module_cls, nn.Module):  # type: ignore[arg-type]
        return None
    whole = inspect.signature(forward)
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


def _forward_on_device(
    module_rref: RRef[nn.Module], device: str, keeps_device: bool, args: Any, kwargs: Any
) -> Any:
    """Run ``forward`` of a module on a device, and move its result to the CPU unless ``keeps_device``."""
    result = module_rref.local_value().forward(
        *(_to_device(a, device) for a in args), **{name: _to_device(a, device) for name, a in kwargs.items()}
    )
    if keeps_device:
        return result
    if isinstance(result, tuple):
        return tuple(_to_device(r, "cpu") for r in result)
    return _to_device(result, "cpu")


def _to_device(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _deserialize(checkpoint: bool, *values: Any) -> RemoteModule:
    module = RemoteModule.__new__(RemoteModule)
    vars(module).update(zip(_REMOTE_MODULE_PICKLED_ATTRIBUTES, values, strict=True))
    module._add_forward_methods(checkpoint)
    return module


_RemoteModule = RemoteModule
"""In torch, the base class of RemoteModule, whose constructor takes ``_module_interface_cls``."""
