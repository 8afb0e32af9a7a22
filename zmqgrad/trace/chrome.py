"""Writes the Trace Event Format, which Perfetto and chrome://tracing open. Streams; gzip by suffix.

The format is documented by Google ("Trace Event Format"). Times in it are microseconds; here they are
nanoseconds until they are written.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import msgspec

from zmqgrad.errors import TraceError

Event = dict[str, Any]
"""One event: ``ph`` (its phase), ``name``, ``pid``, ``tid``, ``ts``, and by phase ``dur``, ``id`` etc."""


def write(path: Path, events: Iterable[Event]) -> int:
    """Writes ``events`` to ``path``, compressed if it ends with ``.gz``. Returns how many.

    A file that cannot be finished is removed.

    Raises:
        TraceError: if the file cannot be written.
    """
    opened = False
    try:
        with path.open("wb") as raw:
            opened = True
            if path.suffix != ".gz":
                return write_to(raw, events)
            with gzip.GzipFile("", "wb", compresslevel=5, fileobj=raw) as file:
                return write_to(file, events)
    except BaseException as e:
        if opened and path.is_file():  # not a device
            path.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise TraceError(f"cannot write {path}: {e.strerror or e}") from e
        raise


def write_to(file: IO[bytes] | gzip.GzipFile, events: Iterable[Event]) -> int:
    """Writes ``events`` to an open file. Returns how many."""
    encode, count = msgspec.json.Encoder().encode, 0
    file.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
    for count, event in enumerate(events, 1):
        file.write(encode(event) if count == 1 else b",\n" + encode(event))
    file.write(b"\n]}\n")
    return count
