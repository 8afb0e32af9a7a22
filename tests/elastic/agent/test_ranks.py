"""The ranks that agents compute: against the definition, for any nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.elastic.agent.events import Failure
from zmqgrad.elastic.agent.ranks import NodeInfo, in_order, place
from zmqgrad.errors import RendezvousStateError

infos = st.builds(
    NodeInfo,
    node=st.text(max_size=5),
    role=st.sampled_from(["trainer", "evaluator"]),
    local_world_size=st.integers(1, 5),
    restarts=st.integers(0, 3),
    address=st.sampled_from(["10.0.0.1", "10.0.0.2"]),
    port=st.integers(1, 65535),
    node_rank=st.none() | st.integers(0, 3),
)


@given(nodes=st.lists(infos, min_size=1, max_size=6))
def test_every_rank_is_assigned_once(nodes: list[NodeInfo]) -> None:
    places = [place(nodes, rank, round=7) for rank in range(len(nodes))]
    assert [rank for each in places for rank in each.ranks] == list(range(places[0].world_size))
    for role in {node.role for node in nodes}:
        own = [each for node, each in zip(nodes, places, strict=True) if node.role == role]
        ranks = [each.first_role_rank + i for each in own for i in range(each.local_world_size)]
        assert ranks == list(range(own[0].role_world_size))
    # All agents agree on what is common.
    assert len({(p.world_size, p.num_nodes, p.master_addr, p.master_port, p.restarts) for p in places}) == 1
    assert places[0].restarts == max(node.restarts for node in nodes)
    assert (places[0].master_addr, places[0].master_port) == (nodes[0].address, nodes[0].port)


@given(nodes=st.lists(infos, min_size=1, max_size=4))
def test_fixed_ranks_are_kept_or_refused(nodes: list[NodeInfo]) -> None:
    fixed = [node.node_rank for node in nodes]
    if fixed == [None] * len(nodes):
        assert in_order(nodes) == nodes
    elif set(fixed) == set(range(len(nodes))):
        assert [node.node_rank for node in in_order(nodes)] == list(range(len(nodes)))
    else:
        with pytest.raises(RendezvousStateError, match=r"Give each of the .* nodes another --node-rank"):
            in_order(nodes)


@given(node=infos)
def test_what_is_published_is_read(node: NodeInfo) -> None:
    assert NodeInfo.decode(node.encode().encode()) == node


def test_a_failure_is_read_as_it_was_reported() -> None:
    failure = Failure(3, 1, -9, True, ("Traceback", "ValueError: the reason"))
    assert Failure.decode(failure.encode().encode()) == failure
    assert failure.exit_code == 137


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"node": "a"}', b"\xff"])
def test_malformed_data_names_the_reason(data: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="another version"):
        NodeInfo.decode(data)
    with pytest.raises(RendezvousStateError, match="another version"):
        Failure.decode(data)
