"""The decoders of all that comes from peers, files and stores, each as a function of bytes.

A target accepts any bytes: it returns, or raises the errors that its decoder documents. Anything else is a
defect, as is a hang, and memory out of proportion to the input.
"""

from __future__ import annotations

import socket
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from zmqgrad.elastic import state as rendezvous_state
from zmqgrad.elastic.agent.error_files import read_error
from zmqgrad.elastic.agent.events import Failure
from zmqgrad.elastic.agent.ranks import NodeInfo
from zmqgrad.errors import (
    JournalError,
    PayloadError,
    ProtocolError,
    RendezvousStateError,
    StoreError,
    TraceError,
)
from zmqgrad.interop.probe import HTTP_REQUEST, Probe
from zmqgrad.runtime.finalizers import Notes
from zmqgrad.store import FileStore
from zmqgrad.store.contents import Contents
from zmqgrad.store.journal import Journal
from zmqgrad.store.reply_cache import ReplyCache
from zmqgrad.store.state import State
from zmqgrad.trace import log
from zmqgrad.transport.sealed import records
from zmqgrad.transport.shared_memory.mapped_blocks import MappedBlocks
from zmqgrad.transport.shared_memory.segment import Segment
from zmqgrad.wire.codec import DECODE_ERRORS, decode_all, decode_query, encode
from zmqgrad.wire.frames import ENVELOPE_FORMAT, MAGIC, VERSION, WITH_MANIFEST
from zmqgrad.wire.messages import BY_TYPE, ArenaOffer, Manifest, Tensors

Target = Callable[[bytes], None]

TARGETS: dict[str, Target] = {}
KINDS = sorted(BY_TYPE)
QUERIES = [kind for kind in KINDS if BY_TYPE[kind].__name__.startswith("Store")]


def target(*errors: type[Exception]) -> Callable[[Target], Target]:
    """Adds a target that may raise ``errors``."""

    def add(function: Target) -> Target:
        def run(data: bytes) -> None:
            try:
                function(data)
            except errors:
                return

        TARGETS[function.__name__] = run
        return run

    return add


def enveloped(kind: int, header: bytes) -> bytes:
    return ENVELOPE_FORMAT.pack(MAGIC, VERSION, kind, 1, 2, 3, 0, 0, 0, 0, 0, 0) + header


def pieces(data: bytes) -> Iterator[bytes]:
    """Splits ``data`` into pieces whose sizes are in front of them."""
    while data:
        size = data[0]
        yield data[1 : 1 + size]
        data = data[1 + size :]


# ---- messages ---------------------------------------------------------------------------------------------


@target(ProtocolError)
def frame(data: bytes) -> None:
    envelope, manifest, message = decode_all(data)
    again = encode(message, *envelope[1:4], envelope.channel, manifest)
    assert decode_all(bytes(again))[1:] == (manifest, message)


@target(ProtocolError)
def message(data: bytes) -> None:
    if data:
        kind = KINDS[data[0] % len(KINDS)]
        decode_all(enveloped(kind | (WITH_MANIFEST if data[0] & 0x80 else 0), data[1:]))


@target()
def store_queries(data: bytes) -> None:
    """All queries of one store; one that is malformed changes nothing."""
    state: Any = State()
    for number, piece in enumerate(pieces(data)):
        try:
            *_, query = decode_query(enveloped(QUERIES[piece[0] % len(QUERIES)] if piece else 0, piece[1:]))
        except ProtocolError:
            continue
        for effect in state.apply(query, number, float(number)):
            encode(effect.message, 0, 0, 0)


@target(ProtocolError, PayloadError)
def tensors(data: bytes) -> None:
    from zmqgrad.wire.tensors import decode_tensors

    try:
        encoded = msgspec.msgpack.decode(data, type=Tensors)
    except DECODE_ERRORS:
        return
    for tensor in decode_tensors(encoded, [bytearray(16), bytearray(64), bytearray(4096)]):
        repr((tensor.shape, tensor.dtype, tensor.layout))


@target(ProtocolError)
def shared_memory(data: bytes) -> None:
    """A manifest of a peer whose segment is mapped here, and the offer of another segment."""
    segment, blocks = Segment(1 << 16), MappedBlocks(lambda: Notes(int))
    try:
        blocks.map(1, ArenaOffer(segment.id, segment.size), segment.open_for_reader(1))
        use_blocks(segment, blocks, data)
    finally:
        blocks.close()
        segment.close()


def use_blocks(segment: Segment, blocks: MappedBlocks, data: bytes) -> None:
    try:
        offer = msgspec.msgpack.decode(data, type=ArenaOffer)
    except DECODE_ERRORS:
        pass
    else:
        blocks.map(2, offer, segment.open_for_reader(2))
        return
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except DECODE_ERRORS:
        return
    buffers = tuple(
        msgspec.structs.replace(b, segment=segment.id if b.segment % 2 else b.segment)
        for b in manifest.buffers
    )
    manifest = msgspec.structs.replace(manifest, buffers=buffers)
    for opened in blocks.open(1, manifest, [bytearray(16), bytearray(64)]):
        bytes(opened)


