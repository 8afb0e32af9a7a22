"""Incoming payloads to calls and values. The only place where bytes of a peer are unpickled."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from zmqgrad.errors import FunctionNotFoundError, PayloadError, ProtocolError
from zmqgrad.rpc.serialization.context import References
from zmqgrad.rpc.serialization.pickler import __name__ as pickler_module
from zmqgrad.wire.lazy_frame import Buffer
from zmqgrad.wire.messages import BlobLocation, Payload, PayloadFormat
from zmqgrad.wire.tensors import blob_bytes, decode_tensors
from zmqgrad.wire.tensors.blobs import window
from zmqgrad.wire.tensors.modes import without_modes


def deserialize_tensors(
    payload: Payload, frames: Sequence[Buffer], differentiable: bool = True
) -> list[torch.Tensor]:
    """Return the tensors beside a payload; unless ``differentiable``, none of them requires grad yet.

    Raises:
        ProtocolError: if they do not fit their frames.
    """
    encoded = payload.tensors
    return decode_tensors(encoded, frames, differentiable) if encoded.tensors or encoded.batches else []


def deserialize(
    payload: Payload,
    frames: Sequence[Buffer],
    tensors: list[torch.Tensor],
    references: References | None = None,
) -> Any:
    """Return the value of a payload.

    Args:
        tensors: the result of :func:`deserialize_tensors`.
        references: adopts the RRefs in the value.

    Raises:
        ProtocolError: if payload and frames do not fit.
        FunctionNotFoundError: if it names a function or class that cannot be imported here.
        PayloadError: if it cannot be rebuilt here for another reason.
    """
    if payload.format is PayloadFormat.NONE:
        return None
    if payload.format is PayloadFormat.TENSORS:
        if len(tensors) != 1:
            raise ProtocolError(f"a value that is one tensor has {len(tensors)} tensors")
        return tensors[0]
    return _unpickle(payload, frames, tensors, references)


def deserialize_call(
    reference: str,
    payload: Payload,
    frames: Sequence[Buffer],
    tensors: list[torch.Tensor],
    references: References | None = None,
) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Return function (None if ``reference`` names it), args and kwargs of a call.

    Raises:
        ProtocolError, FunctionNotFoundError, PayloadError: as :func:`deserialize`.
    """
    if payload.format is PayloadFormat.NONE:
        return None, (), {}
    if payload.format is PayloadFormat.TENSORS:
        return None, _in_order(tensors, payload.order) if payload.order else tensors, {}
    content = _unpickle(payload, frames, tensors, references)
    size = 2 if reference else 3
    if not isinstance(content, tuple) or len(content) != size:
        raise ProtocolError(f"the payload of a call is not a tuple of {size} items")
    args, kwargs = content[-2:]
    return (None if reference else content[0]), args, kwargs


def _in_order(tensors: Sequence[torch.Tensor], order: Sequence[int]) -> list[torch.Tensor]:
    if max(order) >= len(tensors):
        raise ProtocolError(f"arguments are tensors {order[:8]} of {len(tensors)}")
    return [tensors[index] for index in order]


def _unpickle(
    payload: Payload, frames: Sequence[Buffer], tensors: list[torch.Tensor], references: References | None
) -> Any:
    if payload.pickled is None:
        raise ProtocolError("a payload lacks its pickle")
    # Inline buffers are copied, so that arrays built on them can be written to.
    buffers = [
        bytearray(blob_bytes(b, frames))
        if b.location is BlobLocation.INLINE
        else _held(blob_bytes(b, frames))
        for b in payload.buffers
    ]
    unpickler = _RpcUnpickler(blob_bytes(payload.pickled, frames), buffers, tensors, references)
    complete = False
    try:
        value = unpickler.load()
        complete = True
    except (ProtocolError, PayloadError, FunctionNotFoundError, TimeoutError):  # as in the serializer
        raise
    except (AttributeError, ModuleNotFoundError) as e:
        raise FunctionNotFoundError(
            f"{e}; the RPC pickler does not serialize what can be imported on the caller: "
            f"it must be importable on the callee as well"
        ) from e
    except (Exception, SystemExit, GeneratorExit) as e:  # user code must not end this process
        raise PayloadError(f"cannot rebuild a value that was sent: {type(e).__name__}: {e}") from e
    finally:
        if not complete and references is not None:
            adopted = unpickler.adopted_fork_ids()
            rest = [fork for fork in payload.forks if fork[2] not in adopted]
            if rest:
                references.discard(rest)
    return value


@without_modes
def _held(data: Buffer) -> Buffer:
    """``data``, whose memory is used again only after the last object that refers to it has ended.

    The collector calls back for what is in a cycle before ``__del__`` of the objects there, which may use it,
    or keep it. It does not see what a tensor refers to, so it leaves ``data`` to those.
    """
    if memoryview(data).readonly:
        return data
    tensor = torch.frombuffer(data, dtype=torch.uint8)
    return window(tensor, tensor.data_ptr(), tensor.nbytes)


class _Adopter:
    """Adopts forks and records which. Not a method of the unpickler, whose memo would make it a cycle."""

    def __init__(self, references: References) -> None:
        self._references = references
        self.fork_ids: set[int] = set()

    def __call__(self, *fork: Any) -> Any:
        self.fork_ids.add(fork[2])
        return self._references.adopt(*fork)


class _RpcUnpickler(pickle.Unpickler):
    def __init__(
        self, data: Buffer, buffers: Sequence[Any], tensors: list[torch.Tensor], references: References | None
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._tensors = tensors
        self._references = references
        self._adopter: _Adopter | None = None

    def adopted_fork_ids(self) -> set[int]:
        """Ids of the forks that were adopted so far."""
        return set() if self._adopter is None else self._adopter.fork_ids

    def find_class(self, module: str, name: str) -> Any:
        if module == pickler_module:
            if name == "tensor_at":
                return self._tensors.__getitem__
            if name == "adopt" and self._references is not None:
                self._adopter = self._adopter or _Adopter(self._references)
                return self._adopter
        if module == "__mp_main__":
            module = "__main__"
        return super().find_class(module, name)
