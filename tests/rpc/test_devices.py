"""Device maps: what can be one, where tensors go, and, where there is a GPU, that they get there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from zmqgrad import autograd, rpc
from zmqgrad.errors import ConfigurationError, PayloadError
from zmqgrad.rpc.api import rpc_sync
from zmqgrad.rpc.devices import (
    check_group,
    check_present,
    for_calls,
    for_gradients,
    for_replies,
    to_device_map,
)
from zmqgrad.rpc.gathering import broadcast
from zmqgrad.rpc.membership.worker_info import WorkerRecord
from zmqgrad.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from zmqgrad.testing import Cluster, cluster
from zmqgrad.wire.tensors import devices as staging

CPU, GPU, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


def same(x: Any) -> Any:
    return x


@contextmanager
def mapped(device_map: dict[Any, Any]) -> Iterator[Cluster]:
    """Two workers; the first maps its devices to those of the second."""
    options = RpcBackendOptions(rpc_timeout=20.0, device_maps={"worker1": device_map})
    with cluster(2, options) as made:
        yield made


# ---- what can be one -------------------------------------------------------------------------------------


def test_devices_by_number_name_and_object_are_the_same() -> None:
    assert to_device_map({0: "cuda:1", "cpu": torch.device("cpu")}) == {GPU: SECOND, CPU: CPU}
    options = TensorPipeRpcBackendOptions(device_maps={"w": {0: 1}}, devices=["cuda:0"])
    options.set_device_map("w", {"cuda:1": 0})
    options.set_device_map("v", {0: 0})
    assert options.device_maps == {"w": {GPU: SECOND, SECOND: GPU}, "v": {GPU: GPU}}
    assert options.devices == [GPU]
    options.set_devices([1])
    assert options.devices == [SECOND]


@pytest.mark.parametrize(
    ("device_map", "said"),
    [
        ({0: 1, 1: 1}, "only supports 1-to-1 mapping"),
        ({0: 1, "cuda:0": 2}, "only supports 1-to-1 mapping"),
        ({0: "meta"}, "with its number"),
        ({"cuda": 0}, "with its number"),
        ({0: -1}, "device"),
        ({0: "elsewhere"}, "is no device"),
        ({0: None}, "is no device"),
        ([0], "a dict from device to device"),
    ],
)
def test_invalid_device_maps(device_map: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        RpcBackendOptions().set_device_map("w", device_map)
    with pytest.raises(ConfigurationError, match=said):
        RpcBackendOptions(device_maps={"w": device_map})


@pytest.mark.parametrize(("devices", "said"), [(["cpu"], "CUDA devices"), ([0, 0], "duplicate")])
def test_invalid_devices(devices: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        RpcBackendOptions().set_devices(devices)


def test_a_second_map_may_not_contradict_the_first() -> None:
    options = RpcBackendOptions()
    options.set_device_map("w", {0: 1})
    for wrong in ({0: 2}, {1: 1}):
        with pytest.raises(ConfigurationError, match="1-to-1"):
            options.set_device_map("w", wrong)
    assert options.device_maps == {"w": {GPU: SECOND}}


def test_devices_that_this_process_does_not_have() -> None:
    beyond = torch.cuda.device_count()
    options = RpcBackendOptions(device_maps={"w": {beyond: 0}})
    with pytest.raises(
        ConfigurationError, match=f"the device map for w names cuda:{beyond}, but this process"
    ):
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)


def record(name: str, maps: dict[str, dict[str, str]], count: int = -1) -> WorkerRecord:
    return WorkerRecord(name, 0, 0, (), "", 0, "", maps, count)


def test_maps_are_checked_against_the_group() -> None:
    there = record("b", {}, 2)
    check_group([record("a", {"b": {"cuda:0": "cuda:1"}}), there])
    check_group([record("a", {"b": {"cuda:0": "cuda:7"}}), record("b", {})])  # it did not look
    said = (
        "Node a has target devices with invalid indices in its device map for b: it names cuda:2, but b has 2"
    )
    with pytest.raises(ConfigurationError, match=said):
        check_group([record("a", {"b": {"cuda:0": "cuda:2"}}), there])
    with pytest.raises(ConfigurationError, match="no such worker"):
        check_group([record("a", {"c": {"cuda:0": "cuda:0"}}), there])
    check_present([CPU], 0, "here", "it")


def test_replies_use_the_inverse_device_map() -> None:
    a, b = record("a", {"b": {"cuda:0": "cuda:1"}}), record("b", {"a": {"cuda:0": "cpu"}})
    assert for_calls(a, b) == {GPU: SECOND}
    assert for_replies(b, a) == {SECOND: GPU}
    assert for_calls(b, a) == {GPU: CPU}
    assert "Request" in for_calls(b, a).missing
    assert "Response device mapping is not available for destination a" in for_replies(b, a).missing
    assert for_replies(a, b) == {CPU: GPU}


def test_gradients_use_the_inverse_map_of_their_tensors() -> None:
    """Maps that are no mirror images: merged, they would send a gradient to a device of another tensor."""
    a = record("a", {"b": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}})
    b = record("b", {"a": {"cuda:0": "cuda:0", "cuda:1": "cuda:1"}})
    for sender, receiver in ((a, b), (b, a)):
        call, reply = for_calls(sender, receiver), for_replies(sender, receiver)
        assert for_gradients(receiver, sender, in_reply=False) == {v: k for k, v in call.items()}
        assert for_gradients(receiver, sender, in_reply=True) == {v: k for k, v in reply.items()}
    assert for_gradients(b, a, in_reply=False) != for_gradients(b, a, in_reply=True)


# ---- on the way, without a GPU ---------------------------------------------------------------------------


def test_a_tensor_for_a_device_that_is_not_there() -> None:
    beyond = torch.cuda.device_count()
    with mapped({"cpu": beyond}):
        with pytest.raises(
            PayloadError, match=f"for device cuda:{beyond}, but this process sees {beyond} CUDA"
        ):
            rpc_sync("worker1", same, args=(torch.ones(3),))
        assert rpc_sync("worker1", len, args=([1, 2],)) == 2  # all else goes on


def test_tensors_arrive_on_the_mapped_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives, by name; the devices are left out. Others than the map's owner send as ever."""
    arrived: list[tuple[str, tuple[int, ...]]] = []
    monkeypatch.setattr(
        "zmqgrad.wire.tensors.decoding.copy_to_device", lambda t, name: arrived.append((name, t.shape)) or t
    )
    tensors = [torch.rand(3), torch.rand(50_000, requires_grad=True), torch.rand(4, 6)[:, ::2], torch.eye(2)]
    tensors.append(torch.eye(2).to_sparse())
    with mapped({"cpu": "cuda:5"}) as made:
        back = rpc_sync("worker1", same, args=(tensors,))
        assert arrived == [("cuda:5", t.shape) for t in tensors]
        assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(back, tensors, strict=True))
        assert back[1].requires_grad
        arrived.clear()
        for future in broadcast(["worker0", "worker1"], same, args=(torch.ones(2),)):
            future.wait()
        assert arrived == [("cuda:5", (2,))]
        with made.acting(1):
            arrived.clear()
            assert rpc_sync("worker0", same, args=(torch.ones(2),)).sum() == 2
            assert arrived == []  # the answer of worker 0 goes as the call came: by no map


