"""The owner's side of RRefs: which values stay, and for how long, whatever comes first."""

from __future__ import annotations

import pytest

from zmqgrad.errors import RpcTimeoutError, RRefError
from zmqgrad.rpc.rref.protocol import DropValue
from zmqgrad.rpc.rref.values import OwnedValues
from zmqgrad.wire.ids import join_id

pytestmark = pytest.mark.open_outcomes  # of values whose makers never come

MAKER, OTHER = 1, 2
VALUE = join_id(MAKER, 7)
FORK, CHILD = join_id(MAKER, 8), join_id(OTHER, 1)


def lost(value: int) -> RuntimeError:
    return RuntimeError(f"lost: {value}")


@pytest.fixture
def values() -> OwnedValues:
    return OwnedValues("owner")


def test_who_asks_early_gets_what_the_call_will_set(values: OwnedValues) -> None:
    early = values.find(VALUE)
    made = values.create_pending(MAKER, VALUE, FORK)
    assert made is early
    made.set_result("it")
    assert values.value(VALUE, timeout=0.0) == "it"


def test_what_is_not_made_in_time_is_said_so(values: OwnedValues) -> None:
    with pytest.raises(RpcTimeoutError, match="was not made within it"):
        values.value(VALUE, timeout=0.0)


def test_a_value_goes_with_its_last_fork_and_is_known_to_be_gone(values: OwnedValues) -> None:
    made = values.create_pending(MAKER, VALUE, FORK)
    made.set_result("it")
    values.note(VALUE, CHILD, OTHER)
    assert values.delete([(VALUE, FORK)]) == []
    assert values.delete([(VALUE, CHILD)]) == [DropValue(VALUE)]
    assert values.drop(VALUE) is made
    with pytest.raises(RRefError, match="nothing referred to it"):
        values.find(VALUE)


def test_a_value_without_forks_that_is_being_made_goes_once_it_is_made(values: OwnedValues) -> None:
    made = values.create_pending(MAKER, VALUE, FORK)
    assert values.delete([(VALUE, FORK)]) == [DropValue(VALUE)]
    assert values.drop(VALUE) is None
    made.set_result("it")
    values.value_ready(VALUE)
    assert values.statistics() == {"owner_rrefs": 0, "forks": 0}
    with pytest.raises(RRefError, match="nothing referred to it"):
        values.find(VALUE)


def test_closing_settles_who_waits_for_a_value_without_forks(values: OwnedValues) -> None:
    made = values.create_pending(MAKER, VALUE, FORK)
    assert values.delete([(VALUE, FORK)]) == [DropValue(VALUE)]
    assert values.drop(VALUE) is None
    values.close()
    assert isinstance(made.exception(), RRefError)


def test_a_value_whose_makers_call_is_yet_to_come_is_not_dropped(values: OwnedValues) -> None:
    values.note(VALUE, CHILD, OTHER)
    assert values.delete([(VALUE, CHILD)]) == [DropValue(VALUE)]
    assert values.drop(VALUE) is None
    assert not values.create_pending(MAKER, VALUE, FORK).done()


def test_a_fork_that_was_lent_again_keeps_the_value(values: OwnedValues) -> None:
    made = values.create_pending(MAKER, VALUE, FORK)
    dropped = values.delete([(VALUE, FORK)])
    assert values.share(VALUE, made, join_id(0, 1), OTHER)
    assert dropped == [DropValue(VALUE)]
    assert values.drop(VALUE) is None


def test_the_lost_take_their_forks_along_and_get_no_more(values: OwnedValues) -> None:
    made = values.create_pending(MAKER, VALUE, FORK)
    values.lose(MAKER, lost)
    assert not values.share(VALUE, made, join_id(0, 1), MAKER)
    assert values.statistics() == {"owner_rrefs": 1, "forks": 0}, "a child of its fork may still register"
    assert values.expire(MAKER) == [DropValue(VALUE)]


def test_what_the_lost_should_have_made_is_orphaned(values: OwnedValues) -> None:
    asked = values.find(VALUE)
    values.lose(MAKER, lost)
    assert str(asked.exception()) == f"lost: {VALUE}"
    assert values.statistics() == {"owner_rrefs": 0, "forks": 0}


def test_what_the_lost_should_have_made_fails_also_who_asks_later(values: OwnedValues) -> None:
    values.lose(MAKER, lost)
    for promise in (values.find(VALUE), values.find(VALUE)):
        assert str(promise.exception()) == f"lost: {VALUE}"
    assert values.statistics() == {"owner_rrefs": 0, "forks": 0}
    values.note(VALUE, CHILD, OTHER)
    assert values.find(VALUE).done()
    assert values.delete([(VALUE, CHILD)]) == [DropValue(VALUE)]


def test_a_call_that_has_arrived_makes_its_value_though_its_maker_is_lost(values: OwnedValues) -> None:
    """It runs late. A child of the maker's fork may register until the grace time is over."""
    values.lose(MAKER, lost)
    made = values.create_pending(MAKER, VALUE, FORK)
    made.set_result("it")
    values.value_ready(VALUE)
    values.note(VALUE, CHILD, OTHER)
    assert values.value(VALUE, timeout=0.0) == "it"
    assert values.expire(MAKER) == []
    assert values.delete([(VALUE, CHILD)]) == [DropValue(VALUE)]


def test_after_the_grace_time_a_fork_of_the_lost_keeps_nothing(values: OwnedValues) -> None:
    values.lose(MAKER, lost)
    values.expire(MAKER)
    values.create_pending(MAKER, VALUE, FORK).set_result("it")
    values.value_ready(VALUE)
    assert values.statistics() == {"owner_rrefs": 0, "forks": 0}


def test_closing_settles_whoever_waits_and_makes_nothing_anew(values: OwnedValues) -> None:
    asked = values.find(VALUE)
    values.close()
    assert isinstance(asked.exception(), RRefError)
    with pytest.raises(RRefError, match="was shut down"):
        values.find(VALUE)


def test_a_fork_that_registers_during_close_leaves_no_value_that_nobody_sets(values: OwnedValues) -> None:
    values.create_pending(MAKER, VALUE, FORK)
    values.close()
    values.note(VALUE, CHILD, OTHER)
    assert values.statistics() == {"owner_rrefs": 0, "forks": 0}
    with pytest.raises(RRefError, match="was shut down"):
        values.find(VALUE)


def test_the_last_fork_of_a_value_may_go_while_its_maker_is_lost(values: OwnedValues) -> None:
    """In another thread, between the errors of two values that wait for calls of that worker."""
    forks = {join_id(MAKER, n): join_id(OTHER, n) for n in (1, 2)}
    deleted: list[int] = []

    def delete_all(_: object) -> None:
        for effect in values.delete(forks.items()):
            assert isinstance(effect, DropValue)
            deleted.append(effect.rref_id)
            values.drop(effect.rref_id)

    for value, fork in forks.items():
        values.note(value, fork, OTHER)
        values.find(value).add_done_callback(delete_all)
    values.lose(MAKER, lost)
    assert deleted == list(forks)
    assert values.statistics() == {"owner_rrefs": 0, "forks": 0}
