"""What each operator decides, and what each action changes: one test per sentence of the description."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from zmqgrad.elastic.observer import Observer
from zmqgrad.elastic.operators import (
    ROLLBACK_SECONDS,
    Action,
    Context,
    close,
    exit_round,
    join,
    joining,
    keep_alive,
    retire,
    return_to_line,
    spares,
)
from zmqgrad.elastic.settings import RendezvousSettings, RendezvousTimeout
from zmqgrad.elastic.state import NodeDesc, RendezvousState, decode, encode, new_node
from zmqgrad.elastic.transitions import apply, assign_ranks, num_admissible, remove
from zmqgrad.errors import ConfigurationError, RendezvousStateError

A, B, C, D, E = (NodeDesc(f"host{n}", 10, 0) for n in range(5))
SETTINGS = RendezvousSettings("job", 2, 3, RendezvousTimeout(join=60, last_call=10), 5.0, 3)
DEADLINE = 100.0


def known_to(
    node: NodeDesc, state: RendezvousState, now: float = 0.0, age: float = 0.0, last_call: float = 0.0
) -> Context:
    return Context(node, state, SETTINGS, now, age, last_call)


def gathering(*nodes: NodeDesc) -> RendezvousState:
    """A round that ``nodes`` have joined."""
    state = RendezvousState()
    for node in nodes:
        apply(Action.ADD_TO_PARTICIPANTS, state, node, SETTINGS)
    return state


def complete(*nodes: NodeDesc) -> RendezvousState:
    state = gathering(*nodes)
    apply(Action.MARK_RENDEZVOUS_COMPLETE, state, nodes[0], SETTINGS)
    return state


# ---- join -------------------------------------------------------------------------------------------------


def test_join_adds_the_node_to_an_open_round() -> None:
    assert join(known_to(A, RendezvousState()), DEADLINE) is Action.ADD_TO_PARTICIPANTS


def test_join_waits_for_enough_nodes_and_then_for_the_last_call() -> None:
    assert join(known_to(A, gathering(A)), DEADLINE) is Action.SYNC
    assert join(known_to(A, gathering(A, B), last_call=9.9), DEADLINE) is Action.SYNC
    assert join(known_to(A, gathering(A, B), last_call=10.0), DEADLINE) is Action.MARK_RENDEZVOUS_COMPLETE
    assert join(known_to(A, gathering(A), last_call=10.0), DEADLINE) is Action.SYNC


def test_a_round_is_not_completed_without_a_node_that_has_a_place_in_it() -> None:
    """A node that returns is in line until it sees that the round is open."""
    state = gathering(A, B)
    state.wait_list.append(C)
    assert join(known_to(A, state, last_call=10.0), DEADLINE) is Action.SYNC
    assert join(known_to(C, state, last_call=10.0), DEADLINE) is Action.ADD_TO_PARTICIPANTS
    remove(state, [C], SETTINGS)
    assert join(known_to(A, state, last_call=10.0), DEADLINE) is Action.MARK_RENDEZVOUS_COMPLETE


def test_join_keeps_its_node_alive_while_it_waits() -> None:
    assert join(known_to(A, gathering(A), age=5.0), DEADLINE) is Action.KEEP_ALIVE
    waiting = complete(A, B)
    apply(Action.ADD_TO_WAIT_LIST, waiting, C, SETTINGS)
    assert join(known_to(C, waiting, age=5.0), DEADLINE) is Action.KEEP_ALIVE


def test_join_finishes_in_a_complete_round() -> None:
    assert join(known_to(A, complete(A, B)), DEADLINE) is Action.FINISH
    assert join(known_to(A, complete(A, B), now=DEADLINE + 1), DEADLINE) is Action.FINISH


def test_join_waits_for_the_next_round_if_this_one_has_room() -> None:
    state = complete(A, B)
    assert join(known_to(C, state), DEADLINE) is Action.ADD_TO_WAIT_LIST
    apply(Action.ADD_TO_WAIT_LIST, state, C, SETTINGS)
    assert join(known_to(C, state), DEADLINE) is Action.SYNC


def test_join_waits_as_a_spare_if_the_round_is_full() -> None:
    state = complete(A, B, C)
    assert join(known_to(D, state, age=math.inf), DEADLINE) is Action.ADD_TO_WAIT_LIST
    apply(Action.ADD_TO_WAIT_LIST, state, D, SETTINGS)
    assert spares(state, SETTINGS) == [D]
    assert join(known_to(D, state), DEADLINE) is Action.SYNC


def test_no_time_passes_while_a_node_is_a_spare() -> None:
    state = complete(A, B, C)
    apply(Action.ADD_TO_WAIT_LIST, state, D, SETTINGS)
    operator, later = joining(), 1000 * DEADLINE
    assert operator(known_to(D, state, now=later), DEADLINE) is Action.SYNC
    apply(Action.REMOVE_FROM_PARTICIPANTS, state, B, SETTINGS)
    join_timeout = SETTINGS.timeout.join
    assert operator(known_to(D, state, now=later + join_timeout), DEADLINE) is Action.SYNC
    late = known_to(D, state, now=later + join_timeout + 0.1)
    assert operator(late, DEADLINE) is Action.REMOVE_FROM_WAIT_LIST


def test_a_spare_takes_the_place_and_the_rank_of_a_lost_node_and_displaces_no_other() -> None:
    """It is the first that looks at the open round, before those which have only left it to come back."""
    state = complete(A, B, C)
    for spare in (D, E):
        apply(Action.ADD_TO_WAIT_LIST, state, spare, SETTINGS)
    remove(state, [B], SETTINGS)  # it died
    assert num_admissible(state, SETTINGS) == 1
    assert spares(state, SETTINGS) == [E]
    for member in (A, C):
        assert return_to_line(known_to(member, state), DEADLINE) is Action.MOVE_TO_WAIT_LIST
        apply(Action.MOVE_TO_WAIT_LIST, state, member, SETTINGS)
    assert (state.round, state.complete) == (1, False)
    assert spares(state, SETTINGS) == [E]
    assert join(known_to(E, state), DEADLINE) is Action.SYNC
    for node in (D, C, A):
        assert join(known_to(node, state), DEADLINE) is Action.ADD_TO_PARTICIPANTS
        apply(Action.ADD_TO_PARTICIPANTS, state, node, SETTINGS)
        assert join(known_to(E, state), DEADLINE) is Action.SYNC
    assert state.complete
    assert state.participants == {A: 0, D: 1, C: 2}
    assert state.wait_list == [E]


def test_a_node_that_leaves_a_round_for_good_does_not_wait_for_the_next() -> None:
    state = complete(A, B)
    assert return_to_line(known_to(C, state), DEADLINE) is Action.FINISH
    assert return_to_line(known_to(A, gathering(A)), DEADLINE) is Action.FINISH, "it is in the next one"
    assert return_to_line(known_to(A, state, now=DEADLINE + 1), DEADLINE) is Action.ERROR_TIMEOUT
    apply(Action.ADD_TO_WAIT_LIST, state, C, SETTINGS)
    assert exit_round(known_to(C, state), DEADLINE) is Action.REMOVE_FROM_WAIT_LIST


def test_a_spare_was_not_needed_if_the_job_ends() -> None:
    state = complete(A, B, C)
    apply(Action.ADD_TO_WAIT_LIST, state, D, SETTINGS)
    apply(Action.MOVE_TO_WAIT_LIST, state, A, SETTINGS)
    apply(Action.MARK_RENDEZVOUS_CLOSED, state, B, SETTINGS)
    assert join(known_to(D, state), DEADLINE) is Action.ERROR_NOT_NEEDED
    for node in (A, E):
        assert join(known_to(node, state), DEADLINE) is Action.ERROR_CLOSED


def test_join_of_a_closed_rendezvous_fails() -> None:
    state = complete(A, B)
    apply(Action.MARK_RENDEZVOUS_CLOSED, state, A, SETTINGS)
    for node in (A, C):
        assert join(known_to(node, state), DEADLINE) is Action.ERROR_CLOSED


def test_join_rolls_back_for_a_while_after_its_deadline() -> None:
    late = DEADLINE + 1
    assert join(known_to(A, gathering(A), now=late), DEADLINE) is Action.REMOVE_FROM_PARTICIPANTS
    state = complete(A, B)
    apply(Action.ADD_TO_WAIT_LIST, state, C, SETTINGS)
    assert join(known_to(C, state, now=late), DEADLINE) is Action.REMOVE_FROM_WAIT_LIST
    assert join(known_to(D, state, now=late), DEADLINE) is Action.ERROR_TIMEOUT
    too_late = DEADLINE + ROLLBACK_SECONDS + 0.1
    assert join(known_to(A, gathering(A), now=too_late), DEADLINE) is Action.ERROR_TIMEOUT


# ---- exit, close, keep-alive -----------------------------------------------------------------------------


def test_exit_removes_a_participant() -> None:
    assert exit_round(known_to(A, complete(A, B)), DEADLINE) is Action.REMOVE_FROM_PARTICIPANTS
    assert exit_round(known_to(C, complete(A, B)), DEADLINE) is Action.FINISH
    assert exit_round(known_to(A, complete(A, B), now=DEADLINE + 1), DEADLINE) is Action.ERROR_TIMEOUT


def test_close_marks_the_rendezvous_as_closed() -> None:
    state = complete(A, B)
    assert close(known_to(C, state), DEADLINE) is Action.MARK_RENDEZVOUS_CLOSED
    assert close(known_to(C, state, now=DEADLINE + 1), DEADLINE) is Action.ERROR_TIMEOUT
    apply(Action.MARK_RENDEZVOUS_CLOSED, state, A, SETTINGS)
    assert close(known_to(C, state, now=DEADLINE + 1), DEADLINE) is Action.FINISH


def test_a_state_that_no_other_node_uses_is_retired() -> None:
    state = gathering(A)
    assert retire(known_to(B, state), DEADLINE) is Action.FINISH
    apply(Action.REMOVE_FROM_PARTICIPANTS, state, A, SETTINGS)
    assert retire(known_to(B, state), DEADLINE) is Action.MARK_RETIRED
    assert retire(known_to(B, state, now=DEADLINE + 1), DEADLINE) is Action.ERROR_TIMEOUT
    apply(Action.MARK_RETIRED, state, B, SETTINGS)
    assert retire(known_to(B, state), DEADLINE) is Action.FINISH
    assert join(known_to(A, state), DEADLINE) is Action.ERROR_CLOSED


def test_keep_alive_renews_a_heartbeat_that_is_due() -> None:
    assert keep_alive(known_to(A, complete(A, B), age=5.0), DEADLINE) is Action.KEEP_ALIVE
    assert keep_alive(known_to(A, complete(A, B), age=4.9), DEADLINE) is Action.FINISH
    assert keep_alive(known_to(C, complete(A, B), age=math.inf), DEADLINE) is Action.FINISH
    late = known_to(A, complete(A, B), age=5.0, now=DEADLINE + 1)
    assert keep_alive(late, DEADLINE) is Action.ERROR_TIMEOUT


# ---- transitions ------------------------------------------------------------------------------------------


def test_a_round_is_complete_with_the_maximum_of_nodes() -> None:
    state = gathering(A, B)
    assert (state.complete, state.deadline) == (False, 1)
    apply(Action.ADD_TO_PARTICIPANTS, state, C, SETTINGS)
    assert (state.complete, state.deadline) == (True, None)
    assert state.participants == state.completed_ranks == {A: 0, B: 1, C: 2}


def test_a_last_call_ends_when_too_few_nodes_remain_and_the_next_is_another() -> None:
    state = gathering(A, B)
    apply(Action.REMOVE_FROM_PARTICIPANTS, state, B, SETTINGS)
    assert state.deadline is None
    apply(Action.ADD_TO_PARTICIPANTS, state, B, SETTINGS)
    assert state.deadline == 2


def test_the_next_round_opens_when_the_last_participant_has_left() -> None:
    state = complete(A, B)
    apply(Action.ADD_TO_WAIT_LIST, state, C, SETTINGS)
    apply(Action.REMOVE_FROM_PARTICIPANTS, state, A, SETTINGS)
    assert (state.round, state.complete) == (0, True)
    assert state.completed_ranks == {A: 0, B: 1}, "what the round agreed on does not change"
    apply(Action.REMOVE_FROM_PARTICIPANTS, state, B, SETTINGS)
    assert (state.round, state.complete) == (1, False)
    assert join(known_to(C, state), DEADLINE) is Action.ADD_TO_PARTICIPANTS
    apply(Action.ADD_TO_PARTICIPANTS, state, C, SETTINGS)
    assert state.wait_list == []


def test_a_node_that_left_the_wait_list_has_no_heartbeat() -> None:
    state = complete(A, B)
    apply(Action.ADD_TO_WAIT_LIST, state, C, SETTINGS)
    apply(Action.KEEP_ALIVE, state, C, SETTINGS)
    heartbeat = state.last_heartbeats[C]
    apply(Action.REMOVE_FROM_WAIT_LIST, state, C, SETTINGS)
    assert (state.wait_list, C in state.last_heartbeats) == ([], False)
    apply(Action.ADD_TO_WAIT_LIST, state, C, SETTINGS)
    assert state.last_heartbeats[C] > heartbeat, "one that missed both sees a new heartbeat"


def test_a_full_group_is_not_disturbed_by_nodes_that_wait() -> None:
    state = complete(A, B)
    assert num_admissible(state, SETTINGS) == 0
    for node in (C, D):
        apply(Action.ADD_TO_WAIT_LIST, state, node, SETTINGS)
    assert num_admissible(state, SETTINGS) == 1
    full = complete(A, B, C)
    full.wait_list.append(D)
    assert num_admissible(full, SETTINGS) == 0


@pytest.mark.parametrize(
    ("nodes", "previous", "ranks"),
    [
        ([C, A, B], {}, {A: 0, B: 1, C: 2}),
        ([A, B, C], {A: 2, B: 1, C: 0}, {A: 2, B: 1, C: 0}),
        ([A, C, D], {A: 2, B: 1, C: 0}, {A: 2, C: 0, D: 1}),
        ([A, B], {A: 3, B: 1, C: 0, D: 2}, {A: 0, B: 1}),
        ([A, B, D], {A: 3, B: 4, C: 0}, {D: 0, A: 1, B: 2}),
    ],
)
def test_a_living_node_keeps_its_rank_and_newcomers_fill_the_holes(
    nodes: list[NodeDesc], previous: dict[NodeDesc, int], ranks: dict[NodeDesc, int]
) -> None:
    assert assign_ranks(nodes, previous) == ranks


def test_a_node_that_was_declared_dead_lives_again_with_its_next_heartbeat() -> None:
    state, observer = complete(A, B), Observer()
    observer.observe(state, 0.0)
    observer.declare_dead(B)
    observer.declare_dead(C)
    assert observer.dead(SETTINGS, 0.0) == [B]
    apply(Action.KEEP_ALIVE, state, A, SETTINGS)
    observer.observe(state, 1.0)
    assert observer.dead(SETTINGS, 1.0) == [B]
    apply(Action.KEEP_ALIVE, state, B, SETTINGS)
    observer.observe(state, 2.0)
    assert observer.dead(SETTINGS, 2.0) == []


# ---- encoding and settings --------------------------------------------------------------------------------


def test_a_state_is_json_and_equal_states_have_equal_bytes() -> None:
    state = complete(B, A)
    apply(Action.ADD_TO_WAIT_LIST, state, C, SETTINGS)
    assert decode(encode(state)) == state
    shuffled = decode(encode(state))
    shuffled.participants = dict(reversed(state.participants.items()))
    shuffled.last_heartbeats = dict(reversed(state.last_heartbeats.items()))
    assert encode(shuffled) == encode(state) != encode(complete(B, A))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "malformed"),
        (b"\x80\x04pickle", "malformed"),
        (b"[]", "malformed"),
        (b'{"version": 4}', "malformed"),
        (b'{"version": 1}', "has version 1, not 4: all nodes must run the same"),
        (b'{"version": 5, "more": 1}', "has version 5, not 4: all nodes must run the same"),
        (encode(RendezvousState()).replace(b'"round":0', b'"round":"0"'), "malformed"),
        (encode(RendezvousState())[:-1] + b',"other":1}', "malformed"),
    ],
)
def test_what_is_not_a_state_is_refused(data: bytes, what: str) -> None:
    with pytest.raises(RendezvousStateError, match=what):
        decode(data)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"run_id": ""}, "run id"),
        ({"min_nodes": 0}, "min_nodes is 0; it must be an integer, at least 1"),
        ({"max_nodes": 1}, "max_nodes is 1; it must be an integer, at least 2"),
        ({"min_nodes": "2"}, "min_nodes is '2'"),
        ({"keep_alive_interval": 0.0}, "keep_alive_interval is 0.0"),
        (
            {"keep_alive_interval": 1e-9},
            "keep_alive_interval is 1e-09; it must be .* at least 0.01",
        ),
        ({"keep_alive_interval": 10**400}, "keep_alive_interval is 1000"),
        ({"keep_alive_max_attempt": 0}, "keep_alive_max_attempt is 0"),
    ],
)
def test_invalid_settings(change: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        RendezvousSettings(**{"run_id": "job", "min_nodes": 2, "max_nodes": 3, **change})  # type: ignore[arg-type]


def test_timeouts_are_positive() -> None:
    for seconds in (0, "1", math.nan):
        with pytest.raises(ConfigurationError, match=f"'last_call' is {seconds!r}"):
            RendezvousTimeout(last_call=seconds)  # type: ignore[arg-type]


def test_a_host_whose_full_name_is_localhost_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without DNS: else the nodes of all hosts had the same name."""
    monkeypatch.setattr("socket.getfqdn", lambda: "localhost.localdomain")
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    assert new_node().fqdn == "node7"


def test_processes_of_one_host_and_one_id_are_two_nodes() -> None:
    """As in two containers with the network of the host: each agent is process 1 there."""
    program = "from zmqgrad.elastic.state import new_node; print(new_node('host').local_id)"
    run = [sys.executable, "-c", program]
    found = {subprocess.run(run, capture_output=True, timeout=100, check=True).stdout for _ in range(2)}
    assert len(found) == 2


def test_descriptors_of_one_process_differ() -> None:
    first, second = new_node(), new_node("10.0.0.1")
    assert first != second
    assert second.fqdn == "10.0.0.1"
    assert sorted([second, first]) == sorted([first, second])
