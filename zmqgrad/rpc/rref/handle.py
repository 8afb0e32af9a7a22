"""The state of an RRef: ids, the owner, and on the owner the promise that holds the value.

A handle can outlive its RRef, because a pending call holds the handle as well. When nothing holds the handle
any more, the owner is notified that the reference is deleted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zmqgrad.rpc.futures import PythonFuture
from zmqgrad.rpc.serialization.context import SerializedByReference
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Inbound

if TYPE_CHECKING:
    from zmqgrad.rpc.rref.table import ReferenceTable


class Handle(SerializedByReference):
    """One reference to value ``rref_id`` of worker ``owner``.

    ``fork_id`` is 0 on the owner, whose own references are not counted as forks.
    """

    __slots__ = (
        "__weakref__",
        "creation",
        "fork_id",
        "owner",
        "promise",
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
        promise: Promise[Any] | None = None,
        type_name: str = "",
    ) -> None:
        self.table = table
        self.rref_id = rref_id
        self.fork_id = fork_id
        self.owner = owner
        self.promise = promise  # on the owner: the value; on a user: None unless creation failed
        self.type_name = type_name
        self.value_type: PythonFuture[Any] | None = None  # once requested
        self.creation: Promise[Inbound] | None = None  # the owner's reply, if this worker requested the value

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Bound as a default: while the interpreter ends, the globals of modules become None one by one. No
        # thread could send the release any more; the owner drops the fork when it misses this process.
        if self.fork_id and not is_finalizing():
            self.table.enqueue_release(self.fork_id)
