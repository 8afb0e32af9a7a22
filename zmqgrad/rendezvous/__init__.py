"""Rendezvous: turns a URL into a store, a rank and a world size.

``rendezvous(url)`` is a generator, as torch's is. It yields one item: requesting a second raises, because
no handler here supports re-rendezvous. Handlers are registered by scheme:

- ``env://``: MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE from the environment, or what Slurm or Open MPI
  set (:func:`~zmqgrad.environment.read_launch`); ``?rank=..&world_size=..`` and the arguments of
  :func:`rendezvous` override it.
- ``tcp://host:port?rank=..&world_size=..``, also as ``zmq://``: from the URL and the arguments.
- ``file:///path?rank=..&world_size=..``: likewise, through a file on a file system that all workers share. It
  must not exist yet, and is deleted with the last store that is closed.
- ``etcd://host1,host2/prefix?rank=..&world_size=..``: likewise, in an etcd cluster. The prefix is that of one
  job. ``ZMQGRAD_STORE`` with such a URL, without rank and world size, does so for ``env://``.
- ``elastic://host:port?run_id=..&min_nodes=..&max_nodes=..``: :mod:`zmqgrad.elastic.url` assigns the rank.

With ``env`` and ``tcp`` rank 0 serves the store, unless the launcher does (TORCHELASTIC_USE_AGENT_STORE). The
agent of ``torchrun`` serves a store of torch's: rank 0 then serves a
:mod:`sidecar <zmqgrad.rendezvous.sidecar>`.

:func:`rendezvous_beside` is for groups that may share their address with process groups of torch: there the
store is always a sidecar, and a file has a companion.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from numbers import Integral
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from zmqgrad import environment
from zmqgrad.environment import MAX_PORT, agent_serves_store, missing_variable, read_launch, torchrun_attempt
from zmqgrad.errors import (
    ArgumentTypeError,
    RendezvousError,
    RendezvousTimeoutError,
    StoreError,
    StoreTimeoutError,
    TransportError,
)
from zmqgrad.rendezvous.sidecar import Rival, open_sidecar
from zmqgrad.store import FileStore, PrefixStore, Store, TCPStore
from zmqgrad.store.etcd.store import open_url
from zmqgrad.transport.host_address import choose_address
from zmqgrad.transport.security import load_keys

DEFAULT_TIMEOUT = timedelta(minutes=30)

RendezvousResult = tuple[Store, int, int]
"""Store, rank, world size."""

Handler = Callable[..., Iterator[RendezvousResult]]
"""Called with the URL, and ``timeout`` and further arguments by name; yields one result."""


class Request(NamedTuple):
    """A parsed URL. Rank and world size are None if the URL does not contain them."""

    url: str
    scheme: str
    host: str | None
    port: int | None
    path: str
    rank: int | None
    world_size: int | None


class Group(NamedTuple):
    """Identifies a group among those that share an address."""

    purpose: str
    number: int = 0
    """Counts the groups of this purpose at one place: all workers join them in the same order."""
    rival: Rival | None = None
    """A group that must not exist beside this one."""

    def __str__(self) -> str:
        return f"{self.purpose}/{self.number}"


_handlers: dict[str, Handler] = {}
_handlers_lock = threading.Lock()

_REGISTERED_BY = {"elastic": "zmqgrad.elastic.url"}
"""Modules of higher layers that register a scheme when they are imported, at the first URL of that scheme."""

_BESIDE_TORCH = ("tcp", "file", "env", "etcd")
"""Schemes whose address several groups may use."""

_sidecars = itertools.count()
"""Numbers the stores that :func:`rendezvous` opens under torchrun, in the same order on all workers."""


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Register ``handler`` for URLs of ``scheme``. It finds rank and world size in the query of the URL.

    Raises:
        RendezvousError: if the scheme is taken.

    Example:
        >>> def meet(url, **settings):  # of mine://...
        ...     yield HashStore(), 0, 1
        >>> register_rendezvous_handler("mine", meet)
        >>> next(rendezvous("mine://anywhere"))[1:]
        (0, 1)
    """
    with _handlers_lock:
        if scheme in _handlers:
            raise RendezvousError(f"there is a handler for {scheme}:// already")
        _handlers[scheme] = handler


