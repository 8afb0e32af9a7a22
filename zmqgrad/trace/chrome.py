"""Writes the Trace Event Format, which Perfetto and chrome://tracing open. Streams.

The format is documented by Google ("Trace Event Format"). Times in it are microseconds; here they are
nanoseconds until they are written.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from typing import IO, Any

import msgspec

Event = dict[str, Any]
"""One event: ``ph`` (its phase), ``name``, ``pid``, ``tid``, ``ts``, and by phase ``dur``, ``id`` etc."""


def write(file: IO[bytes] | gzip.GzipFile, events: Iterable[Event]) -> int:
    """Writes ``events`` to an open file. Returns how many."""
    encode, count = msgspec.json.Encoder().encode, 0
    file.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
    for count, event in enumerate(events, 1):
        file.write(encode(event) if count == 1 else b",\n" + encode(event))
    file.write(b"\n]}\n")
    return count
