"""The recorder of a process: collects events in memory, and writes them to a log from a thread of its own.

A thread that records appends one tuple to a queue, which is one atomic operation; the writer encodes and
writes what has accumulated every ``FLUSH_SECONDS``, so a process that is killed loses at most that. The queue
is bounded: what does not fit is dropped and counted. An error of the file (a full disk) stops the recording,
is logged once, and never reaches the program.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import reprlib
import secrets
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

from zmqgrad import environment
from zmqgrad.errors import TraceError
from zmqgrad.runtime.clock import monotonic_ns as now
from zmqgrad.runtime.clock import wall_ns
from zmqgrad.trace import log, stacks
from zmqgrad.trace.active import Active
from zmqgrad.trace.events import ProcessInfo, Tag
from zmqgrad.trace.requests import RemoteRequests
from zmqgrad.transport import tap as tapping
from zmqgrad.transport.tap import Identity, Usage
from zmqgrad.wire.messages import BY_TYPE, ForwardAutogradReq, Message, MessageType

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.05
CLOCK_SAMPLE_NANOSECONDS = 1_000_000_000
MAX_QUEUED_EVENTS = 1 << 16
BATCH_EVENTS = 2048
"""Events that are encoded at once. Encoding keeps the GIL, so a batch must stay well below a millisecond."""

SHORT_WAIT_NANOSECONDS = 1_000_000
"""A wait that ends within this time, and has not failed, is not recorded: its messages tell as much."""

MAX_NAMES = 1 << 16
"""Names that a log declares; what comes later has none (the keys of a store may all differ)."""

MAX_NAME_CHARACTERS = 200
JOIN_SECONDS = 5.0
THREAD_NAME = "zmqgrad-trace"

Row = tuple[Any, ...]

_repr = reprlib.Repr()
_repr.maxother = _repr.maxstring = 60


def _name_getters() -> dict[int, Callable[[Message], Any]]:
    """How the name of a message is read, by its type: the function of a call, the first key of a query."""
    getters: dict[int, Callable[[Message], Any]] = {}
    for kind, struct in BY_TYPE.items():
        for field in ("function", "key", "keys", "prefix"):
            if field in struct.__struct_fields__:
                getters[kind] = attrgetter(field)
                break
    getters[MessageType.FORWARD_AUTOGRAD_REQ] = _wrapped_function
    return getters


def _wrapped_function(message: Message) -> str:
    assert isinstance(message, ForwardAutogradReq)
    return getattr(message.wrapped, "function", "")


_NAME_OF = _name_getters()
_FORWARD_REPLY = int(MessageType.FORWARD_AUTOGRAD_RESP)
_WITH_SEND = frozenset((MessageType.FORWARD_AUTOGRAD_REQ, MessageType.FORWARD_AUTOGRAD_RESP))
_WITH_CONTEXT = frozenset(k for k, struct in BY_TYPE.items() if "context_id" in struct.__struct_fields__)


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
        TraceError: if the directory cannot be created or written to.
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
        self.directory = Path(directory).absolute()
        self.path: Path | None = None
        """The log; None until something is recorded, and in a process where nothing is."""
        self.arguments, self.heartbeats, self.max_events = arguments, heartbeats, max_events
        self._job = job
        self._create_directory()
        self._reset()

    def _reset(self) -> None:
        self.queue: deque[Row] = deque()
        self.active = Active()
        self.threads = _Threads()
        self.names: dict[str, int] = {"": 0}
        self.failed = False
        self._dropped = 0
        self._actors = itertools.count(1)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards the rest
        self._open = 0  # actors that are not closed
        self.measures: dict[int, weakref.WeakMethod[Callable[[], Usage]]] = {}  # by actor
        self._writer: _Writer | None = None

    def _create_directory(self) -> None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise TraceError(f"cannot create the trace directory {self.directory}: {e.strerror or e}") from e
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise TraceError(f"cannot write to the trace directory {self.directory}: no permission")

    def attach(self, identity: Identity) -> Tracer:
        """Returns the tracer of an object; the first one opens the log and starts the writer."""
        actor = next(self._actors)
        self.queue.append((Tag.ACTOR_STARTED, now(), actor, *identity))
        with self._lock:
            self._open += 1
            if self._writer is None and not self.failed:
                self._writer = _Writer(self)
        return Tracer(self, actor, identity)

    def detach(self, actor: int) -> None:
        """Ends the writer with the last actor, so that no thread is left after ``shutdown``."""
        self.measures.pop(actor, None)
        self.queue.append((Tag.ACTOR_STOPPED, now(), actor))
        with self._lock:
            self._open -= 1
            writer = None
            if not self._open:
                writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def close(self) -> None:
        """Writes what is queued and ends the writer. Idempotent."""
        with self._lock:
            writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

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
                self.queue.append((Tag.STACK, moment, native_id, name, stack))

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
        self.queue.append((Tag.THREAD, now(), number, thread.name, threading.get_native_id()))
        return number

    def declare_name(self, name: object) -> int:
        """The number of a name that has none; also of a tuple of keys: that of the first."""
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
                self.queue.append((Tag.NAME, now(), number, name[:MAX_NAME_CHARACTERS]))
                self.names[name] = number  # only now: others may use the number at once
        return number

    # ---- the log ----------------------------------------------------------------------------------------

    def create(self) -> int:
        """Creates the log, or opens it again. Returns its descriptor.

        Raises:
            OSError: if that is not possible.
        """
        if self.path is not None:
            return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        host = socket.gethostname()
        self.path = self.directory / f"{host}-{os.getpid()}-{secrets.token_hex(4)}{log.SUFFIX}"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(self.path, flags, 0o600)
        info = ProcessInfo(
            host,
            os.getpid(),
            wall_ns(),
            now(),
            own_clock(),
            self._job,
            " ".join(sys.argv)[:MAX_NAME_CHARACTERS],
            os.getppid(),
        )
        try:
            write_all(fd, log.header(info))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def take(self) -> list[Row]:
        """Takes the events that are queued, and then what threads are in the middle of."""
        # In this order: what a begin refers to is queued before it, and its end is queued later.
        moment, count = now(), len(self.queue)
        begun = self.active.claim(moment)
        pop = self.queue.popleft
        rows = [pop() for _ in range(count)]
        rows += begun
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            rows.append((Tag.DROPPED, now(), dropped))
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


class _Writer:
    """The thread that writes the log of ``recorder``, from now until :meth:`close`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._fd = -1
        self._sampled = 0
        self._usages: dict[int, Usage] = {}
        self._lock = threading.Lock()  # guards the file
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        requests = stacks.Requests(self._recorder.directory)
        while not self._stop.wait(FLUSH_SECONDS):
            if requests.is_new() and not self._recorder.failed:
                self._recorder.record_stacks()
            self.flush()

    def flush(self) -> None:
        """Writes what is queued."""
        recorder = self._recorder
        if recorder.failed or not (recorder.queue or recorder.active):
            return
        with self._lock:
            try:
                if self._fd < 0:
                    self._fd = recorder.create()
                rows = recorder.take()
                for start in range(0, len(rows), BATCH_EVENTS):
                    write_all(self._fd, log.record(rows[start : start + BATCH_EVENTS]))
                self._sample()  # only now: the actors are declared
            except OSError as e:
                recorder.fail(e)

    def _sample(self) -> None:
        moment = now()
        if moment - self._sampled < CLOCK_SAMPLE_NANOSECONDS:
            return
        self._sampled = moment
        rows: list[Row] = [(Tag.CLOCK_SAMPLE, moment, wall_ns())]
        for actor, measure in list(self._recorder.measures.items()):
            method = measure()
            usage = method() if method is not None else None
            if usage is not None and self._usages.get(actor) != usage:
                self._usages[actor] = usage
                rows.append((Tag.USAGE, now(), actor, *usage))
        write_all(self._fd, log.record(rows))

    def close(self) -> None:
        """Writes the rest and ends. Called once."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
        self.flush()
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def own_clock() -> str:
    """Identifies the monotonic clock of this process: that of the running kernel; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"  # a container may have a clock of its own
    except OSError:
        return ""


