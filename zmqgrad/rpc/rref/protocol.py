"""The RRef protocol as pure bookkeeping of forks (docs/concepts/references.md).

Guarantees, under any order, loss and repetition of control messages:

    (R1) the owner keeps a value while any user of it is alive,
    (R2) once no user is left, the value is dropped,
    (R3) a user's deletion cannot overtake the fork it made.

A fork is one reference held by one worker. How R1 holds for each way to send one:

    owner -> user         the owner registers the fork when it creates it; it starts out confirmed
    user  -> owner        the owner notifies the parent at once (RREF_CHILD_ACCEPT)
    user  -> other user   the child registers with the owner (RREF_FORK_REQUEST), then notifies its parent

Until then the parent does not request its own deletion, even if nothing refers to it any more.

Lost workers: the forks of a lost worker may have children whose requests are still in flight, and nobody but
that worker knew of them. So its forks, and the forks that were sent to it, stay registered until
:meth:`OwnerForks.expire` and :meth:`UserForks.expire` are called, a grace time after the loss. (R1) holds for
a child of a lost parent if its request arrives within that time, and (R2) holds after it. Without a loss,
neither depends on any time.

An owner that is lost to one worker may live on for others. It never confirms the forks of that worker any
more, for which their parents would wait for ever: so :meth:`UserForks.expire` notifies these.

Methods return the effects that the caller must carry out; none of them sends, waits or calls back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zmqgrad.wire.ids import split_id

MIN_RECENT_FORKS = 50_000
"""The minimum number of deleted forks that an owner remembers, for late messages about them."""


@dataclass(frozen=True, slots=True)
class DropValue:
    """Owner: no fork of ``rref_id`` is left."""

    rref_id: int


@dataclass(frozen=True, slots=True)
class SendDelete:
    """User: notify ``owner`` that this fork is deleted, until it acknowledges."""

    owner: int
    rref_id: int
    fork_id: int


@dataclass(frozen=True, slots=True)
class SendForkRequest:
    """User: request that ``owner`` registers this fork, until it acknowledges."""

    owner: int
    rref_id: int
    fork_id: int


@dataclass(frozen=True, slots=True)
class SendChildAccept:
    """New user, or the owner: notify ``parent`` that the owner knows its child."""

    parent: int
    rref_id: int
    fork_id: int


Effect = DropValue | SendDelete | SendForkRequest | SendChildAccept


class RecentIds:
    """A bounded set of ids: the last ``least`` that were added, and up to as many before them.

    It is a sparse bitmap: ids are dense, so most take less than a byte. There are two generations; the older
    one is dropped when the younger one is full.
    """

    __slots__ = ("_count", "_least", "_older", "_younger")

    def __init__(self, least: int) -> None:
        self._least = least
        self._count = 0
        self._younger: dict[int, int] = {}
        self._older: dict[int, int] = {}

    def add(self, number: int) -> None:
        """Add ``number``."""
        place, bit = number >> _WORD, 1 << (number & _BITS)
        word = self._younger.get(place, 0)
        if word & bit:
            return
        self._younger[place] = word | bit
        self._count += 1
        if self._count >= self._least:
            self._younger, self._older, self._count = {}, self._younger, 0

    def discard(self, number: int) -> None:
        """Remove ``number``."""
        place, bit = number >> _WORD, 1 << (number & _BITS)
        if self._younger.get(place, 0) & bit:
            self._younger[place] ^= bit
            self._count -= 1
        if self._older.get(place, 0) & bit:
            self._older[place] ^= bit

    def __contains__(self, number: int) -> bool:
        place, bit = number >> _WORD, 1 << (number & _BITS)
        return bool((self._younger.get(place, 0) | self._older.get(place, 0)) & bit)

    def __len__(self) -> int:
        """The number of entries; an id that is in both generations counts twice."""
        return sum(word.bit_count() for words in (self._younger, self._older) for word in words.values())


_WORD = 8
_BITS = (1 << _WORD) - 1


class OwnerForks:
    """The forks of values that this worker owns: rref id -> fork id -> the worker that holds it."""

    def __init__(self) -> None:
        self._forks: dict[int, dict[int, int]] = {}
        # A fork can be deleted before it is registered (its user cancelled a call that has not run yet), and
        # its registration can be resent afterwards: neither must revive it.
        self._gone = RecentIds(MIN_RECENT_FORKS)

    def note(self, rref_id: int, fork_id: int, holder: int) -> None:
        """Register fork ``fork_id`` of ``holder``. Idempotent; ignored after its deletion."""
        if fork_id not in self._gone:
            self._forks.setdefault(rref_id, {}).setdefault(fork_id, holder)

    def delete(self, rref_id: int, fork_id: int, holder: int | None = None) -> list[Effect]:
        """Remove fork ``fork_id``.

        Args:
            holder: who has deleted it: others' forks stay. One that is not registered yet can only be that of
                the worker that has made its id. None: this worker knows that it does not exist.
        """
        forks = self._forks.get(rref_id)
        if holder is not None and (forks or {}).get(fork_id, split_id(fork_id)[0]) != holder:
            return []
        self._gone.add(fork_id)
        if forks is None:
            return []
        forks.pop(fork_id, None)
        return self._dropped_if_empty(rref_id)

    def expire(self, worker: int) -> list[Effect]:
        """Remove all forks of a worker that was lost so long ago that their children have registered."""
        effects: list[Effect] = []
        for rref_id, forks in list(self._forks.items()):
            for fork_id in [f for f, holder in forks.items() if holder == worker]:
                effects += self.delete(rref_id, fork_id)
        return effects

    def _dropped_if_empty(self, rref_id: int) -> list[Effect]:
        if self._forks[rref_id]:
            return []
        del self._forks[rref_id]
        return [DropValue(rref_id)]

    def knows(self, rref_id: int) -> bool:
        """Whether ``rref_id`` has forks."""
        return rref_id in self._forks

    def forks(self) -> dict[int, dict[int, int]]:
        """A copy of rref id -> fork id -> holder."""
        return {r: dict(f) for r, f in self._forks.items()}


@dataclass(slots=True)
class UserFork:
    """A reference that this worker holds to a value of ``owner``."""

    rref_id: int
    fork_id: int
    owner: int
    parent: int | None  # the worker to notify once confirmed, if any
    confirmed: bool
    released: bool = False  # nothing here refers to it any more
    deleting: bool = False  # and SendDelete has been returned
    children: dict[int, int] = field(default_factory=dict)  # fork id -> holder, not yet known to the owner


class UserForks:
    """The forks that this worker holds."""

    def __init__(self) -> None:
        self._forks: dict[int, UserFork] = {}
        self._parents: dict[int, int] = {}  # child fork id -> fork id of ours that it came from
        self._unconfirmed: dict[int, list[Effect]] = {}  # by lost owner: what the parents of forks wait for

    def create(self, rref_id: int, fork_id: int, owner: int) -> None:
        """Add the fork of a value that ``owner`` is requested to create (``remote``); its reply confirms."""
        self._forks[fork_id] = UserFork(rref_id, fork_id, owner, None, confirmed=False)

    def forget(self, fork_id: int) -> None:
        """Remove a fork whose creation was not requested after all."""
        self._forks.pop(fork_id, None)

    def import_fork(self, rref_id: int, fork_id: int, owner: int, parent: int) -> list[Effect]:
        """Add a fork that arrived in a message of ``parent``."""
        if fork_id in self._forks:
            return []
        known = parent == owner  # the owner registered it when it created it
        self._forks[fork_id] = UserFork(rref_id, fork_id, owner, None if known else parent, known)
        return [] if known else [SendForkRequest(owner, rref_id, fork_id)]

    def confirm(self, fork_id: int) -> list[Effect]:
        """Note that the owner has registered ``fork_id``."""
        fork = self._forks.get(fork_id)
        if fork is None or fork.confirmed:
            return []
        fork.confirmed = True
        effects: list[Effect] = []
        if fork.parent is not None:
            effects.append(SendChildAccept(fork.parent, fork.rref_id, fork_id))
        return effects + self._delete_if_free(fork)

    def holds(self, fork_id: int) -> bool:
        """Whether ``fork_id`` is held here. False once its owner is lost."""
        return fork_id in self._forks

    def is_confirmed(self, fork_id: int) -> bool:
        """Whether the owner has registered ``fork_id``."""
        fork = self._forks.get(fork_id)
        return fork is not None and fork.confirmed

    def fork(self, parent_fork: int, child_fork: int, holder: int) -> None:
        """Add child ``child_fork``, sent to ``holder``. ``parent_fork`` stays until the child is accepted."""
        self._forks[parent_fork].children[child_fork] = holder
        self._parents[child_fork] = parent_fork

    def child_accepted(self, child_fork: int, by: int | None = None) -> list[Effect]:
        """Note that the owner has registered ``child_fork``, or that it will never exist.

        Args:
            by: who says so: the worker that holds the child, or the owner; others are ignored. None: this
                worker.
        """
        parent = self._forks.get(self._parents.get(child_fork, -1))
        if parent is not None and by not in (None, parent.owner, parent.children.get(child_fork)):
            return []
        self._parents.pop(child_fork, None)
        if parent is None:
            return []
        parent.children.pop(child_fork, None)
        return self._delete_if_free(parent)

    def release(self, fork_id: int) -> list[Effect]:
        """Note that nothing on this worker refers to ``fork_id`` any more."""
        fork = self._forks.get(fork_id)
        if fork is None:
            return []
        fork.released = True
        return self._delete_if_free(fork)

    def deleted(self, fork_id: int) -> None:
        """Note that the owner has acknowledged the deletion of ``fork_id``."""
        self._forks.pop(fork_id, None)

    def lose(self, owner: int) -> None:
        """Drop the forks of values that a lost worker owned."""
        for fork in [f for f in self._forks.values() if f.owner == owner]:
            del self._forks[fork.fork_id]
            if not fork.confirmed and fork.parent is not None:
                accept = SendChildAccept(fork.parent, fork.rref_id, fork.fork_id)
                self._unconfirmed.setdefault(owner, []).append(accept)
            for child in fork.children:
                self._parents.pop(child, None)

    def expire(self, worker: int) -> list[Effect]:
        """Drop the children sent to a lost worker, once their own children have registered.

        And those that came from others, of values that it owned: only their parents still know of them.
        """
        effects = self._unconfirmed.pop(worker, [])
        for fork in list(self._forks.values()):
            for child in [c for c, holder in fork.children.items() if holder == worker]:
                effects += self.child_accepted(child)
        return effects

    def _delete_if_free(self, fork: UserFork) -> list[Effect]:
        if not (fork.released and fork.confirmed) or fork.children or fork.deleting:
            return []
        fork.deleting = True
        return [SendDelete(fork.owner, fork.rref_id, fork.fork_id)]

    def __len__(self) -> int:
        return len(self._forks)

    def forks(self) -> list[UserFork]:
        """All forks held here."""
        return list(self._forks.values())
