"""Waits for the output of workers, and shows it. The agent's thread blocks only here."""

from __future__ import annotations

import errno
import logging
import os
import select
import selectors
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from zmqgrad.elastic.agent.consequences import may_tell_of_loss
from zmqgrad.elastic.agent.output import Screen
from zmqgrad.elastic.agent.streams import DISK_FULL, PIPE_BYTES, STDERR, Stream
from zmqgrad.elastic.agent.tracebacks import Shown, Tracebacks
from zmqgrad.elastic.agent.workers import Worker

logger = logging.getLogger(__name__)

STALL_SECONDS = 1.0
"""How long our output may wait for its reader after a signal that stops this agent."""

Ready = list[tuple[selectors.SelectorKey, int]]


class HasFileno(Protocol):
    """Something to select on."""

    def fileno(self) -> int: ...


class _Source(NamedTuple):
    worker: Worker
    stream: Stream


class Listener:
    """Shows the streams of all workers on ``screen``.

    Args:
        screen: where the output goes.
        others: what else ends a wait by becoming readable.

    Attributes:
        output_closed: whether our own output has no reader any more, or none that reads after a signal.
        shown: the tracebacks that were shown.
    """

    def __init__(self, screen: Screen, *others: HasFileno) -> None:
        self.output_closed = False
        self.shown = Shown()
        self._screen = screen
        self._has_lost_output = False
        self._selector = selectors.DefaultSelector()
        for other in others:
            self._selector.register(other, selectors.EVENT_READ)

    def add(self, worker: Worker) -> None:
        """Start listening to the streams and the exit of a worker."""
        worker.tracebacks = Tracebacks(self.shown, worker.rank)
        for stream in worker.streams:
            self._selector.register(stream, selectors.EVENT_READ, _Source(worker, stream))
        if worker.sentinel is not None:
            self._selector.register(worker.sentinel, selectors.EVENT_READ)

    def remove(self, worker: Worker) -> None:
        """Stop listening to a worker that has exited. Shows what it wrote, also an unterminated line."""
        self.exited(worker)
        self.wait(0)  # in the right order with what others have written before
        for key in list(self._selector.get_map().values()):
            source: _Source | None = key.data
            if source is None or source.worker is not worker:
                continue
            left = PIPE_BYTES  # a process that has left the session of the worker may write without end
            while left > 0 and (chunk := source.stream.read()):
                left -= len(chunk)
                self._show(source, chunk)
            self._finish(source)

    def exited(self, worker: Worker) -> None:
        """Stop listening to the exit of a worker: its sentinel stays readable."""
        if worker.sentinel is not None and worker.sentinel in self._selector.get_map():
            self._selector.unregister(worker.sentinel)

    def ready(self, seconds: float | None) -> Ready:
        """Wait for output, an exit or another event, at most ``seconds``. Then call :meth:`show`."""
        return self._selector.select(seconds)

    def show(self, ready: Ready) -> None:
        """Show the output that is ready, except of workers that were removed since.

        A worker tells of the loss of another behind what that one has written: what came in between two
        reads is read before it is shown, so that the cause comes first.
        """
        held: list[tuple[_Source, bytes | None]] = []
        while True:
            waits_for_cause = False
            for source, chunk in self._read(ready):
                is_held = any(source is other for other, _ in held)
                tells = chunk is not None and may_tell_of_loss(chunk)
                if tells or is_held:
                    held.append((source, chunk))
                    waits_for_cause |= tells and not is_held  # once each: it may write without end
                else:
                    self._take(source, chunk)
            if not waits_for_cause:
                break
            ended = {id(source) for source, chunk in held if chunk is None}
            ready = [each for each in self._selector.select(0) if id(each[0].data) not in ended]
        for source, chunk in held:
            self._take(source, chunk)

    def _read(self, ready: Ready) -> list[tuple[_Source, bytes | None]]:
        """What is ready, by stream; None at its end."""
        sources = [key.data for key, _ in ready if self._selector.get_map().get(key.fd) is key]
        return [(source, source.stream.read()) for source in sources if source is not None]

    def _take(self, source: _Source, chunk: bytes | None) -> None:
        if chunk is None:
            self._finish(source)
        else:
            self._show(source, chunk)

    def wait(self, seconds: float | None) -> None:
        """Wait as :meth:`ready` does, and show the output."""
        self.show(self.ready(seconds))

    def end_line(self) -> None:
        """End an unterminated line of a worker, before the agent writes a message."""
        self._guarded(self._screen.end_line)

    def close(self) -> None:
        """Stop listening and restore the terminal."""
        self._selector.close()
        self._guarded(self._screen.close)

    def _show(self, source: _Source, chunk: bytes) -> None:
        worker, stream = source
        self._take_lines(source, stream.lines.feed(chunk))
        if stream.live:
            self._show_live(stream, worker.tracebacks.feed_live(chunk) if stream.fd == STDERR else chunk)

    def _finish(self, source: _Source) -> None:
        worker, stream = source
        self._take_lines(source, stream.lines.finish())
        if stream.fd == STDERR and stream.live:
            self._show_live(stream, worker.tracebacks.finish_live())
        elif stream.fd == STDERR:
            self._show_lines(stream, worker.tracebacks.finish())
        self._selector.unregister(stream)

    def _take_lines(self, source: _Source, lines: list[bytes]) -> None:
        worker, stream = source
        if stream.fd == STDERR:
            worker.remember(lines)
        if not stream.live:
            self._show_lines(stream, worker.tracebacks.feed(lines) if stream.fd == STDERR else lines)

    def _show_lines(self, stream: Stream, lines: list[bytes]) -> None:
        if stream.shown:
            self._guarded(lambda: self._screen.lines(stream.fd, stream.label, lines))

    def _show_live(self, stream: Stream, chunk: bytes) -> None:
        if stream.shown and chunk:
            self._guarded(lambda: self._screen.live(stream.fd, stream.label, chunk))

    def _guarded(self, write: Callable[[], None]) -> None:
        if self.output_closed:
            return
        try:
            write()
        except OSError as e:
            if e.errno in (errno.EPIPE, errno.EIO):  # as in "| head"; the terminal was closed
                self.output_closed = True
                return
            if e.errno not in DISK_FULL:
                raise
            if not self._has_lost_output:
                self._has_lost_output = True
                logger.error("cannot write the output of the workers: %s; it is incomplete", e.strerror)


def write_all(fd: int, data: bytes, hurry: int | None = None) -> None:
    """Write all of ``data`` to ``fd``; waits as long as nobody reads it.

    Args:
        hurry: a descriptor. Once it is readable, the wait ends after :data:`STALL_SECONDS`.

    Raises:
        BrokenPipeError: if nobody reads it, or that wait has ended.
    """
    writable, either = select.poll(), select.poll()
    for poller in (writable, either):
        poller.register(fd, select.POLLOUT)
    if hurry is not None:
        either.register(hurry, select.POLLIN)
    view = memoryview(data)
    while view:
        if [ready for ready, _ in either.poll()] == [hurry] and not writable.poll(1000 * STALL_SECONDS):
            raise BrokenPipeError(errno.EPIPE, "nobody reads it")
        with suppress(BlockingIOError):
            view = view[os.write(fd, view[: select.PIPE_BUF]) :]  # of which a pipe takes so much at once