def test_gradients_arrive_on_the_devices_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only worker 0 has a map. What arrives, by name; devices themselves are left out."""
    arrived: list[str] = []
    monkeypatch.setattr(
        "zmqgrad.wire.tensors.decoding.copy_to_device", lambda t, name: arrived.append(name) or t
    )
    w = torch.ones(3, requires_grad=True)
    with mapped({"cpu": "cuda:5"}) as made:
        with made.acting(1), autograd.context() as context_id:
            # The call goes by no map, and so does its reply; and their gradients, though worker 0 has one.
            y = rpc_sync("worker0", torch.mul, args=(w, 2))
            autograd.backward(context_id, [y.sum()])
            assert autograd.get_gradients(context_id)[w].eq(2).all()
        assert arrived == []


def test_a_strange_device_of_a_peer_is_refused() -> None:
    for name in ("cuda", "xpu:0", "cuda:99999", "cpu:0"):
        with pytest.raises(Exception, match="device"):
            staging.copy_to_device(torch.ones(1), name)


# ---- with a GPU ------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@needs_gpu
def test_tensors_of_a_gpu_arrive_on_a_gpu_and_come_back() -> None:
    x = torch.rand(1000, 100, device=GPU)
    samples = [x, x.t(), x[:, ::3], x.to(torch.bfloat16), x[:0], x[0, 0], x.to_sparse(), torch.ones(2)]
    with mapped({0: 0}):
        for sample in samples:
            back = rpc_sync("worker1", same, args=(sample,))
            assert back.device == sample.device
            assert torch.equal(back.to_dense(), sample.to_dense())
        said = (
            "Request device mapping is not available for destination worker0.*`set_device_map` on `TensorPipe"
        )
        with pytest.raises(PayloadError, match=said):
            rpc_sync("worker0", same, args=(x,))


@needs_gpu
def test_work_that_was_queued_before_is_seen_and_gradients_come_back() -> None:
    with mapped({0: 0}):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.zeros(1 << 22, device=GPU)
            for _ in range(200):
                x = x + 1
            assert rpc_sync("worker1", torch.sum, args=(x,)).item() == 200 * (1 << 22)
        w = torch.ones(3, device=GPU, requires_grad=True)
        with autograd.context() as context_id:
            y = rpc_sync("worker1", torch.mul, args=(w, w))
            autograd.backward(context_id, [y.sum()])
            gradient = autograd.get_gradients(context_id)[w]
            assert gradient.device == GPU
            assert gradient.eq(2).all()
