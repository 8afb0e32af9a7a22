"""``zmqgrad trace report``: writes one web page of a trace, which needs no network."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import msgspec

from zmqgrad.cli.trace_output import add_job_arguments, directory_of, open_job
from zmqgrad.errors import TraceError
from zmqgrad.runtime.clock import monotonic_ns
from zmqgrad.trace.findings import find
from zmqgrad.trace.report.page import render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad trace report``."""
    add_job_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, and write no page")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write it (default: DIRECTORY/report.html)"
    )
    for name, which, default in (("--since", "earlier", 0.0), ("--until", "later", float("inf"))):
        parser.add_argument(
            name,
            metavar="SECONDS",
            type=float,
            default=default,
            help=f"leave out messages sent {which} than this, from the start of the job",
        )


def execute(arguments: argparse.Namespace) -> int:
    """Write the page, print where it is, and return the exit code."""
    began = monotonic_ns()
    job = open_job(arguments)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(find(job, notes=True))).decode())
        return 0
    page = render(job, since=arguments.since, until=arguments.until)
    path = Path(arguments.output or Path(directory_of(arguments)) / "report.html")
    _write(path, page)
    seconds = (monotonic_ns() - began) / 1e9
    print(f"{path}: {len(page) / 1e6:.1f} MB, made in {seconds:.1f} s; open it in a browser")
    return 0


def _write(path: Path, page: bytes) -> None:
    """Replaces the file at once, readable for the user alone: it has names of the program, as the trace."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(handle, "wb") as file:
                file.write(page)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as e:
        raise TraceError(f"cannot write the report {path}: {e.strerror or e}") from e
