"""The state that all nodes of a rendezvous share, and its form in the backend: JSON.

The state contains no time of any clock. A heartbeat is a counter that its node increments, and a deadline is
the number of a last call; how long ago either changed, each node measures by its own monotonic clock
(:mod:`~zmqgrad.elastic.observer`). So clocks that disagree or jump affect nothing.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from dataclasses import dataclass, field
from typing import get_type_hints

import msgspec

from zmqgrad.errors import RendezvousStateError

VERSION = 4
"""Of the encoding. A state of another version is refused."""


class NodeDesc(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A node: an agent process.

    Args:
        fqdn: the name of its host.
        pid: its process id.
        local_id: tells the handlers of one process apart, and processes of one id in several containers.
    """

    fqdn: str
    pid: int
    local_id: int

    def __str__(self) -> str:
        return f"{self.fqdn}_{self.pid}_{self.local_id}"


@dataclass
class RendezvousState:
    """The shared state.

    Attributes:
        round: number of the current round.
        complete: whether the participants of this round are final.
        closed: whether no further round will begin. Never reset.
        retired: whether the process that serves the state stops to, as no node uses it. Never reset.
        deadline: number of the last call that is running; None if no participant can complete the round yet.
        last_calls: number of last calls so far.
        participants: the nodes of this round. Their ranks are valid once it is complete.
        wait_list: nodes in line for the next round. Those of the round that ended come first, then the others
            in the order in which they came. Those beyond ``max_nodes`` are spares.
        last_heartbeats: the number of the last heartbeat of each participant and waiting node.
        completed_ranks: the ranks of all nodes of the last round that was completed, also of those that have
            left since. The nodes of that round agree on it, and keep their ranks where possible.
        store_address: ``host:port`` of the store that rank 0 serves for the completed round; empty: none yet.
        settings: the :attr:`~zmqgrad.elastic.RendezvousSettings.agreement` of the nodes; empty: none yet.
        heartbeats: number of heartbeats so far. No number is used twice, not even by a node that was removed
            and came back: an observer that missed both must not take its new heartbeat for the old one.
        creator: the node that wrote the first state. A state of another one is not what became of this one.
    """

    round: int = 0
    complete: bool = False
    closed: bool = False
    retired: bool = False
    deadline: int | None = None
    last_calls: int = 0
    participants: dict[NodeDesc, int] = field(default_factory=dict)
    wait_list: list[NodeDesc] = field(default_factory=list)
    last_heartbeats: dict[NodeDesc, int] = field(default_factory=dict)
    completed_ranks: dict[NodeDesc, int] = field(default_factory=dict)
    store_address: str = ""
    settings: str = ""
    heartbeats: int = 0
    creator: str = ""


_TYPES = get_type_hints(RendezvousState)
_BY_NODE = [name for name, kind in _TYPES.items() if kind == dict[NodeDesc, int]]

_Encoded = msgspec.defstruct(
    "_Encoded",
    {"version": int, **_TYPES, **dict.fromkeys(_BY_NODE, list[tuple[NodeDesc, int]])}.items(),
    forbid_unknown_fields=True,
)
"""The JSON form: an object whose keys are strings; what has no order is sorted."""


class _Version(msgspec.Struct):
    version: int


def encode(state: RendezvousState) -> bytes:
    """Encode ``state``. Equal states have equal encodings."""
    fields = {
        name: sorted(value.items()) if isinstance(value, dict) else value
        for name, value in vars(state).items()
    }
    return msgspec.json.encode({"version": VERSION, **fields})


def decode(data: bytes) -> RendezvousState:
    """Decode what :func:`encode` returned.

    Raises:
        RendezvousStateError: if it is malformed, or was written by another version.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            raise RendezvousStateError(
                f"the state of the rendezvous has version {version}, not {VERSION}: all nodes must run "
                f"the same version of zmqgrad"
            )
        encoded = msgspec.json.decode(data, type=_Encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise RendezvousStateError(f"the state of the rendezvous is malformed: {e}") from e
    fields = msgspec.structs.asdict(encoded)
    del fields["version"]
    for name in _BY_NODE:
        fields[name] = dict(fields[name])
    return RendezvousState(**fields)


_local_ids = itertools.count(secrets.randbits(31))
"""From a number of its own for each process: two containers of one host may have its name, and process 1."""


def new_node(local_addr: str | None = None) -> NodeDesc:
    """Returns a descriptor that is new in this process. ``local_addr``: its host, if its name is of no use.

    Without DNS the full name of many hosts is localhost, which tells no two of them apart.
    """
    name = local_addr or socket.getfqdn()
    if name.partition(".")[0].startswith("localhost") and not local_addr:
        name = socket.gethostname()
    return NodeDesc(name, os.getpid(), next(_local_ids))
