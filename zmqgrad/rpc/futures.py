"""The future of a remote call: a ``torch.futures.Future`` that Ctrl-C can interrupt.

The answer is rebuilt by whoever gets there first: a thread that waits for it, or an engine thread, so that
callbacks (user code) never run in the receiver's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from zmqgrad.runtime.engine_pool import Task
from zmqgrad.runtime.future import Outcome
from zmqgrad.transport.base import Inbound

T = TypeVar("T")


class RpcFuture(torch.futures.Future[T]):
    """What ``rpc_async`` gives."""

    def __init__(self, answer: Outcome[Inbound], open_answer: Callable[[Outcome[Inbound]], T]) -> None:
        super().__init__()
        self._answer = answer
        self._open = open_answer
        self._claim = threading.Lock()  # taken, never given back, by whoever completes the future
        self._completed: Outcome[None] = Outcome()
        self.waiting = False

    def complete(self) -> None:
        """Rebuild the answer, which must be there, and settle. Only the first call does anything."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            try:
                value = self._open(self._answer)
            except Exception as e:
                self.set_exception(e)  # type: ignore[arg-type]  # torch's stub asks for T
            else:
                self.set_result(value)
        finally:
            self._completed.set(None)

    def wait(self) -> T:
        """The result; waits for it.

        Raises:
            what the remote function raised, with its own type; ``RpcTimeoutError``, ``PeerLostError``.
        """
        # done() is torch's: true already for callbacks, which run while the future is being completed.
        if not self.done():
            self.waiting = True
            try:
                self._answer.wait_done()  # has a deadline: every pending call does, or the user said 0
            finally:
                self.waiting = False
                if self._answer.done():
                    self.complete()
            self._completed.wait_done()
        result: T = super().wait()
        return result

    def __repr__(self) -> str:
        return f"<RpcFuture {'done' if self.done() else 'pending'}>"


class Completer:
    """Completes futures whose answers arrive while nobody waits, many to one task of an engine thread."""

    def __init__(self, submit: Callable[[Task], None]) -> None:
        self._submit = submit
        self._ready: deque[RpcFuture[Any]] = deque()
        self._running = threading.Lock()

    def answered(self, future: RpcFuture[Any]) -> None:
        """Called in the receiver's thread when the answer of ``future`` is there."""
        if future.waiting:
            return  # the waiting thread wakes and completes it
        self._ready.append(future)
        if self._running.acquire(blocking=False):
            try:
                self._submit(self._run)
            except BaseException:
                self._running.release()
                raise

    def _run(self) -> None:
        while True:
            try:
                while self._ready:
                    self._ready.popleft().complete()
            except IndexError:
                pass
            finally:
                self._running.release()
            # One may have been added between the last look and the release.
            if not self._ready or not self._running.acquire(blocking=False):
                return
