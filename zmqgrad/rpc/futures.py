"""The future of a remote call: a ``torch.futures.Future`` that Ctrl-C can interrupt and asyncio can await.

The answer is rebuilt by whoever gets there first: a thread that waits for it, or an engine thread, so that
callbacks (user code) never run in the receiver's thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from zmqgrad.errors import RpcError
from zmqgrad.rpc.calls import What, describe
from zmqgrad.rpc.raising import anew, error_of_callback, raise_anew
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.thread_pool import Task
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.tensors.streams import NOTHING_ARRIVED, watch_arrivals

logger = logging.getLogger(__name__)

STUCK_SECONDS = 0.02
"""Answers wait behind a callback for so long before another thread completes their futures."""

T = TypeVar("T")
S = TypeVar("S")


class PythonFuture(torch.futures.Future[T]):
    """A ``torch.futures.Future`` whose wait can be interrupted, and which ``await`` understands.

    Safe to use from any thread; ``await`` it in any running event loop.
    """

    _failed = False
    _arrived = NOTHING_ARRIVED  # on devices, in the thread that settled this
    _alarms: tuple[Promise[Any], ...] = ()  # of those who want to know at once; written under _alarms_lock

    def wait(self) -> T:
        """The result; waits for it.

        Raises:
            what was set instead of a result.
        """
        if not self.done():  # torch waits in C++, deaf to Ctrl-C (DESIGN 16.10)
            settled: Promise[None] = Promise()
            super().add_done_callback(_setter(settled))
            settled.wait_done()
        result: T = super().wait()
        if self._arrived is not NOTHING_ARRIVED:
            self._arrived.hand_over()
        return result

    def value(self) -> T:
        """The result, which must be there, as in a callback."""
        result: T = super().value()
        if self._arrived is not NOTHING_ARRIVED:
            self._arrived.hand_over()
        return result

    def set_exception(self, result: Exception) -> None:  # type: ignore[override]  # torch's stub asks for T
        """Settle with an error, of which each ``wait`` raises a copy: see Note [Errors of futures].

        Raises:
            AssertionError: if it is no exception, as with torch.
        """
        if not isinstance(result, Exception):
            raise AssertionError(f"{result} is of type {type(result)}, not an Exception.")
        self._set_unwrap_func(raise_anew)
        self.set_result(anew(result))
        self._failed = True
        for alarm in self._alarms:
            alarm.set_result(self)

    def then(self, callback: Callable[[Any], S]) -> PythonFuture[S]:
        """A future of what ``callback(self)`` returns, once this one is done.

        What ``callback`` raises is a RuntimeError of that future, as with torch; the cause is the original.
        """
        _check_callable(callback)
        child: PythonFuture[S] = PythonFuture()

        def call(_: object) -> None:
            try:
                value = callback(self)
            except Exception as e:
                child.set_exception(error_of_callback(e))
            else:
                child._arrived = self._arrived.and_what_follows()
                child.set_result(value)

        self.add_done_callback(call)
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback(self)`` when this is done, at once if it is; what it raises is logged."""
        _check_callable(callback)

        def call(_: object) -> None:
            try:
                callback(self)
            except Exception:
                logger.exception("a callback of %r failed", self)

        super().add_done_callback(call)

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        awaited: asyncio.Future[T] = loop.create_future()

        def settle() -> None:
            if awaited.cancelled():
                return
            try:
                awaited.set_result(self.wait())
            except StopIteration as e:  # asyncio refuses it: it would end a generator somewhere
                told = RuntimeError(f"what was awaited raised StopIteration: {e}")
                told.__cause__ = e
                awaited.set_exception(told)
            except Exception as e:
                awaited.set_exception(e)

        def tell(_: object) -> None:
            try:
                loop.call_soon_threadsafe(settle)
            except RuntimeError as e:  # the loop was closed: nobody awaits any more
                logger.debug("the event loop that awaited %r is gone: %s", self, e)

        super().add_done_callback(tell)
        return awaited.__await__()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'done' if self.done() else 'pending'}>"


_alarms_lock = threading.Lock()


@contextmanager
def alarmed(futures: Sequence[PythonFuture[Any]], outcome: Promise[Any]) -> Iterator[None]:
    """Meanwhile, ``outcome`` is set to the first of ``futures`` that fails, or has."""
    with _alarms_lock:
        for future in futures:
            future._alarms += (outcome,)
    try:
        for future in futures:
            if future._failed:
                outcome.set_result(future)
        yield
    finally:
        with _alarms_lock:
            for future in futures:
                future._alarms = tuple(o for o in future._alarms if o is not outcome)


def _check_callable(callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"incompatible function arguments. A callback must be callable, not {callback!r}")


def _setter(outcome: Promise[None]) -> Callable[[object], None]:
    def settle(_: object) -> None:
        outcome.set_result(None)

    return settle


