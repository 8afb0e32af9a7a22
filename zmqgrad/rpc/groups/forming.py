"""From a store at which workers meet to the group of this one, and to the address that it listens on.

A group of a fixed world size and one without do not share a store at the same time: whoever comes second is
refused, as its calls could reach only half of the workers.
"""

from __future__ import annotations

import re
import secrets

import msgspec

from zmqgrad import environment
from zmqgrad.errors import ConfigurationError, DuplicateWorkerError, RendezvousError, StoreTimeoutError
from zmqgrad.rpc.groups.dynamic import DynamicGroup
from zmqgrad.rpc.groups.group import Group, close_quietly, make_worker
from zmqgrad.rpc.groups.identity import WorkerRecord, check_rank
from zmqgrad.rpc.groups.joining import REFUSED, read_all
from zmqgrad.rpc.groups.roster import PREFIX, allot_id, lives
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import FileStore, PrefixStore, Store, TCPStore
from zmqgrad.transport.exposure import (
    check_exposure,
    facing_address,
    may_be_exposed,
    own_address,
)
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.transport.security import keys_of

_generation = 1
"""Which group of a fixed size this process is in, or joins next; all its workers count alike."""

_OF_FIXED_GROUP = re.compile(r"rpc/\d+/worker/\d+")

_JOB_KEY = "rpc/job"
"""Where the workers that meet at a store find a name for their job, which is random."""

GLANCE_SECONDS = 0.2
"""How long a key that was just listed may take to be read."""


def join_group(
    store: Store,
    name: str,
    rank: int | None,
    world_size: int | None,
    options: RpcBackendOptions,
    deadline: Deadline,
) -> Group:
    """Join the group that meets at ``store``; without a world size, one that others may join and leave.

    Raises:
        ConfigurationError, RendezvousError: as :meth:`Group.join`, and what forms it; the store is closed.
    """
    if world_size is None:
        group: Group = form_dynamic(name, rank, store, options)
    else:
        group = form_fixed(name, store, -1 if rank is None else rank, world_size, options)
    try:
        group.join(deadline)
    except BaseException as e:
        if isinstance(e, DuplicateWorkerError):  # all are told, and try anew
            _count(world_size)
        close_quietly(group)
        raise
    _count(world_size)
    return group


def _count(world_size: int | None) -> None:
    """A group has met. One that has not is tried again, by those whom somebody kept waiting."""
    global _generation
    _generation += world_size is not None


def form_fixed(name: str, store: Store, rank: int, world_size: int, options: RpcBackendOptions) -> Group:
    """The group of ``world_size`` workers, not joined yet. Closes ``store`` if it cannot be.

    Raises:
        ConfigurationError: if rank and world size cannot be right.
        RendezvousError: if a group of no fixed size meets here.
    """
    try:
        check_rank(rank, world_size)
        dynamic = store.list_keys(f"{PREFIX}/worker/")
        _refuse_beside_others(store, dynamic, "of no fixed size")
        worker = make_worker(name, rank, world_size, _mailbox(name, rank, store, options), options)
    except BaseException:
        store.close()
        raise
    # Under a launcher's own store, an earlier group of this process may have left keys.
    own = PrefixStore(f"rpc/{_generation}", store, owned=True)
    return Group(worker, own, _if_served(store))


def form_dynamic(name: str, rank: int | None, store: Store, options: RpcBackendOptions) -> DynamicGroup:
    """The group that meets here, however many they are; not joined yet. Closes ``store`` if it cannot be.

    Raises:
        ConfigurationError: if there can be no worker of that rank.
        RendezvousError: if a group of a fixed size meets here.
    """
    own = PrefixStore(PREFIX, store, owned=True)
    try:
        fixed = [key for key in store.list_keys("rpc/") if _OF_FIXED_GROUP.fullmatch(key)]
        _refuse_beside_others(store, fixed, "of a fixed size")
        number = allot_id(own, name, rank)
        worker = make_worker(name, number, 0, _mailbox(name, number, store, options), options)
    except BaseException:
        store.close()
        raise
    return DynamicGroup(worker, own, _if_served(store))


def _refuse_beside_others(store: Store, keys: list[str], what: str) -> None:
    """Does a worker live that published itself under one of ``keys``? Then another kind of group meets here.

    Raises:
        RendezvousError: if so, naming it.
    """
    for key in keys:
        try:
            raw = read_all(store, [key], GLANCE_SECONDS)[0]
        except StoreTimeoutError:
            continue  # it has left at this very moment
        if raw.startswith(REFUSED.encode()):
            continue
        other = msgspec.json.decode(raw, type=WorkerRecord)
        if lives(other):
            raise RendezvousError(
                f"RPC group mixes statically and dynamically initialized members which is not supported: "
                f"{other.name} (process {other.pid} of {other.host}) is in a group {what}; let all workers "
                f"give the same world size, or none of them"
            )


def _mailbox(name: str, number: int, store: Store, options: RpcBackendOptions) -> ZmqMailbox:
    job = store.compare_set(_JOB_KEY, "", secrets.token_hex(8))  # whoever comes first says it for all
    return ZmqMailbox(
        name,
        number,
        tcp_host=listening_host(store),
        arena=options.arena(),
        timeouts=options.limits,
        inflight=options.inflight(),
        keys=keys_of(),
        io_threads=options.io_threads,
        spin_seconds=options.spin_seconds(),
        job=job,
        fast_path=options.uses_fast_path(),
    )


def _if_served(store: Store) -> TCPStore | None:
    """``store``, if this worker serves it."""
    return store if isinstance(store, TCPStore) and store.is_master else None


def listening_host(store: Store) -> str:
    """The address of this host that others reach it by: the one that faces the host where they meet.

    That is the store's; MASTER_ADDR where they meet by a file. If nobody says, it is the address of the
    default route where this may be listened on, and otherwise loopback: all workers are on this host then.

    Raises:
        ConfigurationError: if it may not be listened on, or there is none.
    """
    beneath, keyed = getattr(store, "underlying_store", store), keys_of() is not None
    host, port = getattr(beneath, "host", None), getattr(beneath, "port", 0)
    if isinstance(beneath, FileStore):
        host = environment.read_launch().master_addr
        if host is None:
            return own_address() if may_be_exposed(keyed) else "127.0.0.1"
    try:
        facing = facing_address(host or "127.0.0.1", port)
    except OSError as e:
        raise ConfigurationError(f"no way leads to {host}, where the workers of this group meet: {e}") from e
    check_exposure(f"tcp://{facing}:0", keyed)
    return facing
