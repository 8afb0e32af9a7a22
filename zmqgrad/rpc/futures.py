"""The future of a remote call: a ``torch.futures.Future`` that Ctrl-C can interrupt and asyncio can await.

The reply is decoded by the first thread that can: one that waits for it, or an engine thread, so that
callbacks (user code) never run in the receiver's thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextvars import Context, copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from zmqgrad.errors import ClosedError, RpcError
from zmqgrad.rpc.calls import Description, describe, refused_wait
from zmqgrad.rpc.in_flight import is_serving
from zmqgrad.rpc.raising import copy_exception, error_of_callback, raise_copy
from zmqgrad.rpc.torch_internals import CppFuture, set_unwrap_func
from zmqgrad.runtime.arguments import check_callable
from zmqgrad.runtime.blocking import blocking_section, check_may_wait, may_wait_for_others
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.service_thread import CoalescedJob, TimerHandle
from zmqgrad.runtime.thread_pool import Task
from zmqgrad.transport.base import Inbound
from zmqgrad.transport.tap import Tracer
from zmqgrad.wire.tensors.streams import NO_COPIES, DeviceCopies, record_copies

logger = logging.getLogger(__name__)

STUCK_SECONDS = 0.02
"""How long replies wait behind a callback before another thread completes their futures."""

MAX_NESTED = 20
"""Futures of callbacks that are set within each other. A level takes five frames of Python, of 1000."""

T = TypeVar("T")
S = TypeVar("S")


class Endings:
    """The indices of ``futures``, in the order in which these are done.

    A future that is done calls back at once, in the thread that asks for it, and C++ only prints what a
    signal handler raises there, such as Ctrl-C. So it calls a function of C, in which no handler runs.

    Raises:
        NotInitializedError: if this process is a fork of the one that waits for a reply.
    """

    def __init__(self, futures: Iterable[Any]) -> None:
        self._ended: SimpleQueue[int] = SimpleQueue()
        for index, future in enumerate(futures):
            if isinstance(future, RpcFuture):
                future.check_process()
            # Not the method of RpcFuture, which would complete each future in a task of its own.
            CppFuture.add_done_callback(future, partial(self._ended.put, index))

    def wait(self, seconds: float | None = None) -> int | None:
        """The next index. None if that takes more than ``seconds`` (None: no limit)."""
        if not self._ended.empty():
            return self._ended.get()
        with blocking_section():
            try:
                return self._ended.get(timeout=seconds)
            except Empty:
                return None


class _Chain(threading.local):
    """The futures of callbacks that this thread is setting: one within the callback of another."""

    # Of all threads, until they have their own: a finalizer may find a state that its thread is just making.
    depth = 0
    unset: deque[Callable[[], None]] | None = None

    def set(self, set_it: Callable[[], None]) -> None:
        """Call ``set_it``, which sets a future: at once, or in the outermost callback if many are nested."""
        if self.depth >= MAX_NESTED:
            own = deque[Callable[[], None]]()
            if self.unset is None:
                self.unset = own
            self.unset.append(partial(copy_context().run, set_it))
            return
        self.depth += 1
        try:
            set_it()
            while self.depth == 1 and self.unset:
                self.unset.popleft()()
        finally:
            self.depth -= 1

    def run(self, callback: Callable[[Any], S], future: Any) -> S:
        """Call ``callback(future)``, which may wait for any future that this thread has to set."""
        outer, unset = self.depth, self.unset
        self.depth, self.unset = 0, None  # so that what it makes does not wait for those around it
        try:
            while unset:
                self.set(unset.popleft())
            return callback(future)
        finally:
            self.depth, self.unset = outer, unset


_chain = _Chain()


class PythonFuture(torch.futures.Future[T]):
    """A ``torch.futures.Future`` whose wait can be interrupted, and which can be awaited.

    Thread-safe; ``await`` works in any running event loop. Callbacks run with the context variables (so in
    the autograd context) and in the grad mode of the thread that added them, whichever thread calls them.
    """

    _copies = NO_COPIES  # what the thread that set the result copied to devices

    def wait(self) -> T:
        """Wait for the result, and return it.

        Raises:
            RpcError: if a finalizer calls this in a thread that must not wait.
            Exception: a copy of the error that was set.
        """
        if not self.done():  # torch waits in C++, where Ctrl-C cannot interrupt it
            check_may_wait()
            Endings([self]).wait()
        return super().wait()

    def set_exception(self, result: Exception) -> None:  # type: ignore[override]  # torch's stub asks for T
        """Set an error, of which each ``wait`` raises a copy: see Note [Errors of futures].

        Raises:
            AssertionError: if ``result`` is not an exception, as with torch.
        """
        if not isinstance(result, Exception):
            raise AssertionError(f"{result} is of type {type(result)}, not an Exception.")
        if not self.done():  # otherwise set_result raises, and wait() must return the result as before
            set_unwrap_func(self, raise_copy)
        self.set_result(copy_exception(result))

    def _set_copied(self, result: T, copies: DeviceCopies) -> None:
        """Set the result, of which ``copies`` went to devices; ``wait`` makes the streams wait for them."""
        if copies is not NO_COPIES:
            self._copies = copies
            set_unwrap_func(self, lambda _: copies.wait_on_current_stream())
        self.set_result(result)

    def _settle(self, set_it: Callable[..., None], *outcome: Any) -> None:
        """Call ``set_it(*outcome)``. No effect if the program has set this future meanwhile."""
        try:
            set_it(*outcome)
        except RuntimeError:
            if not self.done():
                raise
            logger.debug("%r was set by the program: its reply is dropped", self)

    def then(self, callback: Callable[[Any], S]) -> PythonFuture[S]:
        """A future of the result of ``callback(self)``, which runs once this one is done.

        What ``callback`` raises becomes a RuntimeError of that future, as with torch, with the cause.
        """
        check_callable(callback)
        child: PythonFuture[S] = PythonFuture()

        def call(_: object) -> None:
            try:
                value = _chain.run(callback, self)
            except BaseException as e:  # SystemExit, too: nothing else would ever set the child
                _chain.set(partial(child.set_exception, error_of_callback(e)))
                if isinstance(e, KeyboardInterrupt):
                    raise
                if not isinstance(e, Exception):
                    logger.exception("a callback of %r failed", self)
            else:
                _chain.set(partial(child._set_copied, value, self._copies.extend_events()))

        self._call_when_done(call)
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback(self)`` when this is done, or at once if it is. What it raises is logged."""
        check_callable(callback)

        def call(_: object) -> None:
            try:
                _chain.run(callback, self)
            except KeyboardInterrupt:  # of the main thread, which may be in this call
                raise
            except BaseException:  # SystemExit, too, whether or not this is done already
                logger.exception("a callback of %r failed", self)

        self._call_when_done(call)

    def _call_when_done(self, callback: Callable[[Any], None]) -> None:
        context, recorded = copy_context(), torch.is_grad_enabled()
        uncalled: list[Callable[[Any], None]] = []

        def call(_: object) -> None:
            try:
                found = uncalled.pop()
            except IndexError:
                return
            try:
                if torch.is_grad_enabled() is recorded:
                    context.run(found, self)
                else:
                    with torch.set_grad_enabled(recorded):
                        context.run(found, self)
            except Exception:
                logger.exception("a callback of %r failed", self)

        if not self.done():
            super().add_done_callback(call)
        # Only now: of what is called at once, C++ only prints what a signal handler raises in it.
        uncalled.append(callback)
        if self.done():
            call(None)

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        awaited: asyncio.Future[T] = loop.create_future()

        def set_awaited() -> None:
            if awaited.cancelled():
                return
            try:
                awaited.set_result(self.wait())
            except StopIteration as e:  # asyncio refuses it: it would end a generator somewhere
                error = RuntimeError(f"what was awaited raised StopIteration: {e}")
                error.__cause__ = e
                awaited.set_exception(error)
            except Exception as e:
                awaited.set_exception(e)

        def on_done(_: object) -> None:
            try:
                loop.call_soon_threadsafe(set_awaited)
            except RuntimeError as e:  # the loop was closed
                logger.debug("the event loop that awaited %r was closed: %s", self, e)

        super().add_done_callback(on_done)
        return awaited.__await__()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'done' if self.done() else 'pending'}>"


