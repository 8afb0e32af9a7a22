"""The RRef protocol under any order, loss and repetition of its messages: R1 to R3."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zmqgrad.rpc.rref import protocol
from zmqgrad.rpc.rref.protocol import (
    DropValue,
    OwnerForks,
    RecentIds,
    SendChildAccept,
    SendDelete,
    SendForkRequest,
    UserForks,
)

OWNER = 0
WORKERS = 4
VALUE = 7


@dataclass(frozen=True)
class Letter:
    """A message on its way: what happens at ``target``, and then at ``source`` (the acknowledgement)."""

    source: int
    target: int
    kind: str
    fork: int
    answer: bool = False


class Simulation(RuleBasedStateMachine):
    """Workers 1 to 3 refer to one value of worker 0, and pass it around by letters that go astray.

    Control letters are repeated until answered, as the shell does; a letter that carries a fork (a call)
    arrives once, at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owner = OwnerForks()
        self.users = {w: UserForks() for w in range(1, WORKERS)}
        self.letters: list[Letter] = []
        self.unanswered: set[Letter] = set()
        self.travelling: list[tuple[int, int, int]] = []  # fork, parent worker, holder
        self.alive: dict[int, int] = {}  # fork -> worker, referred to by the program there
        self.in_hand = 0  # references on the owner itself
        self.dropped = False
        self.forks = 0
        self.dead = False  # worker 3
        self.unexpired: set[int] = set()  # workers that still keep the forks of the dead

    # -- the program

    @initialize(worker=st.integers(1, WORKERS - 1))
    def owner_sends(self, worker: int) -> None:
        """The owner passes its value to a user: once, or nothing would ever be close to being dropped."""
        fork = self._new_fork()
        self.owner.note(VALUE, fork, worker)
        self.travelling.append((fork, OWNER, worker))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), to=st.integers(0, WORKERS - 1))
    def user_sends(self, data: st.DataObject, to: int) -> None:
        """A user passes its reference on: to another user, to the owner, or to itself."""
        parent = data.draw(st.sampled_from(sorted(self.alive)))
        if self.dead and to == WORKERS - 1:
            return  # it would be refused
        holder, fork = self.alive[parent], self._new_fork()
        self.users[holder].fork(parent, fork, to)
        self.travelling.append((fork, holder, to))

    @precondition(lambda self: self.travelling)
    @rule(data=st.data())
    def arrives(self, data: st.DataObject) -> None:
        """A call with a reference in it is unpacked."""
        item = data.draw(st.sampled_from(self.travelling))
        self.travelling.remove(item)
        fork, parent, holder = item
        if holder == OWNER:
            assert not self.dropped, "R1: the value is gone though a reference to it was under way"
            self.in_hand += 1
            self._carry_out(OWNER, [SendChildAccept(parent, VALUE, fork)])
        else:
            self.alive[fork] = holder
            self._carry_out(holder, self.users[holder].import_fork(VALUE, fork, OWNER, parent))

    @precondition(lambda self: self.travelling)
    @rule(data=st.data())
    def never_leaves(self, data: st.DataObject) -> None:
        """A call with a reference in it could not be sent after all."""
        item = data.draw(st.sampled_from(self.travelling))
        self.travelling.remove(item)
        fork, parent, _ = item
        if parent == OWNER:
            self._carry_out(OWNER, self.owner.delete(VALUE, fork))
        else:
            self._carry_out(parent, self.users[parent].child_accepted(fork))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def user_lets_go(self, data: st.DataObject) -> None:
        """The program on a user has no use for a reference any more."""
        fork = data.draw(st.sampled_from(sorted(self.alive)))
        holder = self.alive.pop(fork)
        self._carry_out(holder, self.users[holder].release(fork))

    # -- the network

    @precondition(lambda self: self.letters)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "deliver", "lose", "twice"]))
    def letter(self, data: st.DataObject, fate: str) -> None:
        """Any letter, not only the oldest, arrives, is lost, or arrives and stays to arrive again."""
        letter = data.draw(st.sampled_from(self.letters))
        if fate != "twice":
            self.letters.remove(letter)
        if fate != "lose":
            self._deliver(letter)

    @precondition(lambda self: self.unanswered)
    @rule(data=st.data())
    def again(self, data: st.DataObject) -> None:
        """Nobody answered: the same is said once more."""
        self.letters.append(data.draw(st.sampled_from(sorted(self.unanswered, key=repr))))

    @precondition(lambda self: not self.dead and WORKERS - 1 in self.alive.values())
    @rule()
    def dies(self) -> None:
        """Worker 3, which holds a reference, dies: its references and all letters to or from it are lost."""
        dead = WORKERS - 1
        self.dead = True
        self.unexpired = set(range(dead))
        self.alive = {f: w for f, w in self.alive.items() if w != dead}
        self.travelling = [t for t in self.travelling if dead not in t[1:]]
        self.letters = [x for x in self.letters if dead not in (x.source, x.target)]
        self.unanswered = {x for x in self.unanswered if dead not in (x.source, x.target)}
        self.users[dead] = UserForks()
        for worker in range(1, dead):
            self.users[worker].lose(dead)

    @precondition(lambda self: self.unexpired and not self._orphans())
    @rule(data=st.data())
    def grace_ends(self, data: st.DataObject) -> None:
        """The children of the dead have registered long ago: one worker drops what it kept for them."""
        worker = data.draw(st.sampled_from(sorted(self.unexpired)))
        self._expire(worker)

    @rule()
    def nothing(self) -> None:
        """Time passes: there may be nothing else left to happen."""

    def _expire(self, worker: int) -> None:
        self.unexpired.remove(worker)
        at = self.owner if worker == OWNER else self.users[worker]
        self._carry_out(worker, at.expire(WORKERS - 1))

    def _orphans(self) -> bool:
        """Whether a child of the dead is alive that the owner does not know yet."""
        known = self.owner.forks().get(VALUE, {})
        forks = [f for w, u in self.users.items() if w != WORKERS - 1 for f in u.forks()]
        return any(f.parent == WORKERS - 1 and f.fork_id not in known and not f.confirmed for f in forks)

    # -- the shell

    def _new_fork(self) -> int:
        self.forks += 1
        return self.forks

    def _carry_out(self, worker: int, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case DropValue():
                    self.dropped = True
                case SendDelete(owner, _, fork):
                    self._post(Letter(worker, owner, "delete", fork))
                case SendForkRequest(owner, _, fork):
                    self._post(Letter(worker, owner, "request", fork))
                case SendChildAccept(parent, _, fork):
                    self._post(Letter(worker, parent, "accept", fork))

    def _post(self, letter: Letter) -> None:
        self.letters.append(letter)
        self.unanswered.add(letter)

    def _deliver(self, letter: Letter) -> None:
        if letter.answer:
            asked = Letter(letter.target, letter.source, letter.kind, letter.fork)
            if asked not in self.unanswered:
                return
            self.unanswered.remove(asked)
            if letter.kind == "request":
                self._carry_out(letter.target, self.users[letter.target].confirm(letter.fork))
            elif letter.kind == "delete":
                self.users[letter.target].deleted(letter.fork)
            return
        if letter.kind == "request":
            if not self.dropped:
                self.owner.note(VALUE, letter.fork, letter.source)
        elif letter.kind == "delete":
            self._carry_out(OWNER, self.owner.delete(VALUE, letter.fork))
        elif letter.target == OWNER:
            pass
        else:
            self._carry_out(letter.target, self.users[letter.target].child_accepted(letter.fork))
        self.letters.append(Letter(letter.target, letter.source, letter.kind, letter.fork, answer=True))

    # -- the guarantees

    @invariant()
    def never_dropped_while_referred_to(self) -> None:
        """(R1), and with it (R3)."""
        if self.alive or self.travelling:
            assert not self.dropped

    def teardown(self) -> None:
        """(R2) Everybody lets go, every letter arrives in the end: the value is dropped, nothing is left."""
        for _ in range(10_000):
            if self.travelling:
                fork, parent, holder = self.travelling.pop()
                if holder == OWNER:
                    self._carry_out(OWNER, [SendChildAccept(parent, VALUE, fork)])
                else:
                    self.alive[fork] = holder
                    self._carry_out(holder, self.users[holder].import_fork(VALUE, fork, OWNER, parent))
            elif self.alive:
                fork, holder = self.alive.popitem()
                self._carry_out(holder, self.users[holder].release(fork))
            elif self.letters:
                self._deliver(self.letters.pop())
            elif self.unanswered:
                self.letters.extend(sorted(self.unanswered, key=repr))
            elif self.unexpired:
                self._expire(min(self.unexpired))
            else:
                break
        assert not self.owner.forks()
        assert not [u.forks() for u in self.users.values() if len(u)]
        assert not self.unanswered
        assert self.dropped or not self.forks


TestSimulation = Simulation.TestCase


# ---- single steps ----------------------------------------------------------------------------------------


def test_a_fork_deleted_before_it_is_noted_stays_deleted() -> None:
    """Its user gave up on the call that makes the value, and that call runs only now."""
    owner = OwnerForks()
    assert owner.delete(VALUE, 1) == []
    owner.note(VALUE, 1, holder=1)
    assert not owner.knows(VALUE)


def test_a_late_repetition_does_not_revive_a_fork() -> None:
    owner = OwnerForks()
    owner.note(VALUE, 1, 1)
    owner.note(VALUE, 2, 2)
    assert owner.delete(VALUE, 2) == []
    owner.note(VALUE, 2, 2)
    assert owner.delete(VALUE, 1) == [DropValue(VALUE)]


def test_what_is_remembered_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(protocol, "MIN_RECENT_FORKS", 10)
    owner = OwnerForks()
    owner.note(VALUE, 0, 1)
    for fork in range(1, 100):
        owner.note(VALUE, fork, 1)
        assert owner.delete(VALUE, fork) == []
        for late in range(max(1, fork - 9), fork + 1):
            owner.note(VALUE, late, 1)
        assert owner.forks() == {VALUE: {0: 1}}, "the last ten are not brought back by a late message"
    owner.note(VALUE, 1, 1)
    assert owner.forks() == {VALUE: {0: 1, 1: 1}}, "the oldest are forgotten"


@pytest.mark.parametrize("spread", [1, 3, 1 << 50])
def test_remembered_numbers_are_the_last_ones(spread: int) -> None:
    """The oracle is a list of all; numbers are near each other, or far apart."""
    draw = random.Random(spread)
    remembered, added = RecentIds(50), list[int]()
    for _ in range(2000):
        number = draw.randrange(300) * spread
        if draw.random() < 0.2:
            remembered.discard(number)
            added = [n for n in added if n != number]
        else:
            remembered.add(number)
            added.append(number)
        assert number not in remembered or number in added
        latest = list(dict.fromkeys(reversed(added)))[:40]
        assert all(n in remembered for n in latest)
        assert len(remembered) <= 100
    assert -1 not in remembered


def test_a_user_that_is_asked_for_its_own_value_is_told_at_birth() -> None:
    user = UserForks()
    user.create(VALUE, 1, OWNER)
    assert user.release(1) == [], "the owner may not know of it yet"
    assert user.confirm(1) == [SendDelete(OWNER, VALUE, 1)]
    assert user.confirm(1) == []
    assert len(user) == 1, "until the owner has answered"
    user.deleted(1)
    assert len(user) == 0


def test_a_parent_outlives_the_journey_of_its_child() -> None:
    parent, child = UserForks(), UserForks()
    parent.import_fork(VALUE, 1, OWNER, OWNER)
    parent.fork(1, 2, holder=2)
    assert parent.release(1) == []
    assert child.import_fork(VALUE, 2, OWNER, parent=1) == [SendForkRequest(OWNER, VALUE, 2)]
    assert child.import_fork(VALUE, 2, OWNER, parent=1) == []
    assert child.confirm(2) == [SendChildAccept(1, VALUE, 2)]
    assert parent.child_accepted(2) == [SendDelete(OWNER, VALUE, 1)]
    assert parent.child_accepted(2) == []


def test_the_fork_of_a_lost_parent_stays_until_its_child_has_registered() -> None:
    """0 -> 2 -> 3: worker 2 dies while the request of worker 3 is in flight."""
    owner = OwnerForks()
    owner.note(VALUE, 1, holder=2)
    owner.note(VALUE, 2, holder=3)
    assert owner.expire(2) == []
    assert owner.delete(VALUE, 2) == [DropValue(VALUE)]


def test_a_child_sent_to_a_lost_worker_keeps_its_parent_until_grandchildren_have_registered() -> None:
    """0 -> 1 -> 2 -> 3: worker 2 dies unknown to the owner, so only worker 1 keeps the value for worker 3."""
    user = UserForks()
    user.import_fork(VALUE, 1, OWNER, OWNER)
    user.fork(1, 2, holder=2)
    assert user.release(1) == []
    user.lose(2)
    assert len(user) == 1
    assert user.expire(2) == [SendDelete(OWNER, VALUE, 1)]


def test_a_parent_is_told_of_a_child_that_has_lost_the_owner_once_grandchildren_have_registered() -> None:
    """0 -> 1 -> 2 -> 3: worker 2 loses the owner, which lives on for the others."""
    user = UserForks()
    user.import_fork(VALUE, 2, OWNER, parent=1)
    user.fork(2, 3, holder=3)
    user.lose(OWNER)
    assert not user.holds(2)
    assert user.expire(OWNER) == [SendChildAccept(1, VALUE, 2)]
    assert user.expire(OWNER) == []


def test_a_child_is_accepted_by_its_holder_or_the_owner_alone() -> None:
    """Else its parent would be deleted before the owner knows of it."""
    for holder_or_owner in (3, OWNER):
        forks = UserForks()
        forks.create(VALUE, 1, OWNER)
        forks.fork(1, 2, 3)
        assert forks.confirm(1) == forks.release(1) == forks.child_accepted(2, 4) == []
        assert forks.child_accepted(2, holder_or_owner) == [SendDelete(OWNER, VALUE, 1)]
