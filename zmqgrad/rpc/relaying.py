"""Blocks that many workers read, and that each other host gets once: one reader there passes them on.

Published tensors (:mod:`~zmqgrad.rpc.publishing`) and the arguments of group calls
(:mod:`~zmqgrad.rpc.groups.sending`) are versions on the *shelf* of the worker that has made them, their
*source*. A reader asks the source, and gets all blocks of a version in one reply: leased to it, if it is on
the host of the source. The first reader of another host that asks is sent the blocks, and becomes the *relay*
of its host: it puts them on its own shelf. The source tells the others to ask the relay. If that is lost,
leaves, is slow, or busy with an older version, they ask the source again, and the first of them is the next
relay: whatever happens to a relay costs time only.

A worker that begins to read says so on its own shelf before it asks, and nothing is put there for others
when it has ended: so nothing stays there for ever, in whichever order messages arrive.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from zmqgrad.errors import (
    ClosedError,
    PeerLostError,
    RpcError,
    RpcTimeoutError,
    TransportError,
    UnknownWorkerError,
)
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.in_flight import served, time_left
from zmqgrad.rpc.serialization.pickler import OutOfBand
from zmqgrad.runtime.blocking import blocking_section
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise, countdown
from zmqgrad.transport.base import Buffer, Frame, Inbound
from zmqgrad.transport.shared_memory.packing import unchanging
from zmqgrad.wire.ids import split_id

if TYPE_CHECKING:
    from zmqgrad.rpc.worker import Worker

logger = logging.getLogger(__name__)

RELAY_SECONDS = 60.0
"""How long a reader waits for the relay of its host before it asks the source again: at most half of the time
that is left."""

Key = str | int
"""What a version is of: a published name, or the id of the frames of one group call."""


class Place(NamedTuple):
    """Where a tensor is: ``offset`` in bytes from the start of block number ``block``."""

    block: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Version:
    """One version: its blocks, by their number, and where its tensors are in them."""

    number: int
    source: int
    places: dict[str, Place]
    blocks: dict[int, Any]
    narrowed: bool = False
    relays: dict[str, list[int]] = field(default_factory=dict)
    """By host: the worker that passes it on, behind those that have failed to."""

    @cached_property
    def _encoded_places(self) -> bytes:
        return msgspec.msgpack.encode(self.places)

    def __reduce__(self) -> Any:
        """Each block is one frame, which is leased if the reader is on this host."""
        blocks = {number: OutOfBand(block) for number, block in self.blocks.items()}
        return _received, (self.number, self.source, self._encoded_places, blocks, self.narrowed)


_decode_places = msgspec.msgpack.Decoder(dict[str, Place]).decode


def _received(number: int, source: int, places: bytes, blocks: dict[int, Any], narrowed: bool) -> Version:
    return Version(number, source, _decode_places(places), blocks, narrowed)


class Redirection(NamedTuple):
    """Version ``number`` is with ``relay``."""

    number: int
    relay: int


@dataclass(eq=False)
class Reading:
    """That something is read on a worker: by so many, of which so many are busy; and what they have seen."""

    users: int = 0
    busy: int = 0
    seen: float = 0


class Shelf:
    """The versions that one worker has for readers: its own, and those that it relays to its host."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._lock = threading.RLock()  # guards all below
        self._changed = threading.Condition(self._lock)
        self._versions: dict[Key, Version] = {}
        self._unannounced: dict[Key, Version] = {}
        self._reading: dict[Key, Reading] = {}
        self._closed = False
        worker.hooks.closing.append(self._close)
        worker.hooks.peer_lost.append(lambda peer, _: self._on_lost(peer))

    def keys(self) -> set[Key]:
        """What is kept here, or being read."""
        with self._lock:
            return self._versions.keys() | self._reading.keys()

    def newest(self, key: Key, known: int = 0) -> Version | None:
        """The newest version on this worker; an unannounced one only for a reader that knows its number."""
        unannounced = self._unannounced.get(key)
        if unannounced is not None and unannounced.number <= known:
            return unannounced
        return self._versions.get(key)

    def put(self, key: Key, version: Version | None, unannounced: Version | None = None) -> None:
        """Let readers have ``version``, of which this worker is the source, and drop the one before.

        Args:
            version: None: it stays the one before.
            unannounced: of which readers are about to hear. If that fails, nobody ever has it: the next
                version, perhaps of another worker, has its number.
        """
        with self._lock:
            before = self._versions.get(key)
            for each in (version, unannounced):
                if each is not None and before is not None:  # relays stay: they have what did not change
                    for host, relays in before.relays.items():
                        each.relays.setdefault(host, relays[-1:])
            if version is not None:
                self._versions[key] = version
            self._unannounced.pop(key, None)
            if unannounced is not None:
                self._unannounced[key] = unannounced
            self._changed.notify_all()

    def drop(self, key: Key) -> Version | None:
        """Let readers have none, and read no more. Returns the version that they had."""
        with self._lock:
            self._reading.pop(key, None)
            self._unannounced.pop(key, None)
            self._changed.notify_all()
            return self._versions.pop(key, None)

    # ---- reading ----------------------------------------------------------------------------------------

    def begin(self, key: Key) -> Reading:
        """This worker begins to read: from now on it may be a relay."""
        with self._lock:
            reading = self._reading.setdefault(key, Reading())
            reading.users += 1
            return reading

    def seen(self, key: Key, reading: Reading, number: int) -> None:
        """This worker reads version ``number`` now: it does not relay an older one any more."""
        with self._lock:
            reading.seen = max(reading.seen, number)
            self._drop_relayed(key, number)

    @contextmanager
    def busy(self, reading: Reading) -> Iterator[None]:
        """Context manager while a reader is given a version: it fetches the next one only after that."""
        with self._lock:
            reading.busy += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._lock:
                reading.busy -= 1

    def end(self, key: Key, reading: Reading) -> None:
        """Undo :meth:`begin`. What this worker relays goes with its last reader."""
        with self._lock:
            reading.users -= 1
            if not reading.users and self._reading.get(key) is reading:
                del self._reading[key]
                self._drop_relayed(key, math.inf)

    def _drop_relayed(self, key: Key, number: float) -> None:
        found = self._versions.get(key)
        if found is not None and found.source != self.worker.id and found.number < number:
            del self._versions[key]
        self._changed.notify_all()

    def wait_for(self, key: Key, number: int) -> Version | None:
        """The newest version, once it is ``number`` or later.

        Returns:
            None when the caller has stopped waiting, and as soon as it is certain that there will be none, or
            none before a callback of the program has returned.
        """

        def find() -> Version | None:
            found = self._versions.get(key)
            return found if found is not None and found.number >= number else None

        def is_decided() -> bool:
            reading = self._reading.get(key)
            if self._closed or find() is not None or reading is None:
                return True
            return reading.seen >= number or reading.busy >= reading.users

        with blocking_section(), self._lock:
            left = time_left()
            self._changed.wait_for(is_decided, None if left == math.inf else left)
            return find()

    # ---- relaying ---------------------------------------------------------------------------------------

    def relay_for(self, key: Key, known: int, reader: int, failed: int) -> tuple[Version, int] | None:
        """As :meth:`newest`, and the relay for the host of ``reader``, which becomes it if there is none."""
        host = self.worker.membership.record(reader).host
        with self._lock:  # whoever drops the version knows all of its relays
            version = self.newest(key, known)
            if version is None:
                return None
            relays = version.relays.setdefault(host, [])
            if not relays or relays[-1] == failed or relays[-1] in self.worker.lost:
                relays.append(reader)
            return version, relays[-1]

    def relay(self, key: Key, reading: Reading, version: Version, known: Mapping[int, Any]) -> bool:
        """Let the readers of this host have a ``version`` that has arrived, but for the ``known`` blocks.

        Returns:
            Whether they can: this worker has not ended to read it.
        """
        mailbox, blocks = self.worker.mailbox, dict[int, Any]()
        for number in {place.block for place in version.places.values()} or version.blocks:
            if number in known:
                blocks[number] = known[number]
                continue
            data = memoryview(version.blocks[number])
            block = mailbox.allocated(data)
            if block is None:  # it was small, or there was no room
                block = mailbox.allocate(len(data), Deadline.after(0.0))
                if isinstance(block, str):  # readers get copies
                    block = version.blocks[number]
                else:
                    mailbox.write(block, 0, data)
            blocks[number] = block
        with self._lock:
            if self._reading.get(key) is not reading:
                return False
            self._versions[key] = replace(version, blocks=blocks)
            self._changed.notify_all()
            return True

    def _on_lost(self, peer: int) -> None:
        """Drop the frames of calls of a lost worker. What it has published stays with its readers."""
        for key in self.keys():
            if isinstance(key, int) and split_id(key)[0] == peer:
                self.drop(key)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            self._versions.clear()
            self._unannounced.clear()
            self._reading.clear()
            self._changed.notify_all()


