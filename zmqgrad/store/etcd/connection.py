"""Connection of one :class:`~zmqgrad.store.etcd.store.EtcdStore` to its cluster.

Each query is one transaction around the state machine: it reads at one revision, and writes only if nothing
that it has read has changed since. A blocked query waits for a change of what is missing.
"""

from __future__ import annotations

import logging
import math
import os
import random
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from zmqgrad.errors import ClosedError, StoreError, StoreTimeoutError, TransportError
from zmqgrad.runtime.blocking import blocking_section
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.effects import Reply
from zmqgrad.store.etcd.cluster import (
    INVALID,
    NOT_FOUND,
    OUT_OF_RANGE,
    EtcdCluster,
    EtcdRefusedError,
    EtcdWatch,
    Event,
    after_prefix,
    decode,
    encode,
)
from zmqgrad.store.etcd.contents import (
    MAX_WRITES,
    EtcdContents,
    Layout,
    Stored,
    nested,
    replaced_parts,
)
from zmqgrad.store.state import State
from zmqgrad.store.watch import WatchRegistry
from zmqgrad.store.watch_cache import ChangeNotification
from zmqgrad.store.watch_targets import Prefix, Target, prefix_matches
from zmqgrad.wire.messages import KeyDeleted, KeyUpdated, Message, PrefixChanged, StoreWait

logger = logging.getLogger(__name__)

WATCH_SECONDS = 2.0
"""A watch is made anew after so much silence: a member that was cut off, or stands still, is silent, too."""

CONFLICT_SECONDS = 2e-3
"""Mean pause after the first transaction of a query that failed because another store was faster."""

MAX_CONFLICT_SECONDS = 0.1

LEASE_SECONDS = 3600
"""What a client leaves behind that is killed, the id of its last change, disappears after this time."""

LATE_SECONDS = 1.0
"""Time for a request of a query that has none left: what exists at its deadline can still be read."""

CLOSE_SECONDS = 5.0


class _Client:
    """Numbers the changes that one thread at a time makes, so that a repeated one is recognized."""

    def __init__(self, place: bytes) -> None:
        self.place = place
        self.modified = 0
        """The revision of its last change."""


