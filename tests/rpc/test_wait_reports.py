"""What errors and ZMQGRAD_DEBUG=1 tell of calls and backward passes that wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zmqgrad import autograd, rpc, trace
from zmqgrad.errors import PeerLostError, RpcTimeoutError
from zmqgrad.testing import Cluster, cluster
from zmqgrad.wire.messages import MessageType

TIMEOUT = 1.0
release, blocked = threading.Event(), threading.Event()
flush: list[trace.Recorder] = []


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("ZMQGRAD_DEBUG", "1")
    release.clear()
    blocked.clear()
    with cluster(2) as c:
        try:
            yield c
        finally:
            release.set()
            flush.clear()


def block() -> None:
    """Returns when the test is over. What was recorded is written before, so no test depends on when."""
    for recorder in flush:
        recorder.flush()
    blocked.set()
    release.wait(60)


def test_a_timeout_tells_where_the_call_is(pair: Cluster, tmp_path: Path) -> None:
    with trace.record(tmp_path) as recorder:
        flush.append(recorder)
        with pytest.raises(RpcTimeoutError, match=r"block on \w+; \w+ has run it for .*s, in thread"):
            rpc.rpc_sync(1, block, timeout=TIMEOUT)
        release.set()
        with (
            pair.network.drop(MessageType.RESULT),
            pytest.raises(RpcTimeoutError, match=r"replied .* before; the reply has not arrived"),
        ):
            rpc.rpc_sync(1, block, timeout=TIMEOUT)
        with (
            pair.network.drop(MessageType.CALL),
            pytest.raises(RpcTimeoutError, match=r"has not received it, as far as its trace shows"),
        ):
            rpc.rpc_sync(1, block, timeout=TIMEOUT)


def test_a_lost_peer_tells_where_the_call_was(pair: Cluster, tmp_path: Path) -> None:
    with trace.record(tmp_path) as recorder:
        flush.append(recorder)
        lost = rpc.rpc_async(1, block)
        assert blocked.wait(60)
        pair.workers[0].lose(1, "killed by the test")
        with pytest.raises(PeerLostError, match=r"block .*\w+ has run it for .*, in thread"):
            lost.wait()


def test_without_a_trace_the_pending_calls_are_counted(pair: Cluster) -> None:
    other = rpc.rpc_async(1, block)
    with pytest.raises(RpcTimeoutError, match=r"; 1 other calls are pending here. Set ZMQGRAD_TRACE"):
        rpc.rpc_sync(1, block, timeout=0.1)
    release.set()
    other.wait()


def test_each_wait_is_reported_once_at_half_of_its_timeout(
    pair: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    rpc.rpc_sync(1, int)
    quick = [rpc.rpc_async(1, int, timeout=TIMEOUT) for _ in range(3)]
    slow = [rpc.rpc_async(1, block, timeout=TIMEOUT) for _ in range(2)]
    for future in quick:
        assert future.wait() == 0
    for future in slow:
        with pytest.raises(RpcTimeoutError):
            future.wait()
    reported = [line for line in capfd.readouterr().err.splitlines() if line.startswith("zmqgrad:")]
    assert len(reported) == 2
    assert all("s left) for block on" in line for line in reported)


def test_the_report_names_the_line_that_waits_and_asks_for_stacks(
    pair: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with trace.record(tmp_path), pytest.raises(RpcTimeoutError):
        rpc.rpc_sync(1, block, timeout=TIMEOUT)  # this line
    told = capfd.readouterr().err
    assert "test_wait_reports.py" in told
    assert "this line" in told
    assert (tmp_path / "stacks.request").exists()


def slow_backward(x: torch.Tensor) -> torch.Tensor:
    """Its backward function does not return before the test is over."""
    y = x * 2
    y.register_hook(lambda _: block())
    return y


def test_a_backward_pass_reports_the_workers_that_it_waits_for(
    pair: Cluster, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rpc._set_rpc_timeout(TIMEOUT)
    with trace.record(tmp_path) as recorder, autograd.context() as context:
        flush.append(recorder)
        y = rpc.rpc_sync(1, slow_backward, args=(torch.ones(2, requires_grad=True),))
        place = r"\(\w+ has run it for .*, in thread .*\)"
        with pytest.raises(RpcTimeoutError, match=rf"no report .*; it waits for \w+ {place}"):
            autograd.backward(context, [y.sum()])
        release.set()
    assert "for a backward pass: " in capfd.readouterr().err
