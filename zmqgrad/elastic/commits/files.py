"""Commits on disk: one file for each part, in one directory. A file is whole, or has another name."""

from __future__ import annotations

import mmap
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zmqgrad.elastic.commits.agreement import REPLICATED
from zmqgrad.errors import CommitError

_NAME = re.compile(r"commit-(\d+)\.(replicated|rank-(\d+))-of-(\d+)")


class _File(NamedTuple):
    number: int
    rank: int
    shards: int
    path: Path


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
        CommitError: if it cannot be read.
    """
    ranks: dict[tuple[int, int], set[int]] = defaultdict(set)
    for file in _files(directory):
        ranks[file.number, file.shards].add(file.rank)
    return {
        number: shards
        for (number, shards), found in sorted(ranks.items())
        if found.issuperset([REPLICATED, *range(shards)])
    }


def write(directory: Path, number: int, rank: int, shards: int, data: memoryview) -> None:
    """Write a part, durably.

    Raises:
        CommitError: if it cannot be written.
    """
    path = _path(directory, number, rank, shards)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with open(partial, "wb", buffering=0) as file:
                left = data
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as e:
        raise CommitError(f"cannot write {path}: {e.strerror}") from e


def read(directory: Path, number: int, rank: int, shards: int) -> memoryview:
    """The bytes of a part, mapped.

    Raises:
        CommitError: if it cannot be read.
    """
    path = _path(directory, number, rank, shards)
    try:
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE))
    except (OSError, ValueError) as e:
        raise CommitError(f"cannot read {path}: {e}") from e


def remove_older(directory: Path, ranks: Collection[int]) -> None:
    """Remove the parts of ``ranks`` that are older than the newest whole commit."""
    newest = max(whole(directory), default=0)
    for file in _files(directory):
        if file.rank in ranks and file.number < newest:
            with suppress(FileNotFoundError):
                file.path.unlink()
