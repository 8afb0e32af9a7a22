"""The hooks for tracing: a tap is called with every message, a tracer with what a worker does besides.

Both run in the thread that sends, receives or works, so they must be quick and must not raise. Without them,
the cost is one comparison with None. What can be traced (a worker, a store's client or server) registers here
and gets its tracer from the active recorder, if there is one.
"""

from __future__ import annotations

import importlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from zmqgrad import environment
from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.messages import Message

INLINE, FRAMES, SHARED_MEMORY = 0, 1, 2
"""How the bytes of a message are transferred."""

WORKER, STORE_CLIENT, STORE_SERVER, RENDEZVOUS_NODE = 1, 2, 3, 4
"""What is traced: the roles of an identity."""


class Tap(Protocol):
    """Called with each message that is sent or received. Plain arguments: an object would double the time."""

    def __call__(
        self,
        outgoing: bool,
        peer: int,
        envelope: tuple[int, ...],
        message: Message,
        size: int,
        time: int,
        path: int = INLINE,
        /,
    ) -> None:
        """Takes a message.

        Args:
            peer: the other worker; of store messages, the id of the client's channel.
            envelope: the fields of an :class:`~zmqgrad.wire.frames.Envelope`.
            size: the bytes of all frames; 0 if it is not known here.
            time: ``monotonic_ns`` just before it was sent, or after it was received.
            path: how its bytes were transferred.
        """


class Tapped(NamedTuple):
    """The arguments of a tap."""

    outgoing: bool
    peer: int
    envelope: Envelope
    message: Message
    size: int
    time: int
    path: int = INLINE


def observer(note: Callable[[Tapped], object]) -> Tap:
    """Returns a tap that calls ``note`` with one object, for those that need not be quick."""

    def tap(outgoing: bool, peer: int, envelope: tuple[int, ...], *rest: Any) -> None:
        note(Tapped(outgoing, peer, Envelope(*envelope), *rest))

    return tap


OnHeartbeat = Callable[[int, bool], None]
"""Called with a peer, and whether the heartbeat was sent to it (or is its reply)."""


class Usage(NamedTuple):
    """What a worker uses at a moment: see :class:`zmqgrad.trace.events.Usage`."""

    threads: int
    blocked: int
    working_limit: int
    leased_bytes: int
    leased_limit: int


