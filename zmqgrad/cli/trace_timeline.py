"""``zmqgrad trace timeline``: writes a timeline that https://ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import argparse
import gzip
import itertools
import sys
from contextlib import nullcontext
from pathlib import Path

from zmqgrad.cli.trace_output import add_view_arguments, open_job, output_file, output_path
from zmqgrad.trace import chrome
from zmqgrad.trace.profiles import profile_events
from zmqgrad.trace.timeline import Timeline

NAME = "timeline.json.gz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad trace timeline``."""
    add_view_arguments(parser, window=True, last=True, stores=True, output=NAME)
    parser.epilog = "-o - writes to stdout; a file whose name ends with .gz is compressed."
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
        chrome.write(sys.stdout.buffer, events)
        return 0
    path = output_path(arguments, NAME)
    with (
        output_file(path) as raw,
        gzip.GzipFile("", "wb", 5, raw) if path.suffix == ".gz" else nullcontext(raw) as file,
    ):
        count = chrome.write(file, events)
    print(f"{path}: {count} events, {path.stat().st_size / 1e6:.1f} MB; open it in https://ui.perfetto.dev")
    return 0