class RpcFuture(PythonFuture[T]):
    """What ``rpc_async`` gives."""

    # With places of their own, as a dictionary for so many takes as long to make as torch's future.
    __slots__ = ("_completer", "called_back", "in_crowd", "peer", "waiting", "what")
    in_crowd: bool
    """Whoever brings the answer looks for more, and asks :meth:`Completer.due` then."""
    what: What
    """Was asked of whom (-1: nobody): for people."""
    peer: int
    _answer: Promise[Inbound] | None = None  # in the dictionary, from which one thread can take it

    def __init__(
        self, answer: Promise[Inbound], completer: Completer, what: What = "", peer: int = -1
    ) -> None:
        torch._C.Future.__init__(self, [])  # all that torch's own does, which looks for devices first
        self._answer = answer
        self._completer = completer
        self.what = what
        self.peer = peer
        self.waiting = self.called_back = self.in_crowd = False

    def answered(self, _: object) -> None:
        """The answer is there; in the thread that brings it."""
        if not self.waiting:  # else the thread that waits wakes and completes it
            self._completer.answered(self)

    def complete(self) -> None:
        """Rebuild the answer, which must be there, and settle. Only the first call does anything."""
        # One step for all threads: so one of them gets it. Nothing of the call is kept afterwards.
        answer: Promise[Inbound] | None = self.__dict__.pop("_answer", None)
        if answer is None:
            return
        try:
            if self._completer.watches:
                value, self._arrived = watch_arrivals(partial(self._completer.open, answer))
            else:
                value = self._completer.open(answer)
        except Exception as e:
            self.set_exception(e)
        except BaseException as e:  # Ctrl-C: nobody else can read the answer any more
            self.set_exception(
                RpcError(f"{type(e).__name__} came while the answer of {self!r} was being read")
            )
            raise
        else:
            self.set_result(value)

    def wait(self) -> T:
        """The result; waits for it.

        Raises:
            what the remote function raised, with its own type; ``RpcTimeoutError``, ``PeerLostError``.
        """
        # done() is torch's: true already for callbacks, which run while the future is being completed.
        answer = None if self.done() else self._answer
        if answer is not None:
            self.waiting = True
            try:
                answer.wait_done()  # has a deadline: every pending call does, or the user said 0
            finally:
                self.waiting = False
                if answer.done():
                    self.complete()
        # Done but for a moment, if another thread is just rebuilding the answer.
        result: T = torch.futures.Future.wait(self)
        if self._arrived is not NOTHING_ARRIVED:
            self._arrived.hand_over()
        return result

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback(self)`` when this is done, at once if it is; what it raises is logged."""
        self.called_back = True
        super().add_done_callback(callback)

    def __repr__(self) -> str:
        asked = f" of {describe(self.what)} on worker {self.peer}" if self.peer >= 0 else ""
        return f"<RpcFuture{asked}: {'done' if self.done() else 'pending'}>"


class Completer:
    """Completes futures whose answers arrive while nobody waits, many to one task of an engine thread.

    A future with callbacks has a task of its own, as callbacks may take long, or wait for other futures.
    That of others can call back, too (``torch.futures.collect_all`` does so unseen): where a task is stuck
    in one of them, another takes its place.

    Args:
        submit: has an engine thread run a task.
        call_later: of the timekeeper.
        open: gives the value of an answer.
        watches: may there be tensors on devices in it? Then their streams are handed to whoever waits.
    """

    def __init__(
        self,
        submit: Callable[[Task], None],
        call_later: Callable[[float, Callable[[], None]], object],
        open: Callable[[Promise[Inbound]], Any],
        watches: bool = False,
    ) -> None:
        self.open = open
        self.watches = watches
        self._submit = submit
        self._call_later = call_later
        self._ready: deque[RpcFuture[Any]] = deque()
        self._running: threading.Lock = threading.Lock()  # one for each task that should be the only one
        self._watched = False
        self._closed = False
        self._apart: set[RpcFuture[Any]] = set()  # those with a task of their own that has not begun

    def answered(self, future: RpcFuture[Any]) -> None:
        """The answer of ``future``, for which nobody waits, is there; in the thread that brings it."""
        if future.called_back and not self._closed:
            self._apart.add(future)
            self._submit(partial(self._complete_apart, future))
            return
        self._ready.append(future)
        if self._closed:  # finish() may have looked already
            self.finish()
        elif not future.in_crowd:
            self._have_run()

    def _complete_apart(self, future: RpcFuture[Any]) -> None:
        self._apart.discard(future)
        future.complete()

    def due(self) -> Task | None:
        """For the engine thread that brings answers and has no more at hand: what it should do itself."""
        if not self._ready:
            return None
        running = self._running
        if not running.acquire(blocking=False):
            self._have_watched()
            return None
        return partial(self._run, running)

    def pass_on(self) -> None:
        """In the thread that brings answers, which will not ask what is :meth:`due` for now."""
        if self._ready:
            self._have_run()

    def _have_run(self) -> None:
        """Have an engine thread complete what is ready."""
        running = self._running
        if not running.acquire(blocking=False):
            self._have_watched()
            return
        try:
            self._submit(partial(self._run, running))
        except BaseException:
            running.release()
            raise

    def _have_watched(self) -> None:
        """There is a task already: look whether it is stuck."""
        if not self._watched:
            self._watched = True
            self._call_later(STUCK_SECONDS, self._check)

    def _check(self) -> None:
        """Somebody found a task running: is there still something to do? Then it may be stuck."""
        self._watched = False
        if self._ready and self._running.locked():
            self._running = threading.Lock()  # the old task ends with the future that it has
            self._have_run()

    def _run(self, running: threading.Lock) -> None:
        while True:
            try:
                while self._ready and running is self._running:
                    self._ready.popleft().complete()
            except IndexError:
                pass
            finally:
                running.release()
            # One may have been added between the last look and the release.
            if not self._ready or running is not self._running or not running.acquire(blocking=False):
                return

    def close(self) -> None:
        """There will be no engine threads: the thread that brings an answer completes the future."""
        self._closed = True
        self._submit = _do

    def finish(self) -> None:
        """The engine threads have dropped their tasks: complete in the calling thread what those left."""
        for future in [*self._apart, *self._ready]:
            future.complete()


def _do(task: Task) -> None:
    task()
