"""Reads the logs of a directory while they grow, and those of processes that join.

Times are of the clock of the first process; other clocks are aligned by their wall clocks alone, because the
messages that would align them are still to come. Processes of one host share a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from zmqgrad.errors import TraceError
from zmqgrad.trace.declarations import declare, shift
from zmqgrad.trace.events import Event
from zmqgrad.trace.live import is_recording
from zmqgrad.trace.log import LogReader, find_logs
from zmqgrad.trace.model import Declared, Entry, Process

RECORDS_AT_ONCE = 16
"""Records of each log that one :meth:`Follower.poll` reads, so that its memory is bounded."""


class Follower:
    """Follows the logs in ``directory``. Close it when done.

    Args:
        job: reads only processes of this job, and those that belong to none; None: of the newest one.

    Raises:
        TraceError: if the directory cannot be read, or has no logs.
    """

    def __init__(self, directory: Path | str, job: str | None = None) -> None:
        self.directory = Path(directory)
        self.problems: dict[Path, str] = {}
        """Why files are not read, or not to their end. A log that is just being created may be one."""
        self.behind = True
        """Whether the last :meth:`poll` left out what is recorded already."""
        self._job = job
        self._logs: dict[Path, _Log] = {}
        self._reference: Process | None = None
        self._newest = (0, "")  # when the job that began last did, and which it is
        self._find()

    def poll(self) -> list[Entry]:
        """Returns what was recorded since the last call, in order of time; some of it if it is much."""
        self._find()
        self.behind = False
        entries: list[Entry] = []
        for path, log in self._logs.items():
            try:
                for _ in range(RECORDS_AT_ONCE):
                    batch = log.read()
                    if batch is None:
                        break
                    began = log.process.info.wall  # its job may be known only now, by its workers
                    self._newest = max([self._newest, *((began, job) for job in log.process.jobs())])
                    if self._is_wanted(log.process):
                        entries += batch
                else:
                    self.behind = True
            except TraceError as e:
                log.process.damage = self.problems[path] = str(e)
                log.close()
        entries.sort(key=lambda entry: entry[0])
        return entries

    def _find(self) -> None:
        for path in find_logs(self.directory):
            if path in self._logs:
                continue
            try:
                log = _Log(path)
            except TraceError as e:
                self.problems[path] = str(e)
                continue
            self.problems.pop(path, None)
            self._reference = self._reference or log.process
            if log.process.clock != self._reference.clock:
                log.convert = shift(log.process, self._reference)
            self._logs[path] = log

    def _is_wanted(self, process: Process) -> bool:
        jobs = process.jobs()
        return not jobs or (self._job or self._newest[1]) in jobs

    def processes(self) -> list[Process]:
        """The processes whose logs are read."""
        return [log.process for log in self._logs.values() if self._is_wanted(log.process)]

    def is_recording(self) -> bool:
        """Whether a process of the job still records."""
        return any(is_recording(process) for process in self.processes())

    def wall(self, time: int) -> int:
        """The wall time (ns since 1970) of a time of an entry."""
        return time + (self._reference.wall_offset if self._reference is not None else 0)

    def close(self) -> None:
        """Closes the logs. Idempotent."""
        for log in self._logs.values():
            log.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Log:
    """A log that is followed."""

    def __init__(self, path: Path) -> None:
        reader = LogReader(path)
        info = reader.info
        self.process = Process(path, info, first=info.monotonic, last=info.monotonic)
        self.convert: Callable[[int], int] = lambda time: time
        self._declared = Declared(self.process)
        self._reader = reader
        self._batches: Iterator[list[Event]] = reader.batches()

    def read(self) -> list[Entry] | None:
        """The next record; None if there is none yet."""
        if self.process.damage:
            return None
        batch = next(self._batches, None)
        if batch is None:
            self._batches = self._reader.batches()
            return None
        declare(self.process, batch)
        return self._declared.entries(batch, self.convert)

    def close(self) -> None:
        self._reader.close()
