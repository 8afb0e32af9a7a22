"""Settings of the arena, from options, the environment, and the machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import zmq

from zmqgrad.errors import ConfigurationError
from zmqgrad.rpc import RpcBackendOptions
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.mailbox import ZmqMailbox
from zmqgrad.transport.shared_memory import settings
from zmqgrad.transport.shared_memory.segment import supported
from zmqgrad.transport.shared_memory.settings import THRESHOLD_BYTES, ArenaSettings, default_limit


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has sealed shared memory")
def test_linux_has_what_segments_are_made_of() -> None:
    """Otherwise all other tests of shared memory would be skipped silently."""
    assert supported()


def test_options_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZMQGRAD_ARENA_LIMIT", raising=False)
    monkeypatch.delenv("ZMQGRAD_ARENA_THRESHOLD", raising=False)
    assert RpcBackendOptions().arena() == ArenaSettings(default_limit(), THRESHOLD_BYTES)
    monkeypatch.setenv("ZMQGRAD_ARENA_LIMIT", "0")
    monkeypatch.setenv("ZMQGRAD_ARENA_THRESHOLD", "1M")
    assert RpcBackendOptions().arena() == ArenaSettings(0, 1 << 20)
    assert RpcBackendOptions(arena_limit=5, arena_threshold=0).arena() == ArenaSettings(5, 0)


@pytest.mark.parametrize(
    "options", [{"arena_limit": -1}, {"arena_limit": "1G"}, {"arena_threshold": 1.5}], ids=str
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"arena_.* must be a number of bytes, at least 0"):
        RpcBackendOptions(**options)


@pytest.mark.parametrize(
    ("says", "limit"), [("max\n", None), ("400\n", 100), (str(1 << 62), None), ("nonsense", None)]
)
def test_a_container_s_limit_counts(
    says: str, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_CGROUP_LIMITS", (str(tmp_path / "none"),))
    machine = default_limit()
    assert machine > 100
    (tmp_path / "max").write_text(says)
    monkeypatch.setattr(settings, "_CGROUP_LIMITS", (str(tmp_path / "none"), str(tmp_path / "max")))
    assert default_limit() == (machine if limit is None else limit)


@pytest.mark.parametrize("threads", [0, -1, 1.0, True, "2", 65])
def test_io_threads_that_cannot_be(threads: Any) -> None:
    with pytest.raises(ConfigurationError, match="io_threads must be a number from 1 to 64"):
        RpcBackendOptions(io_threads=threads)


def test_io_threads_are_those_of_libzmq() -> None:
    assert RpcBackendOptions().io_threads == 1
    mailbox = ZmqMailbox("w0", 0, tcp_host=None, io_threads=2)
    try:
        assert mailbox._context.get(zmq.IO_THREADS) == 2
    finally:
        mailbox.close()
        assert mailbox.join(Deadline.after(10.0)) == []
