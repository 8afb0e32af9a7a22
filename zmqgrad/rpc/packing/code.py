"""The code of functions that travel by value: sent to each peer once, and named by its hash from then on.

Only code is remembered, never what a function holds: closures, defaults and globals are read at each call and
travel with it, so a call sees them as they are at that moment. The simplest functions, which hold nothing but
plain values and refer to nothing but modules, are taken apart here; all others are cloudpickle's, which takes
ten times as long to find out what they refer to, and only their code objects pass through here.

Both sides forget what was used least lately. Whoever is sent a hash that it does not know (it has forgotten,
or a message with the hash has overtaken the one with the code) asks the sender (CODE_FETCH), once.
"""

from __future__ import annotations

import dis
import hashlib
import importlib
import importlib.util
import marshal
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from zmqgrad.errors import PayloadError
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.messages import MAX_CODE, CodeFetch, CodeValue

if TYPE_CHECKING:
    from zmqgrad.rpc.worker import Worker

MAX_CODES = 1000
"""Code objects that are remembered, of all peers together; and hashes that one peer is known to know."""

FETCH_SECONDS = 20.0
"""How long a peer may take to answer a CODE_FETCH."""

PYTHON = importlib.util.MAGIC_NUMBER
"""Tells which code this interpreter understands."""

Fetch = Callable[[int, bytes], CodeValue]
"""(peer, hash) -> the answer of that peer, which is waited for."""

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.Tensor, torch.dtype)
_ABOUT = ("__name__", "__package__", "__file__")


class _Code(NamedTuple):
    code: types.CodeType
    digest: bytes
    data: bytes
    globals: frozenset[str]
    """Names that it looks for in its globals."""
    names: frozenset[str]
    """Those, and names of attributes."""


def _all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code``, and what is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _all_codes(constant)


