"""``zmqgrad trace timeline``: writes a timeline that https://ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

from zmqgrad.cli.trace_output import (
    add_job_arguments,
    add_part_arguments,
    add_stores_argument,
    directory_of,
    open_job,
)
from zmqgrad.trace import chrome
from zmqgrad.trace.profiles import profile_events
from zmqgrad.trace.timeline import Timeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad trace timeline``."""
    add_job_arguments(parser)
    add_part_arguments(parser)
    add_stores_argument(parser)
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where to write it; .gz compresses, - is stdout (default: DIRECTORY/timeline.json.gz)",
    )
    parser.add_argument(
        "--profiler",
        metavar="FILE",
        type=Path,
        nargs="+",
        default=[],
        help="traces that torch.profiler exported on workers of the job, to show beside it",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Write the timeline, and return the exit code."""
    job = open_job(arguments)
    timeline = Timeline(job, arguments.stores)
    profiles = itertools.chain.from_iterable(
        profile_events(timeline, job, path, number) for number, path in enumerate(arguments.profiler)
    )
    events = itertools.chain(timeline.events(), profiles)
    if arguments.output == "-":
        chrome.write_to(sys.stdout.buffer, events)
        return 0
    path = Path(arguments.output or Path(directory_of(arguments)) / "timeline.json.gz")
    count = chrome.write(path, events)
    size = path.stat().st_size
    if arguments.json:
        print(json.dumps({"path": str(path), "events": count, "bytes": size}))
    else:
        print(f"{path}: {count} events, {size / 1e6:.1f} MB; open it in https://ui.perfetto.dev")
    return 0