def rendezvous(
    url: str,
    rank: int = -1,
    world_size: int = -1,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    **kwargs: Any,
) -> Iterator[RendezvousResult]:
    """Find the other workers; yields ``(store, rank, world_size)``. Close the store when done.

    Args:
        url: see the module.
        rank, world_size: override the URL and the environment; -1: not given.
        timeout: how long to wait for the store to reply, and the store's own timeout.
        kwargs: for the handler of the scheme. ``elastic`` takes them as settings, as in its URL; the handlers
            of the other schemes here ignore them, as torch's do.

    Raises:
        RendezvousError: if a setting is missing or invalid, or the port is in use.
        RendezvousTimeoutError: if no store replies within ``timeout``.
        ArgumentTypeError: if ``url`` is no text.
        ConfigurationError: if the store would be reachable from other hosts without a secret.

    Example:
        >>> store, rank, world_size = next(rendezvous("env://"))  # RANK, WORLD_SIZE, MASTER_ADDR
        >>> rank, world_size
        (0, 1)
        >>> store.close()
    """
    if not isinstance(url, str):
        raise ArgumentTypeError(f"the URL of a rendezvous must be a str, not {type(url).__name__}")
    scheme = _scheme_of(url)
    if scheme not in _handlers and scheme in _REGISTERED_BY:
        importlib.import_module(_REGISTERED_BY[scheme])
    handler = _handlers.get(scheme)
    if handler is None:
        known = ", ".join(f"{name}://" for name in sorted({*_handlers, *_REGISTERED_BY}))
        raise RendezvousError(f"No rendezvous handler for {url!r}: its scheme must be one of {known}")
    return handler(_with_arguments(url, rank, world_size), timeout=timeout, **kwargs)


def rendezvous_beside(
    url: str,
    rank: int = -1,
    world_size: int = -1,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    *,
    group: Group,
) -> RendezvousResult:
    """Find the other workers at an address that process groups of torch may use, too.

    Args:
        url, rank, world_size, timeout: as for :func:`rendezvous`.
        group: names the group among those that use this address; equal on all its workers.

    Returns:
        The store, the rank and the world size.

    Raises:
        ConfigurationError: if :mod:`zmqgrad.interop` was not imported.
        RendezvousError, RendezvousTimeoutError: as :func:`rendezvous`.
    """
    if _scheme_of(url) not in _BESIDE_TORCH:
        return next(rendezvous(url, rank, world_size, timeout))
    return _meet(parse(_with_arguments(url, rank, world_size)), timeout, group)


def meeting_place(url: str) -> str | None:
    """What tells apart the groups that meet by ``url`` from those that meet elsewhere.

    A process counts its groups at each place, so that it meets new processes at a new one.

    Returns:
        Equal texts for one place, however its host is spelled; None: each group has a store of its own.

    Raises:
        RendezvousError: if the URL cannot be parsed.
    """
    scheme = _scheme_of(url)
    if scheme == "elastic":
        return None
    if scheme == "env":
        store = environment.store_url()
        return f"port {read_launch().master_port}" if store is None else store.partition("?")[0]
    return f"port {parse(url).port}" if scheme in ("tcp", "zmq") else url.partition("?")[0]


def _scheme_of(url: str) -> str:
    return url.partition("://")[0] if "://" in url else ""


def _with_arguments(url: str, rank: int, world_size: int) -> str:
    """``url`` with the arguments in its query, where they override earlier ones."""
    for name, value in (("rank", rank), ("world_size", world_size)):
        check_integer(name, value)
        if value != -1:
            url += f"{'&' if '?' in url else '?'}{name}={value}"
    return url


