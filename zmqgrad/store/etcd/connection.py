"""Connection of one :class:`~zmqgrad.store.etcd.store.EtcdStore` to its cluster.

Each query is one transaction around the state machine: it reads at one revision, and writes only if nothing
that it has read has changed since. A blocked query waits for a change of what is missing.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from zmqgrad.errors import ClosedError, StoreError, StoreTimeoutError, TransportError
from zmqgrad.runtime.blocking import blocking_section
from zmqgrad.runtime.clock import Deadline
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
    range_of,
    unchanged,
)
from zmqgrad.store.etcd.contents import (
    MAX_WRITES,
    Deletion,
    EtcdContents,
    Layout,
    Save,
    Stored,
    bundled,
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

RENEW_SECONDS = LEASE_SECONDS / 2
"""Age of a lease that is used no more: a change must be recognized as long as it may be repeated."""

MAX_LEASES = 8
"""Leases that are ended when a store is closed. Older ones have ended."""

LATE_SECONDS = 1.0
"""Time for a request of a query that has none left: what exists at its deadline can still be read."""

LEAVE_SECONDS = 1.0
CLOSE_SECONDS = 5.0
"""Time limits of closing: for requests, and for threads."""

LACKS_PART = "key not found"
"""How etcd refuses a transaction whose parts of a value were deleted before."""

T = TypeVar("T")


class _Client:
    """Numbers the changes of one query at a time, so that a repeated one is recognized."""

    def __init__(self, place: bytes) -> None:
        self.place = place
        self.modified = 0
        """The revision of its last change."""
        self.in_doubt = False
        """Whether a member that did not reply may still apply a transaction that has failed elsewhere."""


class _Lease(NamedTuple):
    number: int
    old: Deadline
    """When another one is to be used."""


class _Changes(Protocol):
    """What a transaction is to do: :class:`~zmqgrad.store.etcd.contents.EtcdContents` for a query."""

    def writes(self) -> int: ...
    def comparisons(self) -> list[dict[str, Any]]: ...
    def operations(self, save: Save) -> list[dict[str, Any]]: ...


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
        self._leases: deque[_Lease] = deque(maxlen=MAX_LEASES)  # the last is used
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

        def execute() -> tuple[EtcdContents, tuple[State, Message | None]]:
            contents = EtcdContents(self._layout, query, partial(self._read, limit))
            state = State(contents)
            return contents, (state, state.answer(query, expired=expired))

        return self._transact(execute, limit)

    def _transact(self, execute: Callable[[], tuple[_Changes, T]], limit: Deadline) -> T:
        """Call ``execute`` until the changes that it returns could be made. Returns its result."""
        pause = CONFLICT_SECONDS
        client: _Client | None = None
        tried: dict[bytes, T] = {}
        try:
            while True:
                try:
                    changes, result = execute()
                    if client is None and changes.writes():
                        client = self._take_client()
                    # Without changes as well, so that no earlier attempt can be applied any more.
                    if client is None or not (changes.writes() or client.in_doubt):
                        return result
                    attempt = secrets.token_hex(8).encode()
                    tried[attempt] = result
                    last = self._commit(client, attempt, changes, limit)
                    if last in tried:
                        return tried[last]
                except EtcdRefusedError as e:
                    if e.code == NOT_FOUND:
                        self._leases.clear()  # they have ended
                    elif e.code != OUT_OF_RANGE and LACKS_PART not in str(e):
                        raise
                if limit.passed():
                    raise TransportError("others have changed the same keys all the time")
                # Two stores that were in each other's way must not meet again.
                threading.Event().wait(min(random.uniform(0, 2 * pause), limit.left()))
                pause = min(2 * pause, MAX_CONFLICT_SECONDS)
        finally:
            if client is not None:
                with self._lock:
                    self._clients.append(client)

    def _take_client(self) -> _Client:
        with self._lock:
            if self._clients:
                return self._clients.pop()
        return _Client(self._layout.client(secrets.token_hex(8)))

    def _read(
        self, deadline: Deadline, ranges: Sequence[dict[str, Any]], revision: int
    ) -> tuple[int, list[dict[str, Any]]]:
        pinned = {"revision": revision} if revision else {}
        reply = self._cluster.transact(
            {"success": [{"request_range": {**each, **pinned}} for each in ranges]}, deadline
        )
        results = [each["response_range"] for each in reply.content.get("responses", ())]
        return revision or reply.revision, results

    def _commit(self, client: _Client, attempt: bytes, changes: _Changes, deadline: Deadline) -> bytes:
        """Make ``changes``, unless something that the query has read has changed since.

        Returns:
            The last attempt of ``client`` that was successful: ``attempt``, or an earlier one.
        """
        if changes.writes() > MAX_WRITES:
            raise EtcdRefusedError(
                f"{changes.writes()} changes in one query (at most {MAX_WRITES}); make several", INVALID
            )
        lease = self._get_lease(deadline)
        deadline = deadline.capped(LEASE_SECONDS - RENEW_SECONDS)
        operations = changes.operations(partial(self._save, lease, deadline))
        place = encode(client.place)
        reply = self._cluster.transact(
            {
                "compare": [unchanged(client.place, client.modified), *changes.comparisons()],
                "success": [
                    {"request_put": {"key": place, "value": encode(attempt), "lease": lease}},
                    *nested(operations),
                ],
                "failure": [{"request_range": {"key": place}}],
            },
            deadline,
        )
        if reply.content.get("succeeded"):
            client.modified, client.in_doubt = reply.revision, False
            self._forget_parts(replaced_parts(self._layout, reply.content["responses"]), deadline)
            return attempt
        kvs = reply.content["responses"][0]["response_range"].get("kvs")
        modified = int(kvs[0]["mod_revision"]) if kvs else 0
        # What compared another revision of this client fails for ever.
        client.in_doubt = modified == client.modified and (client.in_doubt or reply.repeated)
        client.modified = modified
        return decode(kvs[0].get("value")) if kvs else b""  # perhaps the reply to a first try was lost

    def _save(self, lease: int, deadline: Deadline, parts: Sequence[tuple[bytes, bytes]]) -> None:
        """Write ``parts``. They stay only if a transaction takes their lease away.

        A member that handles a repeated request late must not give it to them again.
        """
        for group in bundled(parts):
            keys = [encode(place) for place, _ in group]
            puts = [
                {"key": key, "value": encode(part), "lease": lease}
                for key, (_, part) in zip(keys, group, strict=True)
            ]
            self._cluster.transact(
                {
                    "compare": [
                        {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": 0}
                        for key in keys
                    ],
                    "success": [{"request_put": put} for put in puts],
                },
                deadline,
            )

    def _forget_parts(self, prefixes: list[bytes], deadline: Deadline) -> None:
        for prefix in prefixes:
            try:
                self._cluster.post("/kv/deleterange", range_of(prefix), deadline)
            except TransportError as e:  # it only costs room in the cluster
                logger.warning("%s: parts of a replaced value stay in etcd: %s", self.name, e)

    def _get_lease(self, deadline: Deadline) -> int:
        lease = self._leases[-1] if self._leases else None
        if lease is None or lease.old.passed():
            old = Deadline.after(RENEW_SECONDS)
            granted = self._cluster.post("/lease/grant", {"TTL": LEASE_SECONDS}, deadline)
            lease = _Lease(int(granted["ID"]), old)
            self._leases.append(lease)
        return lease.number

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
                target=self._pass_on, args=(target, watch, revision), name=f"{self.name}-watch", daemon=True
            )
            self._watching[target] = watch, thread
            thread.start()

    def _pass_on(self, target: Target, watch: EtcdWatch, last: int) -> None:
        """Pass on the changes of ``target`` behind revision ``last``."""
        try:
            while not watch.closed:
                for events in watch.batches(WATCH_SECONDS):
                    for notification in self._notifications(target, events, last):
                        self.watches.on_notification(notification)
                        last = notification.revision
        except TransportError as e:
            logger.debug("%s: the watch of %r begins anew: %s", self.name, target, e)
            with self._lock:
                if self._watching.get(target, (None,))[0] is watch:
                    del self._watching[target]
            self.watches.on_disconnect()  # registers it again, and so starts another thread
        finally:
            watch.close()

    def _notifications(self, target: Target, events: list[Event], last: int) -> Iterator[ChangeNotification]:
        """What ``events`` are for watches of ``target``. Several of one revision make these read again.

        Args:
            last: the revision of the notification before.
        """
        seen = len(self._layout.keys)
        if not isinstance(target, Prefix):
            for _, data, revision in events:
                if data is None:
                    yield KeyDeleted(target, revision, last, None)
                else:
                    yield KeyUpdated(target, revision, last, None, _short(data))
                last = revision
            return
        keys = [place[seen:].decode() for place, _, _ in events]
        concerned = [
            (key, e) for key, e in zip(keys, events, strict=True) if prefix_matches(target.text, key)
        ]
        count = Counter(event.revision for _, event in concerned)
        for key, (_, data, revision) in concerned:
            new = None if data is None or count[revision] > 1 else _short(data)
            left_out = count[revision] > 1 or (data is not None and new is None)
            yield PrefixChanged(target.text, revision, last, key, new, left_out)
            last = revision

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
        for watch, _ in watching.values():
            watch.close()
        leaving = Deadline.after(LEAVE_SECONDS)
        for lease in list(self._leases):
            try:
                self._cluster.post("/lease/revoke", {"ID": lease.number}, leaving)
            except EtcdRefusedError:
                pass  # it has ended
            except TransportError as e:
                logger.debug("%s: what it leaves in etcd disappears in an hour: %s", self.name, e)
        self._cluster.close()
        self.watches.close()  # now, as what they read again would wait for the cluster
        deadline = Deadline.after(CLOSE_SECONDS)
        for _, thread in watching.values():
            thread.join(deadline.timeout())

    def delete_all(self, deadline: Deadline) -> None:
        """Delete all keys and queues of the store. Errors as :meth:`request`."""
        with self._translated():
            self._transact(lambda: (Deletion(self._layout), None), deadline)


def _concerns(event: Event, places: list[bytes]) -> bool:
    return event.value is not None and any(
        event.key == place or (place.endswith(b"/") and event.key.startswith(place)) for place in places
    )


def _short(data: bytes) -> bytes | None:
    """The value that is stored as ``data``, or None if it is elsewhere."""
    stored = Stored(data)
    return stored.value if stored.parts is None else None