# ---- what readers call ------------------------------------------------------------------------------------


def is_local(worker: Worker, peer: int) -> bool:
    """Whether ``peer`` is on this host; False if there is no link to it any more, as it is lost."""
    try:
        return worker.mailbox.is_local(peer)
    except TransportError:  # as sending to it will raise
        return False


def offer(key: Key, newest: int, failed: int, known: Collection[int]) -> Version | Redirection | None:
    """Runs on the source: its newest version for the worker that calls.

    Args:
        key: of the versions.
        newest: the number of the newest version that the reader has heard of.
        failed: the relay that did not have the version; -1: none.
        known: the blocks that the reader has as a relay.

    Returns:
        None if there is none.
    """
    worker, request = current_worker(), served()
    shelf = worker.shelf
    if request is None:
        return None
    reader = request.source
    if reader == worker.id or is_local(worker, reader):
        return shelf.newest(key, newest)
    found = shelf.relay_for(key, newest, reader, failed)
    if found is None:
        return None
    version, relay = found
    if relay != reader:
        return Redirection(version.number, relay)
    return replace(version, blocks={n: block for n, block in version.blocks.items() if n not in known})


def relayed(key: Key, number: int) -> Version | None:
    """Runs on a relay: version ``number`` or a later one, once it is here; None if it does not come."""
    return current_worker().shelf.wait_for(key, number)


