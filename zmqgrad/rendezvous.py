"""How workers find each other: a URL says how, and out come a store, a rank and a world size.

``rendezvous(url)`` is a generator, as torch's is: the first item is what one wants, and asking for a second
fails, for no handler here can meet again. Handlers are registered by scheme:

- ``env://``: MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE from the environment, or what Slurm or Open MPI
  set (:func:`zmqgrad.environment.read_launch`); ``?rank=..&world_size=..`` and the arguments of
  :func:`rendezvous` win over it.
- ``tcp://host:port?rank=..&world_size=..``, and the same as ``zmq://``: from the URL and the arguments.
- ``file:///path?rank=..&world_size=..``: likewise, by a file that all can reach; it must not be there yet,
  and goes with the last worker that closes its store.

By ``env`` and ``tcp`` rank 0 serves the store, unless the launcher does (TORCHELASTIC_USE_AGENT_STORE). The
agent of ``torchrun`` serves one of torch's: rank 0 then serves ours :mod:`beside <zmqgrad.store.sidecar>` it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from numbers import Integral
from typing import NamedTuple, NoReturn
from urllib.parse import parse_qsl, urlsplit

from zmqgrad.environment import MAX_PORT, Launch, agent_serves_store, missing, read_launch, torchrun_attempt
from zmqgrad.errors import (
    RendezvousError,
    RendezvousTimeoutError,
    StoreError,
    StoreTimeoutError,
    TransportError,
)
from zmqgrad.store import FileStore, PrefixStore, Store, TCPStore
from zmqgrad.store.sidecar import open_sidecar

DEFAULT_TIMEOUT = timedelta(minutes=30)

Met = tuple[Store, int, int]
"""Store, rank, world size."""

Handler = Callable[..., Iterator[Met]]
"""Called with the URL, and ``timeout`` by name; yields what was met."""


class Request(NamedTuple):
    """A URL taken apart. Rank and world size are None where nobody has said."""

    url: str
    scheme: str
    host: str | None
    port: int | None
    path: str
    rank: int | None
    world_size: int | None


_handlers: dict[str, Handler] = {}
_handlers_lock = threading.Lock()


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Let ``handler`` serve URLs of ``scheme``. Rank and world size reach it in the URL's query.

    Raises:
        RendezvousError: if the scheme is taken.
    """
    with _handlers_lock:
        if scheme in _handlers:
            raise RendezvousError(f"there is a handler for {scheme}:// already")
        _handlers[scheme] = handler


def rendezvous(
    url: str, rank: int = -1, world_size: int = -1, timeout: timedelta | float = DEFAULT_TIMEOUT
) -> Iterator[Met]:
    """Meet the others; yields ``(store, rank, world_size)``. Close the store when done.

    Args:
        url: see the module.
        rank, world_size: win over what the URL or the environment says; -1: not given here.
        timeout: how long to wait for the store to answer, and the store's own timeout.

    Raises:
        RendezvousError: if a setting is missing or cannot be right, or the port is in use.
        RendezvousTimeoutError: if no store answers within ``timeout``.
        ConfigurationError: if the store would be open to others without protection.
    """
    if not isinstance(url, str):
        raise TypeError(f"the URL of a rendezvous must be a str, not {type(url).__name__}")
    scheme = url.partition("://")[0] if "://" in url else ""
    handler = _handlers.get(scheme)
    if handler is None:
        known = ", ".join(f"{name}://" for name in sorted(_handlers))
        raise RendezvousError(f"No rendezvous handler for {url!r}: its scheme must be one of {known}")
    for name, value in (("rank", rank), ("world_size", world_size)):
        check_integer(name, value)
        if value != -1:
            url += f"{'&' if '?' in url else '?'}{name}={value}"
    return handler(url, timeout=timeout)


def check_integer(name: str, value: object) -> None:
    """Can ``value`` be a rank or a world size at all?

    Raises:
        RendezvousError: if it is none of Python's or numpy's integers.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RendezvousError(f"`{name}` must be an integer. {value!r} is none")


def says_world_size(url: str) -> bool:
    """Does ``url``, or what it leads to, say how many workers there are? (Of schemes not known here: yes.)

    Raises:
        RendezvousError: if it cannot be read.
    """
    if not isinstance(url, str) or url.partition("://")[0] not in ("env", "tcp", "zmq", "file"):
        return True
    request = parse(url)
    said = request.world_size
    return (read_launch().world_size if said is None and request.scheme == "env" else said) is not None


def meeting_place(
    url: str, rank: int | None = -1, timeout: timedelta | float = DEFAULT_TIMEOUT
) -> tuple[Store, int | None]:
    """The store of a group that any number of workers join and leave, and the rank; None if that was given.

    Args:
        url: as for :func:`rendezvous`. By ``env`` and ``tcp``, rank 0 serves the store, if anybody has it;
            otherwise it must be served already.
        rank: wins over the URL and the environment; -1: not given here. None: whichever will be free.
        timeout: how long to wait for the store to answer, and the store's own timeout.

    Raises: as :func:`rendezvous`.
    """
    request = parse(url)
    if rank is not None:
        check_integer("rank", rank)
    given = _rank_of(request) if rank == -1 else rank
    if request.scheme == "file":
        if request.host is not None or not request.path.strip("/"):
            raise RendezvousError(f"{url!r} names no file; write file:///path")
        return FileStore(request.path, timeout=timeout), given
    host, port, where = request.host, request.port, repr(url)
    if request.scheme == "env":
        launch = read_launch()
        host, port, where = launch.master_addr, launch.master_port, "the environment"
    if host is None:
        raise missing("MASTER_ADDR") if request.scheme == "env" else RendezvousError(f"{url!r} lacks a host")
    if port is None:
        raise missing("MASTER_PORT") if request.scheme == "env" else RendezvousError(f"{url!r} lacks a port")
    return _open(host, port, -1 if given is None else given, None, timeout, where), given


def _rank_of(request: Request) -> int:
    """The rank that the URL says, or the environment where the workers meet by that."""
    if request.rank is not None:
        return request.rank
    if request.scheme != "env":
        raise _lacking("rank", request)
    rank = read_launch().rank
    if rank is None:
        raise missing("RANK", "the argument rank")
    return rank


def parse(url: str) -> Request:
    """Take ``url`` apart; of settings given twice, the last counts.

    Raises:
        RendezvousError: naming what cannot be right.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
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
    """Can there be a worker ``rank`` of ``world_size``?

    Raises:
        RendezvousError: if not, naming ``where`` the two came from.
    """
    if world_size < 1:
        raise RendezvousError(f"the world size is {world_size} ({where}); it must be at least 1")
    if not 0 <= rank < world_size:
        raise RendezvousError(
            f"the rank is {rank} ({where}); with a world size of {world_size} it must be from 0 to "
            f"{world_size - 1}"
        )