class EtcdConnection:
    """Safe to use from any thread. You must close it.

    Args:
        name: for threads and log lines.
        cluster: closed with this.
        base: the prefix of all keys of the store in the cluster.
    """

    watches: WatchRegistry
    """The watches of the store. Must be set before :meth:`start_watching`."""

    def __init__(self, name: str, cluster: EtcdCluster, base: bytes) -> None:
        self.name = name
        self.blocked = 0
        """Number of blocked queries."""
        self._cluster = cluster
        self._layout = Layout(base)
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards all below
        self._clients: list[_Client] = []  # which no thread uses now
        self._lease = 0
        self._watching: dict[Target, tuple[EtcdWatch, threading.Thread]] = {}
        self._closed = False

    # ---- queries ----------------------------------------------------------------------------------------

    def request(self, query: Message, deadline: Deadline) -> Message:
        """The reply to ``query``, perhaps a refusal. Blocks as the query requires, until ``deadline``.

        Raises:
            StoreTimeoutError: if no member of the cluster can be used before ``deadline``.
            StoreError: if the cluster refuses, this is closed, or this process is a fork.
        """
        with self._translated():
            state, reply = self._apply(query, deadline)
            if reply is None:
                with self._counted(), blocking_section():
                    reply = self._wait(query, state, deadline)
            return reply

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Errors of the cluster as errors of the store."""
        self._check_open()
        try:
            yield
        except ClosedError as e:
            raise StoreError(f"{self.name} is closed") from e
        except EtcdRefusedError as e:
            raise StoreError(str(e)) from e
        except TransportError as e:
            raise StoreTimeoutError(str(e)) from e

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self.blocked += 1
        try:
            yield
        finally:
            with self._lock:
                self.blocked -= 1

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError(f"{self.name} was opened before a fork: open it again here")
        if self._closed:
            raise StoreError(f"{self.name} is closed")

    def _wait(self, query: Message, state: State, deadline: Deadline) -> Message:
        while True:
            self._await_change(query, state, deadline)
            state, reply = self._apply(query, deadline)
            if reply is not None:
                return reply

    def _await_change(self, query: Message, state: State, deadline: Deadline) -> None:
        """Wait until what ``query`` waits for may exist, or for some seconds."""
        layout = self._layout
        condition: Any = next(iter(state.awaited))
        places: list[bytes] = []
        if isinstance(condition, str):
            start, end = layout.key(condition), None
            places.append(start)
            if type(query) is StoreWait:  # a queue of that name counts as well
                start, end = layout.keys, after_prefix(layout.items)
                places.append(layout.queue(condition))
        else:
            start = layout.queue(condition[1])
            end = after_prefix(start)
            places.append(start)
        watch = self._cluster.watch(start, end, state.revision)
        try:
            for events in watch.batches(min(WATCH_SECONDS, deadline.left())):
                if deadline.passed() or any(_concerns(event, places) for event in events):
                    return
        except EtcdRefusedError as e:
            if e.code != OUT_OF_RANGE:
                raise
        finally:
            watch.close()

    def _apply(self, query: Message, deadline: Deadline) -> tuple[State, Message | None]:
        """Apply ``query`` in one transaction. The reply is None if it blocks, and there is time left."""
        expired = deadline.passed()
        limit = deadline if deadline.left() >= LATE_SECONDS else Deadline.after(LATE_SECONDS)
        pause = CONFLICT_SECONDS
        while True:
            try:
                contents = EtcdContents(self._layout, query, partial(self._read, limit))
                state = State(contents)
                effects = state.apply(query, None, 0.0)
                if not effects and expired:
                    effects = state.expire(math.inf)
                if not contents.changes() or self._commit(contents, limit):
                    return state, next((e.message for e in effects if type(e) is Reply), None)
            except EtcdRefusedError as e:
                if e.code not in (OUT_OF_RANGE, NOT_FOUND):
                    raise
                self._lease = 0  # it has ended, or what was read was dropped
            if limit.passed():
                raise TransportError("others have changed the same keys all the time")
            # Two stores that were in each other's way must not meet again.
            threading.Event().wait(min(random.uniform(0, 2 * pause), limit.left()))
            pause = min(2 * pause, MAX_CONFLICT_SECONDS)

    def _read(
        self, deadline: Deadline, ranges: Sequence[dict[str, Any]], revision: int
    ) -> tuple[int, list[dict[str, Any]]]:
        pinned = {"revision": revision} if revision else {}
        newest, reply = self._cluster.transact(
            {"success": [{"request_range": {**each, **pinned}} for each in ranges]}, deadline
        )
        results = [each["response_range"] for each in reply.get("responses", ())]
        return revision or newest, results

    def _commit(self, contents: EtcdContents, deadline: Deadline) -> bool:
        """Write what the query has changed. Returns False if something that it has read has changed since."""
        if contents.writes() > MAX_WRITES:
            raise EtcdRefusedError(
                f"{contents.writes()} changes in one query (at most {MAX_WRITES}); make several", INVALID
            )
        lease = self._get_lease(deadline)

        def save(number: str, parts: Sequence[bytes]) -> None:
            for index, part in enumerate(parts):  # they stay only if the transaction succeeds
                put = {"key": encode(self._layout.part(number, index)), "value": encode(part), "lease": lease}
                self._cluster.post("/kv/put", put, deadline)

        operations = contents.operations(save)
        with self._lock:
            client = self._clients.pop() if self._clients else self._new_client()
        try:
            return self._commit_as(client, contents.comparisons(), operations, lease, deadline)
        finally:
            with self._lock:
                self._clients.append(client)

    def _new_client(self) -> _Client:
        return _Client(self._layout.client(secrets.token_hex(8)))

    def _commit_as(
        self,
        client: _Client,
        comparisons: list[dict[str, Any]],
        operations: list[dict[str, Any]],
        lease: int,
        deadline: Deadline,
    ) -> bool:
        change = secrets.token_hex(8).encode()
        place = encode(client.place)
        mine = {"key": place, "target": "MOD", "result": "EQUAL", "mod_revision": client.modified}
        _, reply = self._cluster.transact(
            {
                "compare": [mine, *comparisons],
                "success": [
                    {"request_put": {"key": place, "value": encode(change), "lease": lease}},
                    *nested(operations),
                ],
                "failure": [{"request_range": {"key": place}}],
            },
            deadline,
        )
        if reply.get("succeeded"):
            client.modified = int(reply["header"]["revision"])
            self._forget_parts(replaced_parts(self._layout, reply["responses"]), deadline)
            return True
        kvs = reply["responses"][0]["response_range"].get("kvs")
        client.modified = int(kvs[0]["mod_revision"]) if kvs else 0
        return bool(kvs) and decode(kvs[0].get("value")) == change  # the reply to a first try was lost

    def _forget_parts(self, prefixes: list[bytes], deadline: Deadline) -> None:
        for prefix in prefixes:
            try:
                self._cluster.post(
                    "/kv/deleterange",
                    {"key": encode(prefix), "range_end": encode(after_prefix(prefix))},
                    deadline,
                )
            except TransportError as e:  # it only costs room in the cluster
                logger.warning("%s: parts of a replaced value stay in etcd: %s", self.name, e)

    def _get_lease(self, deadline: Deadline) -> int:
        lease = self._lease
        if not lease:
            lease = int(self._cluster.post("/lease/grant", {"TTL": LEASE_SECONDS}, deadline)["ID"])
            self._lease = lease
        return lease

    # ---- watches ----------------------------------------------------------------------------------------

    def start_watching(self, target: Target, revision: int) -> None:
        """Pass on the changes of ``target`` behind ``revision``, unless they are passed on already."""
        with self._lock:
            if self._closed or target in self._watching:
                return
            layout = self._layout
            start = layout.key(target.text if isinstance(target, Prefix) else target)
            end = after_prefix(start) if isinstance(target, Prefix) else None
            watch = self._cluster.watch(start, end, revision)
            thread = threading.Thread(
                target=self._pass_on, args=(target, watch), name=f"{self.name}-watch", daemon=True
            )
            self._watching[target] = watch, thread
            thread.start()

    def _pass_on(self, target: Target, watch: EtcdWatch) -> None:
        try:
            while not watch.closed:
                for events in watch.batches(WATCH_SECONDS):
                    for notification in self._notifications(target, events):
                        self.watches.on_notification(notification)
        except TransportError as e:
            logger.debug("%s: the watch of %r begins anew: %s", self.name, target, e)
            with self._lock:
                if self._watching.get(target, (None,))[0] is watch:
                    del self._watching[target]
            self.watches.on_disconnect()  # registers it again, and so starts another thread
        finally:
            watch.close()

    def _notifications(self, target: Target, events: list[Event]) -> list[ChangeNotification]:
        """What ``events`` are for watches of ``target``. Several of one revision make these read again."""
        seen = len(self._layout.keys)
        if not isinstance(target, Prefix):
            return [
                KeyDeleted(target, revision, 0, None)
                if data is None
                else KeyUpdated(target, revision, 0, None, _short(data))
                for _, data, revision in events
            ]
        found: list[ChangeNotification] = []
        count: dict[int, int] = {}
        for place, _, revision in events:
            if prefix_matches(target.text, place[seen:].decode()):
                count[revision] = count.get(revision, 0) + 1
        for place, data, revision in events:
            key = place[seen:].decode()
            if not prefix_matches(target.text, key):
                continue
            new = None if data is None or count[revision] > 1 else _short(data)
            left_out = count[revision] > 1 or (data is not None and new is None)
            found.append(PrefixChanged(target.text, revision, 0, key, new, left_out))
        return found

    def stop_watching(self, target: Target) -> None:
        """Pass on no more changes of ``target``."""
        with self._lock:
            watch, _ = self._watching.pop(target, (None, None))
        if watch is not None:
            watch.close()

    # ---- closing ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse blocked queries, and leave the cluster. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            watching, self._watching = self._watching, {}
        self.watches.close()
        for watch, _ in watching.values():
            watch.close()
        if self._lease:
            try:
                self._cluster.post("/lease/revoke", {"ID": self._lease}, Deadline.after(1.0))
            except TransportError as e:
                logger.debug("%s: what it leaves in etcd disappears in an hour: %s", self.name, e)
        self._cluster.close()
        deadline = Deadline.after(CLOSE_SECONDS)
        for _, thread in watching.values():
            thread.join(deadline.timeout())

    def delete_all(self, deadline: Deadline) -> None:
        """Delete all keys and queues of the store. Errors as :meth:`request`."""
        with self._translated():
            self._delete(self._layout.base, deadline)

    def _delete(self, prefix: bytes, deadline: Deadline) -> None:
        keys = {"key": encode(prefix), "range_end": encode(after_prefix(prefix))}
        self._cluster.post("/kv/deleterange", keys, deadline)


def _concerns(event: Event, places: list[bytes]) -> bool:
    return event.value is not None and any(
        event.key == place or (place.endswith(b"/") and event.key.startswith(place)) for place in places
    )


def _short(data: bytes) -> bytes | None:
    """The value that is stored as ``data``, or None if it is elsewhere."""
    stored = Stored(data)
    return stored.value if stored.parts is None else None
