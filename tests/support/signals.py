"""Signals that come in a call of C, and handlers that run wherever a function is called."""

from __future__ import annotations

import ctypes
import itertools
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import pytest


class Interrupt(BaseException):
    """What the handler raises."""


def _handle(signum: int, frame: Any) -> None:
    raise Interrupt


def interrupted_in_c(drop: Callable[[], object]) -> None:
    """Calls ``drop``, of C, and checks that the caller gets what the handler of a signal raises.

    The signal comes just before, in the same call of C, as Ctrl-C in a backward pass that drops tensors. Its
    handler runs before the next line of Python. In a line of a finalizer, its exception would reach nobody.
    """
    steps = [partial(ctypes.PyDLL(None)["raise"], signal.SIGUSR1), partial(drop)]
    before = signal.signal(signal.SIGUSR1, _handle)
    try:
        with pytest.raises(Interrupt):
            deque(map(partial.__call__, steps), maxlen=0)
    finally:
        signal.signal(signal.SIGUSR1, before)


def called_within(change: Callable[[], object], handler: Callable[[], object], number: int) -> bool:
    """Call ``change``, and ``handler`` where ``change`` calls a function for the ``number``-th time.

    There a signal handler can run. Returns whether there are so many calls.
    """
    calls = itertools.count(1)
    called = False

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal called
        if event in ("call", "c_return") and next(calls) == number:
            sys.setprofile(None)
            handler()
            called = True

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        change()
    finally:
        sys.setprofile(before)
    return called


def ends(work: Callable[[], object]) -> bool:
    """Whether ``work``, in a thread of its own, ends: a handler that waits for its own thread never does."""
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def run() -> None:
        try:
            work()
            ended.put(None)
        except BaseException as e:
            ended.put(e)

    threading.Thread(target=run, daemon=True).start()
    try:
        error = ended.get(timeout=60)
    except Empty:
        return False
    if error is not None:
        raise error
    return True
