"""``zmqgrad trace report``: writes one web page of a trace, which needs no network."""

from __future__ import annotations

import argparse

from zmqgrad.cli.trace_output import add_view_arguments, open_job, output_file, output_path
from zmqgrad.runtime.clock import monotonic_ns
from zmqgrad.trace.report.page import render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad trace report``."""
    add_view_arguments(parser, window=True, output="report.html")


def execute(arguments: argparse.Namespace) -> int:
    """Write the page, print where it is, and return the exit code."""
    began = monotonic_ns()
    page = render(open_job(arguments))
    path = output_path(arguments, "report.html")
    with output_file(path) as file:
        file.write(page)
    seconds = (monotonic_ns() - began) / 1e9
    print(f"{path}: {len(page) / 1e6:.1f} MB, made in {seconds:.1f} s; open it in a browser")
    return 0
