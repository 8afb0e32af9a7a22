"""What the library imports is simulated, or known to be harmless, or known to be left out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import zmqgrad
from zmqgrad.testing.simulation.processes import Process, World

ROOT = Path(zmqgrad.__file__).parent

OUTSIDE = {"__main__.py", "cli", "elastic", "ray.py", "testing", "trace"}
"""Parts that run around a job, not in a simulated worker."""

HARMLESS = {
    # compute, and neither wait nor look outside the process
    *(
        "__future__",
        "abc",
        "array",
        "bisect",
        "base64",
        "builtins",
        "collections",
        "contextlib",
        "copy",
        "cryptography",
    ),
    *(
        "dataclasses",
        "datetime",
        "enum",
        "errno",
        "fnmatch",
        "functools",
        "hashlib",
        "heapq",
        "hmac",
        "inspect",
        "io",
    ),
    *(
        "ipaddress",
        "itertools",
        "json",
        "math",
        "msgspec",
        "numbers",
        "operator",
        "pickle",
        "cloudpickle",
        "re",
    ),
    *(
        "reprlib",
        "stat",
        "struct",
        "sys",
        "traceback",
        "types",
        "typing",
        "urllib",
        "warnings",
        "weakref",
        "zlib",
    ),
    # per real thread, as simulated threads are
    *("contextvars", "torch"),
    # on memory and files that the processes of one run share as real ones do, and never wait for each other
    *("mmap", "pathlib", "resource", "tempfile"),
    # import machinery: the finder of the simulation stands in it
    "importlib",
    # the collector is switched off in a run
    "gc",
    # writes to standard error under a lock that is never held at a scheduling point
    "logging",
}
"""Top-level modules that a simulated process uses as they are."""

LEFT_OUT = {
    "asyncio": "an event loop waits in the real selector: no drawn program uses one",
    "fcntl": "locks of files are those of the real kernel: no drawn program uses a file store",
    "multiprocessing": "its finalizers run at a real exit",
    "sqlite3": "as fcntl",
}
"""Modules that a simulated program must not reach, and why."""

SETS_OF_OBJECTS = {
    "_connections": "of file stores, which no drawn program uses",
    "_offenders": "only asked whether it contains one",
    "_watches": "of clusters of etcd, which no drawn program uses",
    "_threads": "a simulated thread has a number for its hash",
}
"""Attributes and variables that are sets of objects hashed by their address, and why that may be."""


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            found.add(node.module)
    return {name for name in found if name.partition(".")[0] != "zmqgrad"}


@pytest.fixture(scope="module")
def simulated() -> set[str]:
    return set(Process(World(0, ("host0",)), 0, "host0", 100).instead)


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """Modules that a simulated process imports, and the files that import them."""
    found: dict[str, set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        if relative.parts[0] not in OUTSIDE:
            for name in imports_of(path):
                found.setdefault(name, set()).add(str(relative))
    return found


def test_whatever_the_library_imports_is_simulated_or_known(
    simulated: set[str], imported: dict[str, set[str]]
) -> None:
    known = simulated | HARMLESS | LEFT_OUT.keys()
    assert not {
        name: sorted(files) for name, files in imported.items() if name.partition(".")[0] not in known
    }


def test_the_lists_name_nothing_that_is_simulated_or_not_imported(
    simulated: set[str], imported: dict[str, set[str]]
) -> None:
    listed = HARMLESS | LEFT_OUT.keys()
    assert not listed & simulated
    assert listed <= {name.partition(".")[0] for name in imported}


def test_nothing_is_taken_from_a_simulated_module_by_a_dotted_name(
    simulated: set[str], imported: dict[str, set[str]]
) -> None:
    """The import of ``zmq.utils`` finds the real package: only what is pure may follow a dot."""
    dotted = {name for name in imported if "." in name and name.partition(".")[0] in simulated}
    assert dotted <= {"zmq.utils"}


def test_no_set_whose_order_depends_on_addresses_is_kept() -> None:
    """What is done for each of such a set has another order in another process: a dict has the same."""
    found: dict[str, str] = {}
    for package in ("rpc", "runtime", "store", "transport"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.AnnAssign):
                    kind = ast.unparse(node.annotation)
                    if kind.startswith("set[") and kind not in ("set[int]", "set[str]", "set[bytes]"):
                        name = node.target.attr if isinstance(node.target, ast.Attribute) else ""
                        found[name or ast.unparse(node.target)] = f"{path.name}: {kind}"
    assert found.keys() == SETS_OF_OBJECTS.keys(), found
