"""The recorder of a process: collects events in memory; a thread writes them (:mod:`zmqgrad.trace.writer`).

A thread that records appends one tuple to a queue, which is one atomic operation. The queue is bounded: what
does not fit is dropped and counted. An error of the file (a full disk) stops the recording, is logged once,
and never reaches the program.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import secrets
import stat
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zmqgrad import environment
from zmqgrad.errors import TraceError
from zmqgrad.runtime.arguments import check_instance
from zmqgrad.runtime.clock import monotonic_ns as now
from zmqgrad.trace import events, stacks
from zmqgrad.trace.active import Active, Row
from zmqgrad.trace.events import tag_of
from zmqgrad.trace.tracer import MAX_NAME_CHARACTERS, MAX_NAMES, Tracer
from zmqgrad.trace.writer import THREAD_NAME, Writer
from zmqgrad.transport import tap as tapping
from zmqgrad.transport.tap import Identity, Usage

logger = logging.getLogger(__name__)

MAX_QUEUED_EVENTS = 1 << 16

STACKS_NANOSECONDS = 1_000_000_000
"""How often stacks are recorded at most when waits fail: thousands may time out together."""


class _Threads(threading.local):
    """The number of the calling thread in the log; 0: not declared yet."""

    number = 0


class Recorder:
    """Records what happens in this process. See :func:`record` for how to use it.

    Args:
        directory: of the logs; created (mode 0700) if it is missing.
        job: the same for all processes of a job; empty: their workers tell it.
        arguments: whether to record the ``repr`` of the arguments of calls.
        heartbeats: whether to record heartbeats.
        max_events: how many events may wait for the writer.

    Raises:
        ArgumentTypeError: if an argument has another type.
        TraceError: if the directory cannot be created or written to, or other users may write to it.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        job: str = "",
        arguments: bool = False,
        heartbeats: bool = False,
        max_events: int = MAX_QUEUED_EVENTS,
    ) -> None:
        check_instance("the directory of a trace", directory, (str, os.PathLike), "a path")
        check_instance("job", job, str, "a str")
        check_instance("max_events", max_events, int, "an int")
        self.directory = Path(directory).absolute()
        self.path: Path | None = None
        """The log; None until something is recorded, and in a process where nothing is."""
        self.arguments, self.heartbeats, self.max_events = arguments, heartbeats, max_events
        self.job = job
        self._create_directory()
        self._reset()

    def _reset(self) -> None:
        self.queue: deque[Row] = deque()
        self.active = Active()
        self.threads = _Threads()
        self.names: dict[str, int] = {"": 0}
        self.failed = False
        self._dropped = 0
        self._next_stacks = 0
        self._actors = itertools.count(1)
        self._numbers = itertools.count(1)
        self.writing = threading.Lock()  # held by the writer that takes events and writes them: one at a time
        self._lock = threading.Lock()  # guards the rest
        self._open = 0  # actors that are not closed
        self._memory: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self.measures: dict[int, weakref.WeakMethod[Callable[[], Usage]]] = {}  # by actor
        self._writer: Writer | None = None
        self._ending: Writer | None = None  # one that the last actor's thread ends, or has ended

    def _create_directory(self) -> None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise TraceError(f"cannot create the trace directory {self.directory}: {e.strerror or e}") from e
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise TraceError(f"cannot write to the trace directory {self.directory}: no permission")
        self._check_access()

    def _check_access(self) -> None:
        """Only this user may add logs, remove them, or ask for stacks; the modes of files stop readers."""
        status, user = self.directory.stat(), os.geteuid()
        remedy = f"use a directory of your own, such as {self.directory}/trace-{user}, which is created"
        if status.st_uid not in (user, 0) and user != 0:
            owner = f"belongs to another user (uid {status.st_uid})"
            raise TraceError(f"the trace directory {self.directory} {owner}: {remedy}")
        if status.st_mode & stat.S_IWOTH:
            raise TraceError(f"all users may write to the trace directory {self.directory}: {remedy}")

    def attach(self, identity: Identity) -> Tracer:
        """Returns the tracer of ``identity``; the first one opens the log and starts the writer."""
        actor = next(self._actors)
        self.queue.append((tag_of(events.ActorStarted), now(), actor, *identity))
        with self._lock:
            self._open += 1
            if self._writer is None and not self.failed:
                self._writer = Writer(self)
        return Tracer(self, actor, identity)

    def detach(self, actor: int) -> None:
        """Records the end of ``actor``; the last one ends the writer, so that no thread is left.

        After :meth:`close`, the writer that has ended writes it: a program may shut down even later at exit.
        """
        self.measures.pop(actor, None)
        self.queue.append((tag_of(events.ActorStopped), now(), actor))
        with self._lock:
            self._open -= 1
            writer = None
            if not self._open or self._writer is None:
                writer, self._writer = self._writer or self._ending, None
                self._ending = writer
        if writer is not None:
            writer.close()

    def close(self) -> None:
        """Writes what is queued and ends the writer. Idempotent."""
        with self._lock:
            writer, self._writer = self._writer, None
            before, self._ending = self._ending, writer or self._ending
        # A thread that closes the last actor may be cut short by the end of the process.
        for one in (before, writer):
            if one is not None:
                one.close()

    def flush(self) -> None:
        """Writes what is queued, in the calling thread."""
        writer = self._writer
        if writer is not None:
            writer.flush()

    def record_stacks(self) -> None:
        """Records the Python stacks of all threads of this process but the writer."""
        moment = now()
        for native_id, name, stack in stacks.dump(exclude=THREAD_NAME):
            if len(self.queue) >= self.max_events:
                self.drop()
            else:
                self.queue.append((tag_of(events.StackDumped), moment, native_id, name, stack))

    def wait_failed(self, moment: int, thread: int, interrupted: bool) -> None:
        """Records where the threads are while the one that waited in vain still holds its locks.

        Args:
            moment: when its wait ended.
            thread: its number.
            interrupted: whether Ctrl-C ended it.
        """
        if interrupted:
            self.queue.append((tag_of(events.Interrupted), moment, thread))
        if moment >= self._next_stacks:
            self._next_stacks = moment + STACKS_NANOSECONDS
            self.record_stacks()

    def in_child(self) -> Recorder | None:
        """As :class:`~zmqgrad.transport.tap.Recorder`: the child gets a log of its own."""
        self.path = None
        self._reset()
        return self

    # ---- numbers ----------------------------------------------------------------------------------------

    def declare_thread(self) -> int:
        """The number of the calling thread, declared."""
        thread = threading.current_thread()
        number = self.threads.number = next(self._numbers)
        self.queue.append(
            (tag_of(events.ThreadDeclared), now(), number, thread.name, threading.get_native_id())
        )
        return number

    def declare_name(self, name: object) -> int:
        """The number of ``name``, declared if it has none yet; for a tuple of keys: that of the first."""
        if isinstance(name, tuple):
            name = name[0] if name else ""
            if name in self.names:
                return self.names[name]
        if not isinstance(name, str) or len(self.names) > MAX_NAMES:
            return 0
        with self._lock:
            number = self.names.get(name)
            if number is None:
                number = len(self.names)
                self.queue.append((tag_of(events.NameDeclared), now(), number, name[:MAX_NAME_CHARACTERS]))
                self.names[name] = number  # only now: others may use the number at once
        return number

    def number_of(self, thing: object) -> int:
        """A number that ``thing`` has for as long as it exists, and nothing else before or after it."""
        with self._lock:
            number = self._memory.get(thing)
            if number is None:
                number = self._memory[thing] = next(self._numbers)
            return number

    # ---- for the writer --------------------------------------------------------------------------------

    def take(self) -> list[Row]:
        """Returns and removes the queued events, followed by the begins of what threads are doing."""
        # In this order: what a begin refers to is queued before it, and its end is queued later.
        moment, count = now(), len(self.queue)
        begun = self.active.claim(moment)
        pop = self.queue.popleft
        rows = [pop() for _ in range(count)]
        rows += begun
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            rows.append((tag_of(events.Dropped), now(), dropped))
        return rows

    def drop(self) -> None:
        """Counts an event that the queue has no room for."""
        with self._lock:
            self._dropped += 1

    def fail(self, error: OSError) -> None:
        """Stops recording after ``error``: what is queued from here on is dropped."""
        self.failed = True
        self.max_events = 0
        self.queue.clear()
        logger.warning(
            "cannot write the trace log %s: %s; this process is not traced any more, and continues",
            self.path or self.directory,
            error.strerror or error,
        )


