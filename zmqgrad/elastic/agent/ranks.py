"""The ranks of the workers of a round, computed from what each agent publishes. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, TypeVar

from zmqgrad.errors import RendezvousStateError

P = TypeVar("P", bound="Published")


@dataclass(frozen=True)
class Published:
    """What an agent writes to the store of a round, as JSON."""

    def encode(self) -> str:
        """The form in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls: type[P], data: bytes) -> P:
        """Decode what :meth:`encode` returned.

        Raises:
            RendezvousStateError: if it is malformed.
        """
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError, RecursionError) as e:
            raise RendezvousStateError(
                f"an agent of another version takes part in this job: {data[:200]!r} ({e})"
            ) from e


@dataclass(frozen=True)
class NodeInfo(Published):
    """What an agent publishes to the other agents of its round.

    Args:
        node: identifies the agent in all rounds.
        role: of its workers.
        local_world_size: number of its workers.
        restarts: how many restarts of the job this agent knows of.
        address, port: where worker rank 0 listens, if it runs on this node.
        node_rank: fixed rank of this node; None: the rendezvous assigns it.
        watch_port: where the agent listens until it ends; 0: nowhere.
    """

    node: str
    role: str
    local_world_size: int
    restarts: int
    address: str
    port: int
    node_rank: int | None = None
    watch_port: int = 0


class Placement(NamedTuple):
    """The place of one node and its workers in a round."""

    round: int
    node_rank: int
    num_nodes: int
    first_rank: int
    local_world_size: int
    world_size: int
    first_role_rank: int
    role_world_size: int
    master_addr: str
    master_port: int
    restarts: int
    """Restarts of the whole job so far, equal on all nodes."""
    address: str = ""
    """Of this node."""

    @property
    def ranks(self) -> range:
        """The ranks of the workers of this node."""
        return range(self.first_rank, self.first_rank + self.local_world_size)


def in_order(infos: Sequence[NodeInfo]) -> list[NodeInfo]:
    """Order the nodes by their fixed ranks. Without any, returns them as given.

    Raises:
        RendezvousStateError: if the nodes do not have each fixed rank once.
    """
    if all(info.node_rank is None for info in infos):
        return list(infos)
    ordered = sorted(infos, key=lambda info: -1 if info.node_rank is None else info.node_rank)
    if [info.node_rank for info in ordered] != list(range(len(infos))):
        ranks = ", ".join(
            f"{info.node}: {'none' if info.node_rank is None else info.node_rank}" for info in ordered
        )
        raise RendezvousStateError(
            f"the nodes of the job have the fixed ranks {ranks}. Give each of the {len(infos)} nodes another "
            f"--node-rank, from 0 to {len(infos) - 1}, or none of them any"
        )
    return ordered


def place(infos: Sequence[NodeInfo], node_rank: int, round: int) -> Placement:
    """Compute the place of node ``node_rank`` from the information of all nodes, in the order of their ranks.

    Ranks are consecutive on a node. Role ranks count only workers of the same role. The number of restarts is
    the largest one known: failures of several nodes in one round cause one restart.
    """
    own = infos[node_rank]
    before = infos[:node_rank]
    return Placement(
        round=round,
        node_rank=node_rank,
        num_nodes=len(infos),
        first_rank=sum(info.local_world_size for info in before),
        local_world_size=own.local_world_size,
        world_size=sum(info.local_world_size for info in infos),
        first_role_rank=sum(info.local_world_size for info in before if info.role == own.role),
        role_world_size=sum(info.local_world_size for info in infos if info.role == own.role),
        master_addr=infos[0].address,
        master_port=infos[0].port,
        restarts=max(info.restarts for info in infos),
        address=own.address,
    )
