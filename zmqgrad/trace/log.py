"""The trace log of one process: its format and its reader.

::

    offset  size
         0     8  magic: 89 "zgtrace"; the first byte is no text, so no text file is mistaken for a log
         8     4  version of the format, big-endian
        12        records, each: size in 4 bytes (big-endian), then as many bytes of msgpack

The first record is a map, :class:`~zmqgrad.trace.events.ProcessInfo`; each other one is a list of events
(:mod:`zmqgrad.trace.events`), in the order of recording; what has a duration is recorded at its end, or at
a flush before that. A process that is killed may leave a record cut off
at the end; the reader stops before it.
"""

from __future__ import annotations

import operator
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from zmqgrad.errors import TraceError
from zmqgrad.trace.events import Event, ProcessInfo, RequestRan, Waited, decoded

_T = TypeVar("_T")

MAGIC = b"\x89zgtrace"
VERSION = 1
SUFFIX = ".zgtrace"
MAX_RECORD_BYTES = 64 << 20
"""Limit of one record; a larger size means that the file is damaged."""

_PREFIX = struct.Struct("!8sI")
_SIZE = struct.Struct("!I")


def _plain(value: object) -> object:
    """A value of a class derived from ``str`` (``numpy.str_``) or ``int``, as that."""
    return str.__str__(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decode_info = msgspec.msgpack.Decoder(ProcessInfo).decode
_decode_packed = msgspec.msgpack.Decoder(list[decoded()]).decode  # type: ignore[misc]


def _decode_events(data: bytes) -> list[Event]:
    events: list[Event] = []
    for event in _decode_packed(data):
        if isinstance(event, (RequestRan, Waited)):
            events += event.parts()
        else:
            events.append(event)
    return events


def header(info: ProcessInfo) -> bytes:
    """The start of a log."""
    return _PREFIX.pack(MAGIC, VERSION) + _record(encode(info))


def record(events: Sequence[Any]) -> bytes:
    """A record of events: structs, or tuples that begin with their tag."""
    return _record(encode(events))


def encode(value: object) -> bytes:
    """As msgpack; characters that UTF-8 does not have (those of a path that is no text) are escaped."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(_escaped(msgspec.to_builtins(value, enc_hook=_plain)))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(each) for key, each in value.items()}
    return [_escaped(each) for each in value] if isinstance(value, (list, tuple)) else value


def _record(data: bytes) -> bytes:
    return _SIZE.pack(len(data)) + data


class LogReader:
    """Reads the log at ``path``, from its start; also while it grows. Use as a context manager, or close it.

    Args:
        on_read: called with the size of each record that was read.

    Attributes:
        info: the process that wrote it.

    Raises:
        TraceError: if it is no trace log, of another version, damaged, or cannot be opened.
    """

    def __init__(self, path: Path | str, on_read: Callable[[int], object] = int) -> None:
        self.path = Path(path)
        self._on_read = on_read
        try:
            if self.path.exists() and not self.path.is_file():  # opening a named pipe waits for a writer
                raise TraceError(f"{self.path} is no trace log: it is no regular file")
            self._file: BinaryIO = self.path.open("rb")
        except OSError as e:
            raise TraceError(f"cannot open the trace log {self.path}: {e.strerror or e}") from e
        try:
            self.info = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> ProcessInfo:
        start = self._file.read(_PREFIX.size)
        if not (start or MAGIC).startswith(MAGIC[: len(start)]):
            raise TraceError(f"{self.path} is no trace log: it begins with {start[:8]!r}")
        if len(start) < _PREFIX.size:
            raise TraceError(f"the trace log {self.path} ends within its header: nothing was recorded")
        version = _PREFIX.unpack(start)[1]
        if version != VERSION:
            raise TraceError(
                f"the trace log {self.path} has version {version} of the format, this release reads "
                f"{VERSION}: read it with the release of zmqgrad that wrote it"
            )
        data = self._next_record()
        if data is None:
            raise TraceError(f"the trace log {self.path} ends within its header: nothing was recorded")
        return self._decode(_decode_info, data)

    def batches(self) -> Iterator[list[Event]]:
        """Yields the events recorded since the last call, record by record; ends before a record cut off.

        Raises:
            TraceError: if the file is damaged; the message says where.
        """
        while (data := self._next_record()) is not None:
            yield self._decode(_decode_events, data)

    def __iter__(self) -> Iterator[Event]:
        """Yields the events recorded since the last call one by one; errors as :meth:`batches`."""
        for batch in self.batches():
            yield from batch

    def skip(self, keep: int = 0) -> bool:
        """Skips records, without decoding them, until at most ``keep`` bytes of the present file are left.

        Returns:
            Whether anything was skipped.
        """
        try:
            end = os.fstat(self._file.fileno()).st_size
            start = at = self._file.tell()
            while end - at > keep:
                head = self._file.read(_SIZE.size)
                following = at + _SIZE.size + (_SIZE.unpack(head)[0] if len(head) == _SIZE.size else end)
                if following > end or following == at + _SIZE.size:
                    break  # a record cut off, or damage: for the next read to tell
                at = self._file.seek(following)
            self._file.seek(at)
            return at != start
        except OSError as e:
            raise TraceError(f"cannot read the trace log {self.path}: {e.strerror or e}") from e

    def _next_record(self) -> bytes | None:
        """The next record. None if it is not complete yet; a later call tries again."""
        try:
            self._at = at = self._file.tell()
            head = self._file.read(_SIZE.size)
            size = _SIZE.unpack(head)[0] if len(head) == _SIZE.size else 0
            if size > MAX_RECORD_BYTES:
                raise self._damaged(f"a record of {size} bytes")
            data = self._file.read(size)
            if size and len(data) == size:
                self._on_read(_SIZE.size + size)
                return data
            if len(head) == _SIZE.size and not size:
                raise self._damaged("an empty record")
            self._file.seek(at)
            return None
        except OSError as e:
            raise TraceError(f"cannot read the trace log {self.path}: {e.strerror or e}") from e

    def _decode(self, decode: Callable[[bytes], _T], data: bytes) -> _T:
        try:
            return decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise self._damaged(str(e)) from e

    def _damaged(self, what: str) -> TraceError:
        return TraceError(f"the trace log {self.path} is damaged at byte {self._at}: {what}")

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def find_logs(directory: Path | str) -> list[Path]:
    """The logs in ``directory``, oldest first.

    Raises:
        TraceError: if it is no directory, or has no logs.
    """
    path = Path(directory)
    try:
        found = [each for each in path.iterdir() if each.suffix == SUFFIX]
        found.sort(key=lambda each: (changed_ns(each), each.name))
    except NotADirectoryError as e:
        raise TraceError(f"{path} is a file: pass the directory of the logs, {path.parent}") from e
    except OSError as e:
        raise TraceError(f"cannot read the trace directory {path}: {e.strerror or e}") from e
    if not found:
        below = sorted({str(each.parent) for each in path.glob(f"*/*{SUFFIX}")})
        if below:
            raise TraceError(f"no trace logs in {path} itself, but below it: pass {' or '.join(below[:5])}")
        raise TraceError(
            f"no trace logs (*{SUFFIX}) in {path}: was the job started with ZMQGRAD_TRACE={path}?"
        )
    return found


def changed_ns(path: Path) -> int:
    """When the log was changed last (ns since 1970); 0: long ago, if it was removed."""
    try:
        return path.stat().st_mtime_ns
    except OSError:  # it was removed, or is a link to nothing: who opens it is told
        return 0
