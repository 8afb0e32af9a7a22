"""One script, line by line, on torch's stores and on ours: what comes back, and what kind of error.

Where torch's stores differ among themselves we follow its TCPStore and HashStore, which agree in all that is
here. ``DIFFERENT`` says where we do something else on purpose, and docs/store.md tells our users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from zmqgrad import store as ours

T = timedelta
SHORT = timedelta(milliseconds=30)
SECOND = timedelta(seconds=1)
"""Torch lets it bound the connection to its own server, too."""

SCRIPT = r"""
s.set("k", "v")
s.set("k", b"v\xff\0")
s.get("k")
s.get(b"k")
s.set("k", bytearray(b"x"))
s.set("ü", "ü")
s.get("ü")
s.set("k", 5)
s.set(5, "x")
s.set("k", None)
s.set("k")
s.get("none")
s.get(None)
s.multi_get(["none"])
s.multi_get(["k", "none"])
s.multi_get([])
s.multi_get(("k", b"k"))
s.multi_get("k")
s.wait(["k"])
s.wait(["none"])
s.wait(["none"], T(milliseconds=20))
s.wait(["none"], 0.02)
s.wait(("k",), T(seconds=1))
s.wait("k")
s.wait([1])
s.wait(["k"], "1")
s.add("n", 1)
s.add("n", "1")
s.add("n", 1.5)
s.add("n", True)
s.add("n", -5)
s.get("n")
s.set("n", "40")
s.add("n", 2)
s.add("n", 2**63)
s.add(b"n", 1)
s.compare_set("c", "", "1")
s.compare_set("c", "", "2")
s.compare_set("c", "1", "2")
s.compare_set("c2", "x", "2")
s.check(["c2"])
s.compare_set("c2", b"", b"\xfe")
s.compare_set("c2", b"\xfe", "z")
s.compare_set("c2", "z", 1)
s.get("c2")
s.check([])
s.check(["k"])
s.check(["k", "none"])
s.check(("k",))
s.check("k")
s.num_keys()
s.delete_key("c2")
s.delete_key("c2")
s.num_keys()
s.append("ap", "a")
s.append("ap", b"b\xfe")
s.get("ap")
s.append("ap", 1)
s.multi_set(["a", "b"], ["1", b"2"])
s.multi_set([], [])
s.multi_set(["a"], "1")
s.multi_get(["a", "b"])
s.has_extended_api()
s.queue_push("q", "1")
s.queue_push("q", b"2\xff")
s.queue_push("q", 3)
s.queue_len("q")
s.check(["q"])
s.check(["q", "k"])
s.wait(["q", "k"])
s.num_keys()
s.delete_key("q")
s.queue_pop("q")
s.queue_pop("q", False)
s.queue_pop("q", block=False)
s.queue_pop(key="q", block=False)
s.queue_pop("q")
s.queue_len("q")
s.queue_len("never")
s.set("q", "key")
s.queue_push("q", "x")
s.get("q")
s.queue_pop("q", False)
s.delete_key("q")
sorted(s.list_keys())
s.barrier("bar", 1)
s.barrier("bar", 1)
s.barrier(key="bar2", world_size=1, timeout=None)
s.barrier("bar3", 2, T(milliseconds=20))
s.barrier("bar4", 2)
s.timeout
s.set_timeout(T(milliseconds=40))
s.timeout
s.set_timeout(0.5)
s.timeout
s.set_timeout("1")
s.set_timeout(None)
s.clone().get("k")
s.clone().timeout
s.set("", "empty")
s.get("")
s.nonsense
""".strip().splitlines()

DIFFERENT = {
    's.add("n", 2**63)': "an int that does not fit is a wrong value (ValueError), not a wrong type",
}
"""Lines of the script whose outcome is another, and why."""


PROMISED = {
    's.get("none")': "wait timeout",
    's.multi_get(["k", "none"])': "wait timeout",
    's.wait(["none"])': "wait timeout",
    's.wait(["none"], T(milliseconds=20))': "wait timeout after",
    's.queue_pop("q")': "wait timeout",
    's.queue_pop("q", False)': "queue is empty",
    's.barrier("bar3", 2, T(milliseconds=20))': "barrier timeout after",
    "s.nonsense": "has no attribute 'nonsense'",
}
"""Parts of error texts of torch's TCPStore that programs match on."""

