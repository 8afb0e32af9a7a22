"""The thread that writes the log of a process: what has accumulated, every ``FLUSH_SECONDS``.

So a process that is killed loses at most that.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from zmqgrad.runtime.clock import monotonic_ns as now
from zmqgrad.runtime.clock import wall_offset
from zmqgrad.trace import events, log, stacks
from zmqgrad.trace.active import Row
from zmqgrad.trace.events import ProcessInfo, tag_of
from zmqgrad.trace.tracer import MAX_NAME_CHARACTERS
from zmqgrad.transport.tap import Usage

if TYPE_CHECKING:
    from zmqgrad.trace.recorder import Recorder

FLUSH_SECONDS = 0.05
CLOCK_SAMPLE_NANOSECONDS = 1_000_000_000
BATCH_EVENTS = 2048
"""Events that are encoded at once. Encoding keeps the GIL, so a batch must stay well below a millisecond."""

JOIN_SECONDS = 5.0
THREAD_NAME = "zmqgrad-trace"


class Writer:
    """The thread that writes the log of ``recorder``, from now until :meth:`close`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._fd = -1
        self._sampled = 0
        self._usages: dict[int, Usage] = {}
        self._lock = recorder.writing  # also of the writer before this one, which may still write the rest
        self._requests = stacks.Requests(recorder.directory)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_SECONDS):
            if self._requests.is_new() and not self._recorder.failed:
                self._recorder.record_stacks()
            self.flush()

    def flush(self) -> None:
        """Writes what is queued. The clock's samples go on without: how long a job hangs shows by them."""
        recorder = self._recorder
        is_due = self._fd >= 0 and now() - self._sampled >= CLOCK_SAMPLE_NANOSECONDS
        if recorder.failed or not (recorder.queue or recorder.active or is_due):
            return
        with self._lock:
            try:
                if self._fd < 0:
                    self._fd = self._open()
                moment = now()  # the sample must not promise events that are recorded while we write
                rows = recorder.take()
                for start in range(0, len(rows), BATCH_EVENTS):
                    write_all(self._fd, log.record(rows[start : start + BATCH_EVENTS]))
                self._sample(moment)  # only now: the actors are declared
            except OSError as e:
                recorder.fail(e)

    def _open(self) -> int:
        """Creates the log, or opens it again. Returns its descriptor."""
        recorder = self._recorder
        if recorder.path is not None:
            return os.open(recorder.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        host = socket.gethostname()
        recorder.path = recorder.directory / f"{host}-{os.getpid()}-{secrets.token_hex(4)}{log.SUFFIX}"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(recorder.path, flags, 0o600)
        moment, program = now(), " ".join(sys.argv)[:MAX_NAME_CHARACTERS]
        clocks = moment + wall_offset(), moment, own_clock()
        info = ProcessInfo(host, os.getpid(), *clocks, recorder.job, program, os.getppid(), stacks.LIBRARY)
        try:
            write_all(fd, log.header(info))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _sample(self, moment: int) -> None:
        if moment - self._sampled < CLOCK_SAMPLE_NANOSECONDS:
            return
        self._sampled = moment
        rows: list[Row] = [(tag_of(events.ClockSample), moment, moment + wall_offset())]
        for actor, measure in list(self._recorder.measures.items()):
            method = measure()
            usage = method() if method is not None else None
            if usage is not None and self._usages.get(actor) != usage:
                self._usages[actor] = usage
                rows.append((tag_of(events.Usage), now(), actor, *usage))
        write_all(self._fd, log.record(rows))

    def close(self) -> None:
        """Writes the rest and ends. Idempotent, and safe beside itself in another thread."""
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
