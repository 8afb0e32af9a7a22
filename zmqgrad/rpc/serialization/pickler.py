"""The C pickler with ``reducer_override``: tensors and RRefs are replaced, code is sent by name or by value.

Functions and classes that can be imported are pickled by name; lambdas, closures and local classes by value,
by cloudpickle. Functions and classes of ``__main__`` go by name, so that the peer's own run, as in torch; to
peers that run another program, whose ``__main__`` may lack the name, their code goes along.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch

from zmqgrad.errors import FunctionNotFoundError, PayloadError
from zmqgrad.rpc.serialization.context import RpcSerializable, SerializationContext, SerializedByReference
from zmqgrad.rpc.serialization.naming import find_function, in_main, reference_to
from zmqgrad.rpc.serialization.scripts import reduce_script_module
from zmqgrad.rpc.serialization.subclasses import reduce_subclass

OutOfBand = pickle.PickleBuffer
"""A buffer within a value: it is a frame of its own, and arrives as a buffer."""


def tensor_at(index: int) -> torch.Tensor:
    """Placeholder in pickles; the unpickler replaces it by a lookup in the tensors of the payload."""
    raise AssertionError("used in pickles only; the unpickler replaces it by the tensors of the payload")


def adopt(*fork: Any) -> Any:
    """Placeholder in pickles; the unpickler replaces it by the worker's own ``adopt``."""
    raise AssertionError("used in pickles only; the unpickler replaces it by the worker's own function")


def _found_or(made: tuple[Any, ...], reference: str) -> tuple[Any, ...]:
    """How to rebuild what ``reference`` names: it is that of the reader, who makes it if it has none."""
    make, args, state, *items, set_state = made
    return find_or_make, (reference, make, args), (reference, set_state, state), *items, set_state_of_made


