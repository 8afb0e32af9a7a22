"""The way out for what is not plain: a pickle, in which every tensor is replaced by its index.

The tensors travel beside it, as do out-of-band buffers (numpy arrays). Lambdas, closures and whatever else
cannot be imported go by value, through cloudpickle. Functions and classes of ``__main__`` go by reference to
peers that run the same program (their globals are then the callee's own), and by value to others.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import torch

from zmqgrad.errors import PayloadError, PeerLostError
from zmqgrad.rpc.packing.naming import find_function, in_main, reference_to
from zmqgrad.rpc.packing.scripts import reduce_script_module
from zmqgrad.rpc.packing.terms import Packed, Terms, TravelsAsReference, TravelsInCalls
from zmqgrad.wire.lazy_frame import Frame
from zmqgrad.wire.messages import Blob, BlobLocation, Payload, PayloadFormat
from zmqgrad.wire.tensors import encode_tensors

INLINE = 64 << 10
"""Pickles of up to so many bytes travel in the header."""


def tensor_at(index: int) -> torch.Tensor:
    """Stands in pickles for a tensor that travels beside them."""
    raise AssertionError("stands in pickles only; the unpickler puts the tensors of the payload here")


def adopt(*fork: Any) -> Any:
    """Stands in pickles for what makes an RRef of a fork."""
    raise AssertionError("stands in pickles only; the unpickler puts the worker's own function here")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self,
        file: io.BytesIO,
        terms: Terms,
        buffer_callback: Callable[[pickle.PickleBuffer], object],
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.tensors: list[torch.Tensor] = []
        self.forks: list[tuple[Any, ...]] = []
        self._terms = terms
        self._of_modules: set[int] = set()  # ids of Parameters that stay what they are

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor:
            self.tensors.append(obj)
            return tensor_at, (len(self.tensors) - 1,)
        if self._terms.with_history and isinstance(obj, torch.nn.Module):
            self._of_modules.update(map(id, obj.parameters()))
        if (
            kind is torch.nn.Parameter
            and self._terms.with_history
            and obj.requires_grad
            and id(obj) not in self._of_modules
        ):
            self.tensors.append(obj)
            return tensor_at, (len(self.tensors) - 1,)
        if isinstance(obj, TravelsInCalls):
            return self._reduce(obj)
        if kind is types.GeneratorType or kind is types.CoroutineType:
            instead = "a list" if kind is types.GeneratorType else "what it gives, by asyncio.run for example"
            raise PayloadError(f"{obj!r} cannot be sent: it runs here and cannot be copied; send {instead}")
        if kind is types.MethodType and getattr(obj.__self__, obj.__name__, None) == obj:
            # By name: behind a method that is decorated, or of a class, cloudpickle finds its bare function,
            # which has no name to be found by, and would send its code.
            return getattr, (obj.__self__, obj.__name__)
        if self._terms.main_by_reference and isinstance(obj, (types.FunctionType, type)) and in_main(obj):
            return find_function, (f"__main__:{obj.__qualname__}",)
        if isinstance(obj, torch.jit.ScriptFunction):
            return self._reduce_script_function(obj)
        if isinstance(obj, torch.jit.ScriptModule):
            return reduce_script_module(obj)
        return super().reducer_override(obj)

    def _reduce_script_function(self, function: Any) -> tuple[Any, ...]:
        reference = reference_to(function, self._terms.main_by_reference)
        if not reference:
            raise PayloadError(
                f"script function {function.qualified_name} is sent by name, and cannot be found by it: "
                f"define it at the top level of a module that the callee imports as well"
            )
        return find_function, (reference,)

    def _reduce(self, obj: TravelsInCalls) -> tuple[Any, ...]:
        if isinstance(obj, TravelsAsReference):
            return adopt, self._fork(obj)
        return obj.reduce_for_call()

    def _fork(self, rref: Any) -> tuple[Any, ...]:
        if self._terms.references is None:
            raise PayloadError("an RRef can travel only inside a remote call or its result")
        fork = self._terms.references.fork(rref)
        self.forks.append(fork)
        return fork


class _Probe(_Pickler):
    """Pickles a value to find out whether that can be done: makes no forks and keeps no output."""

    def __init__(self, terms: Terms) -> None:
        super().__init__(io.BytesIO(), terms, lambda buffer: None)

    def _fork(self, rref: Any) -> tuple[Any, ...]:
        if self._terms.references is None:
            raise PayloadError("an RRef can travel only inside a remote call or its result")
        return ()


def _first_unpicklable(value: Any, parts: Mapping[str, Any], terms: Terms) -> str:
    """Name and type of the first of ``parts`` that cannot be pickled; the type of ``value`` if all can."""
    for name, part in parts.items():
        try:
            _Probe(terms).dump(part)
        except Exception:
            return f"{name} ({type(part).__name__})"
    return f"a value of type {type(value).__name__}"


def pack_pickled(value: Any, terms: Terms, parts: Callable[[], Mapping[str, Any]] = dict) -> Packed:
    """Pickle ``value``.

    Args:
        parts: returns the arguments in ``value`` by name, for the error message.

    Raises:
        PayloadError: naming the argument that cannot be pickled.
    """
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    frames: list[Frame] = []
    pickler = _Pickler(file, terms, buffers.append)
    try:
        pickler.dump(value)
        tensors = encode_tensors(pickler.tensors, frames, terms.devices)
        outside = tuple(blob(b.raw(), frames) for b in buffers)
    except BaseException as e:
        for fork in pickler.forks:
            assert terms.references is not None
            terms.references.unfork(fork)
        if not isinstance(e, Exception) or isinstance(e, PeerLostError):
            raise
        reason = str(e) if isinstance(e, PayloadError) else f"{type(e).__name__}: {e}"
        raise PayloadError(f"cannot serialize {_first_unpicklable(value, parts(), terms)}: {reason}") from e
    forks = tuple([fork[:4] for fork in pickler.forks])
    payload = Payload(PayloadFormat.PICKLE, tensors, blob(file.getbuffer(), frames), outside, forks)
    return Packed(payload, frames, pickler.tensors)


def blob(data: bytes | memoryview, frames: list[Frame]) -> Blob:
    """``data`` in the header; in a frame of its own, added to ``frames``, if it is long."""
    if len(data) <= INLINE:
        return Blob(BlobLocation.INLINE, len(data), bytes(data))
    frames.append(data)
    return Blob(BlobLocation.FRAME, len(data), b"", len(frames) - 1)
