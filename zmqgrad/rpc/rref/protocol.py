"""Who refers to what: the RRef protocol as pure bookkeeping (DESIGN section 9).

Guarantees, under any order, loss and repetition of control messages:

    (R1) the owner keeps a value while any user of it is alive,
    (R2) once no user is left, the value is dropped,
    (R3) a user's deletion cannot overtake the fork it made.

A fork is one reference held by one worker. How each way of travelling keeps R1:

    owner -> user         the owner notes the fork as it is made; it is confirmed at birth
    user  -> owner        the owner tells the parent at once (RREF_CHILD_ACCEPT)
    user  -> other user   the child asks the owner to note it (RREF_FORK_REQUEST), then tells its parent

and the parent, until told, does not ask for its own deletion even when nothing refers to it any more.
Methods return the effects that the caller must carry out; none of them sends, waits or calls out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

REMEMBERED = 50_000
"""How many deleted forks an owner remembers at least, for words about them that come late."""


@dataclass(frozen=True, slots=True)
class DropValue:
    """Owner: nobody refers to ``rref_id`` any more."""

    rref_id: int


@dataclass(frozen=True, slots=True)
class SendDelete:
    """User: tell ``owner`` that this fork is gone, until it answers."""

    owner: int
    rref_id: int
    fork_id: int


@dataclass(frozen=True, slots=True)
class SendForkRequest:
    """User: ask ``owner`` to note this fork, until it answers."""

    owner: int
    rref_id: int
    fork_id: int


@dataclass(frozen=True, slots=True)
class SendChildAccept:
    """New user, or the owner: tell ``parent`` that its child is known."""

    parent: int
    rref_id: int
    fork_id: int


Effect = DropValue | SendDelete | SendForkRequest | SendChildAccept


class RecentIds:
    """The last ``least`` numbers that were added, and up to as many before them.

    Numbers that are near each other, as ids are, share a word of bits: most take less than a byte. There are
    two generations, of which the older is forgotten when the younger is full.
    """

    __slots__ = ("_count", "_least", "_older", "_younger")

    def __init__(self, least: int) -> None:
        self._least = least
        self._count = 0
        self._younger: dict[int, int] = {}
        self._older: dict[int, int] = {}

    def add(self, number: int) -> None:
        """Remember ``number``."""
        place, bit = number >> _WORD, 1 << (number & _BITS)
        word = self._younger.get(place, 0)
        if word & bit:
            return
        self._younger[place] = word | bit
        self._count += 1
        if self._count >= self._least:
            self._younger, self._older, self._count = {}, self._younger, 0

    def discard(self, number: int) -> None:
        """Forget it."""
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
        """How many numbers there is room taken for; one that both generations have counts twice."""
        return sum(word.bit_count() for words in (self._younger, self._older) for word in words.values())


_WORD = 8
_BITS = (1 << _WORD) - 1


class OwnerForks:
    """The forks of values that this worker owns: rref id -> fork id -> the worker that holds it."""

    def __init__(self) -> None:
        self._forks: dict[int, dict[int, int]] = {}
        # A fork can be deleted before it is noted (its user gave up on a call that is still to run), and a
        # request for it be repeated after: neither must revive it.
        self._gone = RecentIds(REMEMBERED)

    def note(self, rref_id: int, fork_id: int, holder: int) -> None:
        """``holder`` has fork ``fork_id``. Noting it twice is harmless, and so is noting it too late."""
        if fork_id not in self._gone:
            self._forks.setdefault(rref_id, {})[fork_id] = holder

    def delete(self, rref_id: int, fork_id: int) -> list[Effect]:
        """Fork ``fork_id`` is gone."""
        self._gone.add(fork_id)
        forks = self._forks.get(rref_id)
        if forks is None:
            return []
        forks.pop(fork_id, None)
        return self._dropped_if_empty(rref_id)

    def lose(self, worker: int) -> list[Effect]:
        """``worker`` died and took its forks along."""
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
        """Does anybody refer to ``rref_id``?"""
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
    parent: int | None  # the worker to tell once the owner knows, if any
    confirmed: bool
    released: bool = False  # nothing here refers to it any more
    deleting: bool = False  # and the owner is being told
    children: dict[int, int] = field(default_factory=dict)  # fork id -> holder, not yet known to the owner


class UserForks:
    """The forks that this worker holds."""

    def __init__(self) -> None:
        self._forks: dict[int, UserFork] = {}
        self._parents: dict[int, int] = {}  # child fork id -> fork id of ours that it came from

    def create(self, rref_id: int, fork_id: int, owner: int) -> None:
        """We asked ``owner`` to make the value (RREF by ``remote``); its answer confirms."""
        self._forks[fork_id] = UserFork(rref_id, fork_id, owner, None, confirmed=False)

    def forget(self, fork_id: int) -> None:
        """The owner was not asked for it after all."""
        self._forks.pop(fork_id, None)

    def import_fork(self, rref_id: int, fork_id: int, owner: int, parent: int) -> list[Effect]:
        """A fork came in a message of ``parent``."""
        if fork_id in self._forks:
            return []
        known = parent == owner  # the owner noted it as it was made
        self._forks[fork_id] = UserFork(rref_id, fork_id, owner, None if known else parent, known)
        return [] if known else [SendForkRequest(owner, rref_id, fork_id)]

    def confirm(self, fork_id: int) -> list[Effect]:
        """The owner knows of ``fork_id``."""
        fork = self._forks.get(fork_id)
        if fork is None or fork.confirmed:
            return []
        fork.confirmed = True
        effects: list[Effect] = []
        if fork.parent is not None:
            effects.append(SendChildAccept(fork.parent, fork.rref_id, fork_id))
        return effects + self._delete_if_free(fork)

    def holds(self, fork_id: int) -> bool:
        """Is ``fork_id`` held here? Not any more once its owner was lost."""
        return fork_id in self._forks

    def is_confirmed(self, fork_id: int) -> bool:
        """Does the owner know of ``fork_id``?"""
        fork = self._forks.get(fork_id)
        return fork is not None and fork.confirmed

    def fork(self, parent_fork: int, child_fork: int, holder: int) -> None:
        """We are sending ``child_fork`` of our ``parent_fork`` to ``holder``; that one stays until told."""
        self._forks[parent_fork].children[child_fork] = holder
        self._parents[child_fork] = parent_fork

    def child_accepted(self, child_fork: int) -> list[Effect]:
        """The owner knows of ``child_fork`` (or it will never come to be)."""
        parent = self._forks.get(self._parents.pop(child_fork, -1))
        if parent is None:
            return []
        parent.children.pop(child_fork, None)
        return self._delete_if_free(parent)

    def release(self, fork_id: int) -> list[Effect]:
        """Nothing on this worker refers to ``fork_id`` any more."""
        fork = self._forks.get(fork_id)
        if fork is None:
            return []
        fork.released = True
        return self._delete_if_free(fork)

    def deleted(self, fork_id: int) -> None:
        """The owner knows that ``fork_id`` is gone."""
        self._forks.pop(fork_id, None)

    def lose(self, worker: int) -> list[Effect]:
        """``worker`` died: so did the values that it owned, and children on their way to it."""
        effects: list[Effect] = []
        for fork in list(self._forks.values()):
            if fork.owner == worker:
                del self._forks[fork.fork_id]
                for child in fork.children:
                    self._parents.pop(child, None)
                continue
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
