"""Futures are completed, whatever happens to others: in which order replies, callbacks and waits come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.waiting import eventually
from tests.support.workers import WAIT, two_workers
from zmqgrad import rpc
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.thread_pool import Task


def when_done(future: Any, callback: Callable[[], object]) -> None:
    """Add a callback as C++ does: of it, an :class:`RpcFuture` does not know."""
    torch._C.Future.add_done_callback(future, lambda _: callback())


def test_a_reply_may_be_read_while_its_future_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a reader that then has nothing else to do, and no thread waits for the future."""
    with two_workers() as (worker, _):
        reader: Any = worker.mailbox._endpoint.reader  # type: ignore[attr-defined]
        add, drain = Promise.add_done_callback, reader.on_idle
        posted, polls = threading.Event(), threading.Event()

        def drain_and_tell() -> Task | None:
            task: Task | None = drain()
            if posted.is_set():
                polls.set()
            return task

        def add_late(reply: Promise[Any], callback: Callable[[Any], None]) -> None:
            if callback.__name__ == "on_reply":
                eventually(reply.done, bool)
                reader.post(posted.set)
                assert polls.wait(WAIT)
            add(reply, callback)

        reader.on_idle = drain_and_tell
        monkeypatch.setattr(Promise, "add_done_callback", add_late)
        future = rpc.rpc_async(1, abs, args=(-5,))
        finished = threading.Event()
        when_done(future, finished.set)
        assert finished.wait(WAIT)