@target(ProtocolError)
def sealed(data: bytes) -> None:
    record = [*pieces(data)]
    head = records.read_head(record)
    cipher = records.Cipher(bytes(records.KEY_BYTES), head.channel, 1, 2)
    opened = [cipher.open(record, index) for index in range(head.parts)]
    assert all(len(part) + records.TAG_BYTES == len(sealed) for part, sealed in zip(opened, record[1:]))  # noqa: B905


@target()
def probe(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data[: 1 << 12])
        theirs.shutdown(socket.SHUT_WR)
        probed = Probe.__new__(Probe)
        probed._socket = ours
        with probed:
            probed.identify(1.0, HTTP_REQUEST * (len(data) % 2))


# ---- what is read from stores -----------------------------------------------------------------------------


@target(RendezvousStateError)
def rendezvous(data: bytes) -> None:
    rendezvous_state.decode(data)


@target(RendezvousStateError)
def agents(data: bytes) -> None:
    """What agents of other nodes write to the store of a round."""
    if data[:1] < b"\x80":
        NodeInfo.decode(data)
    else:
        Failure.decode(data[1:])


# ---- files ------------------------------------------------------------------------------------------------


@contextmanager
def file_of(data: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "file"
        path.write_bytes(data)
        yield path


@target()
def error_file(data: bytes) -> None:
    with file_of(data) as path:
        assert all(isinstance(line, str) for line in read_error(path))


@target(TraceError)
def trace_log(data: bytes) -> None:
    with file_of(data) as path, log.LogReader(path) as reader:
        for _ in reader:
            pass


@target(StoreError)
def file_store(data: bytes) -> None:
    with file_of(damaged(_a_file_store(), data)) as path, FileStore(str(path), timeout=0.0) as store:
        use(store)


@target(StoreError)
def file_store_rows(data: bytes) -> None:
    """A file that another program has written to: SQLite itself checks no types."""
    with file_of(_a_file_store()) as path:
        insert(path, data, ("keys", "items (name, value)"))
        with FileStore(str(path), timeout=0.0) as store:
            use(store)


@target(JournalError)
def journal(data: bytes) -> None:
    with file_of(damaged(_a_journal(), data)) as path:
        load(path)


@target(JournalError)
def journal_rows(data: bytes) -> None:
    with file_of(_a_journal()) as path:
        insert(path, data, ("keys", "items (name, value)", "replies", "counters"))
        load(path)


def use(store: FileStore) -> None:
    for call in (
        lambda: [store.get(key) for key in store.list_keys("")],
        lambda: store.add("n", 1),
        lambda: store.append("k", b"more"),
        lambda: store.compare_set("k", b"", b"v"),
        lambda: store.queue_pop("q", False),
        lambda: store.num_keys(),
    ):
        try:
            call()  # type: ignore[no-untyped-call]
        except StoreError:
            continue


def load(path: Path) -> None:
    opened = Journal(path)
    try:
        contents: Any = Contents()
        opened.load(contents, ReplyCache())
    finally:
        opened.close()


def damaged(whole: bytes, data: bytes) -> bytes:
    """``whole`` with bytes changed: each edit has an offset of two bytes, and a value."""
    changed = bytearray(whole)
    for at in range(0, len(data) - 2, 3):
        changed[int.from_bytes(data[at : at + 2], "big") % len(changed)] = data[at + 2]
    return bytes(changed)


def insert(path: Path, data: bytes, tables: tuple[str, ...]) -> None:
    """Inserts rows of any types: data is a list of lists."""
    try:
        rows = msgspec.msgpack.decode(data, type=list[list[Any]])
    except DECODE_ERRORS:
        return
    db = sqlite3.connect(path, isolation_level=None)
    try:
        for row in rows:
            if len(row) > 1:
                table = tables[int(row[0]) % len(tables) if isinstance(row[0], int) else 0]
                try:
                    marks = ", ".join("?" * (len(row) - 1))
                    if table == "counters":
                        db.execute("DELETE FROM counters")
                    db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", row[1:])
                except (sqlite3.Error, OverflowError, UnicodeEncodeError, TypeError):
                    continue
    finally:
        db.close()


@cache
def _a_file_store() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "store"
        with FileStore(str(path)) as store:
            store.multi_set(["k", "n"], [b"value", b"1"])
            store.queue_push("q", b"item")
        return path.read_bytes()


@cache
def _a_journal() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        opened, contents = Journal(path), Contents()
        opened.load(contents, ReplyCache())
        contents.put("k", b"value", [])
        contents.push("q", b"item")
        opened.commit()
        opened.close()
        return path.read_bytes()
