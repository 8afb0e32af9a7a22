"""A rendezvous backend in etcd (version 3.4 or newer), which survives the loss of any host.

The state is the value of one key. A second one is written with it if more than heartbeats changed; the nodes
watch that one. The fencing token is the revision at which the key was last modified; a
write is a transaction that compares it. Reads are linearizable: a member that was cut off from the others
cannot return an old state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zmqgrad.elastic.state_holder import RendezvousBackend, Token
from zmqgrad.errors import ClosedError, RendezvousConnectionError, RendezvousStateError, TransportError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.etcd.cluster import EtcdCluster, EtcdOptions, decode, encode, unchanged

PREFIX, ANNOUNCEMENTS = "zmqgrad/rendezvous/", "zmqgrad/announcements/"
"""Keys of etcd begin with these. The rest is the id of the job."""


class EtcdBackend(RendezvousBackend):
    """Keeps the state under a key of an etcd cluster.

    A request to which a member does not reply is repeated at the next one. That is safe: a transaction
    compares the revision, and what it finds instead is compared with what was to be written.

    Args:
        members: (host, port) of each member; one is enough, more survive the loss of a member.
        run_id: identifies the job.
        options: how to connect.

    Raises:
        ConfigurationError: if ``etcd3gw`` is not installed, or an option is invalid.

    Example:
        >>> backend = EtcdBackend([("etcd0", 2379)], "job")  # doctest: +SKIP
    """

    name = "etcd"

    def __init__(
        self, members: Sequence[tuple[str, int]], run_id: str, options: EtcdOptions | None = None
    ) -> None:
        self._place = f"{PREFIX}{run_id}".encode()
        self._key = encode(self._place)
        self._watched = f"{ANNOUNCEMENTS}{run_id}".encode()
        options = options or EtcdOptions()
        self._timeout = options.timeout
        self._cluster = EtcdCluster(members, options)
        self._seen = 0  # revision of the cluster when the state was last read or written

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._transact({"success": [{"request_range": {"key": self._key}}]})
        return self._found(found)

    def set_state(
        self, state: bytes, token: Token = None, announce: bool = True
    ) -> tuple[bytes, Token, bool] | None:
        if token is not None and type(token) is not int:
            raise RendezvousStateError(f"a token of another backend: {token!r}")
        puts = [{"request_put": {"key": self._key, "value": encode(state)}}]
        if announce:
            puts.append({"request_put": {"key": encode(self._watched), "value": ""}})
        reply = self._transact(
            {
                "compare": [unchanged(self._place, token or 0)],
                "success": puts,
                "failure": [{"request_range": {"key": self._key}}],
            }
        )
        if reply.get("succeeded"):
            return state, self._seen, True
        found = self._found(reply)
        return None if found is None else (*found, found[0] == state)  # the reply to a first try may be lost

    def wait_for_change(self, token: Token, seconds: float) -> bool:
        if token is not None and type(token) is not int:
            raise RendezvousStateError(f"a token of another backend: {token!r}")
        try:
            watch = self._cluster.watch(self._watched, None, self._seen if token is None else token)
            try:
                return any(watch.batches(seconds)) or watch.failed
            finally:
                watch.close()
        except ClosedError:
            return True  # the next read says so
        except TransportError:  # what it was to continue from was dropped; it may be again, at once
            self._cluster.pause()
            return True

    def close(self, in_use: bool = False) -> None:
        self._cluster.close()

    def _found(self, reply: dict[str, Any]) -> tuple[bytes, int] | None:
        kvs = reply["responses"][0]["response_range"].get("kvs")
        return None if not kvs else (decode(kvs[0].get("value")), int(kvs[0]["mod_revision"]))

    def _transact(self, transaction: dict[str, Any]) -> dict[str, Any]:
        try:
            self._seen, reply, _ = self._cluster.transact(transaction, Deadline.after(self._timeout))
        except TransportError as e:
            raise RendezvousConnectionError(str(e)) from e
        return reply