def check_integer(name: str, value: object) -> None:
    """Check that ``value``, given as ``name``, is an integer of Python or numpy.

    Raises:
        RendezvousError: if it is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RendezvousError(f"`{name}` must be an integer. {value!r}")


def has_world_size(url: str) -> bool:
    """Whether ``url`` or the environment sets a world size. True for schemes of other handlers.

    Raises:
        RendezvousError: if the URL cannot be parsed.
    """
    if not isinstance(url, str) or url.partition("://")[0] not in ("env", "tcp", "zmq", "file", "etcd"):
        return True
    request = parse(url)
    if request.world_size is None and request.scheme == "env":
        return read_launch().world_size is not None
    return request.world_size is not None


def open_store(
    url: str,
    rank: int | None = -1,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    group: Group | None = None,
) -> tuple[Store, int | None]:
    """Open the store of a dynamic group, which has no world size.

    Args:
        url: as for :func:`rendezvous`. With ``env`` and ``tcp``, rank 0 serves the store if any worker has
            that rank; otherwise it must be served already.
        rank: overrides the URL and the environment; -1: not given. None: the next free one.
        timeout: how long to wait for the store to reply, and the store's own timeout.
        group: as for :func:`rendezvous_beside`; None: the address is for this store alone.

    Returns:
        The store, and the rank, which is None if ``rank`` was None.

    Raises:
        RendezvousError, RendezvousTimeoutError, ConfigurationError: as :func:`rendezvous`.
    """
    request = parse(url)
    if rank is not None:
        check_integer("rank", rank)
    own_rank = _rank_of(request) if rank == -1 else rank
    return _open(request, -1 if own_rank is None else own_rank, None, timeout, group), own_rank


def _rank_of(request: Request) -> int:
    """The rank from the URL, or for ``env`` from the environment."""
    if request.rank is not None:
        return request.rank
    if request.scheme != "env":
        raise _missing_parameter("rank", request)
    rank = read_launch().rank
    if rank is None:
        raise missing_variable("RANK", "the argument rank")
    return rank


def parse(url: str) -> Request:
    """Parse ``url``. The last of repeated settings applies.

    Returns:
        Its parts; None where it does not set them.

    Raises:
        RendezvousError: if a part is invalid; the message names it.
    """
    try:
        parts = urlsplit(url)
        # etcd has several, which the store takes apart.
        host, port = (None, None) if parts.scheme == "etcd" else (parts.hostname, parts.port)
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as e:
        raise RendezvousError(f"the URL {url!r} cannot be read: {e}") from e
    rank, world_size = _number(url, query, "rank"), _number(url, query, "world_size")
    return Request(url, parts.scheme, host, port, parts.path, rank, world_size)


def _number(url: str, query: dict[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise RendezvousError(f"{name} is {text!r} in {url!r}; it must be a number") from None


def check_rank(rank: int, world_size: int, where: str) -> None:
    """Check that ``rank`` and ``world_size`` are valid.

    Raises:
        RendezvousError: if they are not, naming their source ``where``.
    """
    if world_size < 1:
        raise RendezvousError(f"the world size is {world_size} ({where}); it must be at least 1")
    if not 0 <= rank < world_size:
        raise RendezvousError(
            f"the rank is {rank} ({where}); with a world size of {world_size} it must be from 0 to "
            f"{world_size - 1}"
        )


def _meet_once(
    url: str, timeout: timedelta | float = DEFAULT_TIMEOUT, **kwargs: Any
) -> Iterator[RendezvousResult]:
    """The handler of all schemes here."""
    yield _meet(parse(url), timeout)
    raise RendezvousError(
        f"{url!r} does not support re-rendezvous: call rendezvous() again, or restart the workers"
    )


def _meet(request: Request, timeout: timedelta | float, group: Group | None = None) -> RendezvousResult:
    if request.scheme == "env":
        rank, world_size = _rank_and_world_size_of_launch(request)
    else:
        rank, world_size = _rank_and_world_size(request)
    return _open(request, rank, world_size, timeout, group), rank, world_size


def _open(
    request: Request, rank: int, world_size: int | None, timeout: timedelta | float, group: Group | None
) -> Store:
    """Open the store of the group; ``rank`` -1: served by another worker. ``world_size`` None: dynamic."""
    if request.scheme == "file":
        path = _path_of(request, group)
        try:
            return FileStore(path, -1 if world_size is None else world_size, timeout)
        except StoreError as e:
            raise RendezvousError(f"rendezvous by {request.url!r}: {e}") from e
    place = request.url if request.scheme == "etcd" else None
    if request.scheme == "env":
        place = environment.store_url()
    if place is not None:
        return open_url(place, timeout, "" if group is None else f"/{group}")
    return _serve_or_connect(request, rank, world_size, timeout, group)


def _rank_and_world_size_of_launch(request: Request) -> tuple[int, int]:
    """Rank and world size from the URL and the arguments, else from the environment."""
    launch = read_launch()
    rank = _rank_of(request)
    world_size = launch.world_size if request.world_size is None else request.world_size
    if world_size is None:
        raise missing_variable("WORLD_SIZE", "the argument world_size")
    rank_from = launch.rank_from if request.rank is None else "an argument"
    size_from = launch.world_size_from if request.world_size is None else "an argument"
    check_rank(rank, world_size, f"the rank from {rank_from}, the world size from {size_from}")
    return rank, world_size


def _rank_and_world_size(request: Request) -> tuple[int, int]:
    """Rank and world size from the URL and the arguments."""
    if request.rank is None or request.world_size is None:
        raise _missing_parameter("rank" if request.rank is None else "world_size", request)
    check_rank(request.rank, request.world_size, f"from {request.url!r}")
    return request.rank, request.world_size


def _path_of(request: Request, group: Group | None) -> str:
    """The file of the store. Process groups have ``request.path``, in torch's format."""
    if request.host is not None or not request.path.strip("/"):
        raise RendezvousError(f"{request.url!r} names no file; write file:///path?rank=..&world_size=..")
    return request.path if group is None else f"{request.path}.{group.purpose}"


