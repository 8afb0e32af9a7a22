"""Commits on disk: one file for each part, in one directory. A file is whole, or has another name.

A file is the bytes of the part, and a trailer: a magic number, the origin of the commit (0: not known), the
size, and the CRC-32 of the bytes. Parts of one number, but of several origins, are no commit: the ranks have
made them at different times.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zmqgrad.elastic.commits.agreement import REPLICATED
from zmqgrad.errors import CommitError

_NAME = re.compile(r"commit-(\d+)\.(replicated|rank-(\d+))-of-(\d+)")

_TRAILER = struct.Struct("<8sQQQ")

_MAGIC = b"zmqgrad1"


class _File(NamedTuple):
    number: int
    rank: int
    shards: int
    path: Path

    def origin(self) -> int | None:
        """Of the commit; None: the file is damaged.

        Raises:
            FileNotFoundError: if it was removed.
        """
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size - _TRAILER.size
            if size < 0:
                return None
            file.seek(size)
            magic, origin, expected, _ = _TRAILER.unpack(file.read())
        return origin if (magic, expected) == (_MAGIC, size) else None


def _damaged(path: Path) -> CommitError:
    return CommitError(
        f"{path} is damaged, or of another version: copy it back from a backup, or remove it to go on without"
    )


def _path(directory: Path, number: int, rank: int, shards: int) -> Path:
    part = "replicated" if rank == REPLICATED else f"rank-{rank}"
    return directory / f"commit-{number}.{part}-of-{shards}"


def _files(directory: Path) -> Iterator[_File]:
    try:
        paths = list(directory.iterdir())
    except FileNotFoundError:
        return
    except OSError as e:
        raise CommitError(f"cannot read {directory}: {e.strerror}") from e
    for path in paths:
        if match := _NAME.fullmatch(path.name):
            rank = REPLICATED if match[3] is None else int(match[3])
            yield _File(int(match[1]), rank, int(match[4]), path)


def whole(directory: Path) -> dict[int, int]:
    """The commits of which ``directory`` has all parts: numbers, and how many sharded parts.

    Raises:
        CommitError: if it cannot be read, or a file in it is damaged.
    """
    return {number: shards for number, shards, _ in _whole(directory, ignore_damaged=False)}


def _whole(directory: Path, ignore_damaged: bool) -> list[tuple[int, int, int]]:
    """Numbers, how many sharded parts, and origins; sorted."""
    ranks: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for file in _files(directory):
        try:
            origin = file.origin()
        except FileNotFoundError:
            continue
        except OSError as e:
            raise CommitError(f"cannot read {file.path}: {e.strerror}") from e
        if origin is not None:
            ranks[file.number, file.shards, origin].add(file.rank)
        elif not ignore_damaged:
            raise _damaged(file.path)
    return sorted(key for key, found in ranks.items() if found.issuperset([REPLICATED, *range(key[1])]))


def newest(directory: Path) -> tuple[int, int]:
    """Number and origin of the newest commit of which ``directory`` has all parts; 0: there is none."""
    return max(
        ((number, origin) for number, _, origin in _whole(directory, ignore_damaged=True)), default=(0, 0)
    )


def write(directory: Path, number: int, rank: int, shards: int, origin: int, data: memoryview) -> None:
    """Write a part, durably.

    Raises:
        CommitError: if it cannot be written.
    """
    path = _path(directory, number, rank, shards)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    trailer = _TRAILER.pack(_MAGIC, origin, len(data), zlib.crc32(data))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_partial(directory, rank)
        try:
            with open(partial, "xb") as file:  # not through a link that somebody else has made
                file.write(data)
                file.write(trailer)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync_names(directory)
    except OSError as e:
        raise CommitError(f"cannot write {path}: {e.strerror}") from e


def _remove_partial(directory: Path, rank: int) -> None:
    """Remove what killed processes have written of a part of ``rank``: the disk may be full of it."""
    for path in directory.glob(".commit-*"):
        match = _NAME.fullmatch(path.stem.removeprefix("."))
        if match and (REPLICATED if match[3] is None else int(match[3])) == rank:
            path.unlink(missing_ok=True)


def _sync_names(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems of networks do that by themselves, and refuse it
            os.fsync(fd)
    finally:
        os.close(fd)


def read(directory: Path, number: int, rank: int, shards: int) -> memoryview:
    """The bytes of a part, mapped.

    Raises:
        CommitError: if it cannot be read, or is damaged.
    """
    path = _path(directory, number, rank, shards)
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE))
    except (OSError, ValueError) as e:
        raise CommitError(f"cannot read {path}: {e}") from e
    data, trailer = data[: -_TRAILER.size], data[-_TRAILER.size :]
    if len(trailer) < _TRAILER.size or _TRAILER.unpack(trailer)[2:] != (len(data), zlib.crc32(data)):
        raise _damaged(path)
    return data


def remove_older(directory: Path, ranks: Collection[int], kept: int) -> None:
    """Remove the parts of ``ranks`` that are older than the newest whole commit, but not of ``kept``."""
    limit, _ = newest(directory)
    for file in _files(directory):
        if file.rank in ranks and file.number < limit and file.number != kept:
            with suppress(FileNotFoundError):
                file.path.unlink()