def _globals(code: types.CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if "GLOBAL" in step.opname or step.opname in ("LOAD_NAME", "STORE_NAME", "DELETE_NAME"):
            yield step.argval


class CodeBook:
    """What one worker knows of code. Safe to use from several threads.

    Args:
        fetch: asks a peer for code.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()  # guards all below
        self._by_id: OrderedDict[int, _Code] = OrderedDict()  # keeps the code, so ids stay its own
        self._by_digest: OrderedDict[bytes, _Code] = OrderedDict()
        self._peers: dict[int, PeerCode] = {}
        self.fetched = 0

    def of(self, peer: int) -> PeerCode:
        """The book as it concerns ``peer``."""
        with self._lock:
            return self._peers.setdefault(peer, PeerCode(self, peer))

    def note(self, code: types.CodeType) -> _Code | None:
        """An entry for ``code``; None if it is to be sent each time."""
        with self._lock:
            known = self._by_id.get(id(code))
            if known is not None:
                self._by_id.move_to_end(id(code))
                return known
        try:
            data = marshal.dumps(code)
        except ValueError:  # made by hand, with constants that no compiler makes
            return None
        if len(data) > MAX_CODE:
            return None
        return self._keep(code, data)

    def _keep(self, code: types.CodeType, data: bytes) -> _Code:
        everything = list(_all_codes(code))
        entry = _Code(
            code,
            hashlib.sha256(PYTHON + data).digest(),
            data,
            frozenset(name for each in everything for name in _globals(each)),
            frozenset(name for each in everything for name in each.co_names),
        )
        with self._lock:
            entry = self._by_digest.setdefault(entry.digest, entry)
            self._by_digest.move_to_end(entry.digest)
            self._by_id[id(code)] = entry._replace(code=code)
            for entries in (self._by_id, self._by_digest):
                while len(entries) > MAX_CODES:
                    entries.popitem(last=False)
        return entry

    def data_of(self, digest: bytes) -> bytes:
        """The code of that hash; empty if it is not known (any more)."""
        with self._lock:
            known = self._by_digest.get(digest)
            return b"" if known is None else known.data

    def find(self, peer: int, digest: bytes, data: bytes) -> types.CodeType:
        """The code that ``peer`` means by ``digest``, and perhaps sent as ``data``.

        Raises:
            PayloadError: if that peer has forgotten it, or runs another Python.
        """
        with self._lock:
            known = self._by_digest.get(digest)
            if known is not None:
                self._by_digest.move_to_end(digest)
                return known.code
        python = PYTHON
        if not data:
            self.fetched += 1
            answer = self._fetch(peer, digest)
            python, data = answer.python, answer.code
        if not data:
            raise PayloadError(
                f"the code of a function is missing, and its sender, which has sent many others since, has "
                f"forgotten it (it keeps {MAX_CODES}): define it in a module that can be imported here"
            )
        if python != PYTHON or hashlib.sha256(PYTHON + data).digest() != digest:
            raise PayloadError(
                f"the code of a function comes from another version of Python than this, {sys.version}: "
                f"run the same on all workers, or define it in a module that can be imported here"
            )
        return self._keep(marshal.loads(data), data).code


class PeerCode:
    """How code travels to and from one peer."""

    def __init__(self, book: CodeBook, peer: int) -> None:
        self._book = book
        self._peer = peer
        self._told: OrderedDict[bytes, None] = OrderedDict()  # hashes that the peer was told the code of

    # ---- there ------------------------------------------------------------------------------------------

    def reduce_code(self, code: types.CodeType) -> tuple[Any, ...] | None:
        """As ``__reduce__``; None: have it sent as ever."""
        entry = self._book.note(code)
        return None if entry is None else (code_at, self._name(entry))

    def reduce_function(self, function: types.FunctionType) -> tuple[Any, ...] | None:
        """As ``__reduce__`` for a function that is simple; None: leave it to others."""
        if function.__kwdefaults__ or function.__dict__ or getattr(function, "__type_params__", None):
            return None
        cells = function.__closure__ or ()
        try:
            annotations = function.__annotations__
            held = (
                *(function.__defaults__ or ()),
                *(cell.cell_contents for cell in cells),
                *annotations.values(),
            )
        except (ValueError, NameError):  # an empty cell; an annotation that nobody has evaluated yet
            return None
        if not all(type(value) in _PLAIN for value in held):
            return None
        entry = self._book.note(function.__code__)
        modules = None if entry is None else _modules(entry, function.__globals__)
        if entry is None or modules is None:
            return None
        digest, data = self._name(entry)
        about = {name: function.__globals__[name] for name in _ABOUT if name in function.__globals__}
        return function_of, (
            (digest, data),
            (function.__name__, function.__qualname__, function.__module__),
            about,
            modules,
            function.__defaults__,
            cells,
            annotations,
        )

    def _name(self, entry: _Code) -> tuple[bytes, bytes]:
        """The hash, and the first time the code as well."""
        told = self._told
        data = b"" if entry.digest in told else entry.data
        told[entry.digest] = None
        if len(told) > MAX_CODES:
            try:
                told.popitem(last=False)
            except KeyError:  # another thread was as quick
                return entry.digest, entry.data
        return entry.digest, data

    # ---- and back ---------------------------------------------------------------------------------------

    def code_at(self, digest: bytes, data: bytes) -> types.CodeType:
        """What :meth:`reduce_code` stands for."""
        return self._book.find(self._peer, digest, data)

    def function_of(
        self,
        code: tuple[bytes, bytes],
        names: tuple[str, str, str],
        about: dict[str, Any],
        modules: tuple[tuple[str, str], ...],
        defaults: tuple[Any, ...] | None,
        cells: tuple[types.CellType, ...],
        annotations: dict[str, Any],
    ) -> types.FunctionType:
        """What :meth:`reduce_function` stands for."""
        space = dict(about)
        for alias, name in modules:
            module = importlib.import_module(name)
            if alias:
                space[alias] = module
        function = types.FunctionType(self.code_at(*code), space, names[0], defaults, cells or None)
        function.__qualname__, function.__module__ = names[1:]
        if annotations:
            function.__annotations__ = annotations
        return function


def _modules(entry: _Code, space: dict[str, Any]) -> tuple[tuple[str, str], ...] | None:
    """What the code looks for in its globals ``space``, as (alias, module); None if not modules alone.

    Submodules that may be meant (``xml.dom``) come with an empty alias.
    """
    found: list[tuple[str, str]] = []
    for alias in entry.globals:
        if alias not in space:
            continue  # a builtin
        module = space[alias]
        if not isinstance(module, types.ModuleType):
            return None
        name = module.__name__
        if name in ("__main__", "__mp_main__") or sys.modules.get(name) is not module:
            return None
        found.append((alias, name))
        found += [("", f"{name}.{part}") for part in entry.names if f"{name}.{part}" in sys.modules]
    return tuple(found)


# ---- in a worker ----------------------------------------------------------------------------------------


def book_of(worker: Worker) -> CodeBook:
    """A book for ``worker``, which will answer those who ask for code."""

    def fetch(peer: int, digest: bytes) -> CodeValue:
        asked = worker.request(
            peer, CodeFetch(digest), seconds=FETCH_SECONDS, description="the code of a function"
        )
        answer = worker.wait(asked).message
        return answer if isinstance(answer, CodeValue) else CodeValue(b"")

    def tell(inbound: Inbound) -> None:
        """In the thread that reads: whoever asks may be keeping all others busy."""
        message, envelope = inbound.message, inbound.envelope
        assert isinstance(message, CodeFetch)
        answer = CodeValue(PYTHON, book.data_of(message.digest))
        worker.mailbox.send(envelope.source, answer, envelope.message_id, (), envelope.channel)

    book = CodeBook(fetch)
    worker.hooks.control[CodeFetch.TYPE] = tell
    return book


# ---- in pickles -----------------------------------------------------------------------------------------


def code_at(*args: Any) -> Any:
    """Stands in pickles only, for the reader's :meth:`PeerCode.code_at`."""
    raise AssertionError("the unpickler puts the reader's own method here")


def function_of(*args: Any) -> Any:
    """Stands in pickles only, for the reader's :meth:`PeerCode.function_of`."""
    raise AssertionError("the unpickler puts the reader's own method here")
