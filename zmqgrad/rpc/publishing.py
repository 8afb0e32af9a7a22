"""Published tensors, where they are made: versions on the shelf of a publisher.

A version is immutable: the bytes of its tensors are in blocks (of shared memory, where there is any) that are
written once, before the version is announced by a key in the store. A reader asks the publisher for it, and
gets all blocks at once, each leased to it (:mod:`~zmqgrad.rpc.relaying`): so it has the whole of one version,
whatever is published meanwhile, and no block is written again before its lease has ended. The publisher
itself holds the newest version only.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from typing import Any

import msgspec
import torch

from zmqgrad.errors import (
    ArgumentTypeError,
    ConfigurationError,
    DuplicateNameError,
    PayloadError,
    RpcTimeoutError,
)
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.directory import key_of
from zmqgrad.rpc.in_flight import served
from zmqgrad.rpc.membership.worker_info import check_names
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT
from zmqgrad.rpc.relaying import Place, Redirection, Version, is_local, offer
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.blocking import holding
from zmqgrad.runtime.clock import Deadline, monotonic_ns
from zmqgrad.transport.shared_memory.arena import OWN
from zmqgrad.wire.tensors.blobs import ALIGNMENT_BYTES, window
from zmqgrad.wire.tensors.dtypes import DTYPES, NAMES
from zmqgrad.wire.tensors.memory import copyable, extent, materialized

PREFIX = "published/"

Slice = tuple[int, int, int]
"""A part of a tensor, as ``torch.narrow`` takes it: dim, start, length."""


class Announcement(msgspec.Struct, frozen=True):
    """What the store says of a name: the newest version, and who has it."""

    version: int
    publisher: int


class Published:
    """What one worker publishes.

    Attributes:
        making: held while a version is made: one at a time.
        leases: name, version, and lease of each block that was made here, and may be in use.
    """

    def __init__(self) -> None:
        self.making = threading.Lock()
        self.leases: list[tuple[str, int, Any]] = []

    def note_lease(self, worker: Worker, name: str, number: int, block: Any) -> None:
        """Remember that a block was made for version ``number``, to tell who holds it."""
        if hasattr(block, "lease"):
            place = block.lease.segment.id, block.lease.offset  # what was there before has been freed
            self.leases = [
                each
                for each in self.leases
                if (each[2].segment.id, each[2].offset) != place and worker.mailbox.holders(each[2])
            ]
            self.leases.append((name, number, block.lease))

    def holders(self, worker: Worker) -> str:
        """Which workers hold which versions, in words."""
        name_of, parts = worker.membership.name_of, []
        for name, number, lease in self.leases:
            holders = [p for p in worker.mailbox.holders(lease) if p != OWN]
            if holders:
                peers = ["a lost worker" if p < 0 else name_of(p) for p in holders]
                parts.append(f"version {number} of {name!r}: {', '.join(peers)}")
        return "; ".join(parts)


# ---- the publisher ----------------------------------------------------------------------------------------


def publish(
    name: str,
    tensors: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    changed: Collection[str] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> int:
    """Make the next version of ``name`` from ``tensors``: one copy, which never changes.

    :func:`subscribe` gives it to any worker. This worker keeps the newest version; an older one is kept by
    those that use it. All of them together take at most ``arena_limit`` bytes of shared memory
    (:class:`RpcBackendOptions`). One worker at a time publishes a name.

    Args:
        name: of the versions.
        tensors: a ``state_dict()``, or a module, whose ``state_dict()`` is taken. Strided tensors in host
            memory; of each, the values are published, without gradient.
        changed: names of the tensors that differ from the version before; of tied ones, one is enough. The
            others are not copied: they stay in the memory of the version that had them last, which is kept as
            a whole. None: all.
        timeout: seconds to wait for memory that readers of older versions hold, and for the last publisher to
            say whether it is alive; 0 for no limit; default: the worker's.

    Returns:
        The number of the version; it rises by one with each, also if another worker goes on publishing.

    Raises:
        ArgumentTypeError: if ``tensors`` is no such thing, naming the entry.
        PayloadError: if a tensor cannot be published (on a GPU, sparse, quantized, ...).
        ConfigurationError: if ``changed`` has names that are not in ``tensors``, or leaves out a tensor that
            is new, or of another shape or dtype.
        DuplicateNameError: if another worker, which is alive, publishes this name.
        RpcTimeoutError: if there is not enough memory in time (it says who holds which versions), or if the
            last publisher does not reply.

    Example:
        >>> rpc.publish("weights", {"bias": torch.ones(2)})
        1
        >>> rpc.publish("weights", {"bias": torch.zeros(2)})
        2
    """
    worker, key = current_worker(), key_of(PREFIX, name)
    names = None if changed is None else check_names(changed, "publish: changed", "tensors")
    began, checked = monotonic_ns(), _checked(tensors)
    deadline = Deadline.after(worker.resolve_timeout(timeout) or None)
    shelf = worker.shelf
    published: Published = worker.hooks.extensions.setdefault("published", Published())
    left = deadline.timeout()
    with holding(published.making, -1.0 if left is None else left) as held:
        if not held:
            raise RpcTimeoutError("publish: another thread of this worker has been publishing all the time")
        raw, last = _last(worker, name, deadline)
        number = last.version + 1
        before = shelf.newest(name, last.version) if last.publisher == worker.id else None
        kept = {} if names is None else _unchanged(checked, set(names), before)
        places, blocks = dict(kept), {}
        size, fresh = 0, {key: t for key, t in checked.items() if key not in kept}
        if fresh:
            plan = _Plan(fresh, worker.ids.next())
            size = plan.size
            block = allocate(worker, published, size, deadline)
            plan.fill(block, worker.mailbox.write if hasattr(block, "lease") else _write)
            blocks[next(iter(plan.places.values())).block] = block
            places.update(plan.places)
            published.note_lease(worker, name, number, block)
        if before is not None:
            blocks.update({p.block: before.blocks[p.block] for p in kept.values()})
        version = Version(number, worker.id, {key: places[key] for key in checked}, blocks)
        shelf.put(name, before, unannounced=version)  # first: who reads the announcement asks for it
        announced = msgspec.json.encode(Announcement(number, worker.id))
        if worker.directory.shared().compare_set(key, raw, announced) != announced:
            shelf.drop(name)
            raise DuplicateNameError(f"another worker has begun to publish {name!r}")
        shelf.put(name, version)
    if worker.tracer is not None:
        worker.tracer.published(began, name, number, size)
    return number


def _last(worker: Worker, name: str, deadline: Deadline) -> tuple[bytes, Announcement]:
    """What the store says of ``name``, for the worker that is to publish it next."""
    raw = worker.directory.read(PREFIX + name)
    if not raw:
        return raw, Announcement(0, worker.id)
    last = msgspec.json.decode(raw, type=Announcement)
    if last.publisher != worker.id and worker.directory.is_alive(last.publisher, deadline):
        raise DuplicateNameError(
            f"{worker.membership.name_of(last.publisher)} (worker {last.publisher}) publishes {name!r}: use "
            f"another name, or let that worker publish"
        )
    return raw, last


def _checked(tensors: Any) -> dict[str, torch.Tensor]:
    """The entries of ``tensors``, detached."""
    if isinstance(tensors, torch.nn.Module):
        tensors = tensors.state_dict()
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(
            f"publish: pass a module or its state_dict(), a mapping of names to tensors, not "
            f"{type(tensors).__name__}"
        )
    if not tensors:
        raise ArgumentTypeError(
            "publish: there are no tensors: pass a module that has parameters or buffers, or a mapping of "
            "names to tensors"
        )
    checked: dict[str, torch.Tensor] = {}
    for key, t in tensors.items():
        if not isinstance(key, str) or not isinstance(t, torch.Tensor):
            raise ArgumentTypeError(
                f"publish: entry {key!r} is a {type(t).__name__}: only tensors with a name are published. "
                f"Leave it out, make it a tensor, or publish parts one by one (of an optimizer, by state)"
            )
        if not t.is_cpu or t.layout is not torch.strided or t.is_quantized or t.is_nested:
            raise PayloadError(
                f"publish: {key!r} is a {t.layout} tensor on {t.device}: only strided tensors in host memory "
                f"are published. Pass its .cpu(), .to_dense() or .dequantize()"
            )
        plain = t.detach()
        if type(plain) is not torch.Tensor or t.dtype not in NAMES:
            raise PayloadError(
                f"publish: {key!r} is a {type(t).__name__} of {t.dtype}, which cannot be published. "
                f"Pass a plain tensor (of a DTensor, its to_local() or full_tensor())"
            )
        checked[key] = materialized(plain)
    return checked


def _unchanged(
    tensors: dict[str, torch.Tensor], changed: set[str], before: Version | None
) -> dict[str, Place]:
    """The places of the tensors that are as they were ``before``."""
    unknown = sorted(changed.difference(tensors))
    if unknown:
        raise ConfigurationError(f"publish: changed has names that tensors does not: {', '.join(unknown)}")
    if before is None:
        return {}
    kept: dict[str, Place] = {}
    # ``named_parameters`` has one name of tied tensors, and others may be views of what has changed.
    starts, ends = zip(*sorted(_span(tensors[key]) for key in changed), strict=True) if changed else ((), ())
    ends = tuple(accumulate(ends, max))
    for key in tensors.keys() - changed:
        place, t = before.places.get(key), tensors[key]
        start, end = _span(t)
        before_end = bisect_left(starts, end)
        if before_end and ends[before_end - 1] > start:
            continue
        if place is None or (place.dtype, place.shape) != (NAMES[t.dtype], tuple(t.shape)):
            raise ConfigurationError(
                f"publish: {key!r} is new, or of another shape or dtype than in version {before.number}: "
                f"name it in changed"
            )
        kept[key] = place
    return kept


def _span(t: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of ``t`` and after its last."""
    return t.data_ptr(), t.data_ptr() + extent(t) * t.itemsize


