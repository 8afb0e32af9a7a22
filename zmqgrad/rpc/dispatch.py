"""The doors through which upper floors take part in RPC without RPC knowing them.

autograd answers messages of its own (``requests``), wraps outgoing calls and answers (``outgoing``), opens
the wrapped answers (``openers``), and hears of workers that are lost and of the end. Each worker has its own
doors; nothing here is global.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from zmqgrad.rpc.calls import What
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.messages import Message, MessageType


class Opened(NamedTuple):
    """A wrapped answer, opened: the answer inside, and its tensors as the caller shall see them."""

    message: Message
    tensors: list[torch.Tensor]


RequestHandler = Callable[[Inbound], None]
"""Serves a request; in an engine thread, or in the receiver's if registered as control (must be quick)."""

Outgoing = Callable[[int, Message, Sequence[torch.Tensor], What], Message]
"""(peer, message, its tensors, what it is) -> the message to send instead."""

Opener = Callable[[Inbound], Opened]

EXTENSIONS = ("zmqgrad.autograd",)
"""Floors above that every worker answers for, whether or not its program uses them: a callee has to record
what it is asked to run. Named, not imported, as the arrows point the other way; each has ``install(worker)``.
"""


def install_extension(module: str, worker: Any) -> None:
    """Let an upper floor fill the doors of ``worker``."""
    importlib.import_module(module).install(worker)


@dataclass
class Doors:
    """What upper floors have registered with one worker."""

    requests: dict[MessageType, RequestHandler] = field(default_factory=dict)
    control: dict[MessageType, RequestHandler] = field(default_factory=dict)
    openers: dict[MessageType, Opener] = field(default_factory=dict)
    outgoing: Outgoing | None = None
    unsent: Callable[[Message], None] | None = None
    """Called with what ``outgoing`` gave, if that could not be sent after all."""
    backward: Callable[[int, torch.Tensor, bool], None] | None = None
    """(context id, root, retain_graph): run a distributed backward pass from a tensor of this worker."""
    with_history: Callable[[], bool] = lambda: False
    peer_lost: list[Callable[[int, BaseException], None]] = field(default_factory=list)
    closing: list[Callable[[], None]] = field(default_factory=list)
    debug: dict[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    """What an upper floor tells ``rpc.get_debug_info``, by the floor's name."""
    extensions: dict[str, Any] = field(default_factory=dict)
    """Where an upper floor keeps what it has for this worker, by the floor's name."""
