"""The words of packing: on which terms a value travels, and what it is when it is ready to.

Classes whose instances travel in a manner of their own say so by a base class here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from zmqgrad.wire.lazy_frame import Frame
from zmqgrad.wire.messages import NONE_PAYLOAD, Payload
from zmqgrad.wire.tensors import Devices


class References(Protocol):
    """How RRefs enter and leave payloads. Implemented by a worker, one view per peer."""

    def fork(self, rref: Any) -> tuple[Any, ...]:
        """Make a fork of ``rref`` for whoever reads the payload; gives what it is rebuilt from."""
        ...

    def unfork(self, fork: tuple[Any, ...]) -> None:
        """The message that ``fork`` was made for will never be sent."""
        ...

    def adopt(self, *fork: Any) -> Any:
        """The reader's RRef of such a fork."""
        ...

    def discard(self, forks: Sequence[tuple[int, int, int, int]]) -> None:
        """Let go of forks (their first four items) that came, and that nobody will adopt."""
        ...


class Terms(NamedTuple):
    """On which terms a value travels.

    ``main_by_reference``: the peer runs the same program, so what ``__main__`` defines goes by name.
    ``with_history``: Parameters that require grad go as tensors, so that autograd can follow them; a
    Parameter at the other end could not have a history. Those of a module that travels stay Parameters of
    the copy. ``devices``: where tensors of our devices arrive.
    """

    references: References | None = None
    main_by_reference: bool = True
    with_history: bool = False
    devices: Devices | None = None


DEFAULT_TERMS = Terms()


class Packed(NamedTuple):
    """A value ready to send. ``tensors`` are those that travel beside it, in the order of their index."""

    payload: Payload
    frames: list[Frame]
    tensors: Sequence[torch.Tensor]


PACKED_NOTHING = Packed(NONE_PAYLOAD, [], ())


class TravelsInCalls:
    """Base of classes whose instances travel in calls and their results, and in no other pickle."""

    __slots__ = ()

    def reduce_for_call(self) -> tuple[Any, ...]:
        """As ``__reduce__``."""
        raise NotImplementedError


class TravelsAsReference(TravelsInCalls):
    """Base of classes whose instances are forked, not copied, when they travel (RRef)."""

    __slots__ = ()
