"""What an RRef is made of: ids, the owner, and on the owner the outcome that holds the value.

It can outlive the RRef that users see: a call on its way holds the handle as well. The owner is told that the
reference is gone when nothing holds it any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zmqgrad.rpc.futures import PythonFuture
from zmqgrad.rpc.packing.terms import TravelsAsReference
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Inbound

if TYPE_CHECKING:
    from zmqgrad.rpc.references.table import ReferenceTable


class Handle(TravelsAsReference):
    """One reference to value ``rref_id`` of worker ``owner``.

    ``fork_id`` is 0 on the owner, who needs nobody's leave to keep what it has.
    """

    __slots__ = (
        "__weakref__",
        "creation",
        "fork_id",
        "outcome",
        "owner",
        "rref_id",
        "table",
        "type_name",
        "value_type",
    )

    def __init__(
        self,
        table: ReferenceTable,
        rref_id: int,
        fork_id: int,
        owner: int,
        outcome: Promise[Any] | None = None,
        type_name: str = "",
    ) -> None:
        self.table = table
        self.rref_id = rref_id
        self.fork_id = fork_id
        self.owner = owner
        self.outcome = outcome  # on the owner: the value; on a user: None until creating it failed
        self.type_name = type_name
        self.value_type: PythonFuture[Any] | None = None  # once it was asked for
        self.creation: Promise[Inbound] | None = None  # the owner's answer, where this worker had it made

    def __del__(self) -> None:
        if self.fork_id:
            self.table.release_later(self.fork_id)
