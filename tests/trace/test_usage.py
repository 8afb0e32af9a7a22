"""What workers use is sampled, and does not keep them alive."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from zmqgrad.trace import record, writer
from zmqgrad.trace.events import Usage
from zmqgrad.trace.follow import Follower
from zmqgrad.transport import tap


class Worker:
    """Something that is traced and tells what it uses."""

    def __init__(self) -> None:
        self._tracer: tap.Tracer | None = None
        self.blocked = 0
        tap.register(self)

    @property
    def tracer(self) -> tap.Tracer | None:
        return self._tracer

    @tracer.setter
    def tracer(self, tracer: tap.Tracer | None) -> None:
        self._tracer = tracer
        if tracer is not None:
            tracer.watch_usage(self.usage)

    def identity(self) -> tap.Identity:
        return tap.Identity(tap.WORKER, "w", 0, 1, "j")

    def usage(self) -> tap.Usage:
        return tap.Usage(4, self.blocked, 8, 100, 1000)

    def act(self) -> None:
        assert self.tracer is not None
        self.tracer.context_created(1)


def test_usage_is_recorded_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CLOCK_SAMPLE_NANOSECONDS", 0)
    with record(tmp_path) as active:
        worker = Worker()
        for blocked in (1, 1, 2):
            worker.blocked = blocked
            worker.act()
            active.flush()
        tap.unregister(worker)
    with Follower(tmp_path) as follower:  # reads once, so the actor must be declared before
        entries = follower.poll()
    usages = [event for _, _, actor, event in entries if isinstance(event, Usage) and actor is not None]
    seen = [(u.threads, u.blocked, u.working_limit, u.leased_bytes, u.leased_limit) for u in usages]
    assert seen == [(4, 1, 8, 100, 1000), (4, 2, 8, 100, 1000)]


def test_a_worker_is_not_kept_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CLOCK_SAMPLE_NANOSECONDS", 0)
    with record(tmp_path) as active:
        worker = Worker()
        gone = weakref.ref(worker)
        worker.act()
        tracer = worker.tracer
        assert tracer is not None
        del worker
        gc.collect()
        assert gone() is None
        tracer.context_created(2)
        active.flush()
        tracer.close()
