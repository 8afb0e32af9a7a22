"""``EtcdStore``: a store in an etcd cluster, which survives the loss of any host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from zmqgrad.errors import ConfigurationError
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.arguments import DEFAULT_TIMEOUT, Timeout
from zmqgrad.store.etcd.cluster import ETCD_PORT, EtcdCluster, EtcdOptions, read_options
from zmqgrad.store.etcd.connection import EtcdConnection
from zmqgrad.store.transactional import TransactionalStore
from zmqgrad.store.watch_cache import Registration
from zmqgrad.store.watch_targets import Target
from zmqgrad.transport.bind_policy import is_loopback

BASE = "zmqgrad/store/"
"""Keys of etcd begin with this. The rest is the prefix of the store."""

_numbers = itertools.count()


class EtcdStore(TransactionalStore):
    """A store in an etcd cluster (3.4 or newer). Needs the extra ``etcd``.

    Each call is one transaction, which a majority of the members has written to disk. Calls and watches
    continue with the next member if one is lost. Blocked pops are served in no particular order. Values of
    more than 64 KiB are kept in parts.

    Args:
        members: (host, port) of each member of the cluster, or ``"host1,host2:2379"``.
        prefix: identifies the store in the cluster. Give each job its own: the keys stay in the cluster until
            :meth:`delete_all` is called.
        timeout: how long blocking calls wait for keys, and all calls for the cluster.
        options: how to connect.

    Raises:
        ConfigurationError: if the package ``etcd3gw`` is not installed, or an argument is invalid.
        StoreError: if no member replies within ``timeout``, or the cluster refuses.

    Example:
        >>> with EtcdStore("etcd0,etcd1,etcd2", "job1") as store:  # doctest: +SKIP
        ...     store.set("step", "7")
    """

    def __init__(
        self,
        members: str | Sequence[tuple[str, int]],
        prefix: str,
        timeout: Timeout = DEFAULT_TIMEOUT,
        *,
        options: EtcdOptions | None = None,
    ) -> None:
        if not prefix or not isinstance(prefix, str):
            raise ConfigurationError(f"{prefix!r} is no prefix: it must name the job")
        self._members = parse_members(members) if isinstance(members, str) else tuple(members)
        # A member on this host may be named by its loopback address, which leads to no other host.
        if not self._members:
            raise ConfigurationError("etcd has no members; name at least one")
        self._meeting = next((each for each in self._members if not is_loopback(each[0])), self._members[0])
        self._prefix = prefix
        self._options = options
        base = f"{BASE}{quote(prefix, safe='')}/".encode()
        self._connection = EtcdConnection(
            f"etcd-store-{next(_numbers)}", EtcdCluster(self._members, options), base
        )
        super().__init__(self._connection, timeout)

    @property
    def prefix(self) -> str:
        """What identifies the store in the cluster."""
        return self._prefix

    @property
    def host(self) -> str:
        """A member of the cluster: workers listen at their address on the route there."""
        return self._meeting[0]

    @property
    def port(self) -> int:
        """The port of :attr:`host`."""
        return self._meeting[1]

    def _register(self, target: Target) -> Registration:
        found = super()._register(target)
        self._connection.start_watching(target, found.revision)
        if not self._registry.is_watched(target):
            self._on_unwatched(target)
        return found

    def _on_unwatched(self, target: Target) -> None:
        self._connection.stop_watching(target)
        if self._registry.is_watched(target):  # again: that watch may have been stopped with this one
            self._registry.on_disconnect()

    def clone(self) -> EtcdStore:
        return EtcdStore(self._members, self._prefix, self._timeout, options=self._options)

    def delete_all(self) -> None:
        """Delete all keys and queues of the store, for all that use it.

        Raises:
            StoreError: if the cluster cannot be used, or refuses.
        """
        self._connection.delete_all(Deadline.after(self._timeout))

    def __repr__(self) -> str:
        return f"<EtcdStore {self._prefix!r}>"


def open_url(url: str, timeout: Timeout = DEFAULT_TIMEOUT, suffix: str = "") -> EtcdStore:
    """The store of ``etcd://host1,host2:2379/prefix?protocol=https&..``, with ``suffix`` behind its prefix.

    Raises:
        ConfigurationError: if the URL or a setting in it is invalid.
    """
    parts = urlsplit(url)
    if not parts.netloc or not parts.path.strip("/"):
        raise ConfigurationError(f"{url!r} lacks members or a prefix; write etcd://host1,host2/prefix")
    try:
        settings = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as e:
        raise ConfigurationError(f"the URL {url!r} cannot be read: {e}") from e
    for name in ("rank", "world_size"):
        settings.pop(name, None)
    prefix = unquote(parts.path[1:])
    return EtcdStore(parts.netloc, f"{prefix}{suffix}", timeout, options=read_options(settings))


def parse_members(text: str) -> tuple[tuple[str, int], ...]:
    """The members of ``host1,host2:2379``.

    Raises:
        ConfigurationError: if one is malformed.
    """
    return tuple(parse_member(one) for one in text.split(","))


def parse_member(text: str) -> tuple[str, int]:
    """The host and the port of ``host[:port]``.

    Raises:
        ConfigurationError: if it is malformed.
    """
    text = text.strip()
    if "@" in text:
        raise ConfigurationError(
            "a member of etcd is host or host:port, without a name and a password; set user and password_file"
        )
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.netloc != text:
        raise ConfigurationError(f"a member of etcd is {text!r}; it must be host or host:port")
    return host, ETCD_PORT if port is None else port