def fetch(
    worker: Worker,
    key: Key,
    reading: Reading,
    source: int,
    newest: int,
    deadline: Deadline,
    offered: Callable[..., Version | Redirection | None] = offer,
    *more: Any,
) -> Version | None:
    """Version ``newest`` or a later one, in memory that nobody else sees written to.

    Args:
        worker: which reads.
        key: of the versions.
        reading: what :meth:`Shelf.begin` returned.
        source: who has them.
        newest: the number of the newest known version.
        deadline: for all that is asked.
        offered: runs on the source, as :func:`offer`, with ``more`` arguments.

    Returns:
        None if the source has none any more, or another version is read here by now.

    Raises:
        RpcError: if the source is lost, or does not reply in time.
    """
    shelf, failed = worker.shelf, -1
    while True:
        held = shelf.newest(key)
        known = {} if held is None or held.source == worker.id else held.blocks
        if known and held is not None and held.number >= newest:  # for another reader of this worker
            return worker.ask(worker.id, relayed, (key, held.number), deadline.call_timeout())
        asked = key, newest, failed, tuple(known), *more
        reply = worker.ask(source, offered, asked, deadline.call_timeout())
        if isinstance(reply, Redirection):
            failed = reply.relay
            seconds = min(RELAY_SECONDS, deadline.call_timeout() / 2 or math.inf)
            try:
                found = worker.ask(failed, relayed, (key, reply.number), seconds)
            except (PeerLostError, UnknownWorkerError, RpcTimeoutError) as e:
                logger.info("%s: asks worker %d itself for %r instead: %s", worker.name, source, key, e)
            else:
                if found is not None:
                    return found
        elif reply is None or reply.narrowed or is_local(worker, source):
            return reply
        elif shelf.relay(key, reading, reply, known):  # others of this host wait for it
            return worker.ask(worker.id, relayed, (key, reply.number), deadline.call_timeout())
        else:
            blocks = {**known, **{number: bytearray(block) for number, block in reply.blocks.items()}}
            return replace(reply, blocks=blocks)


# ---- the frames of group calls ----------------------------------------------------------------------------


def offer_frames(worker: Worker, frames: Sequence[Frame]) -> int:
    """Put the frames of a call on the shelf: they must not change. Returns the key for :func:`retract`."""
    key = worker.ids.next()
    blocks = {number: unchanging(frame) for number, frame in enumerate(frames)}
    worker.shelf.put(key, Version(1, worker.id, {}, blocks))
    return key


def complete(inbound: Inbound, key: int) -> Inbound:
    """The request ``inbound``, with its frames, which its sender has on its shelf.

    Raises:
        RpcError: if they are not there any more: the sender has ended the call, or is lost.
    """
    worker, source = current_worker(), inbound.envelope.source
    shelf = worker.shelf
    reading, left = shelf.begin(key), time_left()
    deadline = Deadline.after(None if left == math.inf else left, worker.clock)
    try:
        version = fetch(worker, key, reading, source, 1, deadline)
    finally:
        if shelf.newest(key) is None:  # otherwise the sender says when no member needs it any more
            shelf.end(key, reading)
    if version is None:
        raise RpcError(f"{worker.membership.name_of(source)} has ended this call: its arguments are gone")
    frames: list[Buffer] = [version.blocks[number] for number in range(len(version.blocks))]
    return inbound._replace(frames=frames)


def retract(worker: Worker, key: int, replies: Iterable[Promise[Any]]) -> None:
    """Take the frames of a call from all shelves when all these ``replies`` are here, or have failed."""

    def submit() -> None:
        try:
            worker.submit(partial(_retract, worker, key))
        except ClosedError as e:
            logger.debug("%s is closing, and with it its shelf: %s", worker.name, e)

    promises = list(replies)
    on_done = countdown(len(promises) + 1, submit)
    for promise in promises:
        promise.add_done_callback(on_done)
    on_done(None)


def _retract(worker: Worker, key: int) -> None:
    version = worker.shelf.drop(key)
    for relay in set() if version is None else set().union(*version.relays.values()):
        try:
            worker.call(relay, _forget, (key,), timeout=0)
        except (RpcError, TransportError) as e:  # it has forgotten all of this worker, or will soon
            logger.debug("%s does not tell worker %d that a call has ended: %s", worker.name, relay, e)


def _forget(key: int) -> None:
    """Runs on a relay: no reader is left."""
    current_worker().shelf.drop(key)
