"""Published tensors, where they are read: the newest whole version, fetched as soon as it is announced."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
import torch

from zmqgrad.errors import (
    ArgumentTypeError,
    NotInitializedError,
    PeerLostError,
    RpcTimeoutError,
    StoreError,
    UnknownWorkerError,
)
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.directory import key_of
from zmqgrad.rpc.futures import PythonFuture
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT
from zmqgrad.rpc.publishing import PREFIX, Announcement, Slice, fetch_version, take_parts
from zmqgrad.rpc.raising import copy_exception
from zmqgrad.rpc.relaying import Reading, fetch
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.arguments import as_integer, check_callable
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.future import Promise

logger = logging.getLogger(__name__)


class PublishedTensors(dict[str, torch.Tensor]):
    """The tensors of one version, by name; ``version`` is its number.

    They are in memory of this reader: on the host of the publisher in a private mapping, of which no page is
    copied before it is written. Writing to them changes nothing elsewhere, and no later version.

    Example:
        >>> version = rpc.publish("weights", {"bias": torch.ones(2)})
        >>> with rpc.subscribe("weights") as weights:
        ...     newest = weights.tensors
        >>> newest.version == version, newest["bias"]
        (True, tensor([1., 1.]))
    """

    version: int


class Subscription:
    """The newest version of a name, as :func:`subscribe` returns it. Thread-safe.

    ``async for tensors in subscription`` yields the newest version, then each newer one; versions that were
    soon replaced may be left out.

    Example:
        >>> version = rpc.publish("weights", {"bias": torch.ones(2)})
        >>> with rpc.subscribe("weights") as weights:
        ...     print(weights.wait(newer_than=version - 1).version == version)
        True
    """

    def __init__(
        self,
        worker: Worker,
        name: str,
        narrow: Mapping[str, Slice | None] | None,
        callback: Callable[[PublishedTensors], None] | None,
        deadline: Deadline,
    ) -> None:
        key = key_of(PREFIX, name)
        self._worker = worker
        self._name = name
        self._narrow = narrow
        self._callback = callback
        self._deadline = deadline  # for the first version
        self._lock = threading.Lock()  # guards all below
        self._current: PublishedTensors | None = None
        self._error: Exception | None = None
        self._closed = False
        self._changed: Promise[None] = Promise()  # done with the next change of these
        self._reading = worker.shelf.begin(name) if narrow is None else Reading()  # parts are not passed on
        self._follower = worker.directory.follow(key, self._step, self._end)

    @property
    def tensors(self) -> PublishedTensors:
        """The newest version that is here: ``module.load_state_dict(subscription.tensors)``."""
        assert self._current is not None  # subscribe() has waited for it
        return self._current

    @property
    def version(self) -> int:
        """The number of the newest version that is here; ``tensors.version`` is that of ``tensors``."""
        return 0 if self._current is None else self._current.version

    def wait(self, newer_than: int | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> PublishedTensors:
        """Wait for a version.

        Args:
            newer_than: the number of a version; None: the one that is here now.
            timeout: seconds; 0 for no limit; default: the worker's.

        Returns:
            The newest version, which is newer than ``newer_than``.

        Raises:
            RpcTimeoutError: if there is none in time; it says if the publisher is lost.
            NotInitializedError: if this is closed, or the worker is shut down.
            Exception: what fetching a version raised.
        """
        seconds = self._worker.resolve_timeout(timeout)
        deadline = Deadline.after(seconds or None)
        last = self.version if newer_than is None else as_integer(newer_than, "newer_than")
        while True:
            found, changed = self._newer(last)
            if found is not None:
                return found
            if not changed.wait_done(deadline.timeout()):
                raise RpcTimeoutError(self._explain(last, seconds))

    def _newer(self, last: int) -> tuple[PublishedTensors | None, Promise[None]]:
        """The version that is newer than ``last``, or None; and what is done with the next change."""
        with self._lock:
            if self._closed:
                raise NotInitializedError(f"the subscription to {self._name!r} was closed")
            found = self._current if self.version > last else None
            if found is None and self._error is not None:
                raise copy_exception(self._error)
            return found, self._changed

    def _change(
        self, tensors: PublishedTensors | None, error: Exception | None = None, closed: bool = False
    ) -> bool:
        """Set what waits end with. Returns False if this was closed before."""
        with self._lock:
            if self._closed:
                return False
            self._current = self._current if tensors is None else tensors
            self._error, self._closed = error, closed
            changed = self._changed
            if not closed:
                self._changed = Promise()
        changed.set_result(None)
        return True

    def _explain(self, last: int, seconds: float) -> str:
        worker, directory = self._worker, self._worker.directory
        try:
            listed = directory.list(PREFIX)
        except StoreError as e:
            return f"{worker.name}: no version of {self._name!r} is announced after {seconds:g} s: {e}"
        found = {name: msgspec.json.decode(raw, type=Announcement) for name, raw in listed}
        own = found.get(self._name)
        if own is None:
            names = ", ".join(sorted(found))
            what = f"the names are {names}" if names else "nothing is published in this group"
            return f"{worker.name}: nothing is published as {self._name!r} after {seconds:g} s; {what}"
        name = worker.membership.name_of(own.publisher)
        lost = ""
        if own.publisher in worker.lost:
            lost = f", which is lost: {worker.lost[own.publisher]}"
        elif worker.membership.find_known(own.publisher) is None:  # fetching from it has looked for it
            lost = ", which had left before this worker joined"
        return (
            f"{worker.name}: no version of {self._name!r} newer than {last} is here after {seconds:g} s; "
            f"{name} has published version {own.version}{lost}"
        )

    async def __aiter__(self) -> AsyncIterator[PublishedTensors]:
        last = 0
        while True:
            found, changed = self._newer(last)
            if found is None:
                woken: PythonFuture[Any] = PythonFuture()
                changed.add_done_callback(woken.set_result)
                await woken
            else:
                last = found.version
                yield found

    def __repr__(self) -> str:
        return f"<Subscription to {self._name!r}, {'closed, ' if self._closed else ''}version {self.version}>"

    def close(self) -> None:
        """Fetch no more. Tensors that were read stay valid. Idempotent."""
        self._follower.close()

    def _end(self) -> None:
        self._change(None, closed=True)
        self._worker.shelf.end(self._name, self._reading)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- fetching ---------------------------------------------------------------------------------------

    def _step(self, raw: bytes) -> None:
        announced = msgspec.json.decode(raw, type=Announcement) if raw else None
        if announced is None or announced.version <= self.version or announced.publisher in self._worker.lost:
            return
        try:
            tensors = self._fetch(announced)
        except (PeerLostError, UnknownWorkerError) as e:
            logger.info("%s: the last version of %r stays: %s", self._worker.name, self._name, e)
            return
        except Exception as e:
            self._change(None, copy_exception(e))
            if self._callback is not None and not self._worker.closed:  # perhaps nobody waits
                text = "%s: the callback does not get version %d of %r: %s"
                logger.warning(text, self._worker.name, announced.version, self._name, e)
            return  # the copy has no traceback, which would refer to the tensors
        if tensors is not None and self._change(tensors) and self._callback is not None:
            with self._worker.shelf.busy(self._reading):
                self._callback(tensors)

    def _fetch(self, announced: Announcement) -> PublishedTensors | None:
        version = fetch(
            self._worker,
            self._name,
            self._reading,
            announced.publisher,
            announced.version,
            self._deadline if self._current is None else Deadline(),
            fetch_version,
            self._narrow,
        )
        if version is None:  # another worker publishes it by now, which will be announced
            return None
        if not version.narrowed:  # another subscription of this worker may be the one that relays all of it
            self._worker.shelf.seen(self._name, self._reading, version.number)
        parts = None if version.narrowed else self._narrow
        tensors = PublishedTensors(take_parts(version.places, version.blocks, parts))
        tensors.version = version.number
        return tensors


def subscribe(
    name: str,
    *,
    narrow: Mapping[str, Slice | None] | None = None,
    callback: Callable[[PublishedTensors], None] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Subscription:
    """Follow what :func:`publish` makes of a name, from any worker; waits for the first version.

    Each version is fetched as soon as it is announced. On the host of the publisher it is mapped, without a
    copy; one reader of each other host fetches it, and the others of that host map what that one has.

    Args:
        name: of the versions.
        narrow: the tensors that this reader wants, and of each the part ``(dim, start, length)``, or None:
            all of it. None: all tensors. Of these parts only, a reader of another host fetches the bytes.
        callback: called with each version, in an engine thread, one call at a time; what it raises is logged.
            It must not wait for the next version, which is fetched once it has returned.
        timeout: seconds to wait for a version; 0 for no limit; default: the worker's.

    Returns:
        The subscription. It is followed until ``close()`` or ``shutdown``, also if nothing refers to it.

    Raises:
        RpcTimeoutError: if there is no version in time; it says which names there are.
        ConfigurationError: if there is no such part.
        ArgumentTypeError: if ``name``, ``narrow`` or ``callback`` is no such thing.

    Example:
        >>> version = rpc.publish("weights", {"bias": torch.ones(2)})
        >>> with rpc.subscribe("weights") as weights:
        ...     print(weights.tensors["bias"])
        tensor([1., 1.])
    """
    if narrow is not None and not isinstance(narrow, Mapping):
        raise ArgumentTypeError(
            f"subscribe: narrow is a mapping of names to (dim, start, length) or None, not {narrow!r}"
        )
    if callback is not None:
        check_callable(callback)
    worker = current_worker()
    deadline = Deadline.after(worker.resolve_timeout(timeout) or None)
    subscription = Subscription(worker, name, narrow, callback, deadline)
    try:
        subscription.wait(0, timeout)
    except BaseException:
        subscription.close()
        raise
    return subscription
