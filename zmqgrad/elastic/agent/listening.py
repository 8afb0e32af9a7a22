"""Waits for the output of workers, and shows it. The launcher's thread blocks only here."""

from __future__ import annotations

import os
import select
import selectors
from collections.abc import Callable
from typing import NamedTuple

from zmqgrad.elastic.agent.output import Screen
from zmqgrad.elastic.agent.signals import SignalInbox
from zmqgrad.elastic.agent.workers import STDERR, Stream, WorkerProcess


class _Source(NamedTuple):
    worker: WorkerProcess
    stream: Stream


class Listener:
    """Shows the streams of all workers on ``screen``. ``output_closed``: our output has no reader."""

    def __init__(self, screen: Screen, signals: SignalInbox) -> None:
        self.output_closed = False
        self._screen = screen
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)

    def add(self, worker: WorkerProcess) -> None:
        """Start listening to the streams of a worker."""
        for stream in worker.streams:
            self._selector.register(stream, selectors.EVENT_READ, _Source(worker, stream))

    def wait(self, seconds: float | None) -> None:
        """Wait for output (and show it), a signal or the exit of a child, at most ``seconds``."""
        for key, _ in self._selector.select(seconds):
            source: _Source | None = key.data
            if source is None:
                continue
            chunk = source.stream.read()
            if chunk is None:
                self._finish(source)
            else:
                self._show(source, chunk)

    def drain(self) -> None:
        """Show pending output of workers that have exited, including unterminated lines."""
        for key in list(self._selector.get_map().values()):
            source: _Source | None = key.data
            if source is None:
                continue
            while chunk := source.stream.read():
                self._show(source, chunk)
            self._finish(source)

    def close(self) -> None:
        """Stop listening and restore the terminal."""
        self._selector.close()
        self._guarded(self._screen.close)

    def _show(self, source: _Source, chunk: bytes) -> None:
        stream = source.stream
        self._take_lines(source, stream.lines.feed(chunk))
        if stream.live:
            self._guarded(lambda: self._screen.live(stream.fd, stream.label, chunk))

    def _finish(self, source: _Source) -> None:
        self._take_lines(source, source.stream.lines.finish())
        self._selector.unregister(source.stream)

    def _take_lines(self, source: _Source, lines: list[bytes]) -> None:
        worker, stream = source
        if stream.fd == STDERR:
            worker.remember(lines)
        if not stream.live:
            self._guarded(lambda: self._screen.lines(stream.fd, stream.label, lines))

    def _guarded(self, write: Callable[[], None]) -> None:
        if self.output_closed:
            return
        try:
            write()
        except BrokenPipeError:  # as in "| head"
            self.output_closed = True


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data`` to ``fd``; waits if the descriptor is non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])
