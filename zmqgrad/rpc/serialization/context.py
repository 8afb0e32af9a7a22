"""Inputs and outputs of serialization, and base classes whose instances are serialized in their own way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from zmqgrad.rpc.torch_internals import contents_of
from zmqgrad.transport.tap import Tracer
from zmqgrad.wire.lazy_frame import Frame
from zmqgrad.wire.messages import NONE_PAYLOAD, Payload
from zmqgrad.wire.tensors import Devices

MIN_TRACED_NANOSECONDS = 100_000
"""What takes less to serialize, and has no large tensors, is not worth an event of a trace."""

LARGE_TENSOR_BYTES = 1 << 20
"""Of tensors of this size and more, a trace tells whether their contents were sent before."""


class References(Protocol):
    """How RRefs enter and leave the payloads exchanged with one peer. Implemented by the reference table."""

    def fork(self, rref: Any) -> tuple[Any, ...]:
        """Create a fork of ``rref`` for the peer; returns the arguments of the peer's :meth:`adopt`."""

    def unfork(self, fork: tuple[Any, ...]) -> None:
        """Undo ``fork``: its message will not be sent."""

    def adopt(self, *fork: Any) -> Any:
        """Return the RRef of a received fork."""

    def discard(self, forks: Sequence[tuple[int, int, int, int]]) -> None:
        """Release received forks (their first four items) that will not be adopted."""


class SerializationContext(NamedTuple):
    """How values are serialized for one peer.

    Args:
        references: forks RRefs for the peer; None outside of calls, where RRefs are refused.
        main_by_reference: the peer runs the same program, so functions and classes of ``__main__`` are sent
            by name alone, without the code for a peer that lacks the name.
        parameters_as_tensors: send Parameters that require grad as tensors, so that autograd can record
            them: a Parameter on the peer could not have a history. Parameters of a module that is sent stay
            Parameters of the copy.
        devices: device map, from the devices of this worker to those of the peer.
    """

    references: References | None = None
    main_by_reference: bool = True
    parameters_as_tensors: bool = False
    devices: Devices | None = None


DEFAULT_CONTEXT = SerializationContext()


class SerializedPayload(NamedTuple):
    """A value ready to send.

    Args:
        payload: the part of the message header.
        frames: the frames that the payload refers to.
        tensors: the tensors that travel beside the pickle, in the order of their index.
        nanoseconds: how long that took; 0: not measured, as no trace is recorded.
    """

    payload: Payload
    frames: Sequence[Frame]
    tensors: Sequence[torch.Tensor]
    nanoseconds: int = 0

    def tell(self, tracer: Tracer, peer: int, message_id: int, *, is_reply: bool = False) -> None:
        """Tell ``tracer`` what it took to serialize this, which is sent next, and its large tensors."""
        large = []
        if self.frames:
            found = [contents_of(tensor) for tensor in self.tensors]
            large = [each for each in found if each is not None and each[-1] >= LARGE_TENSOR_BYTES]
        if large or self.nanoseconds >= MIN_TRACED_NANOSECONDS:
            tracer.serialized(self.nanoseconds, peer, message_id, is_reply, large)


SERIALIZED_NONE = SerializedPayload(NONE_PAYLOAD, [], ())


class RpcSerializable:
    """Base of classes whose instances are serialized in calls and results, and in no other pickle."""

    __slots__ = ()

    def reduce_for_rpc(self) -> tuple[Any, ...]:
        """Return what ``__reduce__`` would."""
        raise NotImplementedError


class SerializedByReference(RpcSerializable):
    """Base of classes whose instances are forked, not copied, when they are sent (RRef)."""

    __slots__ = ()
