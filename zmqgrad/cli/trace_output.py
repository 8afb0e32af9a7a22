"""What the views of ``zmqgrad trace`` share: opening a job, and tables, times and names as text."""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from zmqgrad import environment
from zmqgrad.cli.colours import escaped_json
from zmqgrad.errors import ConfigurationError, TraceError
from zmqgrad.runtime.clock import local_time, monotonic_ns
from zmqgrad.trace import Job, Process
from zmqgrad.trace.events import Role
from zmqgrad.trace.labels import process_label, size
from zmqgrad.trace.live import is_live
from zmqgrad.trace.log import find_logs

MIN_NAME_WIDTH = 12
"""Names in the first column of a table are not cut to less, however narrow the terminal is."""

MAX_NAMED = 5
"""How many logs a remark names."""

MANY_EVENTS = 2_000_000
PROGRESS_NANOSECONDS = 5_000_000_000

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def add_view_arguments(
    parser: argparse.ArgumentParser,
    *,
    window: bool = False,
    last: bool = False,
    stores: bool = False,
    json: bool = False,
    output: str = "",
) -> None:
    """Declare the arguments that views share.

    Args:
        window, last: whether a part of the job can be chosen: by times from its start, or up to its end.
        stores: whether messages of stores are left out by default.
        json: whether JSON can be printed.
        output: the name of the file that is written, in the directory of the logs; empty: none is.
    """
    parser.add_argument(
        "directory", nargs="?", help="the directory of the trace logs (default: that of ZMQGRAD_TRACE)"
    )
    parser.add_argument("--job", metavar="ID", help="which job (default: the one that began last)")
    parser.add_argument("--jobs", action="store_true", help="list the jobs of the directory")
    for name, which in (("--since", "earlier"), ("--until", "later")) if window else ():
        help_text = f"leave out what happened {which} than this, from the start of the job"
        parser.add_argument(name, type=float, metavar="SECONDS", help=help_text)
    if last:
        parser.add_argument("--last", type=float, metavar="SECONDS", help="read only the end of the job")
    if stores:
        parser.add_argument("--stores", action="store_true", help="also the messages of stores")
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON; times in nanoseconds")
    if output:
        help_text = f"where to write it (default: DIRECTORY/{output})"
        parser.add_argument("-o", "--output", metavar="FILE", help=help_text)


def chooses_part(arguments: argparse.Namespace) -> bool:
    """Whether only a part of the job is read."""
    return any(getattr(arguments, name, None) is not None for name in ("since", "until", "last"))


def directory_of(arguments: argparse.Namespace) -> str:
    """The directory of the logs.

    Raises:
        ConfigurationError: if it is given neither as an argument nor by ZMQGRAD_TRACE.
    """
    directory: str | None = arguments.directory or environment.trace_directory()
    if directory is None:
        raise ConfigurationError(f"pass the directory of the trace logs, or set {environment.TRACE}")
    return directory


