"""Keys and queues of an :class:`~zmqgrad.store.etcd.store.EtcdStore` as the state machine sees them.

For one query there is one :class:`EtcdContents`. It reads at one revision of the cluster, keeps what the
query writes, and gives both as the parts of a transaction, which fails if anything that was read has changed.

    <base>k/<key>               a value
    <base>q/<queue>/<item>      an item of a queue; etcd orders them by the revision that created them
    <base>c/<id>/<number>       a part of a large value or item
    <base>r/<client>            the id of the last change of a client, so that it recognizes a repetition
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from zmqgrad.store.contents import Item
from zmqgrad.store.etcd.cluster import decode, encode, range_of, unchanged
from zmqgrad.store.transactional import StoredContents
from zmqgrad.store.watch_targets import INTERNAL_PREFIX, prefix_matches
from zmqgrad.wire.messages import (
    Message,
    StoreAdd,
    StoreAppend,
    StoreCheck,
    StoreCompareSet,
    StoreDeleteKey,
    StoreGet,
    StoreMultiGet,
    StoreQueuePop,
    StoreWait,
    StoreWatchKey,
    StoreWatchPrefix,
)

INLINE_BYTES = 64 << 10
"""Larger values are stored in parts, as are others that would make a transaction too large."""

TRANSACTION_BYTES = 512 << 10
"""Limit of the values in one transaction. By default etcd accepts 1.5 MiB."""

PART_BYTES = 1 << 20

MAX_OPERATIONS = 40
"""Operations of a transaction, which may be transactions. By default etcd accepts 128 in all levels."""

MAX_WRITES = 2500
"""Keys and items that one query can change."""

NEEDS_VALUES = frozenset(
    {StoreGet, StoreMultiGet, StoreAdd, StoreAppend, StoreCompareSet, StoreWatchKey, StoreWatchPrefix}
)
"""Queries that need what their keys hold."""

READS_KEYS = frozenset({*NEEDS_VALUES, StoreCheck, StoreWait, StoreDeleteKey}) - {StoreWatchPrefix}
"""Queries that first read all the keys that they name."""

Read = Callable[[Sequence[dict[str, Any]], int], tuple[int, list[dict[str, Any]]]]
"""(ranges, revision; 0: the newest) -> the revision that was read, and the results."""

Save = Callable[[Sequence[tuple[bytes, bytes]]], None]
"""Writes the parts of large values: their places and contents."""


class Layout:
    """The names of etcd's keys of one store.

    Args:
        base: the prefix of all of them.
    """

    def __init__(self, base: bytes) -> None:
        self.base = base
        self.keys, self.items, self.all_parts = base + b"k/", base + b"q/", base + b"c/"

    def key(self, key: str) -> bytes:
        """The place of the value of ``key``."""
        return self.keys + key.encode()

    def queue(self, name: str) -> bytes:
        """The prefix of the items of the queue ``name``. No name is a prefix of another."""
        return self.items + name.encode().hex().encode() + b"/"

    def parts(self, number: str) -> bytes:
        """The prefix of the parts of a large value."""
        return self.all_parts + number.encode() + b"/"

    def part(self, number: str, index: int) -> bytes:
        """The place of one part."""
        return self.parts(number) + b"%08d" % index

    def client(self, number: str) -> bytes:
        """The place of the last change of a client."""
        return self.base + b"r/" + number.encode()


class Stored(NamedTuple):
    """A value as it is stored: itself, or where its parts are."""

    data: bytes

    @property
    def parts(self) -> tuple[str, int] | None:
        """The id and the number of its parts; None if it is whole."""
        if self.data[:1] != b"\1":
            return None
        number, _, count = self.data[1:].decode().partition(" ")
        return number, int(count)

    @property
    def value(self) -> bytes:
        """The value, which is whole."""
        return self.data[1:]

    @staticmethod
    def whole(value: bytes) -> bytes:
        """``value`` as it is stored if it is not large."""
        return b"\0" + value

    @staticmethod
    def in_parts(number: str, count: int) -> bytes:
        """What stands for a large value."""
        return b"\1" + f"{number} {count}".encode()


class _Found(NamedTuple):
    """What is stored at a place, and the revision that wrote it; 0 if there is nothing."""

    modified: int
    data: bytes


class EtcdContents(StoredContents):
    """Storage of the state machine for one query.

    Args:
        query: what the state machine will execute; what it probably reads is read together.
        read: reads from the cluster.
    """

    def __init__(self, layout: Layout, query: Message, read: Read) -> None:
        super().__init__()
        self._layout = layout
        self._read_ranges = read
        self._wants_values = type(query) in NEEDS_VALUES
        self._wants_items = type(query) is StoreQueuePop
        self.revision = 0
        """The revision of the cluster that was read; 0 before."""
        self._found: dict[bytes, _Found] = {}
        self._items: dict[str, tuple[bytes, _Found] | None] = {}  # the first of each queue
        self._written: dict[str, bytes | None] = {}
        self._pushed: list[tuple[str, bytes]] = []
        self._popped: list[tuple[bytes, _Found]] = []
        self._prefixed: dict[str, dict[str, bytes]] = {}
        if type(query) in READS_KEYS:
            self._prefetch(query.keys if hasattr(query, "keys") else [query.key])  # type: ignore[attr-defined]

    # ---- reading ----------------------------------------------------------------------------------------

    def _read(self, ranges: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The results of ``ranges``, all at one revision."""
        results: list[dict[str, Any]] = []
        for start in range(0, len(ranges), MAX_OPERATIONS):
            self.revision, found = self._read_ranges(ranges[start : start + MAX_OPERATIONS], self.revision)
            results += found
        return results

    def _read_one(self, one: dict[str, Any]) -> dict[str, Any]:
        (result,) = self._read([one])
        return result

    def _prefetch(self, keys: Iterable[str]) -> None:
        places = list(dict.fromkeys(map(self._layout.key, keys)))
        ranges = [{"key": encode(place), "keys_only": not self._wants_values} for place in places]
        for place, result in zip(places, self._read(ranges), strict=True):
            self._found[place] = _first(result)[1]

    def _find(self, place: bytes, *, with_value: bool) -> _Found:
        found = self._found.get(place)
        if found is None or (with_value and found.modified and not found.data):
            result = self._read_one({"key": encode(place), "keys_only": not with_value})
            found = self._found[place] = _first(result)[1]
        return found

    def has(self, key: str) -> bool:
        if key in self._written:
            return self._written[key] is not None
        return self._find(self._layout.key(key), with_value=False).modified > 0

    def value(self, key: str) -> bytes | None:
        if key in self._written:
            return self._written[key]
        for known in self._prefixed.values():
            if key in known:
                return known[key]
        found = self._find(self._layout.key(key), with_value=True)
        return self._whole(found.data) if found.modified else None

    def _whole(self, data: bytes) -> bytes:
        stored = Stored(data)
        if stored.parts is None:
            return stored.value
        number, count = stored.parts
        parts = []
        for index in range(count):  # one by one: together, they may be more than a reply can hold
            parts.append(_first(self._read_one({"key": encode(self._layout.part(number, index))}))[1].data)
        return b"".join(parts)

    @property
    def num_keys(self) -> int:
        """Number of keys, without the library's own."""
        prefixes = self._layout.keys, self._layout.key(INTERNAL_PREFIX)
        results = self._read([range_of(prefix, count_only=True) for prefix in prefixes])
        total, internal = (int(result.get("count", 0)) for result in results)
        return total - internal

    def keys(self, prefix: str) -> list[str]:
        """The sorted keys that begin with ``prefix``; internal keys only if ``prefix`` is internal."""
        known = self._prefixed.get(prefix)
        if known is None:
            result = self._read_one(range_of(self._layout.key(prefix), keys_only=not self._wants_values))
            pairs = [
                (decode(kv["key"])[len(self._layout.keys) :].decode(), decode(kv.get("value")))
                for kv in result.get("kvs", ())
            ]
            found = [(key, data) for key, data in pairs if prefix_matches(prefix, key)]
            if self._wants_values:
                known = self._prefixed[prefix] = {key: self._whole(data) for key, data in found}
            else:
                return sorted(key for key, _ in found)
        return sorted(known)

    def first_item(self, name: str) -> tuple[bytes, _Found] | None:
        """The place of the first item of the queue ``name``, and what is there; None if it is empty."""
        if name not in self._items:
            first = {"limit": 1, "sort_order": "ASCEND", "sort_target": "CREATE"}
            items = range_of(self._layout.queue(name), keys_only=not self._wants_items)
            place, found = _first(self._read_one({**items, **first}))
            self._items[name] = (place, found) if found.modified else None
        return self._items[name]

    def has_items(self, name: str) -> bool:
        return self.first_item(name) is not None

    def queue(self, name: str) -> range:
        return range(int(self._read_one(range_of(self._layout.queue(name), count_only=True)).get("count", 0)))

    # ---- writing ----------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes, notifications: list[Any]) -> None:
        """Set ``key``."""
        self._written[key] = value

    def delete(self, key: str, notifications: list[Any]) -> bool:
        """Delete ``key``. Returns whether it existed."""
        existed = self.has(key)
        if existed:
            self._written[key] = None
        return existed

    def push(self, name: str, value: bytes) -> None:
        """Append ``value`` to the queue ``name``."""
        self._pushed.append((name, value))

    def pop(self, name: str) -> Item:
        """Remove and return the first item of the non-empty queue ``name``."""
        first = self.first_item(name)
        assert first is not None
        self._popped.append(first)
        self._items[name] = None
        return Item(first[1].modified, self._whole(first[1].data))

    # ---- the transaction --------------------------------------------------------------------------------

    def writes(self) -> int:
        """How many keys and items the query has changed."""
        return len(self._written) + len(self._pushed) + len(self._popped)

    def comparisons(self) -> list[dict[str, Any]]:
        """What must hold so that nothing that was read has changed."""
        read = {**self._found, **dict(self._popped)}
        return [unchanged(place, found.modified) for place, found in read.items()]

    def operations(self, save: Save) -> list[dict[str, Any]]:
        """What the transaction is to do; ``save`` is called before."""
        room = TRANSACTION_BYTES
        operations: list[dict[str, Any]] = []
        parts: list[tuple[bytes, bytes]] = []
        places: list[tuple[bytes, bytes]] = [
            (self._layout.key(key), value) for key, value in self._written.items() if value is not None
        ]
        places += [
            (self._layout.queue(name) + secrets.token_hex(8).encode(), value) for name, value in self._pushed
        ]
        for place, value in places:
            if len(value) <= min(INLINE_BYTES, room):
                room -= len(value)
                data = Stored.whole(value)
            else:
                number, split = secrets.token_hex(8), _split(value)
                parts += [(self._layout.part(number, index), part) for index, part in enumerate(split)]
                data = Stored.in_parts(number, len(split))
            operations.append(_put(place, value=encode(data), prev_kv=True))
        save(parts)
        operations += [_put(place, ignore_value=True) for place, _ in parts]
        deleted = [self._layout.key(key) for key, value in self._written.items() if value is None]
        deleted += [place for place, _ in self._popped]
        operations += [{"request_delete_range": {"key": encode(place), "prev_kv": True}} for place in deleted]
        return operations


