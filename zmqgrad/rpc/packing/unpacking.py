"""Payloads to Python values: the way in, and the one door by which bytes become objects (P4)."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from zmqgrad.errors import FunctionNotFoundError, PayloadError, ProtocolError
from zmqgrad.rpc.packing.pickling import __name__ as pickling_module
from zmqgrad.rpc.packing.plain import decode_arguments, decode_value
from zmqgrad.rpc.packing.terms import References
from zmqgrad.wire.lazy_frame import Buffer
from zmqgrad.wire.messages import BlobLocation, Payload, PayloadFormat
from zmqgrad.wire.tensors import blob_bytes, decode_tensors


def unpack_tensors(
    payload: Payload, frames: Sequence[Buffer], differentiable: bool = True
) -> list[torch.Tensor]:
    """The tensors beside a payload; unless ``differentiable``, none of them requires grad yet.

    Raises:
        ProtocolError: if they do not fit their frames.
    """
    described = payload.tensors
    return decode_tensors(described, frames, differentiable) if described.tensors or described.batches else []


def unpack(
    payload: Payload,
    frames: Sequence[Buffer],
    tensors: list[torch.Tensor],
    references: References | None = None,
) -> Any:
    """The value of a payload whose tensors are ``tensors``.

    Raises:
        ProtocolError: if payload and frames do not fit.
        FunctionNotFoundError: if it names a function or class that cannot be imported here.
        PayloadError: if it cannot be rebuilt here for another reason.
    """
    form = payload.format
    if form is PayloadFormat.NONE:
        return None
    if form is PayloadFormat.TENSOR:
        if len(tensors) != 1:
            raise ProtocolError(f"a payload of one tensor came with {len(tensors)}")
        return tensors[0]
    if form is PayloadFormat.TUPLE:
        return _in_order(tensors, payload.order) if payload.order else tuple(tensors)
    if payload.pickled is None:
        raise ProtocolError("a payload came without its pickle")
    data = blob_bytes(payload.pickled, frames)
    if form is PayloadFormat.PLAIN:
        return decode_value(data)
    if form is PayloadFormat.ARGUMENTS:
        return decode_arguments(data, tensors)
    if form is PayloadFormat.VALUE:
        return _only(decode_arguments(data, tensors)[0])
    # A copy, so that arrays built on inline buffers can be written to.
    buffers = [
        bytearray(blob_bytes(b, frames)) if b.location is BlobLocation.INLINE else blob_bytes(b, frames)
        for b in payload.buffers
    ]
    unpickler = _Unpickler(data, buffers, tensors, references)
    complete = False
    try:
        value = unpickler.load()
        complete = True
    except (ProtocolError, PayloadError, FunctionNotFoundError):
        raise
    except (AttributeError, ModuleNotFoundError) as e:
        raise FunctionNotFoundError(
            f"{e}; the RPC pickler does not serialize what can be imported on the caller: "
            f"it must be importable on the callee as well"
        ) from e
    except (Exception, SystemExit, GeneratorExit) as e:  # what a class does here must not end this process
        raise PayloadError(f"cannot rebuild a value that was sent: {type(e).__name__}: {e}") from e
    finally:
        if not complete:
            unpickler.discard_rest(payload)
    return value


def _in_order(tensors: list[torch.Tensor], order: Sequence[int]) -> tuple[torch.Tensor, ...]:
    if max(order) >= len(tensors):
        raise ProtocolError(f"a tuple of tensors {order[:8]} came with {len(tensors)}")
    return tuple([tensors[number] for number in order])


def _only(args: Sequence[Any]) -> Any:
    if len(args) != 1:
        raise ProtocolError(f"one value came as {len(args)}")
    return args[0]


def unpack_call(reference: str, payload: Payload, content: Any) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Function (None if ``reference`` names it), args and kwargs, from what :func:`unpack` gave.

    Raises:
        ProtocolError: if that is not what ``pack_call`` makes.
    """
    if payload.format is PayloadFormat.NONE:
        return None, (), {}
    if payload.format is PayloadFormat.TUPLE:
        return None, content, {}
    if payload.format is PayloadFormat.ARGUMENTS:
        return None, *content
    wanted = 2 if reference else 3
    if payload.format is not PayloadFormat.PICKLE or not isinstance(content, tuple) or len(content) != wanted:
        raise ProtocolError(f"the payload of a call is no {wanted}-tuple")
    args, kwargs = content[-2:]
    return (None if reference else content[0]), args, kwargs


class _Adopted:
    """Notes which forks have been adopted. No part of the unpickler, whose memo keeps it: no cycle."""

    def __init__(self, references: References) -> None:
        self._references = references
        self.fork_ids: set[int] = set()

    def __call__(self, *fork: Any) -> Any:
        self.fork_ids.add(fork[2])
        return self._references.adopt(*fork)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: Buffer, buffers: Sequence[Any], tensors: list[torch.Tensor], references: References | None
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._tensors = tensors
        self._references = references
        self._adopted: _Adopted | None = None

    def discard_rest(self, payload: Payload) -> None:
        """Reading has failed: let go of the references that were not reached."""
        reached = () if self._adopted is None else self._adopted.fork_ids
        rest = [fork for fork in payload.forks if fork[2] not in reached]
        if rest and self._references is not None:
            self._references.discard(rest)

    def find_class(self, module: str, name: str) -> Any:
        if module == pickling_module:
            if name == "tensor_at":
                return self._tensors.__getitem__
            if name == "adopt" and self._references is not None:
                self._adopted = self._adopted or _Adopted(self._references)
                return self._adopted
        if module == "__mp_main__":
            module = "__main__"
        return super().find_class(module, name)
