"""Joining a group: choose its kind by the world size, make the worker, and wait until it is a member."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from functools import partial

from zmqgrad import environment
from zmqgrad.errors import ConfigurationError, DuplicateWorkerError, WorldSizeError
from zmqgrad.rendezvous import Group as SharedName
from zmqgrad.rendezvous import meeting_place
from zmqgrad.rendezvous.sidecar import Rival
from zmqgrad.rpc.membership.dynamic import DynamicGroup
from zmqgrad.rpc.membership.fixed import FixedGroup
from zmqgrad.rpc.membership.group import (
    HURRIED_JOIN_TIMEOUT_SECONDS,
    Group,
    close_quietly,
    make_worker,
)
from zmqgrad.rpc.membership.registry import (
    allocate_id,
    check_no_dynamic_group,
    check_no_fixed_group,
    dynamic_store,
    fixed_store,
)
from zmqgrad.rpc.membership.worker_info import check_rank
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import FileStore, Store, TCPStore
from zmqgrad.transport import local
from zmqgrad.transport.host_address import HostAddress, choose_address
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.transport.security import job_keys, keys_for_worker, load_keys

logger = logging.getLogger(__name__)

_joined: Counter[str | None] = Counter()
"""Groups of fixed size that this process has joined, by where they met; equal in all workers of the next."""

_JOB_KEY = "rpc/job"
"""Key of the store that holds the random name of the job."""


def shared_name(init_method: str, world_size: int | None, rank: int | None = None) -> SharedName:
    """The name of the next group among those that share its address. ``world_size`` None: it is dynamic."""
    fixed, dynamic = SharedName("rpc", _generation(init_method)), SharedName("rpc", 0)
    if world_size is None:
        return dynamic._replace(rival=Rival(str(fixed), partial(check_no_fixed_group, rank=rank)))
    return fixed._replace(rival=Rival(str(dynamic), check_no_dynamic_group))


def join_group(
    store: Store,
    name: str,
    rank: int | None,
    world_size: int | None,
    options: RpcBackendOptions,
    deadline: Deadline,
) -> Group:
    """Join the group that uses ``store``.

    Args:
        store: closed with the group, or if joining fails.
        name: of this worker.
        rank: of this worker; None in a dynamic group: the next free one.
        world_size: number of workers; None: the group is dynamic.
        options: of this worker.
        deadline: for the others to join.

    Raises:
        ConfigurationError: if rank, world size or a device map is invalid.
        RendezvousError: if the store is used by a group of the other kind.
        DuplicateWorkerError, WorldSizeError, RendezvousTimeoutError: as :meth:`Group.join`.
    """
    try:
        group = _make_group(store, name, rank, world_size, options)
    except BaseException:
        store.close()
        raise
    try:
        group.join(deadline)
        _end_generation(options.init_method, world_size)
    except BaseException as e:
        is_refused = isinstance(e, (DuplicateWorkerError, WorldSizeError))
        if is_refused or group.has_met:  # so all workers are, or have: they use new keys for the next group
            _end_generation(options.init_method, world_size)
            if is_refused and isinstance(store, FileStore):
                store.disown()
                close_quietly(group)
                raise type(e)(
                    f"{e}. The workers meet by the file {store.path!r}: if another job uses it, give each "
                    f"job a file of its own; if no job does, an earlier one has left it behind: remove it"
                ) from e
        close_quietly(group)
        raise
    return group


def _generation(init_method: str) -> int:
    """Number of the group of fixed size that this process is in, or joins next, where it meets the others."""
    return 1 + _joined[meeting_place(init_method)]


def _end_generation(init_method: str, world_size: int | None) -> None:
    """Use new keys for the next group. After a timeout the keys stay: workers that start late still join."""
    place = meeting_place(init_method)
    _joined[place] += world_size is not None and place is not None


def _make_group(
    store: Store, name: str, rank: int | None, world_size: int | None, options: RpcBackendOptions
) -> Group:
    beneath = getattr(store, "underlying_store", store)
    served = beneath if isinstance(beneath, TCPStore) and beneath.is_master else None
    if world_size is None:
        keys = dynamic_store(store, rank)
        number = allocate_id(keys, name, rank)
        return DynamicGroup(_make_worker(name, number, 0, store, options), keys, served)
    number, _ = check_rank(-1 if rank is None else rank, world_size)
    keys = fixed_store(store, _generation(options.init_method))
    return FixedGroup(_make_worker(name, number, world_size, store, options), keys, served)


def _make_worker(name: str, number: int, world_size: int, store: Store, options: RpcBackendOptions) -> Worker:
    mailbox = _mailbox(name, number, store, options)
    try:
        return make_worker(name, number, world_size, mailbox, options)
    except BaseException:
        mailbox.close()
        mailbox.join(Deadline.after(HURRIED_JOIN_TIMEOUT_SECONDS))
        raise


def _mailbox(name: str, number: int, store: Store, options: RpcBackendOptions) -> ZmqMailbox:
    job = store.compare_set(_JOB_KEY, "", secrets.token_hex(32))  # the first worker sets it for all
    address = worker_address(store)
    fast_path, keys = options.uses_fast_path(), keys_for_worker(job)
    if keys is None and not environment.allows_insecure():
        keys = job_keys(job)
        # All workers are on this host, and other users of it have no business at a port.
        listens = not (fast_path and local.supported())
    else:
        listens = True
    logger.info("worker %s listens at %s", name, address if listens else "unix sockets only")
    return ZmqMailbox(
        name,
        number,
        tcp_host=address.listen if listens else None,
        advertised=address.advertise,
        arena=options.arena(),
        timeouts=options.limits,
        inflight=options.inflight(),
        keys=keys,
        io_threads=options.io_threads,
        spin_seconds=options.spin_seconds(),
        job=job,
        fast_path=fast_path,
    )


def worker_address(store: Store) -> HostAddress:
    """The address at which a worker that meets the others by ``store`` listens, and is reached.

    Of a file the environment names the host (MASTER_ADDR).

    Raises:
        ConfigurationError: if listening on the address is not allowed, or no route leads to the host.
    """
    beneath = getattr(store, "underlying_store", store)
    host, port = getattr(beneath, "host", None), getattr(beneath, "port", 0)
    if isinstance(beneath, FileStore):
        host = environment.read_launch().master_addr
    elif host is None:  # in memory
        host = "localhost"
    try:
        return choose_address(host, port, secured=load_keys() is not None)
    except OSError as e:
        raise ConfigurationError(f"no route to {host}, where the workers of this group meet: {e}") from e