def _tcp(url: str, timeout: timedelta | float = DEFAULT_TIMEOUT) -> Iterator[Met]:
    request = parse(url)
    if request.host is None or request.port is None:
        scheme = request.scheme
        raise RendezvousError(
            f"{url!r} lacks a host or a port; write {scheme}://host:port?rank=..&world_size=.."
        )
    rank, world_size = _place(request)
    store = _open(request.host, request.port, rank, world_size, timeout, repr(url))
    yield store, rank, world_size
    _meet_again(url)


def _file(url: str, timeout: timedelta | float = DEFAULT_TIMEOUT) -> Iterator[Met]:
    request = parse(url)
    if request.host is not None or not request.path.strip("/"):
        raise RendezvousError(f"{url!r} names no file; write file:///path?rank=..&world_size=..")
    rank, world_size = _place(request)
    try:
        store = FileStore(request.path, world_size, timeout)
    except StoreError as e:
        raise RendezvousError(f"rendezvous by {url!r}: {e}") from e
    yield store, rank, world_size
    _meet_again(url)


def _place(request: Request) -> tuple[int, int]:
    """Rank and world size, where the URL and the arguments must say both."""
    if request.rank is None or request.world_size is None:
        raise _lacking("rank" if request.rank is None else "world_size", request)
    check_rank(request.rank, request.world_size, f"from {request.url!r}")
    return request.rank, request.world_size


def _lacking(name: str, request: Request) -> RendezvousError:
    return RendezvousError(
        f"{name} parameter missing: {name} is neither an argument nor in {request.url!r}; give {name}=, or "
        f"append {'&' if '?' in request.url else '?'}{name}=.."
    )


def _env(url: str, timeout: timedelta | float = DEFAULT_TIMEOUT) -> Iterator[Met]:
    request, launch = parse(url), read_launch()
    rank = _rank_of(request)
    world_size = launch.world_size if request.world_size is None else request.world_size
    if world_size is None:
        raise missing("WORLD_SIZE", "the argument world_size")
    host, port = launch.master_addr, launch.master_port
    if host is None:
        raise missing("MASTER_ADDR")
    if port is None:
        raise missing("MASTER_PORT")
    check_rank(rank, world_size, _said_by(request, launch))
    where = f"the environment, which says {host}:{port}"
    store = _open(host, port, rank, world_size, timeout, where)
    yield store, rank, world_size
    _meet_again(url)


def _said_by(request: Request, launch: Launch) -> str:
    rank = launch.rank_from if request.rank is None else "an argument"
    size = launch.world_size_from if request.world_size is None else "an argument"
    return f"the rank from {rank}, the world size from {size}"


def _open(
    host: str, port: int, rank: int, world_size: int | None, timeout: timedelta | float, where: str
) -> Store:
    """The store of the group; rank 0 serves it, unless the launcher's agent does."""
    if not 0 < port <= MAX_PORT:
        raise RendezvousError(
            f"the port is {port} ({where}); all workers must know it, so it must be from 1 to {MAX_PORT}"
        )
    by_agent, attempt, launch = agent_serves_store(), torchrun_attempt(), read_launch()
    try:
        if attempt is not None:
            by_agent = False
            if (host, port) == (launch.master_addr, launch.master_port):
                return open_sidecar(host, port, rank, world_size, timeout, attempt)
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
        raise RendezvousTimeoutError(f"rendezvous by {where}: {e}") from e
    except StoreError as e:
        raise RendezvousError(f"rendezvous by {where}: {e}") from e
    except TransportError as e:
        raise RendezvousError(f"rank 0 cannot serve the store at {host}:{port} ({where}): {e}") from e
    # The agent keeps keys of its own in the same store.
    return PrefixStore("/worker", store, owned=True) if by_agent else store


def _meet_again(url: str) -> NoReturn:
    raise RendezvousError(
        f"{url!r} cannot meet a second time: call rendezvous() anew, or restart the workers"
    )


register_rendezvous_handler("tcp", _tcp)
register_rendezvous_handler("zmq", _tcp)
register_rendezvous_handler("file", _file)
register_rendezvous_handler("env", _env)