def output_path(arguments: argparse.Namespace, name: str) -> Path:
    """The file to write: ``name`` in the directory of the logs, if no other is given."""
    return Path(arguments.output or Path(directory_of(arguments)) / name)


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, readable for the user alone: it has names of the program.

    It takes the place of ``path`` once it is whole; a device or a pipe is written to.

    Raises:
        TraceError: if it cannot be written.
    """
    replaces = os.path.isfile(path) or not os.path.exists(path)  # where it may not look, opening it tells
    target = path.with_name(f".{path.name}.{os.getpid()}") if replaces else path
    new = os.O_EXCL if replaces else 0  # in a directory such as /tmp, others may have put a link there
    try:
        try:
            with open(target, "wb", opener=lambda name, flags: os.open(name, flags | new, 0o600)) as file:
                yield file
            if replaces:
                target.replace(path)
        finally:
            if replaces:
                target.unlink(missing_ok=True)
    except OSError as e:
        raise TraceError(f"cannot write {path}: {e.strerror or e}") from e


def open_job(arguments: argparse.Namespace) -> Job:
    """The job, once recorded; what is missing from its traces is noted on stderr.

    Raises:
        ConfigurationError: if no directory is given.
        TraceError: if the directory has no readable logs, or not those of one job.
    """
    job = read_job(arguments)
    if len(job.jobs) > 1 and arguments.job is None:
        note(
            f"{job.directory} has {len(job.jobs)} jobs; this is the newest, {describe_job(job.jobs[job.id])} "
            "(--jobs lists them)"
        )
    for problem in job.unreadable:
        note(f"left out: {problem}")
    for process in job.processes:
        if process.damage:
            note(f"read in part: {process.damage}")
        if process.dropped:
            note(f"{process}: {process.dropped} events were not recorded, because its buffer was full")
    cut = [process for process in job.processes if not process.has_end and not process.is_live]
    if cut:
        begin, _ = job.span()
        ends = [f"{process_label(p)} (until {(job.known_until(p) - begin) / 1e9:.2f} s)" for p in cut]
        note(
            f"{len(cut)} of {len(job.processes)} logs have no end, because they were cut or their processes "
            f"killed: {', '.join(ends[:MAX_NAMED])}{', ...' if len(ends) > MAX_NAMED else ''}"
        )
    return job


def read_job(arguments: argparse.Namespace) -> Job:
    """The job, or the part of it that the arguments choose (:func:`add_view_arguments`); errors as above."""
    directory = directory_of(arguments)
    job = Job(directory, arguments.job, on_read=Progress(directory).add)
    job.cut_live(is_live)
    given = vars(arguments)
    part = {name: given[name] for name in ("since", "until", "last") if given.get(name) is not None}
    events = sum(process.events for process in job.processes)
    if part:
        job.choose_part(**part)
    elif events > MANY_EVENTS and "last" in given:
        note(f"the trace has {events:,} events, which takes minutes to read: --last SECONDS reads its end")
    return job


def list_jobs(arguments: argparse.Namespace) -> None:
    """Prints the jobs of the directory, the newest last."""
    jobs = Job(directory_of(arguments)).jobs
    for name, processes in sorted(jobs.items(), key=lambda item: min(p.info.wall for p in item[1])):
        print(f"{printable(name)}  {describe_job(processes)}")


def describe_job(processes: Sequence[Process]) -> str:
    """When a job began, its workers and its program."""
    began = min(process.info.wall for process in processes)
    workers = [a.name for p in processes for a in p.actors.values() if a.role is Role.WORKER]
    program = next((p.info.program for p in processes if p.info.program), "")
    return f"{local_time(began // 1_000_000_000, date=True)}, {len(workers)} workers: {printable(program)}"


def count(text: str) -> int:
    """The value of an option that counts.

    Raises:
        ValueError: if it is no number of at least 0.
    """
    if (value := int(text)) < 0:
        raise ValueError(text)
    return value


class Progress:
    """Notes how far the logs of ``directory`` are read, if that takes long. Views may need several passes."""

    def __init__(self, directory: str) -> None:
        self._total = max(1, sum(map(_size_of, find_logs(directory))))
        self._read = 0
        self._noted = monotonic_ns()

    def add(self, count: int) -> None:
        """Counts bytes."""
        self._read += count
        now = monotonic_ns()
        if now - self._noted >= PROGRESS_NANOSECONDS:
            self._noted = now
            number, rest = divmod(self._read, self._total)
            note(f"reading {size(self._total)} of logs, pass {number + 1}: {rest / self._total:.0%}")


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it was removed, or is a link to nothing: who opens it is told
        return 0


def note(text: str) -> None:
    """Prints a remark, beside the output."""
    print(f"note: {printable(text)}", file=sys.stderr)


def printable(text: str) -> str:
    """``text`` from a trace, fit for a terminal: control characters, which might command it, are escaped."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def print_json(value: Any, indent: int = 0) -> None:
    """Print ``value`` as JSON, fit for a terminal."""
    encoded = msgspec.json.encode(value)
    text = (msgspec.json.format(encoded, indent=indent) if indent else encoded).decode()
    print(escaped_json(text))


def clock_text(wall: int) -> str:
    """The local time of day of a wall time (ns), in microseconds."""
    seconds, rest = divmod(wall, 1_000_000_000)
    return f"{local_time(seconds)}.{rest // 1000:06}"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; in a terminal, within its width."""
    print(*table(columns, rows, terminal_width()), sep="\n")


def terminal_width() -> float:
    """The columns of the terminal; infinite if stdout is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: float) -> Iterator[str]:
    """Yields the lines of a table. What does not fit into ``width`` follows below, with the names again."""
    names, *others = zip(columns, *rows, strict=True)
    numbers = [[cell.rjust(max(map(len, cells))) for cell in cells] for cells in others]
    widths = [2 + len(cells[0]) for cells in numbers]
    longest = max(map(len, names))
    if longest + sum(widths) > width:
        longest = min(longest, max(MIN_NAME_WIDTH, int(width) // 3))
    shown = [name if len(name) <= longest else f"{name[: longest - 1]}~" for name in names]
    blocks: list[list[Sequence[str]]] = []
    left = 0.0
    for cells, needed in zip(numbers, widths, strict=True):
        if not blocks or needed > left:
            blocks.append([[name.ljust(longest) for name in shown]])
            left = width - longest
        blocks[-1].append(cells)
        left -= needed
    for i, block in enumerate(blocks or [list[Sequence[str]]([shown])]):
        yield from [""] * (i > 0)
        yield from ("  ".join(line).rstrip() for line in zip(*block, strict=True))
