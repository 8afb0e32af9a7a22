"""The hooks by which upper layers take part in RPC.

autograd serves message types of its own (``requests``), wraps outgoing calls and replies
(``request_interceptor``), unwraps them (``request_unwrappers``, ``response_unwrappers``), and is notified of
lost peers and of shutdown. Each worker has its own hooks; nothing here is global.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from zmqgrad.rpc.calls import Description
from zmqgrad.transport.base import Inbound
from zmqgrad.transport.tap import Tracer
from zmqgrad.wire.messages import Message, MessageType


class Unwrapped(NamedTuple):
    """An unwrapped message: the one inside, and its tensors as the receiver shall see them."""

    message: Message
    tensors: list[torch.Tensor]
    run: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any] | None = None
    """Runs the function of a call with its arguments; None: it is just called."""


class Surrounding(Protocol):
    """What surrounds a call, until its result is serialized."""

    def __exit__(self, *error: object) -> None:
        """End."""

    def suspend(self) -> None:
        """Pause until the result, a future, is done."""

    def resume(self) -> None:
        """Go on, in whichever thread has set the future."""


RequestHandler = Callable[[Inbound], None]
"""Serves a request: in an engine thread, or in the receiver's if registered as control (must be quick)."""

RequestInterceptor = Callable[[int, Message, Sequence[torch.Tensor], Description], Message]
"""(peer, message, its tensors, description) -> the message to send instead."""

Unwrapper = Callable[[Inbound], Unwrapped]
"""Opens a request in the engine thread that is about to serve it, or a reply in the thread that waits."""

EXTENSIONS = ("zmqgrad.autograd",)
"""Upper layers installed in every worker, even if its program does not use them: a callee has to record what
it runs for others. They are named, not imported, because imports point downwards; each has an
``install(worker)``."""


def install_extension(module: str, worker: Any) -> None:
    """Import an upper layer and let it register its hooks with ``worker``."""
    importlib.import_module(module).install(worker)


@dataclass
class Hooks:
    """What upper layers have registered with one worker."""

    requests: dict[MessageType, RequestHandler] = field(default_factory=dict)
    control: dict[MessageType, RequestHandler] = field(default_factory=dict)
    reports: dict[MessageType, RequestHandler] = field(default_factory=dict)
    """Takes what a request reports of its sender, in the thread that has read it: before the request is
    served, and before the end of its sender is known. Must be quick."""
    surroundings: dict[MessageType, Callable[[Inbound], Surrounding | None]] = field(default_factory=dict)
    """Begins what surrounds a call, if anything. It ends before the reply is sent, as the caller may then
    rely on that."""
    request_unwrappers: dict[int, Unwrapper] = field(default_factory=dict)
    response_unwrappers: dict[MessageType, Unwrapper] = field(default_factory=dict)
    request_interceptor: RequestInterceptor | None = None
    on_send_failed: Callable[[Message], None] | None = None
    """Called with the result of ``request_interceptor`` if sending it failed."""
    backward: Callable[[int, torch.Tensor, bool], None] | None = None
    """(context id, root, retain_graph): run a distributed backward pass from a tensor of this worker."""
    with_history: Callable[[], bool] = lambda: False
    """Whether tensors are sent with their autograd history just now."""
    checkpointing: Callable[[], AbstractContextManager[object]] = nullcontext
    """Returns a context manager in which calls that are sent are checkpointed."""
    on_local_value: Callable[[Any], None] | None = None
    """Called with the value of an RRef that a function on its owner is about to use."""
    tracer: Tracer | None = None
    """Records what the worker does; None: it is not traced."""
    peer_lost: list[Callable[[int, BaseException], None]] = field(default_factory=list)
    closing: list[Callable[[], None]] = field(default_factory=list)
    debug: dict[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    """What a layer adds to ``rpc.get_debug_info``, by its name."""
    extensions: dict[str, Any] = field(default_factory=dict)
    """The state that a layer keeps for this worker, by its name."""