class RpcFuture(PythonFuture[T]):
    """The future that ``rpc_async`` returns.

    Example:
        >>> future = rpc.rpc_async("worker1", pow, args=(2, 3))
        >>> future.then(lambda done: done.wait() + 1).wait()
        9
        >>> future.done(), future.value()
        (True, 8)
    """

    # Slots, because a dictionary for all of them takes as long to create as torch's future.
    __slots__ = ("_queue", "batched", "called_back", "description", "is_own", "message_id", "peer", "waiting")
    batched: bool
    """Whether the thread that reads the reply reads more, and calls :meth:`CompletionQueue.drain` then."""
    description: Description
    """What was requested of ``peer`` (-1: unknown), for logs."""
    is_own: bool
    """Whether no call that is served here has made it."""
    message_id: int
    """Of the request; 0: unknown."""
    peer: int
    _reply: Promise[Inbound] | None = None  # in the dictionary, from which only one thread can pop it
    _context: Context  # in the dictionary, too

    def __init__(
        self,
        reply: Promise[Inbound],
        queue: CompletionQueue,
        description: Description = "",
        peer: int = -1,
        message_id: int = 0,
    ) -> None:
        CppFuture.__init__(self, [])  # what torch's own __init__ does after checking the devices
        self._reply = reply
        self._context = copy_context()  # for callbacks that C++ adds (``collect_all``)
        self._queue = queue
        self.description = description
        self.peer = peer
        self.message_id = message_id
        self.waiting = self.called_back = self.batched = False
        self.is_own = not is_serving()
        queue.expected[self] = None

    def on_reply(self, _: object) -> None:
        """Called when the reply has arrived, in the thread that read it."""
        if not self.waiting:  # otherwise the waiting thread completes it
            self._queue.add(self)

    def complete(self) -> None:
        """Decode the reply, which must have arrived, and set the result. Only the first call acts.

        This happens in the context of the call, as with torch.
        """
        queue, token = self._queue, object()
        queue.completing[token] = threading.get_ident(), self
        try:
            queue.expected.pop(self, None)
            # An atomic pop, so only one thread gets it; and neither is kept afterwards.
            reply: Promise[Inbound] | None = self.__dict__.pop("_reply", None)
            if reply is not None:
                self.__dict__.pop("_context").run(self._complete, reply)
        finally:
            del queue.completing[token]
            if queue.waiters:
                queue.notify()

    def _complete(self, reply: Promise[Inbound]) -> None:
        try:
            copies = NO_COPIES
            if self._queue.tracks_streams:
                value, copies = record_copies(partial(self._queue.decode, reply))
            else:
                value = self._queue.decode(reply)
        except Exception as e:
            self._settle(self.set_exception, e)
        except BaseException as e:  # Ctrl-C: the reply cannot be decoded a second time
            text = f"{type(e).__name__} was raised while the reply of {self!r} was being decoded"
            self._settle(self.set_exception, RpcError(text))
            raise
        else:
            if copies is NO_COPIES:
                self._settle(self.set_result, value)
            else:
                self._settle(self._set_copied, value, copies)

    def wait(self) -> T:
        """Wait for the result, and return it.

        Raises:
            RpcTimeoutError: if the call timed out.
            PeerLostError: if the callee is lost.
            NotInitializedError: if this process is a fork of the caller, to which no reply comes.
            RpcError: if a finalizer calls this in a thread that must not wait.
            Exception: what the remote function raised, with its own type.
        """
        reply = None
        if not self.done():  # torch's: true already for callbacks, which run while this is being completed
            self._queue.check_process()
            reply = self._reply
        if reply is not None:
            if not (reply.done() or may_wait_for_others()):
                raise refused_wait(self.description)
            tracer = self._queue.tracer()
            if tracer is not None:
                tracer.wait_begun(self.peer, self.message_id)
            failed = True  # also if the reply arrives while Ctrl-C ends the wait
            try:
                self.waiting = True  # undone whenever Ctrl-C comes
                reply.wait_done()  # has the deadline of the call
                failed = reply.exception() is not None
            finally:
                if tracer is not None:
                    tracer.wait_ended(self.peer, self.message_id, failed)
                self.waiting = False
                if reply.done():
                    self.complete()
        if not self.done():  # another thread is just decoding the reply, which can run code of the user
            return super().wait()
        value: T = CppFuture.wait(self)
        return value

    def check_process(self) -> None:
        """Check that the reply can arrive here.

        Raises:
            NotInitializedError: if this process is a fork of the caller.
        """
        if not self.done():
            self._queue.check_process()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback(self)`` when this is done, or at once if it is. What it raises is logged."""
        self.called_back = True
        super().add_done_callback(callback)

    def __repr__(self) -> str:
        request = f" of {describe(self.description)} on worker {self.peer}" if self.peer >= 0 else ""
        return f"<RpcFuture{request}: {'done' if self.done() else 'pending'}>"


class CompletionQueue:
    """Completes futures whose replies arrive while no thread waits for them, many in one task.

    A future with callbacks gets a task of its own, because callbacks may take long or wait for other futures.
    Other futures can run callbacks, too (``torch.futures.collect_all`` adds some in C++): if the task is
    stuck in one of them, another takes its place.

    Args:
        submit: runs a task in an engine thread.
        call_later: schedules a function with the timer.
        decode: returns the value of a reply.
        tracks_streams: whether replies may have tensors on devices, whose streams the waiting thread must
            synchronize with.
        tracer: returns what records waits; None: nothing does.
        check_process: raises in a forked child.
    """

    def __init__(
        self,
        submit: Callable[[Task], None],
        call_later: Callable[[float, Callable[[], None]], TimerHandle],
        decode: Callable[[Promise[Inbound]], Any],
        tracks_streams: bool = False,
        tracer: Callable[[], Tracer | None] = lambda: None,
        check_process: Callable[[], None] = lambda: None,
    ) -> None:
        self.tracer = tracer
        self.check_process = check_process
        self.decode = decode
        self.tracks_streams = tracks_streams
        self._submit = submit
        self._ready: deque[RpcFuture[Any]] = deque()
        self._running: threading.Lock = threading.Lock()  # held by the one task that is running
        self._check = CoalescedJob(self._replace_if_stuck, call_later)
        self._closed = False
        self._own_tasks: dict[RpcFuture[Any], None] = {}  # futures whose own task has not started
        self.expected: dict[RpcFuture[Any], None] = {}
        """The futures that no thread has begun to complete."""
        self.completing: dict[object, tuple[int, RpcFuture[Any]]] = {}
        """The futures that are being completed, callbacks included, and in which thread."""
        self.waiters = 0
        """Threads in :meth:`wait_completed`."""
        self._lock = threading.RLock()
        self._ended = threading.Condition(self._lock)

    def add(self, future: RpcFuture[Any]) -> None:
        """Add a future whose reply has arrived, in the thread that read it."""
        if future.called_back and not self._closed:
            self._own_tasks[future] = None
            self._submit_unless_closing(partial(self._complete_in_own_task, future))
            return
        self._ready.append(future)
        if self._closed:  # finish() may have run already
            self.finish()
        elif not future.batched:
            self._submit_run()

    def _submit_unless_closing(self, task: Task) -> bool:
        """Submit a task. Returns False if the pool was closed since the last look at ``_closed``.

        Then what the task was for was added before, and :meth:`finish`, which is yet to come, completes it.
        """
        try:
            self._submit(task)
        except ClosedError:
            return False
        return True

    def _complete_in_own_task(self, future: RpcFuture[Any]) -> None:
        self._own_tasks.pop(future, None)
        future.complete()

    def notify(self) -> None:
        """Wake the threads in :meth:`wait_completed`, to look at the futures again."""
        with self._lock:
            self._ended.notify_all()

    def unfinished(self) -> list[RpcFuture[Any]]:
        """The futures that are not done, or whose callbacks run in other threads, and may make calls."""
        me = threading.get_ident()
        return [*list(self.expected), *[f for thread, f in list(self.completing.values()) if thread != me]]

    def wait_completed(self, deadline: Deadline) -> None:
        """Wait until the futures that exist now are done, and other threads have called their callbacks.

        Returns by ``deadline`` in any case, and when the queue is closed.
        """
        futures = []
        for future in self.unfinished():
            reply = future._reply
            if reply is None or reply.wait_done(deadline.timeout()):
                futures.append(future)
                if future in self.expected:  # Ctrl-C may have kept the thread that waited for it from that
                    self.add(future)
        self.flush()
        with self._lock:
            self.waiters += 1
            try:
                for future in futures:
                    self._ended.wait_for(partial(self._has_ended, future), deadline.timeout())
            finally:
                self.waiters -= 1

    def _has_ended(self, future: RpcFuture[Any]) -> bool:
        begun = [each for _, each in list(self.completing.values())]
        return self._closed or not (future in self.expected or future in begun)

    def drain(self) -> Task | None:
        """The task for an engine thread that has read all replies at hand, if there is one."""
        if not self._ready:
            return None
        running = self._running
        if not running.acquire(blocking=False):
            self._check.schedule(STUCK_SECONDS)
            return None
        return partial(self._run, running)

    def flush(self) -> None:
        """Submit what is ready, in a reading thread that will not call :meth:`drain` soon."""
        if self._ready:
            self._submit_run()

    def _submit_run(self) -> None:
        running = self._running
        if not running.acquire(blocking=False):
            self._check.schedule(STUCK_SECONDS)
            return
        submitted = False
        try:
            submitted = self._submit_unless_closing(partial(self._run, running))
        finally:
            if not submitted:
                running.release()

    def _replace_if_stuck(self) -> None:
        """Replace the running task if futures are still ready: it may be stuck in a callback."""
        if self._ready and self._running.locked():
            self._running = threading.Lock()  # the old task ends after its current future
            self._submit_run()

    def _run(self, running: threading.Lock) -> None:
        try:
            while running is self._running and (future := self._next()) is not None:
                if self._ready:
                    self._check.schedule(STUCK_SECONDS)  # its callbacks may wait for those behind it
                future.complete()
        finally:
            running.release()
            # One may have been added between the last look and the release; or completing one has failed.
            if self._ready and running is self._running:
                self._submit_run()

    def _next(self) -> RpcFuture[Any] | None:
        try:
            return self._ready.popleft()
        except IndexError:
            return None

    def close(self) -> None:
        """The engine threads are ending: from now on, the thread that reads a reply completes its future."""
        self._closed = True
        self._submit = _run_task
        self.notify()

    def finish(self) -> None:
        """Complete the futures of tasks that the engine threads dropped, in the calling thread."""
        for future in list(self._own_tasks):
            self._complete_in_own_task(future)
        while (ready := self._next()) is not None:
            ready.complete()


def _run_task(task: Task) -> None:
    task()
