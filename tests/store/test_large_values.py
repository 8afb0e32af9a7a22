"""Values of many packets within a host, over real processes that end, or are killed, in the middle of one."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tools.ports import free_port
from zmqgrad.store import TCPStore

PATIENCE = 60.0
LARGE_BYTES = 24 << 20

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="it is Linux's")]

SERVER = """
import sys
from zmqgrad.store import TCPStore

options = {"is_master": True, "wait_for_workers": False, "journal": sys.argv[2] or None}
store = TCPStore("127.0.0.1", int(sys.argv[1]), **options)
print("serves", flush=True)
sys.stdin.read()
"""

SETTER = """
import os, signal, sys, threading
from zmqgrad.errors import StoreTimeoutError
from zmqgrad.store import TCPStore

store = TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60.0)
store.set("small", b"1")
print("connected", flush=True)
sys.stdin.readline()  # the server has stopped
threading.Thread(target=store.set, args=("large", bytes(int(sys.argv[2]))), daemon=True).start()
try:
    store.wait(["small"], 0.5)
except StoreTimeoutError:
    os.kill(os.getpid(), signal.SIGKILL)
"""

GETTER = """
import hashlib, sys
from zmqgrad.store import TCPStore

store = TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60.0)
for _ in range(int(sys.argv[2])):
    print(hashlib.sha256(store.get("large")).hexdigest(), flush=True)
"""


@contextmanager
def program(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that runs ``code``, killed at the end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def server(port: int, journal: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    with program(SERVER, port, journal or "") as process:
        assert read_line(process) == "serves"
        yield process


def test_values_of_all_sizes() -> None:
    port = free_port()
    with server(port), TCPStore("127.0.0.1", port, timeout=PATIENCE) as store:
        sizes = [n + d for n in (16 << 10, 64 << 10, 128 << 10, 1 << 20) for d in (-200, -50, 0, 50)]
        values = {f"of {size}": os.urandom(size) for size in [0, 1, *sizes, LARGE_BYTES]}
        for key, value in values.items():
            store.set(key, value)
            assert store.get(key) == value
        store.multi_set(list(values), list(values.values()))
        assert store.multi_get(list(values)) == list(values.values())
        store.append("of 1", b"x" * 100_000)
        assert store.get("of 1") == values["of 1"] + b"x" * 100_000
        assert store.compare_set("of 0", "", "y" * 100_000) == b"y" * 100_000
        store.queue_push("queue", values["of 1048576"])
        assert store.queue_pop("queue") == values["of 1048576"]


def test_a_client_is_killed_while_it_sets_a_large_value() -> None:
    """The server serves the others, and the value is set as a whole or not at all."""
    port = free_port()
    with server(port) as serving, TCPStore("127.0.0.1", port, timeout=PATIENCE) as store:
        with program(SETTER, port, LARGE_BYTES) as setter:
            assert read_line(setter) == "connected"
            os.kill(serving.pid, signal.SIGSTOP)
            try:
                setter.communicate("\n", PATIENCE)
                assert setter.returncode == -signal.SIGKILL
            finally:
                os.kill(serving.pid, signal.SIGCONT)
        assert store.get("small") == b"1"
        if store.check(["large"]):
            assert store.get("large") == bytes(LARGE_BYTES)
        store.set("large", b"2" * 100_000)
        assert store.get("large") == b"2" * 100_000


def test_a_client_that_is_killed_while_it_reads_a_large_value() -> None:
    port = free_port()
    with server(port), TCPStore("127.0.0.1", port, timeout=PATIENCE) as store:
        store.set("large", bytes(LARGE_BYTES))
        for _ in range(3):
            with program(GETTER, port, 1000) as getter:
                read_line(getter)
                os.kill(getter.pid, signal.SIGKILL)
            assert store.add("n", 1) > 0
        assert store.get("large") == bytes(LARGE_BYTES)


def test_a_server_is_killed_while_a_client_reads_a_large_value(tmp_path: Path) -> None:
    """The client gets the whole value from the next server."""
    port, value, rounds = free_port(), os.urandom(LARGE_BYTES), 3
    digest = hashlib.sha256(value).hexdigest()
    with ExitStack() as stack:
        serving = stack.enter_context(server(port, tmp_path / "journal"))
        with TCPStore("127.0.0.1", port, timeout=PATIENCE) as store:
            store.set("large", value)
        getter = stack.enter_context(program(GETTER, port, 10 * rounds))
        for _ in range(rounds):
            assert [read_line(getter) for _ in range(5)] == [digest] * 5
            serving.kill()
            serving.wait(PATIENCE)
            serving = stack.enter_context(server(port, tmp_path / "journal"))
        assert [read_line(getter) for _ in range(5 * rounds)] == [digest] * 5 * rounds
        assert getter.wait(PATIENCE) == 0