@contextmanager
def record(
    directory: Path | str,
    *,
    job: str = "",
    arguments: bool = False,
    heartbeats: bool = False,
    max_events: int = MAX_QUEUED_EVENTS,
) -> Iterator[Recorder]:
    """Records this process inside the ``with`` block, workers that exist already included.

    Each process of a job records into a log of its own; ``zmqgrad.trace.Job`` reads those of a directory
    together. If a recorder is active already, this one replaces it inside the block; what
    :mod:`zmqgrad.trace.prometheus` counts goes on.

    Args:
        directory: of the logs; created if it is missing, for the user alone.
        job: tells apart jobs that share the directory, if they have no workers to tell it.
        arguments: whether to record the ``repr`` of the arguments of calls, cut to a bounded length.
        heartbeats: whether to record heartbeats.
        max_events: how many events may wait to be written; what does not fit is dropped and counted.

    Yields:
        the recorder.

    Raises:
        TraceError: if the directory cannot be created or written to.

    Example:
        >>> with trace.record(directory):
        ...     rpc.rpc_sync("worker1", pow, args=(2, 3))
        8
    """
    recorder = Recorder(directory, job=job, arguments=arguments, heartbeats=heartbeats, max_events=max_events)
    counting = getattr(tapping.active(), "around", None)  # counters go on inside the block
    before = tapping.activate(recorder if counting is None else counting(recorder))
    try:
        yield recorder
    finally:
        tapping.activate(before)
        recorder.close()


def start_from_environment() -> Recorder | None:
    """Makes the recorder that ZMQGRAD_TRACE asks for; it is closed when the interpreter exits.

    Returns:
        None if it cannot be made, which is logged: a job is not stopped because it cannot be traced.
    """
    directory = environment.trace_directory()
    assert directory is not None
    try:
        recorder = Recorder(
            directory,
            job=environment.trace_job(),
            arguments=environment.trace_arguments(),
            heartbeats=environment.trace_heartbeats(),
        )
    except TraceError as e:
        logger.warning("%s; this process is not traced", e)
        return None
    atexit.register(recorder.close)
    return recorder


def launch_environment(directory: Path | str) -> dict[str, str]:
    """The variables by which a launcher has the processes of one job traced into ``directory``.

    Raises:
        TraceError: if the directory cannot be created or written to.

    Example:
        >>> sorted(trace.launch_environment(directory))
        ['ZMQGRAD_TRACE', 'ZMQGRAD_TRACE_JOB']
    """
    return {
        environment.TRACE: str(Recorder(directory).directory),
        environment.TRACE_JOB: secrets.token_hex(8),
    }