class Deletion:
    """All keys and queues go; what recognizes repetitions stays, for clients in the middle of one."""

    def __init__(self, layout: Layout) -> None:
        self._prefixes = layout.keys, layout.items, layout.all_parts

    def writes(self) -> int:
        """Few, whatever there is."""
        return len(self._prefixes)

    def comparisons(self) -> list[dict[str, Any]]:
        """Nothing was read."""
        return []

    def operations(self, save: Save) -> list[dict[str, Any]]:
        """What the transaction is to do."""
        return [{"request_delete_range": range_of(prefix)} for prefix in self._prefixes]


def bundled(parts: Sequence[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    """``parts``, in groups that fit one transaction."""
    group: list[tuple[bytes, bytes]] = []
    size = 0
    for place, part in parts:
        size += len(part)
        if group and (size > PART_BYTES or len(group) == MAX_OPERATIONS):
            yield group
            group, size = [], len(part)
        group.append((place, part))
    if group:
        yield group


def nested(operations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``operations``, in nested transactions if they are many: in two levels of these, at most."""
    level = list(operations)
    while len(level) > MAX_OPERATIONS:
        level = [
            {"request_txn": {"success": level[start : start + MAX_OPERATIONS]}}
            for start in range(0, len(level), MAX_OPERATIONS)
        ]
    return level


def _put(place: bytes, **content: Any) -> dict[str, Any]:
    return {"request_put": {"key": encode(place), **content}}


def _split(value: bytes) -> list[bytes]:
    return [value[start : start + PART_BYTES] for start in range(0, len(value), PART_BYTES)]


def _first(result: dict[str, Any]) -> tuple[bytes, _Found]:
    """The first place that a range has found, and what is there."""
    kvs = result.get("kvs")
    if not kvs:
        return b"", _Found(0, b"")
    return decode(kvs[0]["key"]), _Found(int(kvs[0]["mod_revision"]), decode(kvs[0].get("value")))


def replaced_parts(layout: Layout, responses: Iterable[dict[str, Any]]) -> list[bytes]:
    """The prefixes of the parts that nothing refers to any more, after a transaction with these results."""
    found: list[bytes] = []
    for response in responses:
        if "response_txn" in response:
            found += replaced_parts(layout, response["response_txn"].get("responses", ()))
            continue
        put, deleted = response.get("response_put", {}), response.get("response_delete_range", {})
        for kv in [*([put["prev_kv"]] if "prev_kv" in put else ()), *deleted.get("prev_kvs", ())]:
            if (parts := Stored(decode(kv.get("value"))).parts) is not None:
                found.append(layout.parts(parts[0]))
    return found