class Tracer(Protocol):
    """Records what one traced object does. Thread-safe; nothing raises."""

    records_arguments: bool
    """Whether :meth:`request_described` wants the arguments of every call."""
    records_heartbeats: bool

    @property
    def tap(self) -> Tap:
        """Called with each message that is sent or received."""

    def request_started(self, peer: int, message_id: int) -> None:
        """The calling thread begins to serve a request."""

    def request_finished(self, peer: int, message_id: int, failed: bool) -> None:
        """The calling thread has served it."""

    def request_described(
        self, message_id: int, function: str, args: Sequence[Any] | None, kwargs: Any
    ) -> None:
        """A request that is sent next calls ``function``, which its message does not name."""

    def serialized(
        self,
        nanoseconds: int,
        peer: int,
        message_id: int,
        is_reply: bool,
        contents: Sequence[tuple[object, int, int, int]],
    ) -> None:
        """The payload of a request to ``peer``, or of the reply to one of its requests, is ready to be sent.

        Args:
            nanoseconds: what that took; 0: not measured.
            contents: of each large tensor: its storage, and the offset, the version and the size of what is
                sent of it.
        """

    def wait_begun(self, peer: int, message_id: int) -> None:
        """The calling thread waits for the reply to a request, or the end of a backward pass."""

    def wait_ended(self, peer: int, message_id: int, failed: bool) -> None:
        """It does not wait any more."""

    def group_called(self, began: int, function: str, calls: Sequence[int], failed: bool) -> None:
        """A group call took from ``began`` (``monotonic_ns``) until now; ``calls`` are its message ids."""

    def context_created(self, context: int) -> None:
        """A distributed autograd context exists here from now on."""

    def context_released(self, context: int) -> None:
        """It does not any more."""

    def pass_started(self, context: int, pass_id: int) -> None:
        """A backward pass begins here."""

    def pass_finished(self, context: int, pass_id: int, failed: bool) -> None:
        """It is over on all workers."""

    def group_executed(
        self,
        began: int,
        context: int,
        pass_id: int,
        sends: Sequence[int],
        recvs: Sequence[tuple[int, int]],
        missing: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> None:
        """Groups of a pass ran from ``began`` (``monotonic_ns``) until now.

        Args:
            missing: of sends that got gradients in part: for each of their tensors, 1 if it got none.
        """

    def step_taken(self, context: int, staleness: int, applied: bool) -> None:
        """An optimizer has stepped shared parameters here, or not, as the gradients were too old."""

    def published(self, began: int, name: str, version: int, size: int) -> None:
        """A version of ``name`` was published: it took from ``began`` until now, and ``size`` bytes."""

    def rendezvous_step(self, round_number: int, action: str, participants: int, waiting: int) -> None:
        """A node of a rendezvous applied an action to the shared state."""

    def heartbeat(self, peer: int, outgoing: bool) -> None:
        """A heartbeat was sent or received."""

    def watch_usage(self, measure: Callable[[], Usage]) -> None:
        """Calls ``measure``, a method, about once a second until :meth:`close`. It must not raise."""

    def peer_lost(self, peer: int, reason: str, left: bool = False) -> None:
        """A peer was declared lost, or ``left`` the group; what was requested of it fails."""

    def call_failed(self, peer: int, message_id: int, error: str) -> None:
        """A request was given up without a reply; its caller gets an error of the class ``error``."""

    def request_stacks(self) -> None:
        """Asks all processes of the trace to record the stacks of their threads."""

    def locate(self, peer: int, message_id: int, context: int = 0) -> str:
        """Where a request is by now, in words.

        Args:
            message_id: a request that was sent to ``peer``; 0: the one of a backward pass in ``context``
                that ``peer`` has not finished.

        Returns:
            Empty if the logs at hand do not tell. Reads them, which takes up to 0.1 s.
        """

    def close(self) -> None:
        """The traced object was closed."""


class OutgoingSpan(Protocol):
    """The span of a call, at its caller."""

    traceparent: str
    """What identifies it to the callee: a header of W3C Trace Context."""

    def end(self, error: str) -> None:
        """The call has ended; ``error`` says how it failed, empty: it did not. Thread-safe."""


class GroupSpan(Protocol):
    """The span of a group call, at its caller."""

    def parent(self) -> AbstractContextManager[object]:
        """While it lasts, the calls that the calling thread sends are children of this span."""

    def end(self, error: str) -> None:
        """As :meth:`OutgoingSpan.end`, for the last of its calls."""


class Spans(Protocol):
    """Makes a span of each call, such as those of OpenTelemetry. Thread-safe; nothing raises."""

    def call(self, function: str, caller: str, callee: str) -> OutgoingSpan:
        """The calling thread sends a call."""

    def group(self, function: str, caller: str, members: int) -> GroupSpan:
        """The calling thread sends a call to so many members of a group."""

    def serve(
        self, traceparent: str, function: str, caller: str, callee: str
    ) -> AbstractContextManager[object]:
        """The calling thread runs the function of a call, whose caller sent ``traceparent``."""


spans: Spans | None = None
"""Makes the spans of this process; None: nothing does."""


class Identity(NamedTuple):
    """Who is traced."""

    role: int
    name: str
    number: int = 0
    incarnation: int = 0
    job: str = ""
    address: str = ""


class Traced(Protocol):
    """What can be traced. It must call :func:`register`, and :func:`unregister` when it is closed."""

    tracer: Tracer | None

    def identity(self) -> Identity:
        """Who it is."""


class Recorder(Protocol):
    """Makes the tracers of one process."""

    def attach(self, identity: Identity) -> Tracer:
        """Returns the tracer of an object. Must not call back into this module."""

    def in_child(self) -> Recorder | None:
        """Called in a forked child: returns the recorder of the child."""


_lock = threading.RLock()  # guards the next three
_traced: weakref.WeakSet[Any] = weakref.WeakSet()
_recorder: Recorder | None = None
_environment_read = False

START = "zmqgrad.trace.recorder"
"""The module that starts the recorder that the environment asks for (``start_from_environment()``). It is
named, not imported, because imports point downwards."""


def register(traced: Traced) -> None:
    """Makes ``traced`` traceable, and traces it if a recorder is active."""
    _start_from_environment()
    with _lock:
        _traced.add(traced)
        if _recorder is not None:
            traced.tracer = _recorder.attach(traced.identity())


def unregister(traced: Traced) -> None:
    """Ends tracing ``traced``. Idempotent."""
    with _lock:
        _traced.discard(traced)
        tracer, traced.tracer = traced.tracer, None
    if tracer is not None:
        tracer.close()


def active() -> Recorder | None:
    """The recorder that is active, if there is one; that of the environment is started."""
    _start_from_environment()
    return _recorder


def activate(recorder: Recorder | None) -> Recorder | None:
    """Traces all registered objects with ``recorder`` from now on, and returns the one before; None: none."""
    global _recorder, _environment_read
    with _lock:
        before, _recorder = _recorder, recorder
        _environment_read = True  # an explicit recorder replaces that of the environment
        for traced in list(_traced):
            tracer, traced.tracer = traced.tracer, None
            if tracer is not None:
                tracer.close()
            if recorder is not None:
                traced.tracer = recorder.attach(traced.identity())
    return before


def _start_from_environment() -> None:
    global _environment_read
    if _environment_read:
        return
    with _lock:
        if not _environment_read:
            _environment_read = True
            if environment.trace_directory() is not None:
                activate(importlib.import_module(START).start_from_environment())


def _in_child() -> None:
    """In a forked child: what was traced belongs to the parent; what comes gets a recorder of the child."""
    global _lock, _recorder
    _lock = threading.RLock()  # a thread of the parent may have held it
    for traced in list(_traced):
        traced.tracer = None
    _traced.clear()
    if _recorder is not None:
        _recorder = _recorder.in_child()


os.register_at_fork(after_in_child=_in_child)