def _missing_parameter(name: str, request: Request) -> RendezvousError:
    return RendezvousError(
        f"{name} parameter missing: {name} is neither an argument nor in {request.url!r}; pass {name}=, or "
        f"append {'&' if '?' in request.url else '?'}{name}=.."
    )


def _serve_or_connect(
    request: Request, rank: int, world_size: int | None, timeout: timedelta | float, group: Group | None
) -> Store:
    """Open the store of the group. Rank 0 serves it, unless the launcher's agent does.

    With a ``group`` it is a sidecar of torch's store at the address.
    """
    launch = read_launch()
    if request.scheme == "env":
        host, port = launch.master_addr, launch.master_port
        if host is None or port is None:
            raise missing_variable("MASTER_ADDR" if host is None else "MASTER_PORT")
        where = f"the environment, {host}:{port}"
    else:
        if request.host is None or request.port is None:
            raise RendezvousError(
                f"{request.url!r} lacks a host or a port; write {request.scheme}://host:port?rank=..&world_size=.."
            )
        host, port, where = request.host, request.port, repr(request.url)
    if not environment.is_host(host):
        raise RendezvousError(f"{host!r} is not a host name or address ({where})")
    if not 0 < port <= MAX_PORT:
        raise RendezvousError(
            f"the port is {port} ({where}); all workers must know it, so it must be from 1 to {MAX_PORT}"
        )
    by_agent = agent_serves_store()
    attempt = torchrun_attempt()  # not None: the agent is torchrun's, and its store is torch's
    try:
        if attempt is not None:
            by_agent = False
            if (host, port) != (launch.master_addr, launch.master_port):
                attempt = None
        if rank and attempt is None and not by_agent:
            _check_may_listen(host, port)
        if attempt is not None or (group is not None and not by_agent):
            group = group or Group("rendezvous", next(_sidecars))
            return open_sidecar(host, port, rank, world_size, timeout, str(group), attempt, group.rival)
        store = TCPStore(
            host,
            port,
            world_size,
            rank == 0 and not by_agent,
            timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except StoreTimeoutError as e:
        raise RendezvousTimeoutError(
            f"rendezvous by {where}: {e}. Rank 0 has not started or has ended, or it uses "
            f"torch.distributed.rpc; or allow more time: timeout=, for init_rpc "
            f"RpcBackendOptions(join_timeout=SECONDS)"
        ) from None
    except StoreError as e:
        raise RendezvousError(f"rendezvous by {where}: {e}") from e
    except TransportError as e:
        raise RendezvousError(
            f"rank 0 cannot serve the store at {host}:{port} ({where}): {e}; or two workers of this job have "
            f"rank 0"
        ) from e
    store.expect_no_restart()  # whoever serves it keeps it in memory
    # The agent keeps its own keys in the same store.
    return PrefixStore("/worker", store, owned=True) if by_agent else store


def _check_may_listen(host: str, port: int) -> None:
    """Refuse what would refuse rank 0 as well, so that its host's lack of a secret is no silent wait here.

    Raises:
        ConfigurationError: if this process may not listen where those that meet at ``host`` reach it.
    """
    try:
        choose_address(host, port, secured=load_keys() is not None)
    except OSError:
        pass  # no route, or an unknown name: connecting to the store waits for it, and names it


for _scheme in ("tcp", "zmq", "file", "env", "etcd"):
    register_rendezvous_handler(_scheme, _meet_once)