STARTS = {
    'm.TCPStore("127.0.0.1", 1, is_master=False, timeout=SHORT)': ("timed out",),
    'm.TCPStore("127.0.0.1", 0, 2, True, SECOND)': ("Timed out after", "waiting for clients"),
    'm.TCPStore("127.0.0.1", taken, is_master=True, wait_for_workers=False)': (
        "EADDRINUSE",
        "address already in use",
    ),
}
"""Constructors that fail, and parts of torch's error texts."""


@contextmanager
def theirs(kind: str) -> Iterator[Any]:
    if kind == "hash":
        store = dist.HashStore()
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set_timeout(SHORT)
    yield store


@contextmanager
def mine(kind: str, directory: Path) -> Iterator[Any]:
    stores: dict[str, Callable[[], ours.Store]] = {
        "hash": ours.HashStore,
        "tcp": lambda: ours.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "file": lambda: ours.FileStore(str(directory / "store"), 1),
        "prefix": lambda: ours.PrefixStore("view", ours.PrefixStore("of", ours.HashStore()), owned=True),
    }
    with stores[kind]() as store:
        store.set_timeout(SHORT)
        yield store


def outcome(line: str, store: Any) -> str:
    """What ``line`` gives, as a program sees it: the value and its type, or which ``except`` catches."""
    try:
        value = eval(line, {"s": store, "T": T})
    except (dist.QueueEmptyError, ours.QueueEmptyError):
        return "QueueEmptyError"
    except (dist.DistStoreError, ours.DistStoreError):
        return "DistStoreError"
    except TypeError:  # before ValueError: our own for an argument of the wrong type is both
        return "TypeError"
    except AttributeError:
        return "AttributeError"
    except ValueError as e:
        return type(e).__name__
    return f"{type(value).__name__} {value!r}"


def error_of(line: str, **names: Any) -> str:
    """Run ``line``, which raises, and return the text of the error."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  the text is the subject
        eval(line, {"T": T, "SHORT": SHORT, "SECOND": SECOND, **names})
    return str(caught.value)


@pytest.mark.slow
def test_torch_promises_these_texts() -> None:
    with theirs("tcp") as store:
        for line, part in PROMISED.items():
            assert part in error_of(line, s=store)
        for line, parts in STARTS.items():
            for part in parts:
                assert part in error_of(line, m=dist, taken=store.port)


@pytest.mark.parametrize("kind", ["hash", "tcp", "file", "prefix"])
def test_a_program_that_matches_on_error_texts_finds_them(kind: str, tmp_path: Path) -> None:
    with mine(kind, tmp_path) as store:
        for line, part in PROMISED.items():
            assert part in error_of(line, s=store)


def test_a_program_that_matches_on_errors_of_the_start_finds_them() -> None:
    with ours.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:
        for line, parts in STARTS.items():
            for part in parts:
                assert part in error_of(line, m=ours, taken=store.port)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with theirs("hash") as store:
        return [outcome(line, store) for line in SCRIPT]


@pytest.mark.slow
def test_torchs_own_stores_agree(expected: list[str]) -> None:
    """Otherwise there is nothing to follow. A barrier of TCPStore leaves other keys, but who lists those?"""
    with theirs("tcp") as store:
        assert [outcome(line, store) for line in SCRIPT] == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hash", "tcp", "file", "prefix"])
def test_a_program_that_swaps_the_import_sees_the_same(
    kind: str, expected: list[str], tmp_path: Path
) -> None:
    with mine(kind, tmp_path) as store:
        got = [outcome(line, store) for line in SCRIPT]
    differing = {
        line: (one, other)
        for line, one, other in zip(SCRIPT, expected, got, strict=True)
        if (one != other) != (line in DIFFERENT)
    }
    assert differing == {}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("TCPStore", "host_name port world_size is_master timeout wait_for_workers multi_tenant"),
        ("TCPStore", "master_listen_fd use_libuv"),
        ("FileStore", "file_name world_size"),
        ("PrefixStore", "prefix store"),
    ],
)
def test_the_names_of_arguments_are_torchs(name: str, arguments: str) -> None:
    said = getattr(dist, name).__init__.__doc__
    code = getattr(ours, name).__init__.__code__
    for argument in arguments.split():
        assert f"{argument}: " in said
        assert argument in code.co_varnames


def test_every_method_of_torchs_stores_is_here() -> None:
    for name in ("Store", "HashStore", "TCPStore", "FileStore", "PrefixStore"):
        there = {n for n in dir(getattr(dist, name)) if not n.startswith("_")}
        assert there - set(dir(getattr(ours, name))) <= {"libuvBackend"}, name