def find_or_make(reference: str, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What ``reference`` names here, else the result of ``make``."""
    found = _find(reference)
    return make(*args) if found is None else found


def set_state_of_made(obj: Any, state: tuple[str, Callable[[Any, Any], Any], Any]) -> None:
    """Set the state of what :func:`find_or_make` made."""
    reference, set_state, made_with = state
    if _find(reference) is not obj:
        set_state(obj, made_with)


def _find(reference: str) -> Any:
    try:
        found = find_function(reference)
    except FunctionNotFoundError:
        return None
    return found if callable(found) else None


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions and classes by name where the reader has them, else by value."""

    def __init__(
        self,
        file: io.BytesIO,
        main_by_reference: bool,
        buffer_callback: Callable[[pickle.PickleBuffer], object] | None = None,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._main_by_reference = main_by_reference

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is types.GeneratorType or kind is types.CoroutineType:
            instead = "a list" if kind is types.GeneratorType else "its result, by asyncio.run for example"
            raise PayloadError(f"{obj!r} cannot be sent: it runs here and cannot be copied; send {instead}")
        if kind is types.MethodType and getattr(obj.__self__, obj.__name__, None) == obj:
            # By name: cloudpickle would send the function below a decorated method or a classmethod by
            # value, because that function cannot be found by name.
            return getattr, (obj.__self__, obj.__name__)
        if isinstance(obj, (types.FunctionType, type)) and in_main(obj):
            reference = f"__main__:{obj.__qualname__}"
            made = NotImplemented if self._main_by_reference else super().reducer_override(obj)
            return (find_function, (reference,)) if made is NotImplemented else _found_or(made, reference)
        if isinstance(obj, torch.jit.ScriptFunction):
            return self._reduce_script_function(obj)
        if isinstance(obj, torch.jit.ScriptModule):
            return reduce_script_module(obj)
        if kind.__name__ == "ndarray" and kind.__module__ == "numpy" and not obj.flags.writeable:
            # Protocol 5 would keep it read-only. A copy can be written to, as torch's RPC sends it.
            return obj.copy("K").__reduce_ex__(5)
        return super().reducer_override(obj)

    def _reduce_script_function(self, function: Any) -> tuple[Any, ...]:
        reference = reference_to(function, self._main_by_reference)
        if not reference:
            raise PayloadError(
                f"script function {function.qualified_name} is sent by name, and cannot be found by it: "
                f"define it at the top level of a module that the callee imports as well"
            )
        return find_function, (reference,)


class ModuleFollowsError(Exception):
    """A module follows a Parameter of it, which was pickled as a tensor: begin again, as it is known now."""


class RpcPickler(CodePickler):
    """Pickles the content of calls: replaces tensors by their index and RRefs by forks.

    ``dump`` raises ModuleFollowsError if it has to be done again, with the same ``module_parameters``: the
    ids of Parameters that stay Parameters, which are added as their modules are found.
    """

    def __init__(
        self,
        file: io.BytesIO,
        context: SerializationContext,
        buffer_callback: Callable[[pickle.PickleBuffer], object] | None = None,
        module_parameters: set[int] | None = None,
    ) -> None:
        super().__init__(file, context.main_by_reference, buffer_callback)
        self.tensors: list[torch.Tensor] = []
        self.forks: list[tuple[Any, ...]] = []
        self._context = context
        self.module_parameters = set() if module_parameters is None else module_parameters
        self._others: set[int] = set()  # ids of those that were replaced

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor:
            self.tensors.append(obj)
            return tensor_at, (len(self.tensors) - 1,)
        if obj is tensor_at or obj is adopt:  # by name; cloudpickle takes longer to find that out
            return NotImplemented
        if self._context.parameters_as_tensors and not isinstance(obj, RpcSerializable):
            if isinstance(obj, torch.nn.Module):
                self.module_parameters.update(map(id, obj.parameters()))
                if not self._others.isdisjoint(self.module_parameters):
                    raise ModuleFollowsError
            elif (
                isinstance(obj, torch.Tensor) and obj.requires_grad and id(obj) not in self.module_parameters
            ):
                self._others.add(id(obj))
                if kind is torch.nn.Parameter:
                    self.tensors.append(obj)
                    return tensor_at, (len(self.tensors) - 1,)
                reduced = reduce_subclass(obj)
                if reduced is not None:
                    return reduced
        if isinstance(obj, SerializedByReference):
            return adopt, self._fork(obj)
        if isinstance(obj, RpcSerializable):
            return obj.reduce_for_rpc()
        return super().reducer_override(obj)

    def _fork(self, rref: Any) -> tuple[Any, ...]:
        references = self._context.references
        if references is None:
            raise PayloadError("an RRef can travel only inside a remote call or its result")
        fork = references.fork(rref)
        self.forks.append(fork)
        return fork


def tensors_of(
    value: Any, context: SerializationContext, module_parameters: set[int] | None = None
) -> list[torch.Tensor]:
    """The tensors in ``value``, in the order in which they are sent.

    Raises:
        Exception: of pickle, or of a class in ``value``, if it cannot be pickled.
    """
    probe = _PickleProbe(io.BytesIO(), context, lambda buffer: None, module_parameters)
    try:
        probe.dump(value)
    except ModuleFollowsError:
        return tensors_of(value, context, probe.module_parameters)
    return probe.tensors


class _PickleProbe(RpcPickler):
    """Pickles a value only to find out what it contains: creates no forks."""

    def _fork(self, rref: Any) -> tuple[Any, ...]:
        if self._context.references is None:
            raise PayloadError("an RRef can travel only inside a remote call or its result")
        return ()


class _ConstantsPickler(CodePickler):
    """Pickles tensors that have a history without it; torch would make them leaves that require grad."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.grad_fn is not None:
            constant: Any = obj.detach()
            return constant.__reduce_ex__(5)
        return super().reducer_override(obj)


def dumps(value: Any, main_by_reference: bool) -> bytes:
    """Pickle ``value``, tensors included, into one string of bytes that ``pickle.loads`` reads.

    Tensors that have a history become constants.
    """
    file = io.BytesIO()
    _ConstantsPickler(file, main_by_reference).dump(value)
    return file.getvalue()
