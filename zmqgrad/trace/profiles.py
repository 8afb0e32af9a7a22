"""Traces that ``torch.profiler`` exported, on the clock of a job: their events join its timeline.

Kineto writes wall times of its process (``baseTimeNanoseconds`` plus the time of the event, in microseconds).
The clock samples of that process's log convert them to its monotonic clock, and the job to its own.
"""

from __future__ import annotations

import bisect
import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from zmqgrad.errors import TraceError
from zmqgrad.trace.chrome import Event
from zmqgrad.trace.job import Job
from zmqgrad.trace.model import Process
from zmqgrad.trace.timeline import Timeline

_TRACKS = 1_000_000
"""Track groups of a profile that are no process (GPUs) are numbered from here, and by profile."""


def profile_events(timeline: Timeline, job: Job, path: Path, number: int = 0) -> Iterator[Event]:
    """Yields the events of an exported trace as events of ``timeline``.

    What the profiler recorded in threads appears beside their own tracks, in the same process.

    Args:
        number: which of several profiles it is: tells their GPUs apart.

    Raises:
        TraceError: if it cannot be read, is no trace of torch.profiler, or of no process of the job.
    """
    try:
        yield from _events(timeline, job, path, number)
    except (TypeError, ValueError, AttributeError, OverflowError) as e:
        raise TraceError(f"{path} is no trace of torch.profiler: {e}") from e


def _events(timeline: Timeline, job: Job, path: Path, number: int) -> Iterator[Event]:
    trace = _read(path)
    events = [e for e in trace["traceEvents"] if isinstance(e, dict)]
    process = _process(job, path, trace, events)
    convert = _converter(job, process, float(trace["baseTimeNanoseconds"]))
    pids: dict[int, int] = {process.info.pid: timeline.pid(process)}
    tids: dict[tuple[int, Any], int] = {}
    for event in events:
        if not event.get("name") or not isinstance(event.get("pid"), int):
            continue  # marks of the profiler about itself: "Spans", "Traces"
        pid = pids.setdefault(event["pid"], _TRACKS + 1000 * number + len(pids))
        if event.get("ph") == "M":
            if pid == timeline.pid(process) and str(event["name"]).startswith("process"):
                continue  # it has a name already
            if event["name"] == "thread_name":
                event = {**event, "args": {"name": _thread_name(process, event)}}
            time = 0.0
        else:
            time = timeline.microseconds(0) + convert(float(event.get("ts", 0.0))) / 1000
        # Numbers of threads in the log are small, those of the system are not; streams of GPUs have own pids.
        tid = tids.setdefault((pid, event.get("tid", 0)), _tid(event.get("tid", 0), len(tids)))
        yield {**event, "pid": pid, "tid": tid, "ts": time}


def _read(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        trace = msgspec.json.decode(data)
    except (OSError, EOFError, zlib.error, msgspec.DecodeError, RecursionError) as e:
        raise TraceError(f"cannot read the profile {path}: {e}") from e
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise TraceError(f"{path} is no trace of torch.profiler: it has no traceEvents")
    if not isinstance(trace.get("baseTimeNanoseconds"), int):
        raise TraceError(
            f"{path} does not say when it was recorded (baseTimeNanoseconds): export it with "
            f"torch.profiler.profile.export_chrome_trace of PyTorch 2.4 or later"
        )
    return trace


def _process(job: Job, path: Path, trace: Mapping[str, Any], events: Sequence[Event]) -> Process:
    """The process of the job in which the profile was recorded: by host, if it is known, and pid."""
    pids = {event["pid"] for event in events if isinstance(event.get("pid"), int)}
    host = trace.get("host_name")
    found = [p for p in job.processes if p.info.pid in pids and host in (None, p.info.host)]
    if len(found) != 1:
        shown = ", ".join(map(str, sorted(pids))) or "none"
        raise TraceError(
            f"{path} is the profile of {'no' if not found else 'more than one'} process of this job: it has "
            f"processes {shown}{f' of host {host}' if host else ''}, the job {job.processes}"
        )
    return found[0]


def _converter(job: Job, process: Process, base: float) -> Callable[[float], int]:
    """Converts microseconds of the profile to nanoseconds of the job, by the closest clock sample."""
    samples = sorted([(process.info.wall, process.info.monotonic), *process.samples])

    def convert(microseconds: float) -> int:
        # Whole numbers: a double does not hold nanoseconds since 1970.
        wall = int(base) + round(microseconds * 1000)
        index = max(0, bisect.bisect_right(samples, (wall, 1 << 63)) - 1)
        sample_wall, monotonic = samples[index]
        return job.time(process, monotonic + wall - sample_wall)

    return convert


def _thread_name(process: Process, event: Event) -> str:
    names = {thread.native_id: thread.name for thread in process.threads.values()}
    known = names.get(event.get("tid", 0))
    return f"{known} (torch.profiler)" if known else str(event.get("args", {}).get("name", ""))


def _tid(tid: Any, count: int) -> int:
    return tid if isinstance(tid, int) else _TRACKS + count
