"""``zmqgrad trace stats``: counts, bytes and latencies as tables, or as JSON for scripts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from zmqgrad.cli.trace_output import add_view_arguments, count, open_job, print_json, print_table, printable
from zmqgrad.trace.labels import show_time, size
from zmqgrad.trace.stats import ProcessRow, Row, Statistics, statistics

_ORDERS: dict[str, Callable[[Row], Any]] = {
    "messages": lambda row: row.messages,
    "bytes": lambda row: row.bytes,
    "calls": lambda row: row.calls,
    "p50": lambda row: row.whole.p50 or 0,
    "p99": lambda row: row.whole.p99 or 0,
    "max": lambda row: row.whole.max or 0,
    "name": lambda row: row.name,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad trace stats``."""
    add_view_arguments(parser, window=True, last=True, stores=True, json=True)
    parser.add_argument("--sort", choices=_ORDERS, default="messages", help="order (default: %(default)s)")
    parser.add_argument(
        "--top", type=count, default=30, metavar="N", help="rows of a table (default: %(default)s; 0: all)"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Print the statistics of a job."""
    found = statistics(open_job(arguments))
    for rows in (found.types, found.pairs, found.functions):
        rows.sort(key=_ORDERS[arguments.sort], reverse=arguments.sort != "name")
    if arguments.json:
        print_json(found)
        return 0
    _print_processes(found)
    for title, rows in (("function", found.functions), ("type", found.types), ("from > to", found.pairs)):
        rows = [row for row in rows if arguments.stores or not _is_of_store(row)]
        _print_rows(title, rows, arguments.top or len(rows))
    print("\nper call: bytes. sending (by both ends), transfer, queued and running: medians, within 1%")
    if not arguments.stores and any(map(_is_of_store, found.types)):
        print("messages of stores are left out: --stores shows them")
    return 0


def _is_of_store(row: Row) -> bool:
    """Whether this is a type of messages of a store, or a pair of which one is a store."""
    return row.name.startswith("STORE_") or row.name.startswith("store >") or row.name.endswith("> store")


def _print_processes(found: Statistics) -> None:
    print(
        f"{show_time(found.nanoseconds)}, {found.messages} messages, {size(found.bytes)}; "
        f"{found.lost} messages not received, {found.dropped} events dropped"
    )
    columns = ("process", "host", "pid", "events", "dropped", "clock error", "log")
    print_table(columns, [_process_cells(row) for row in found.processes])


def _process_cells(row: ProcessRow) -> Sequence[str]:
    bound = "unknown" if row.clock_bound is None else f"<= {show_time(row.clock_bound)}"
    bound = "none" if row.clock_bound == 0 else bound
    if row.clock_jumps:
        bound += f", wall clock set {row.clock_jumps} times"
    name, host = printable(row.name), printable(row.host)
    state = "damaged" if row.damage else "whole" if row.has_end else "no end"
    return (name, host, str(row.pid), str(row.events), str(row.dropped), bound, state)


def _print_rows(title: str, rows: Sequence[Row], limit: int) -> None:
    if not rows:
        return
    columns = f"{title},messages,bytes,calls,per call,failed,open,p50,p90,p99,max".split(",")
    columns += ["sending", "transfer", "queued", "running"]
    print()
    print_table(columns, [_cells(row) for row in rows[:limit]])
    if len(rows) > limit:
        print(f"... and {len(rows) - limit} more: --top 0 shows all")


def _cells(row: Row) -> Sequence[str]:
    counts = ("-",) * 4
    if row.calls:
        counts = (str(row.calls), size(row.bytes / row.calls), str(row.failed), str(row.unanswered))
    whole = map(show_time, (row.whole.p50, row.whole.p90, row.whole.p99, row.whole.max))
    part = (show_time(each.p50) for each in (row.sending, row.transfer, row.queued, row.running))
    return (printable(row.name), str(row.messages), size(row.bytes), *counts, *whole, *part)
