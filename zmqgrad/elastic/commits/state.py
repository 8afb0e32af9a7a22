"""The state of a training program: committed to memory that outlives its process, restored, saved to disk."""

from __future__ import annotations

import importlib
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from zmqgrad import environment
from zmqgrad.elastic.commits import files
from zmqgrad.elastic.commits.agreement import REPLICATED, Choice
from zmqgrad.elastic.commits.connection import Commits, Room, connect
from zmqgrad.errors import CommitError, ConfigurationError
from zmqgrad.runtime.arguments import check_seconds
from zmqgrad.runtime.clock import Deadline

WAIT_SECONDS = 300.0
"""How long a rank waits for the others, which may take this much longer for a step."""

CODEC = "zmqgrad.rpc.serialization.committed"
"""Turns values into bytes and back. It is named, not imported, because imports point downwards, and it needs
torch, which agents do not."""

Cut = int | Callable[[list[Any], int, int], Any]


class Sharded(NamedTuple):
    """A value of which each rank has another part, for :class:`State`.

    Args:
        value: the part of this rank: a tensor, an object with ``state_dict``, or a plain value.
        cut: how it is cut for another world size. A number: its tensors are joined along this dimension, and
            cut as ``torch.tensor_split`` does; what is no tensor is taken from rank 0. A function: it gets
            the parts of all ranks (of an object, their state dicts), the rank and the world size, and returns
            the part of that rank.

    Example:
        >>> state = State(table=Sharded(torch.zeros(4), cut=0), step=0)
    """

    value: Any
    cut: Cut = 0


