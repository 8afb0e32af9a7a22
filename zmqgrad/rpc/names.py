"""Named objects: references that any worker of the group can find by a name, also one that joins later.

    caller of remote(name=)    claims the name in the store, before anything is made; then sends the remote
                               call, and a second call with a reference to its value
    owner                      keeps that reference once the value has been made, and declares the name ready
    get_ref                    reads from the store who the owner is, and asks it for the reference

So a name is refused before a second object exists, and who finds an object becomes its user by a message of
the owner, as with any RRef: (R1) to (R3) of :mod:`~zmqgrad.rpc.rref.protocol` hold as they do there. The name
itself keeps the value alive. A claim is void once its owner is dead, or its claimer before the owner
has declared it ready. A claimer that loses the owner before that takes its claim back: each may live on for
others, which would wait for a call that has not arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from typing import Any

import msgspec

from zmqgrad.errors import (
    DuplicateNameError,
    PeerLostError,
    RpcTimeoutError,
    StoreError,
    UnknownWorkerError,
)
from zmqgrad.rpc.calls import PendingCall
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.directory import Follower, key_of
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT
from zmqgrad.rpc.rref.api import RRef, call_remote
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.arguments import check_callable
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Inbound

_PREFIX = "names/"

RefCallback = Callable[[RRef[Any] | None], None]


class _Claim(msgspec.Struct, frozen=True):
    """Who has a name. ``number`` is unique to a claim; ``ready``: the value has been made."""

    owner: int
    claimer: int
    number: int
    ready: bool = False

    def encode(self, ready: bool = False) -> bytes:
        return msgspec.json.encode(_Claim(self.owner, self.claimer, self.number, ready))


def _kept(worker: Worker) -> dict[int, RRef[Any]]:
    """The named objects of ``worker``, by the number of their claim. All uses are one atomic operation."""
    kept: dict[int, RRef[Any]] = worker.hooks.extensions.setdefault("names", {})
    return kept


def remote_named(
    worker: Worker, name: str, to: object, function: Callable[..., Any], args: Any, kwargs: Any, timeout: Any
) -> RRef[Any]:
    """As :func:`~zmqgrad.rpc.rref.api.call_remote`, but first claim ``name`` for the value.

    Raises:
        DuplicateNameError: if another object has it.
    """
    key = key_of(_PREFIX, name)
    deadline = Deadline.after(worker.resolve_timeout(timeout) or None)
    owner = worker.membership.find(to, deadline.timeout()).id
    claim = _Claim(owner, worker.id, worker.ids.next())

    def take_back() -> None:
        worker.directory.shared().compare_set(key, claim.encode(), b"")

    def take_back_if_possible() -> None:
        with suppress(StoreError):  # which may have been lost with the owner
            take_back()

    def on_told(reply: Promise[Inbound]) -> None:
        if isinstance(reply.exception(), PeerLostError):
            worker.submit_if_open(take_back_if_possible)

    try:
        _take(worker, name, claim, deadline)
        rref = call_remote(worker, owner, function, args, kwargs, timeout)
        told = _tell(worker, owner, _keep, name, claim.number, claim.claimer, rref)
    except BaseException:
        take_back()
        raise
    told.promise.add_done_callback(on_told)
    return rref


def _tell(worker: Worker, owner: int, function: Callable[..., None], *args: Any) -> PendingCall:
    """Call ``function``, which ``owner`` is to run whenever it can: also later than the call served here."""
    return Context().run(worker.call, owner, function, args, timeout=0)


def _take(worker: Worker, name: str, claim: _Claim, deadline: Deadline) -> None:
    directory, store, expected = worker.directory, worker.directory.shared(), b""
    while True:
        raw = store.compare_set(_PREFIX + name, expected, claim.encode())
        if raw == claim.encode():
            return
        if raw:
            holder = msgspec.json.decode(raw, type=_Claim)
            needed = {holder.owner} if holder.ready else {holder.owner, holder.claimer}
            if all([directory.is_alive(each, deadline) for each in needed]):
                raise DuplicateNameError(
                    f"the name {name!r} is taken: {worker.membership.name_of(holder.owner)} (worker "
                    f"{holder.owner}) has an object of this name. Use another name, rpc.get_ref({name!r}), "
                    f"or rpc.remove_ref({name!r})"
                )
        expected = raw  # void, or taken back since


def _keep(name: str, number: int, claimer: int, rref: RRef[Any]) -> None:
    """Runs on the owner: keep the value for its name once it has been made; give the name back otherwise."""
    worker = current_worker()
    claim, kept, store = _Claim(worker.id, claimer, number), _kept(worker), worker.directory.shared()
    promise = rref.handle.promise
    assert promise is not None
    promise.wait_done()
    if promise.exception() is not None:
        store.compare_set(_PREFIX + name, claim.encode(), b"")
        return
    kept[number] = rref  # first: who reads that it is ready asks for it
    ready = claim.encode(ready=True)
    if store.compare_set(_PREFIX + name, claim.encode(), ready) != ready:  # taken back, or the claim was void
        kept.pop(number, None)


def _lookup(number: int) -> RRef[Any] | None:
    """Runs on the owner."""
    return _kept(current_worker()).get(number)


def _drop(number: int) -> None:
    """Runs on the owner."""
    _kept(current_worker()).pop(number, None)


def _find(worker: Worker, raw: bytes, deadline: Deadline) -> RRef[Any] | None:
    """The reference for the claim ``raw``; None if that is not ready, or its owner is dead."""
    claim = msgspec.json.decode(raw, type=_Claim) if raw else None
    if claim is None or not claim.ready:
        return None
    if claim.owner == worker.id:
        return _kept(worker).get(claim.number)
    try:
        return worker.ask(claim.owner, _lookup, (claim.number,), deadline.call_timeout())
    except (PeerLostError, UnknownWorkerError):
        return None


def get_ref(name: str, timeout: float = UNSET_RPC_TIMEOUT) -> RRef[Any]:
    """The object that :func:`remote` has given a ``name``. Waits until there is one, and it has been made.

    If its owner is lost or leaves, this waits for the next object of that name.

    Args:
        name: of the object.
        timeout: seconds; 0 for no limit; default: the worker's.

    Returns:
        A reference, which keeps the object alive as any other one does.

    Raises:
        RpcTimeoutError: if there is none in time; the message has the names that exist.
        NotInitializedError: if this worker is shut down meanwhile.

    Example:
        >>> created = rpc.remote("worker1", dict, kwargs={"step": 7}, name="state")
        >>> rpc.get_ref("state", timeout=30).to_here()
        {'step': 7}
    """
    worker, key = current_worker(), key_of(_PREFIX, name)
    directory, seconds = worker.directory, worker.resolve_timeout(timeout)
    deadline = Deadline.after(seconds or None)
    found = directory.wait_for(key, lambda: _find(worker, directory.read(key), deadline), deadline)
    if found is None:
        claims = {n: msgspec.json.decode(raw, type=_Claim) for n, raw in directory.list(_PREFIX) if raw}
        present = {record.id for record in worker.membership.all()}
        names = sorted(n for n, claim in claims.items() if claim.ready and claim.owner in present)
        raise RpcTimeoutError(
            f"{worker.name}: there is no object named {name!r} after {seconds:g} s; "
            f"{'the names are ' + ', '.join(names) if names else 'no object has a name'}. Names are given by "
            f"rpc.remote(..., name=...), and end with their owner"
        )
    return found


def remove_ref(name: str) -> bool:
    """Take the ``name`` of an object back: another one may have it. References to the object stay valid.

    Args:
        name: of the object.

    Returns:
        Whether an object had the name.

    Example:
        >>> rref = rpc.remote("worker1", dict, name="state")
        >>> rpc.get_ref("state").owner_name()
        'worker1'
        >>> rpc.remove_ref("state")
        True
    """
    worker, key = current_worker(), key_of(_PREFIX, name)
    seconds, raw = worker.resolve_timeout(UNSET_RPC_TIMEOUT), worker.directory.read(key)
    if not raw or worker.directory.shared().compare_set(key, raw, b"") != b"":
        return False
    claim = msgspec.json.decode(raw, type=_Claim)
    try:
        dropped = _tell(worker, claim.owner, _drop, claim.number).promise
        if dropped.wait_done(seconds or None):  # else it will be
            worker.decode(dropped.result())
    except (PeerLostError, UnknownWorkerError):
        return False
    return True


def watch_ref(name: str, callback: RefCallback) -> Follower:
    """Call ``callback`` with the object that has a ``name``, now and whenever another one gets it.

    It is called with None when the name has been taken back, or the owner was lost or has left: only after a
    reference, and before the next one. Calls run in engine threads, one at a time; what they raise is logged.

    Args:
        name: of the object.
        callback: gets a reference, or None.

    Returns:
        An object whose ``close()`` ends the watch. Shutdown ends it, too.

    Raises:
        ArgumentTypeError: if ``callback`` cannot be called.

    Example:
        >>> watch = rpc.watch_ref("state", lambda rref: None)  # called with None while nothing has the name
        >>> watch.close()
    """
    check_callable(callback)
    worker, key = current_worker(), key_of(_PREFIX, name)
    shown = 0  # the number of the claim that the callback knows; 0: none

    def step(raw: bytes) -> None:
        nonlocal shown
        claim = msgspec.json.decode(raw, type=_Claim) if raw else None
        if claim is not None and claim.ready and claim.number == shown and claim.owner not in worker.lost:
            return
        rref = _find(worker, raw, Deadline())  # nobody would ask again, however busy the owner is
        before, shown = shown, 0
        try:
            if before:
                callback(None)
        finally:  # the next object, whatever that raises
            if rref is not None and claim is not None:
                shown = claim.number
                callback(rref)

    return worker.directory.follow(key, step)
