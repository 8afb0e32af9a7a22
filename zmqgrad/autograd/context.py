"""A distributed autograd pass as one worker knows it: its sends, its gradients, who else takes part.

A context is created where it is first heard of, and forgotten everywhere when its maker leaves the ``with``.
Which context the calling thread records for is a context variable; engine threads set it around each call.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from zmqgrad.autograd.graph.node import added
from zmqgrad.autograd.send_recv import RecvMetadata, Send, attach_recv
from zmqgrad.errors import AutogradError
from zmqgrad.wire.ids import show_id, split_id

if TYPE_CHECKING:
    from zmqgrad.autograd.backward.executor import LocalPass

REMEMBERED = 10_000
"""How many released contexts are remembered, so that a late message does not bring one back."""

ENDED_PASSES = 16
"""When so many passes have ended in one context, their workers are told to forget all but the last."""


class Context:
    """One context on one worker."""

    def __init__(self, context_id: int) -> None:
        self.id = context_id
        self.released = False
        """Has it ended? What is still under way for it is not recorded any more."""
        self._lock = threading.Lock()  # guards the five below
        self._sends: dict[int, Send] = {}
        self._recvs: dict[int, Any] = {}  # nodes
        self._peers: set[int] = set()
        # By id of the leaf, with the leaf: the hash of a tensor is a Python function.
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.add_peer: Callable[[int], None] = self._peers.add
        """That worker takes part; it will be told of the end."""
        self._storages: set[int] = set()  # addresses of the gradients' memory
        self.pass_lock = threading.Lock()  # guards the three below
        self.passes: dict[int, LocalPass] = {}
        self._ended: list[int] = []  # passes that began here and are still remembered, anywhere
        self._forgotten: set[int] = set()

    def end(self) -> None:
        """It has been released: what it holds goes as soon as nobody else holds it."""
        self.released = True  # before its peers are read: see Autograd.outgoing
        with self.pass_lock:
            self.passes.clear()  # they know the context, and a cycle would keep graphs and gradients

    def peers(self) -> set[int]:
        """The workers that this one exchanged messages of the context with."""
        return set(self._peers)

    def add_send(self, send: Send) -> None:
        """Tensors are about to go out."""
        with self._lock:
            self._sends[send.autograd_id] = send

    def remove_send(self, autograd_id: int) -> None:
        """They did not go after all."""
        with self._lock:
            self._sends.pop(autograd_id, None)

    def sends(self) -> list[Send]:
        """All sends so far."""
        with self._lock:
            return list(self._sends.values())

    def recvs(self) -> dict[int, Any]:
        """The nodes behind what came in messages, by their autograd ids, in the order in which it came."""
        with self._lock:
            return dict(self._recvs)

    def receive(
        self,
        autograd_id: int,
        peer: int,
        tensors: list[torch.Tensor],
        wanted: Sequence[int],
        in_reply: bool = False,
    ) -> list[torch.Tensor]:
        """Tensors that came from the send ``autograd_id`` of ``peer``; those at ``wanted`` with history."""
        if wanted:
            metadata = RecvMetadata(self.id, autograd_id, peer, len(wanted), in_reply)
            outputs, self._recvs[autograd_id] = attach_recv(metadata, [tensors[i] for i in wanted])
            for i, output in zip(wanted, outputs, strict=True):
                tensors[i] = output
        return tensors

    def end_pass(self, number: int) -> list[int]:
        """A pass that began here has ended. Gives, once they are many, those to forget: all but the last."""
        with self.pass_lock:
            self._ended.append(number)
            if len(self._ended) < ENDED_PASSES:
                return []
            *over, last = self._ended
            self._ended = [last]
            return over

    def forget_passes(self, numbers: Sequence[int]) -> list[int]:
        """These passes have ended. Gives those that this worker had not heard it of before."""
        with self.pass_lock:
            fresh = [number for number in numbers if number not in self._forgotten]
            self._forgotten.update(fresh)
            for number in fresh:
                self.passes.pop(number, None)
            return fresh

    def is_forgotten(self, number: int) -> bool:
        """Has this pass ended long ago? To be called with the lock of passes held."""
        return number in self._forgotten

    def accumulate(self, leaf: torch.Tensor, gradient: torch.Tensor, shared: bool = False) -> torch.Tensor:
        """Add to the gradient of ``leaf``; gives the sum. ``shared``: others hold ``gradient`` as well.

        A leaf that requires grad no more gets none, as in one process.
        """
        if not leaf.requires_grad:
            return gradient
        with self._lock:
            present = self._gradients.get(id(leaf))
            total = self._own(gradient, shared) if present is None else added(present[1], gradient)
            self._gradients[id(leaf)] = leaf, total
            return total

    def replace(self, leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """The gradient of ``leaf`` is another, or none."""
        with self._lock:
            if gradient is None:
                self._gradients.pop(id(leaf), None)
            else:
                self._gradients[id(leaf)] = leaf, gradient

    def _own(self, gradient: torch.Tensor, shared: bool) -> torch.Tensor:
        """``gradient`` in memory of its own, so that users may write to it. Called with the lock held."""
        if gradient.layout is not torch.strided:
            return gradient.clone() if shared else gradient
        address = gradient.untyped_storage().data_ptr()
        if shared or address in self._storages or 0 in gradient.stride():
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            address = gradient.untyped_storage().data_ptr()
        self._storages.add(address)
        return gradient

    def gradient(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """What has been added up for ``leaf`` so far."""
        with self._lock:
            present = self._gradients.get(id(leaf))
            return None if present is None else present[1]

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Leaf to gradient, of all backward passes of this context so far."""
        with self._lock:
            return dict(self._gradients.values())

    def __repr__(self) -> str:
        return f"<Context {show_id(self.id)}: {len(self._sends)} sends, {len(self._gradients)} gradients>"