class State:
    """What a program has to restore to go on, by name: ``State(model=model, optimizer=optimizer, step=0)``.

    An object that has ``state_dict`` is committed and restored by it; tensors and plain values as they are.
    ``state.step`` is the value of that name, and can be set. All ranks make the same calls, equally often:
    :meth:`restore` first, then :meth:`commit` after a step. A process has one state: an agent refuses all but
    the newest.

    Started by ``zmqgrad run`` or ``launch``, commits are in memory of the agent, and outlive the workers.
    Without an agent they are in this process: then they do not outlive it, and are not agreed upon with other
    ranks; :attr:`outlives_the_process` says which.

    Args:
        values: by name; what is :class:`Sharded` differs between ranks, the rest is the same on all.

    Raises:
        ConfigurationError: if a name is that of a method.

    Example:
        >>> state = State(model=torch.nn.Linear(2, 1), step=0)
        >>> state.restore()  # doctest: +SKIP
        >>> state.step += 1
        >>> state.commit()  # doctest: +SKIP
    """

    def __init__(self, **values: Any) -> None:
        taken = sorted(name for name in values if hasattr(type(self), name) or name.startswith("_"))
        if taken:
            raise ConfigurationError(f"State: {', '.join(taken)} cannot be the name of a value")
        cuts = {name: value.cut for name, value in values.items() if isinstance(value, Sharded)}
        plain = {n: value.value if isinstance(value, Sharded) else value for n, value in values.items()}
        self._values: dict[str, Any] = plain
        self._cuts: dict[str, Cut] = cuts
        self._lock = threading.Lock()  # held during a call
        self._commits: Commits | None = None
        self._number = 0
        self._restored_number = 0  # of the commit that was restored last
        self._origin = 0
        self._maps: dict[int, mmap.mmap] = {}
        self._last: dict[int, memoryview] = {}
        # Unmapped after the next commit: that takes a third of the time of copying.
        self._restored: list[memoryview] = []
        _codec()  # now, as a restore is to be fast

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(
                f"the state has no value {name!r}; it has {', '.join(self._values)}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):  # no value has such a name
            object.__setattr__(self, name, value)
        elif name not in self._values:
            raise AttributeError(f"the state has no value {name!r}: pass it to State() first")
        else:
            self._values[name] = value

    def __repr__(self) -> str:
        return f"<State of {', '.join(self._values)}: commit {self._number}>"

    @property
    def commits(self) -> int:
        """The number of the newest commit that was made or restored here; 0: none."""
        return self._number

    @property
    def outlives_the_process(self) -> bool:
        """Whether commits are with an agent, so that they outlive this process."""
        return environment.commits_address() is not None

    # ---- commit -----------------------------------------------------------------------------------------

    def commit(self, timeout: float = WAIT_SECONDS) -> int:
        """Copy the values to memory that outlives this process. They may change as soon as this returns.

        The copy to another host is made in the background: the next commit waits for it, or :meth:`wait`.

        Args:
            timeout: seconds to wait until the commit before is whole: made by all ranks, and copied.

        Returns:
            The number of the commit.

        Raises:
            CommitError: if that takes longer, or :meth:`restore` was not called before.
            PayloadError: if a value cannot be serialized.
        """
        check_seconds("timeout", timeout, 0)
        with self._lock:
            commits = self._commits
            if commits is None:
                raise CommitError("call restore() before the first commit(), on all ranks")
            number, place = self._number + 1, commits.place
            owned = {REPLICATED: self._captured(False)} if place.is_first_of_host else {}
            if self._cuts:
                owned[place.rank] = self._captured(True)
            sections = {rank: _codec().Section(values) for rank, values in owned.items()}
            size = sum(section.size for section in sections.values())
            parts = []
            room = commits.begin(number, size, timeout)
            target = self._mapped(room.segment, room.fd, room.size)
            last: dict[int, memoryview] = {}
            offset = 0
            for rank, section in sections.items():
                view = target[offset : offset + section.size]
                section.write_to(view)
                parts.append((rank, offset, section.size))
                last[rank] = view
                offset += section.size
            commits.commit(number, self._shards, parts)
            self._number = number
            self._last = last
            self._restored.clear()
            return number

    def wait(self, timeout: float = WAIT_SECONDS) -> None:
        """Wait until the newest commit is whole: all ranks have made it, and its shards are on two hosts.

        From then on it survives the loss of any host. Without other hosts, it survives that of workers. One
        that was restored is not waited for: a host that was lost may have left its shards on one host, until
        another commit is whole.

        Args:
            timeout: seconds.

        Raises:
            CommitError: if that takes longer, or nothing was committed.
        """
        check_seconds("timeout", timeout, 0)
        with self._lock:
            if self._commits is None or not self._number:
                raise CommitError("wait() waits for a commit: call commit() first")
            self._commits.wait_whole(self._number, timeout)

    @property
    def _shards(self) -> int:
        assert self._commits is not None
        return self._commits.place.world_size if self._cuts else 0

    def _captured(self, sharded: bool) -> dict[str, Any]:
        return {
            name: value.state_dict() if hasattr(value, "load_state_dict") else value
            for name, value in self._values.items()
            if (name in self._cuts) == sharded
        }

    def _mapped(self, segment: int, fd: int, size: int) -> memoryview:
        """The memory of a segment, mapped once: mapping takes as long as copying."""
        try:
            found = self._maps.pop(segment, None) or mmap.mmap(fd, size)
        finally:
            os.close(fd)
        kept = list(self._maps.items())[-1:]  # of the commit before
        self._maps = {**dict(kept), segment: found}
        return memoryview(found)

    # ---- restore ----------------------------------------------------------------------------------------

    def restore(self, path: str | os.PathLike[str] | None = None, timeout: float = WAIT_SECONDS) -> bool:
        """Set the values to those of the newest commit that all ranks can have, the same on all.

        It is in the memory of this host or another, else, or if that is newer, in what :meth:`save` has
        written to ``path``.
        Modules and tensors are filled in place.

        Args:
            path: a directory that all hosts have; None: no disk.
            timeout: seconds to wait for the other ranks; and for a host that has what no other has, to join.

        Returns:
            Whether there was one. Otherwise the values are as they were.

        Raises:
            CommitError: if not all ranks call this in time, or a part does not fit; or if the newest whole
                commit is lost in part, and none is on disk. If all ranks catch that, they begin anew.
        """
        check_seconds("timeout", timeout, 0)
        with self._lock:
            commits = self._commits = self._commits or connect()
            deadline = Deadline.after(timeout)
            saved = files.whole(Path(path)) if path is not None else {}
            choice = commits.restore(tuple(saved), timeout)
            self._number = self._restored_number = choice.number
            self._origin = choice.origin
            self._last = {}
            if not choice.number:
                return False
            self._restored.clear()
            if choice.commit is not None:
                self._load(choice, lambda rank: self._read(commits.open(rank, deadline.left())))
            else:
                assert path is not None
                directory, shards = Path(path), saved[choice.number]
                on_disk = Choice(choice.number, shards)
                self._load(on_disk, lambda rank: files.read(directory, choice.number, rank, shards))
            return True

    def _read(self, part: Room) -> memoryview:
        """A view of a part: what is written to it, others do not see."""
        try:
            whole = memoryview(mmap.mmap(part.fd, part.size, flags=mmap.MAP_PRIVATE))
        finally:
            os.close(part.fd)
        self._restored.append(whole)
        return whole[part.offset : part.offset + part.length]

    def _load(self, choice: Choice, read: Callable[[int], memoryview]) -> None:
        codec, commits = _codec(), self._commits
        assert commits is not None
        place = commits.place
        replicated = codec.read_section(read(REPLICATED))
        same = choice.shards == place.world_size
        ranks = [place.rank] if same else range(choice.shards)
        sharded = [codec.read_section(read(rank)) for rank in ranks] if self._cuts else []
        for name, own in self._values.items():
            parts = [section.get(name) for section in (sharded if name in self._cuts else [replicated])]
            if not parts or None in parts:
                raise CommitError(f"commit {choice.number} has no {name!r}: it was made by another program")
            cut = self._cuts.get(name)
            # The memory will have another commit, so what is not filled in place needs a copy.
            filled = hasattr(own, "parameters") or hasattr(own, "dtype")
            if same or name not in self._cuts:
                value = parts[0].load(copy=not filled)
                if filled and not codec.copies(own, value):
                    value = parts[0].load(copy=True)
            elif callable(cut):
                value = cut([part.load(copy=True) for part in parts], place.rank, place.world_size)
            else:
                whole = [part.load(copy=False) for part in parts]
                try:
                    value = codec.cut(whole, cut, place.rank, place.world_size)
                except (RuntimeError, ValueError, LookupError, TypeError) as e:
                    raise CommitError(
                        f"the parts of {name!r} cannot be joined along dimension {cut}, and cut for another "
                        f"world size: {e!r}. Pass a function as cut"
                    ) from e
            self._set(name, own, value)

    def _set(self, name: str, own: Any, value: Any) -> None:
        try:
            if hasattr(own, "load_state_dict"):
                own.load_state_dict(value)
            else:
                self._values[name] = _codec().assign(own, value)
        except (RuntimeError, ValueError, KeyError, TypeError) as e:
            raise CommitError(f"{name!r} cannot be restored: {e}") from e

    # ---- save -------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the newest commit to the directory ``path``, for a :meth:`restore` after all hosts were lost.

        Rank 0 writes what is replicated, each rank what is sharded of it. Of older ones, what this rank has
        written is removed once a newer one is whole; but what was restored only with the second one behind
        it, as other ranks may still read it.

        Raises:
            CommitError: if nothing was committed here, or it cannot be written; or if a newer commit is
                there, or another one of its number, which is of another job then.
        """
        with self._lock:
            commits = self._commits
            if commits is None or not self._number:
                raise CommitError("save() writes the newest commit: call commit() first")
            rank = commits.place.rank
            owners = [REPLICATED] * (rank == 0) + [rank] * bool(self._cuts)
            if not self._last.keys() >= set(owners):
                raise CommitError("save() writes a commit that was made here: call commit() first")
            directory, (newest, origin) = Path(path), files.newest(Path(path)) if owners else (0, 0)
            if newest > self._number or (newest == self._number and origin != self._origin):
                raise CommitError(
                    f"{path} has commit {newest}, and commit {self._number} is to be saved there: another "
                    "job has saved it, or this one began without it. Give each job a directory of its own, "
                    "and pass it to restore(); or remove the files"
                )
            for owner in owners:
                files.write(directory, self._number, owner, self._shards, self._origin, self._last[owner])
            # Other ranks may still read what was restored, until they have made the commit behind it.
            kept = self._restored_number if self._number == self._restored_number + 1 else 0
            files.remove_older(directory, owners, kept)


def _codec() -> Any:
    return importlib.import_module(CODEC)
