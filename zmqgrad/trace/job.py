"""A job's traces together: all logs of a directory on one clock, sends with their receives, calls assembled.

Everything is streamed: :meth:`Job.events`, :meth:`Job.messages` and :meth:`Job.calls` read the logs anew at
each use and keep only what is still incomplete, so a trace may be larger than memory. Times are nanoseconds
of one clock, the reference; :meth:`Job.wall` converts them to wall time.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path as FilePath

from zmqgrad.errors import TraceError
from zmqgrad.trace.calls import Assembly
from zmqgrad.trace.clocks import Alignment, OffsetEstimator
from zmqgrad.trace.declarations import shift, survey
from zmqgrad.trace.events import Event, PeerDeclared, Role, StackDumped
from zmqgrad.trace.kinds import REPEATED
from zmqgrad.trace.log import LogReader, find_logs
from zmqgrad.trace.model import Actor, Call, Declared, Entry, Message, Process, Stamped, newest_job
from zmqgrad.trace.pairing import Pairing
from zmqgrad.wire.messages import REQUEST, RESPONSE

logger = logging.getLogger(__name__)


STALLED_NANOSECONDS = 2_000_000_000
"""A process that records writes a sample of its clock every second. One that is behind by this is stopped."""

UNWRITTEN_NANOSECONDS = 10_000_000
"""Before the end of a log that grows, events may be missing whose threads were just about to record them."""


APART_NANOSECONDS = 60_000_000_000
"""Wall clocks of hosts may differ by this. What ended longer before a job, or began later, is not of it."""

MERGED_NANOSECONDS = 50_000_000
"""What is merged of all logs at once: about what a process writes at once."""


class Job:
    """The traces of one job, in ``directory``.

    Args:
        job: which job, if the directory has logs of several (:attr:`jobs`); None: the one that began last.
        shared_clocks: whether processes whose logs say so share a clock. False: all are aligned by messages.
        on_read: called with the number of bytes of each record that is read, at every use of the job.

    Raises:
        TraceError: if the directory has no readable logs, or none of this job.

    Example:
        >>> with trace.record(directory):
        ...     rpc.rpc_sync("worker1", pow, args=(2, 3))
        8
        >>> [call.function for call in trace.Job(directory).calls()]
        ['builtins:pow']
    """

    def __init__(
        self,
        directory: FilePath | str,
        job: str | None = None,
        *,
        shared_clocks: bool = True,
        on_read: Callable[[int], object] = int,
    ) -> None:
        self.directory = FilePath(directory)
        self._on_read = on_read
        self._part = _WHOLE
        self.cut: float = math.inf
        """The time up to which logs that still grow are read; infinite: none grows."""
        self._shared_clocks = shared_clocks
        self.jobs: dict[str, list[Process]] = {}
        """The processes by job. Those of none, such as a store's own, are part of all that ran meanwhile."""
        self.unreadable: list[str] = []
        """Why files of the directory are left out."""
        self.processes = self._choose(self._survey(), job)
        self.alignment: Alignment | None = None
        """None if all processes share a clock, or no messages connect those that do not."""
        self._by_rank = {(worker.job, worker.rank): worker for worker in self.workers()}
        self._converters: dict[str, Callable[[int], int]] = {}
        self._align()

    # ---- loading ----------------------------------------------------------------------------------------

    def _survey(self) -> list[Process]:
        found: list[Process] = []
        for path in find_logs(self.directory):
            try:
                found.append(survey(path, self._on_read))
            except TraceError as e:
                self.unreadable.append(str(e))
        if not found:
            raise TraceError(
                f"no readable trace logs in {self.directory}:\n  " + "\n  ".join(self.unreadable[:10])
            )
        return found

    def _choose(self, processes: Sequence[Process], job: str | None) -> list[Process]:
        for process in processes:
            for each in process.jobs():
                self.jobs.setdefault(each, []).append(process)
        if job is not None and job not in self.jobs:
            known = ", ".join(self.jobs) or "none"
            raise TraceError(f"{self.directory} has no traces of job {job!r}; it has {known}")
        self.id = newest_job(processes) if job is None else job
        spans = [p.wall_span for p in processes if self.id in p.jobs()]
        begin = min((first for first, _ in spans), default=-math.inf) - APART_NANOSECONDS
        end = max((last for _, last in spans), default=math.inf) + APART_NANOSECONDS
        return [
            p
            for p in processes
            if self.id in p.jobs() or (not p.jobs() and p.wall_span[0] <= end and p.wall_span[1] >= begin)
        ]

    def _clock(self, process: Process) -> str:
        return process.clock if self._shared_clocks else str(process.path)

    def _align(self) -> None:
        clocks = {self._clock(p): p for p in self.processes}
        first = self._clock(self.processes[0])
        self.reference = clocks[first]
        """A process whose clock is that of the job."""
        self._converters = {clock: shift(p, self.reference) for clock, p in clocks.items()}
        if len(clocks) == 1:
            return
        estimator = OffsetEstimator()
        for message in Pairing(aligned=False).run(self._merged()):
            source, target = message.source, message.target
            if source is None or target is None or not message.message_id or message.kind in REPEATED:
                continue
            if not message.kind & (REQUEST | RESPONSE):
                continue  # a notification is read when the subscriber gets to it, and has no unique id
            u, v = self._clock(source.process), self._clock(target.process)
            if u != v and message.sent is not None and message.received is not None:
                estimator.add(
                    u, v, self._own_time(source, message.sent), self._own_time(target, message.received)
                )
        self.alignment = estimator.solve(first)
        if self.alignment is not None:
            for clock in self.alignment.clocks():
                self._converters[clock] = self.alignment.converter(clock)

    def _own_time(self, actor: Actor, time: int) -> int:
        """The inverse of the conversion by wall clocks, which is a shift."""
        return time - self._converters[self._clock(actor.process)](0)

    # ---- time -------------------------------------------------------------------------------------------

    def time(self, process: Process, time: int) -> int:
        """A ``time`` of ``process``, in nanoseconds, converted to the clock of the job."""
        return self._converters[self._clock(process)](time)

    def bound(self, process: Process, time: int) -> float:
        """The largest error (ns) of a ``time`` of ``process`` on the clock of the job.

        Infinite if no messages show it: then times of other hosts are aligned by their wall clocks alone.
        """
        clock, reference = self._clock(process), self._clock(self.reference)
        if clock == reference:
            return 0.0
        if self.alignment is None or clock not in self.alignment.clocks():
            return float("inf")
        return self.alignment.bound(clock, time)

    def wall(self, time: int) -> int:
        """The wall time (ns since 1970) of the reference at ``time`` on the clock of the job."""
        return time + self.reference.wall_offset

    def span(self) -> tuple[int, int]:
        """The span of time of the job.

        Returns:
            When its first actor began, and the time of the last event that is read, in nanoseconds.
        """
        # A log begins at its first flush, after its first events.
        begin = min(
            self.time(p, t)
            for p in self.processes
            for t in (p.first, *(a.started for a in p.actors.values()))
        )
        end = max(self.time(p, p.last) for p in self.processes)
        return begin, int(min(end, self.cut))

    def choose_part(self, since: float = 0.0, until: float = math.inf, last: float = math.inf) -> None:
        """Reads only a part of the job from now on. A message or call that crosses its edges is incomplete.

        Args:
            since, until: seconds from the start of the job.
            last: seconds before the end of the job.

        Raises:
            TraceError: if the job has nothing there.
        """
        begin, end = self.span()
        self._part = max(begin + since * 1e9, end - last * 1e9), begin + until * 1e9
        if not (last > 0 and begin <= self._part[0] <= min(self._part[1], end)):
            raise TraceError(
                f"{self.directory} has nothing of the chosen time: the job lasted {(end - begin) / 1e9:.1f} s"
            )

    def cut_live(self, is_live: Callable[[Process], bool]) -> None:
        """Reads all logs up to one time from now on: up to which each process that still records has written.

        Otherwise the later end of one log would show messages and replies that the others do not have yet.

        Args:
            is_live: returns whether a process still records.
        """
        for process in self.processes:
            process.is_live = is_live(process)
        ends = [self.time(p, p.last) for p in self.processes if p.is_live]
        if ends:
            self.cut = min(e for e in ends if max(ends) - e < STALLED_NANOSECONDS) - UNWRITTEN_NANOSECONDS

    def known_until(self, process: Process) -> float:
        """The time up to which the log of ``process`` tells what it did; infinite if it has its end."""
        return math.inf if process.has_end else min(self.cut, self.time(process, process.last))

    def worker(self, job: str, rank: int) -> Actor | None:
        """The worker of ``rank`` in the group ``job``, as its actors name it; None if it left no log.

        Where a launcher has restarted the workers, each round is a group of its own.
        """
        return self._by_rank.get((job, rank))

    # ---- reading ----------------------------------------------------------------------------------------

    def actors(self) -> list[Actor]:
        """All actors, workers first, in the order of their ranks."""
        found = [actor for process in self.processes for actor in process.actors.values()]
        return sorted(found, key=lambda a: (a.role, a.rank, a.started))

    def workers(self) -> list[Actor]:
        """The workers, in the order of their ranks; one that joined again appears again."""
        return [actor for actor in self.actors() if actor.role is Role.WORKER]

    def events(self) -> Iterator[Stamped]:
        """All events of all processes on one clock, nearly in order of time."""
        for time, declared, actor, event in self._merged():
            yield Stamped(time, declared.process, actor, event)

    def messages(self) -> Iterator[Message]:
        """All messages, each when its second end has been read; those without a second end come last.

        No message is received before it was sent: within the error of the clocks, the receive is moved.
        """
        for message in Pairing().run(self._merged()):
            self._find_ends(message)
            yield message

    def calls(self) -> Iterator[Call]:
        """All requests that have a reply by their type, each when it is complete; open ones come last."""
        for call in Assembly().run(self._merged()):
            self._find_ends(call.request)
            yield call

    def _find_ends(self, message: Message) -> None:
        """Sets the worker at the other end of a message of which one end was recorded, if it left a log."""
        known = message.source or message.target
        if known is not None and known.role is Role.WORKER and not (message.source and message.target):
            other = self.worker(known.job, message.peer)
            message.source, message.target = message.source or other, message.target or other

    def _merged(self) -> Iterator[Entry]:
        """The entries of all logs in order of time. Sorting whole batches is quicker than a heap."""
        streams = [self._stream(process) for process in self.processes]
        heads = [(batch, stream) for stream in streams if (batch := next(stream, _NO_ENTRIES))]
        while heads:
            # Not only up to the end of one batch: then each batch would cost a look at all logs.
            until = min(batch[-1][0] for batch, _ in heads) + MERGED_NANOSECONDS
            ready: list[Entry] = []
            following = []
            for batch, stream in heads:
                while batch and batch[-1][0] <= until:
                    ready += batch
                    batch = next(stream, _NO_ENTRIES)
                if batch:
                    count = bisect.bisect_right(batch, until, key=_time_of)
                    ready += batch[:count]
                    following.append((batch[count:], stream))
            heads = following
            ready.sort(key=_time_of)
            yield from ready

    def _stream(self, process: Process) -> Iterator[list[Entry]]:
        """The entries of a log, batch by batch, each in order of time."""
        convert = self._converters[self._clock(process)]
        declared = Declared(process)
        begin, end = self._part
        end = min(end, self.cut)
        for events in _batches(process, self._on_read):
            if convert(max(map(_time_of_event, events))) < begin:  # quicker than to convert each
                events = [event for event in events if type(event) is PeerDeclared]
            batch = declared.entries(events, convert)
            # What identifies peers is always needed, and stacks asked for just now.
            if (begin, end) != _WHOLE:
                batch = [e for e in batch if begin <= e[0] <= end or type(e[3]) in _ALWAYS]
            batch.sort(key=_time_of)
            if batch:
                yield batch


_time_of = itemgetter(0)
_time_of_event = attrgetter("time")
_WHOLE = (-math.inf, math.inf)
_ALWAYS = frozenset((PeerDeclared, StackDumped))
_NO_ENTRIES: list[Entry] = []


def _batches(process: Process, on_read: Callable[[int], object]) -> Iterator[list[Event]]:
    """The events of a log as far as it can be read."""
    with LogReader(process.path, on_read) as reader:
        try:
            yield from filter(None, reader.batches())
        except TraceError as e:
            logger.debug("%s", e)  # told by Process.damage