class _Plan:
    """Where ``tensors`` go in a new block: those that are the same memory have one place."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], block: int) -> None:
        self.places: dict[str, Place] = {}
        self.size = 0
        self._contents: dict[tuple[Any, ...], tuple[int, torch.Tensor]] = {}
        for key, t in tensors.items():
            bits = t.is_conj(), t.is_neg()  # a lazy conjugate has the memory of what it is of
            what = (t.data_ptr(), t.dtype, t.shape, t.stride(), bits) if t.numel() else (key,)
            if what not in self._contents:
                self._contents[what] = self.size, t
                self.size += -(-t.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            offset = self._contents[what][0]
            self.places[key] = Place(block, offset, NAMES[t.dtype], tuple(t.shape))
        self.size = max(self.size, 1)

    def fill(self, block: Any, write: Callable[[Any, int, memoryview], None]) -> Any:
        """Copy the tensors to ``block``, those that are contiguous by ``write``. Returns ``block``."""
        for offset, t in self._contents.values():
            if t.is_contiguous() and not (t.is_conj() or t.is_neg()):
                write(block, offset, window(t, t.data_ptr(), t.nbytes))
            else:
                target = tensor_at(block, Place(0, offset, NAMES[t.dtype], tuple(t.shape)))
                copyable(target).copy_(copyable(t))
        return block


def _write(block: bytearray, offset: int, data: memoryview) -> None:
    block[offset : offset + len(data)] = data  # as bytes: torch copies no tensors of some dtypes


def allocate(worker: Worker, published: Published, size: int, deadline: Deadline) -> Any:
    """A block of ``size`` bytes: of shared memory, or of this process if the system has none.

    Raises:
        RpcTimeoutError: if readers hold too much of it.
    """
    block = worker.mailbox.allocate(size, deadline)
    if not isinstance(block, str):
        return block
    if block == "off":
        return bytearray(size)
    arena = worker.mailbox.statistics()["arena"]
    held = published.holders(worker)
    who = f"These workers hold versions: {held}. " if held else ""
    wait = "Let readers drop the tensors of older versions, or raise" if size <= arena["limit"] else "Raise"
    raise RpcTimeoutError(
        f"{worker.name}: no shared memory for a version of {size} bytes ({block}): {arena['bytes_leased']} "
        f"of {arena['limit']} are leased. {who}{wait} RpcBackendOptions(arena_limit=BYTES)"
    )


def tensor_at(block: Any, place: Place) -> torch.Tensor:
    """The tensor at ``place`` of ``block``."""
    dtype, shape = DTYPES[place.dtype], place.shape
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(block, dtype=dtype, count=count, offset=place.offset)
    return flat if len(shape) == 1 else flat.view(shape)  # a view takes longer than what it is of


# ---- what readers call ------------------------------------------------------------------------------------


def fetch_version(
    name: str, newest: int, failed: int, known: Collection[int], narrow: Mapping[str, Slice | None] | None
) -> Version | Redirection | None:
    """Runs on the publisher: its newest version for the worker that calls, as :func:`offer`.

    Args:
        name: of the versions.
        newest, failed, known: as for :func:`offer`.
        narrow: the parts that a reader of another host wants; None: all.
    """
    worker, request = current_worker(), served()
    if narrow is not None and request is not None and not is_local(worker, request.source):
        version = worker.shelf.newest(name, newest)
        return None if version is None else _narrowed(version, narrow)
    return offer(name, newest, failed, known)


def _narrowed(version: Version, parts: Mapping[str, Slice | None]) -> Version:
    """A version with only these parts of its tensors, in a block of its own."""
    plan = _Plan(take_parts(version.places, version.blocks, parts), 0)
    blocks = {0: plan.fill(bytearray(plan.size), _write)}
    return Version(version.number, version.source, plan.places, blocks, narrowed=True)


def take_parts(
    places: Mapping[str, Place], blocks: Mapping[int, Any], parts: Mapping[str, Slice | None] | None
) -> dict[str, torch.Tensor]:
    """The tensors at ``places``, on their blocks; with ``parts``, only these, narrowed.

    Raises:
        ConfigurationError: if there is no such part.
    """
    if parts is None:
        return {key: tensor_at(blocks[place.block], place) for key, place in places.items()}
    unknown = sorted(map(str, set(parts).difference(places)))
    if unknown:
        known = ", ".join(sorted(places)[:16])
        raise ConfigurationError(f"no tensor is named {', '.join(unknown)}; among the names are {known}")
    tensors = {key: tensor_at(blocks[places[key].block], places[key]) for key in parts}
    for key, part in parts.items():
        if part is not None:
            try:
                tensors[key] = tensors[key].narrow(*part)
            except (RuntimeError, IndexError, TypeError) as e:
                raise ConfigurationError(
                    f"narrow: {key!r} has the shape {places[key].shape}, and no part (dim, start, length) = "
                    f"{part}: {e}"
                ) from e
    return tensors