def write_all(fd: int, data: bytes) -> None:
    """Writes all of ``data``."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


class Tracer:
    """Records the events of one actor; implements :class:`~zmqgrad.transport.tap.Tracer`."""

    def __init__(self, recorder: Recorder, actor: int, identity: Identity) -> None:
        self._is_worker = identity.role == tapping.WORKER
        self._requests = RemoteRequests(recorder.directory, identity)
        self.records_arguments = recorder.arguments
        self.records_heartbeats = recorder.heartbeats
        self._recorder = recorder
        self._actor = actor
        self._queue = recorder.queue
        self._names = recorder.names
        self._threads = recorder.threads
        self._active = recorder.active
        self._incarnations: dict[int, int] = {}  # of peers, as declared last
        self._closed = False

    def tap(
        self,
        outgoing: bool,
        peer: int,
        envelope: tuple[int, ...],
        message: Message,
        size: int,
        time: int,
        path: int = tapping.INLINE,
        /,
    ) -> None:
        """A message was sent or received."""
        queue = self._queue
        if len(queue) >= self._recorder.max_events:
            self._recorder.drop()
            return
        kind = envelope[0]
        context = 0
        if not self._is_worker:
            context = envelope[4]
        else:
            if not outgoing and self._incarnations.get(peer) != envelope[2]:
                self._declare_peer(time, peer, envelope[2])
            if kind in _WITH_CONTEXT:
                context = message.context_id  # type: ignore[attr-defined]
        number = 0
        name = _NAME_OF.get(kind)
        if name is not None:
            text = name(message)
            known = self._names.get(text)
            number = self._recorder.declare_name(text) if known is None else known
        thread = self._threads.number or self._recorder.declare_thread()
        # Plain numbers for the tags: an attribute of an enumeration takes as long as the rest.
        tag = 6 if outgoing else 7
        queue.append((tag, time, thread, self._actor, kind, peer, envelope[3], context, number, size, path))
        if context and outgoing and kind in _WITH_SEND and message.autograd_id:  # type: ignore[attr-defined]
            send = message.autograd_id  # type: ignore[attr-defined]
            is_reply = kind == _FORWARD_REPLY
            queue.append((22, time, thread, self._actor, context, send, peer, envelope[3], is_reply))

    def _declare_peer(self, time: int, peer: int, incarnation: int) -> None:
        if len(self._incarnations) < MAX_NAMES:
            self._incarnations[peer] = incarnation
            self._queue.append((Tag.PEER, time, self._actor, peer, incarnation))

    def _add(self, tag: int, *values: Any) -> None:
        if len(self._queue) >= self._recorder.max_events:
            self._recorder.drop()
            return
        thread = self._threads.number or self._recorder.declare_thread()
        self._queue.append((tag, now(), thread, self._actor, *values))

    def request_started(self, peer: int, message_id: int) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        thread = self._threads.number or self._recorder.declare_thread()
        self._active.requests[thread, self._actor, peer, message_id] = now()

    def request_finished(self, peer: int, message_id: int, failed: bool) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        key = (self._threads.number or self._recorder.declare_thread(), self._actor, peer, message_id)
        begun, ended = self._active.requests.pop(key, None), now()
        if len(self._queue) >= self._recorder.max_events:
            self._recorder.drop()
        elif begun is None:  # the begin is in the log, or was before the recording
            self._queue.append((9, ended, *key, failed))
        else:
            self._queue.append((24, begun, *key, ended - begun, failed))

    def request_described(
        self, message_id: int, function: str, args: Sequence[Any] | None, kwargs: Any
    ) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        shown = show_arguments(args or (), kwargs or {}) if self.records_arguments else ""
        self._add(10, message_id, function[:MAX_NAME_CHARACTERS], shown)

    def wait_begun(self, peer: int, message_id: int) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        thread = self._threads.number or self._recorder.declare_thread()
        self._active.waits[thread, self._actor, peer, message_id] = now()

    def wait_ended(self, peer: int, message_id: int, failed: bool) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        key = (self._threads.number or self._recorder.declare_thread(), self._actor, peer, message_id)
        begun, ended = self._active.waits.pop(key, None), now()
        if begun is not None and not failed and ended - begun < SHORT_WAIT_NANOSECONDS:
            return
        if len(self._queue) >= self._recorder.max_events:
            self._recorder.drop()
        elif begun is None:  # as above
            self._queue.append((12, ended, *key, failed))
        else:
            self._queue.append((25, begun, *key, ended - begun, failed))

    def context_created(self, context: int) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        self._add(13, context)

    def context_released(self, context: int) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        self._add(14, context)

    def pass_started(self, context: int, pass_id: int) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        self._add(15, context, pass_id)

    def pass_finished(self, context: int, pass_id: int, failed: bool) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        self._add(16, context, pass_id, failed)

    def group_executed(
        self,
        began: int,
        context: int,
        pass_id: int,
        sends: Sequence[int],
        recvs: Sequence[tuple[int, int]],
    ) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        if len(self._queue) >= self._recorder.max_events:
            self._recorder.drop()
            return
        thread, took = self._threads.number or self._recorder.declare_thread(), now() - began
        self._queue.append((17, began, thread, self._actor, context, pass_id, took, sends, recvs))

    def rendezvous_step(self, round_number: int, action: str, participants: int, waiting: int) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        self._add(18, round_number, action, participants, waiting)

    def heartbeat(self, peer: int, outgoing: bool) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        self._add(19, peer, outgoing)

    def watch_usage(self, measure: Callable[[], Usage]) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        self._recorder.measures[self._actor] = weakref.WeakMethod(measure)

    def peer_lost(self, peer: int, reason: str) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        self._add(Tag.PEER_LOST, peer, reason[:MAX_NAME_CHARACTERS])

    def request_stacks(self) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        try:
            stacks.request_stacks(self._recorder.directory)
        except TraceError as e:
            logger.debug("%s", e)

    def locate(self, peer: int, message_id: int, context: int = 0) -> str:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        return self._requests.locate(peer, self._incarnations.get(peer, 0), message_id, context)

    def close(self) -> None:
        """As :class:`~zmqgrad.transport.tap.Tracer`."""
        if not self._closed:
            self._closed = True
            self._recorder.detach(self._actor)


def show_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The arguments of a call as text of bounded length; an argument that cannot be shown does not matter."""
    shown = [_show(each) for each in args[:8]] + [f"{k}={_show(v)}" for k, v in list(kwargs.items())[:8]]
    return ", ".join(shown)[: 2 * MAX_NAME_CHARACTERS]


def _show(value: object) -> str:
    try:
        return _repr.repr(value)
    except Exception as e:  # the user's __repr__ must not fail a call because it is traced
        return f"<{type(value).__name__}: {type(e).__name__} in __repr__>"


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
    together. If a recorder is active already, this one replaces it inside the block.

    Args:
        directory: of the logs; created if it is missing, for the user alone.
        job: tells apart jobs that share the directory, if they have no workers to tell it.
        arguments: whether to record the ``repr`` of the arguments of calls, cut to a bounded length.
        heartbeats: whether to record heartbeats.
        max_events: how many events may wait to be written; what does not fit is dropped and counted.

    Raises:
        TraceError: if the directory cannot be created or written to.
    """
    recorder = Recorder(directory, job=job, arguments=arguments, heartbeats=heartbeats, max_events=max_events)
    before = tapping.activate(recorder)
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
    """
    return {
        environment.TRACE: str(Recorder(directory).directory),
        environment.TRACE_JOB: secrets.token_hex(8),
    }
