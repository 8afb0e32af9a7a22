"""What the views of ``zmqgrad trace`` share: opening a job, and tables, times and names as text."""

from __future__ import annotations

import argparse
import re
import sys

from zmqgrad import environment
from zmqgrad.errors import ConfigurationError
from zmqgrad.trace import Job

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the directory of the logs and the choice of a job in it."""
    parser.add_argument(
        "directory", nargs="?", help="the directory of the trace logs (default: that of ZMQGRAD_TRACE)"
    )
    parser.add_argument("--job", metavar="ID", help="which job, if the directory has traces of several")


def directory_of(arguments: argparse.Namespace) -> str:
    """The directory of the logs.

    Raises:
        ConfigurationError: if it is given neither as an argument nor by ZMQGRAD_TRACE.
    """
    directory: str | None = arguments.directory or environment.trace_directory()
    if directory is None:
        raise ConfigurationError(f"pass the directory of the trace logs, or set {environment.TRACE}")
    return directory


def open_job(arguments: argparse.Namespace) -> Job:
    """The job, once recorded; what is missing from its traces is noted on stderr.

    Raises:
        ConfigurationError: if no directory is given.
        TraceError: if the directory has no readable logs, or not those of one job.
    """
    job = Job(directory_of(arguments), arguments.job)
    for problem in job.unreadable:
        note(f"left out: {problem}")
    for process in job.processes:
        if process.damage:
            note(f"read in part: {process.damage}")
        if process.dropped:
            note(f"{process}: {process.dropped} events were not recorded, because its buffer was full")
    return job


def note(text: str) -> None:
    """Prints a remark, beside the output."""
    print(f"note: {printable(text)}", file=sys.stderr)


def printable(text: str) -> str:
    """``text`` from a trace, fit for a terminal: control characters, which might command it, are escaped."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def duration(nanoseconds: float | None) -> str:
    """A time with a unit that fits, such as ``12.3 us``; ``-`` for None."""
    if nanoseconds is None:
        return "-"
    for limit, divisor, unit in ((1e6, 1e3, "us"), (1e9, 1e6, "ms")):
        if abs(nanoseconds) < limit:
            return f"{nanoseconds / divisor:.1f} {unit}"
    return f"{nanoseconds / 1e9:.2f} s"