_active_context: ContextVar[Context | None] = ContextVar("zmqgrad_autograd_context", default=None)
_wants_result_grad: ContextVar[bool] = ContextVar("zmqgrad_autograd_answer", default=True)


def active_context() -> Context | None:
    """The context that the calling thread records for, if any and if it has not been released."""
    context = _active_context.get()
    return None if context is None or context.released else context


def check_not_nested() -> None:
    """Nothing, if the calling thread does not record.

    Raises:
        AutogradError: if it does.
    """
    if active_context() is not None:
        raise AutogradError("Already have an autograd context id for this thread: contexts do not nest")


def set_active_context(context: Context | None) -> None:
    """From now on the calling thread records for ``context``, without a block that ends it."""
    _active_context.set(context)


def wants_result_grad() -> bool:
    """Does whoever called what the calling thread runs differentiate the answer?"""
    return _wants_result_grad.get()


class ActiveContext:
    """Inside it the calling thread records for ``context``; ``answer``: for its answer as well."""

    __slots__ = ("_answer", "_answer_token", "_context", "_token")

    def __init__(self, context: Context | None, answer: bool = True) -> None:
        self._context = context
        self._answer = answer

    def __enter__(self) -> None:
        self._token = _active_context.set(self._context)
        self._answer_token = _wants_result_grad.set(self._answer)

    def __exit__(self, *exc: object) -> None:
        _wants_result_grad.reset(self._answer_token)
        _active_context.reset(self._token)


class Contexts:
    """The contexts of one worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both
        self._live: dict[int, Context] = {}
        self._released: OrderedDict[int, None] = OrderedDict()

    def new(self, context_id: int) -> Context:
        """A context that begins here."""
        with self._lock:
            context = self._live[context_id] = Context(context_id)
            return context

    def get_or_create(self, context_id: int) -> Context | None:
        """A context that a message speaks of; None if it has been released already."""
        with self._lock:
            if context_id in self._released:
                return None
            context = self._live.get(context_id)
            if context is None:
                context = self._live[context_id] = Context(context_id)
            return context

    def known(self, context_id: int) -> Context | None:
        """A context, if it is here."""
        with self._lock:
            return self._live.get(context_id)

    def find(self, context_id: int) -> Context:
        """A context that must be here.

        Raises:
            AutogradError: saying whether it is unknown or gone.
        """
        with self._lock:
            context = self._live.get(context_id)
            if context is not None:
                return context
            gone = context_id in self._released
        maker, _ = split_id(context_id)
        why = f"no context() here made it, and no call of one that worker {maker} made came here"
        if gone:
            why = "it has been released: its 'with' block was left, or the worker that made it is gone"
        raise AutogradError(f"Could not find autograd context with id: {context_id}; {why}")

    def release(self, context_id: int) -> Context | None:
        """Forget a context; gives it if it was known."""
        with self._lock:
            self._released[context_id] = None
            if len(self._released) > REMEMBERED:
                self._released.popitem(last=False)
            context = self._live.pop(context_id, None)
            if context is not None:
                context.end()
            return context

    def live(self) -> list[Context]:
        """All contexts here."""
        with self._lock:
            return list(self._live.values())
