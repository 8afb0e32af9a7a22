"""The pending calls of a worker. Pure bookkeeping, without clock or I/O.

Every method is one dictionary operation or iterates over a copy, so no lock is needed. A call that a method
removes is returned to one caller only; hence exactly one of reply, deadline, loss and shutdown ends it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from zmqgrad.errors import RpcError
from zmqgrad.rpc.reply_port import ReplyPort
from zmqgrad.rpc.serialization.naming import TORCH_OPERATOR
from zmqgrad.rpc.serialization.scripts import scripted_name
from zmqgrad.runtime.collector import interrupts_library
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.messages import MessageType

if TYPE_CHECKING:
    from zmqgrad.rpc.futures import RpcFuture

logger = logging.getLogger(__name__)

Description = str | Callable[..., Any]
"""What was requested, for logs and errors: a text, or the function itself."""


def describe(description: Description) -> str:
    """The description as text. Never raises.

    An object without a name is described by its type: its ``__repr__`` is code of the program, which could
    wait or make calls itself, in a thread that ends calls.
    """
    if type(description) is str:
        return description
    if isinstance(description, torch.jit.ScriptFunction):
        return scripted_name(description)[1]
    if type(description) is partial:
        return f"partial({describe(description.func)})"
    try:
        name = getattr(description, "__qualname__", None)
    except Exception as e:  # __getattr__ is code of the program, too
        logger.debug("reading the name of a %s failed: %s", type(description), type(e))
        name = None
    if not name or type(name) is not str:
        return f"<{type(description).__qualname__} object>"
    return f"torch.{name.removeprefix(TORCH_OPERATOR)}" if name.startswith(TORCH_OPERATOR) else name


def refused_wait(description: Description) -> RpcError:
    """The error for a wait in a thread on which all other waits depend.

    It is logged here, as what a finalizer raises reaches no caller.
    """
    error = RpcError(
        f"{describe(description)} was sent, but its result cannot be waited for in "
        f"{threading.current_thread().name}: a finalizer (__del__) that runs in this thread would stop all "
        f"other calls. In finalizers use rpc_async, and do not wait for its result"
    )
    logger.warning("%s", error)
    return error


def refuse_in_library(description: Description) -> None:
    """Refuse what a finalizer must not do while the library that it interrupts may hold a lock.

    Raises:
        RpcError: if such a finalizer calls this.
    """
    if interrupts_library():
        error = RpcError(
            f"{describe(description)} cannot be used in a finalizer (__del__) for which the collector "
            f"interrupts the work of this library, which may hold a lock: use rpc_async"
        )
        logger.warning("%s", error)  # as above
        raise error


@dataclass(slots=True, eq=False)
class PendingCall:
    """One request without a reply yet.

    Attributes:
        peer: the worker id of the callee.
        deadline: by the worker's clock; infinite for none.
        timeout: in seconds, for error messages; 0 for none.
        keepalive: an object that stays alive as long as the call.
        kind: the :class:`MessageType` of the request.
        promise: set to the reply, or to the error that ends the call.
        port: where the calling thread waits for the reply.
        future: set if the calling thread does not wait.
        claimant: the thread that is to wait, until it begins to.
        claim: a number that is higher than those of earlier claims.
    """

    message_id: int
    peer: int
    deadline: float
    timeout: float
    description: Description
    keepalive: Any
    kind: int
    promise: Promise[Inbound]
    port: ReplyPort
    future: RpcFuture[Any] | None = None
    claimant: int = 0
    claim: int = 0

    @property
    def makes_value(self) -> bool:
        """Whether it is a ``remote`` call."""
        return self.kind == MessageType.REMOTE_CALL

    def describe(self) -> str:
        """What was requested, as text."""
        return describe(self.description)


class PendingCalls:
    """Pending calls by message id."""

    def __init__(self) -> None:
        self._calls: dict[int, PendingCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: PendingCall) -> None:
        """Add ``call``, which is about to be sent."""
        self._calls[call.message_id] = call

    def take(self, message_id: int) -> PendingCall | None:
        """Remove and return a call; None if it is not pending any more."""
        return self._calls.pop(message_id, None)

    def take_replied(self, message_id: int, source: int) -> PendingCall | None:
        """As :meth:`take`, for a reply of ``source``: None if that is not the callee."""
        call = self._calls.get(message_id)
        return None if call is None or call.peer != source else self._calls.pop(message_id, None)

    def expire(self, now: float) -> list[PendingCall]:
        """Remove and return the calls whose deadline has passed."""
        return self._take_all([c for c in list(self._calls.values()) if c.deadline <= now])

    def lose(self, peer: int) -> list[PendingCall]:
        """Remove and return the calls to ``peer``."""
        return self._take_all([c for c in list(self._calls.values()) if c.peer == peer])

    def drain(self) -> list[PendingCall]:
        """Remove and return all calls."""
        return self._take_all(list(self._calls.values()))

    def all(self) -> list[PendingCall]:
        """A list of all pending calls."""
        return list(self._calls.values())

    def next_deadline(self) -> float:
        """The earliest deadline; infinite if there is none."""
        return min((c.deadline for c in list(self._calls.values())), default=math.inf)

    def _take_all(self, calls: list[PendingCall]) -> list[PendingCall]:
        return [c for c in calls if self._calls.pop(c.message_id, None) is not None]
