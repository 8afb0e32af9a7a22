"""Texts about calls, whatever the objects do that they tell of."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from zmqgrad import rpc
from zmqgrad.errors import PeerLostError, RpcTimeoutError
from zmqgrad.rpc.calls import describe
from zmqgrad.runtime.clock import ManualClock
from zmqgrad.testing import Cluster, cluster
from zmqgrad.wire.messages import MessageType


@pytest.fixture
def pair(clock: ManualClock) -> Iterator[Cluster]:
    with cluster(2, clock=clock) as c:
        yield c


class Shy:
    """A callable that cannot be told of."""

    def __call__(self) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        raise ValueError("not me")


class Nameless(Shy):
    """Not even its name can be read once it was sent."""

    armed = False

    def __getattr__(self, name: str) -> Any:
        if Nameless.armed:
            raise ValueError(f"no {name}")
        raise AttributeError(name)


def twice(text: str) -> str:
    """A function."""
    return text * 2


def same(x: torch.Tensor) -> torch.Tensor:
    """A function that can be compiled."""
    return x


@pytest.fixture
def nameless() -> Iterator[Nameless]:
    yield Nameless()
    Nameless.armed = False


def test_descriptions() -> None:
    assert describe("a text") == "a text"
    assert describe(twice) == "twice"
    assert describe(str.upper) == "str.upper"
    assert describe(torch.add) == "torch.add"
    assert describe(torch.jit.script(same)) == "same"
    assert describe(Shy) == "Shy"
    assert describe(Shy().__call__) == "Shy.__call__"
    assert describe(partial(twice, Shy())) == "partial(twice)"  # type: ignore[arg-type]
    assert describe(partial(Shy())) == "partial(<Shy object>)"
    assert describe(Shy()) == "<Shy object>"


def test_a_call_that_cannot_be_described_times_out_as_all_others(
    pair: Cluster, clock: ManualClock, nameless: Nameless
) -> None:
    for _ in range(2):  # the second time shows that deadlines are checked further on
        with pair.network.drop(MessageType.CALL):
            futures = [
                rpc.rpc_async(1, function, timeout=5) for function in (Shy(), nameless, dict, Shy(), list)
            ]
            Nameless.armed = True
            clock.advance(6)
        for future in futures:
            with pytest.raises(RpcTimeoutError):
                future.wait()
        Nameless.armed = False


def test_such_calls_fail_with_their_peer_as_all_others(pair: Cluster, nameless: Nameless) -> None:
    with pair.network.drop(MessageType.CALL):
        futures = [rpc.rpc_async(1, function) for function in (Shy(), nameless, dict, Shy(), list)]
    Nameless.armed = True
    pair.workers[0].lose(1, "as the test says")
    for future in futures:
        with pytest.raises(PeerLostError, match="as the test says"):
            future.wait()


def test_a_failure_to_describe_one_call_ends_it_and_no_other(
    pair: Cluster, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def locate(*_: object) -> str:
        raise KeyError("a fault of the trace")

    monkeypatch.setattr("zmqgrad.rpc.client.locate", locate)
    with pair.network.drop(MessageType.CALL):
        futures = [rpc.rpc_async(1, dict, timeout=5) for _ in range(3)]
        clock.advance(6)
    for future in futures:
        with pytest.raises(RuntimeError, match="KeyError"):
            future.wait()
    assert "a fault of the trace" in caplog.text


def test_what_shows_calls_shows_those(pair: Cluster, nameless: Nameless) -> None:
    with pair.network.drop(MessageType.CALL):
        futures = [rpc.rpc_async(1, function) for function in (Shy(), nameless)]
    Nameless.armed = True
    assert [repr(future) for future in futures] == [
        "<RpcFuture of <Shy object> on worker 1: pending>",
        "<RpcFuture of <Nameless object> on worker 1: pending>",
    ]
    shown = [call["call"] for call in rpc.get_debug_info()["pending_calls"]]
    assert shown == ["<Shy object>", "<Nameless object>"]
