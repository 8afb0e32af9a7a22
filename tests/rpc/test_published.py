"""Published tensors: whole versions, in order, isolated from each other; and errors that say what to do."""

from __future__ import annotations

import asyncio
import gc
import math
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from tests.rpc.test_names import WAIT, in_thread, lose
from tests.support.waiting import eventually
from zmqgrad import rpc
from zmqgrad.errors import (
    ArgumentTypeError,
    ClosedError,
    ConfigurationError,
    DuplicateNameError,
    NotInitializedError,
    PayloadError,
    RpcTimeoutError,
    StoreTimeoutError,
)
from zmqgrad.testing import Cluster, cluster
from zmqgrad.trace import Job, record
from zmqgrad.trace.events import Published
from zmqgrad.trace.timeline import Timeline
from zmqgrad.wire.messages import MessageType


@pytest.fixture
def trio() -> Iterator[Cluster]:
    with cluster(3) as c:
        yield c


def state(value: float, size: int = 50_000) -> dict[str, torch.Tensor]:
    """Tensors that all have one value, so that a mixture shows."""
    return {"a": torch.full((size,), value), "b": torch.full((3, 5), value, dtype=torch.float64)}


def values(tensors: dict[str, torch.Tensor]) -> set[float]:
    """The values that are in ``tensors``."""
    return {float(x) for t in tensors.values() for x in t.unique()}


class MaskedTensor(torch.Tensor):
    """A subclass, which means something else than its bytes."""


def freed() -> torch.Tensor:
    """A tensor whose memory was freed, as sharded training does."""
    t = torch.ones(5)
    t.untyped_storage().resize_(0)
    return t


COMPLEX = torch.rand(5, dtype=torch.complex64)

SAMPLES: dict[str, torch.Tensor] = {
    "matrix": torch.arange(12.0).view(3, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "every other": torch.arange(10)[::2],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "half": torch.rand(7).to(torch.bfloat16),
    "complex": COMPLEX,
    "conjugate": COMPLEX.conj(),
    "imaginary": COMPLEX.imag,
    "negative": COMPLEX.conj().imag,
    "bool": torch.tensor([True, False]),
    "bits": torch.tensor([1, 0], dtype=torch.uint8).view(torch.uint4),
    "bits with gaps": torch.arange(6, dtype=torch.uint8).view(torch.uint4)[::2],
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "parameter": torch.nn.Parameter(torch.rand(3)),
    "large": torch.rand(100_000),
}


def test_each_kind_of_tensor_arrives_as_it_was(trio: Cluster) -> None:
    rpc.publish("samples", SAMPLES)
    for rank in (0, 1):
        with trio.acting(rank), rpc.subscribe("samples") as subscription:
            found = subscription.tensors
            assert list(found) == list(SAMPLES)
            for key, sample in SAMPLES.items():
                assert found[key].dtype == sample.dtype
                one, other = found[key], sample.detach()
                if key.startswith("bits"):  # torch compares none of these
                    one, other = one.view(torch.uint8), other.view(torch.uint8)
                assert torch.equal(one, other), key
                assert not found[key].requires_grad


def test_a_module_is_published_and_loaded_in_one_line_each(trio: Cluster) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.BatchNorm1d(200))
    assert rpc.publish("policy", module) == 1
    with trio.acting(1), rpc.subscribe("policy") as subscription:
        other = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.BatchNorm1d(200))
        other.load_state_dict(subscription.tensors)
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in module.state_dict().items())


def test_versions_rise_and_a_version_never_changes(trio: Cluster) -> None:
    source = state(1.0)
    rpc.publish("policy", source)
    with trio.acting(1):
        subscription = rpc.subscribe("policy")
    first = subscription.tensors
    for t in source.values():
        t.fill_(2.0)
    assert values(first) == {1.0}
    assert rpc.publish("policy", source) == 2
    second = subscription.wait(newer_than=1)
    assert (first.version, second.version, subscription.version) == (1, 2, 2)
    assert (values(first), values(second)) == ({1.0}, {2.0})


def test_what_a_closed_subscription_held_is_freed_at_once(trio: Cluster) -> None:
    """Not when the collector next looks for cycles: it may be much memory."""
    rpc.publish("policy", state(1.0))
    with trio.acting(1):
        subscription = rpc.subscribe("policy")
    held = weakref.ref(subscription.tensors["a"].untyped_storage())
    gc.collect()
    gc.disable()
    try:
        subscription.close()
        del subscription
        eventually(lambda: held() is None)
    finally:
        gc.enable()


def test_what_a_subscription_held_that_has_failed_is_freed_at_once(trio: Cluster) -> None:
    """Its error refers to no version."""
    rpc.publish("policy", state(1.0))
    with trio.acting(1):
        subscription = rpc.subscribe("policy", narrow={"a": None, "b": None})
    held = weakref.ref(subscription.tensors["a"].untyped_storage())
    gc.collect()
    gc.disable()
    try:
        rpc.publish("policy", {"a": torch.ones(1)})
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="no tensor is named b"):
                subscription.wait(1)
        subscription.close()
        del subscription
        eventually(lambda: held() is None)
    finally:
        gc.enable()


def test_what_a_reader_writes_is_seen_by_nobody_else(trio: Cluster) -> None:
    rpc.publish("policy", state(1.0))
    with trio.acting(1):
        one, other = rpc.subscribe("policy"), rpc.subscribe("policy")
    one.tensors["a"].fill_(9.0)
    assert values(other.tensors) == {1.0}
    rpc.publish("policy", state(1.0) | {"b": torch.full((3, 5), 2.0)}, changed=["b"])
    assert values({"a": one.wait(1)["a"]}) == {1.0}


def test_only_what_changed_is_copied(trio: Cluster) -> None:
    rpc.publish("policy", state(1.0))
    with trio.acting(1):
        subscription = rpc.subscribe("policy")
    given = state(2.0)
    rpc.publish("policy", given, changed=["b"])
    found = subscription.wait(1)
    assert values({"a": found["a"]}) == {1.0}  # taken from version 1: the caller has said that it is equal
    assert values({"b": found["b"]}) == {2.0}
    with pytest.raises(ConfigurationError, match=r"changed has names that tensors does not: c"):
        rpc.publish("policy", given, changed=["c"])
    with pytest.raises(ConfigurationError, match="'c' is new"):
        rpc.publish("policy", given | {"c": torch.ones(1)}, changed=["a"])
    assert rpc.publish("policy", {"b": given["b"]}, changed=[]) == 3
    assert list(subscription.wait(2)) == ["b"]


def test_tied_tensors_are_copied_once(trio: Cluster) -> None:
    t = torch.rand(1000)
    rpc.publish("policy", {"one": t, "other": t})
    with trio.acting(1), rpc.subscribe("policy") as subscription:
        found = subscription.tensors
        assert found["one"].data_ptr() == found["other"].data_ptr()


def test_tied_tensors_change_together(trio: Cluster) -> None:
    """``named_parameters`` has them once, and a ``state_dict`` by each name."""
    module = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 9))
    module[1].weight = module[0].weight
    rpc.publish("policy", module)
    with torch.no_grad():
        module[0].weight.add_(1.0)
    rpc.publish("policy", module, changed=[name for name, _ in module.named_parameters() if "weight" in name])
    with trio.acting(1), rpc.subscribe("policy") as subscription:
        other = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 9))
        other[1].weight = other[0].weight
        other.load_state_dict(subscription.tensors)
    assert torch.equal(other[0].weight, module[0].weight)


def test_views_of_what_has_changed_change_as_well(trio: Cluster) -> None:
    whole = torch.zeros(12)
    named = {"whole": whole, "first": whole[:4], "middle": whole.view(3, 4)[1], "other": torch.zeros(2)}
    rpc.publish("policy", named)
    whole.add_(1)
    named["other"].add_(1)
    rpc.publish("policy", named, changed=["first"])
    with trio.acting(1), rpc.subscribe("policy") as subscription:
        sums = {name: t.sum().item() for name, t in subscription.tensors.items()}
        assert sums == {"whole": 12, "first": 4, "middle": 0, "other": 0}
    rpc.publish("policy", named, changed=["whole"])
    with trio.acting(1), rpc.subscribe("policy") as subscription:
        sums = {name: t.sum().item() for name, t in subscription.tensors.items()}
        assert sums == {"whole": 12, "first": 4, "middle": 4, "other": 0}


def test_parts(trio: Cluster) -> None:
    x = torch.rand(100, 80)
    rpc.publish("policy", {"x": x, "y": torch.ones(3), "z": torch.zeros(4)})
    with trio.acting(1), rpc.subscribe("policy", narrow={"x": (1, 10, 20), "y": None}) as subscription:
        found = subscription.tensors
        assert torch.equal(found["x"], x.narrow(1, 10, 20))
        assert list(found) == ["x", "y"]
    with pytest.raises(ConfigurationError, match=r"no tensor is named w; among the names are x, y, z"):
        rpc.subscribe("policy", narrow={"w": None})
    with pytest.raises(ConfigurationError, match="no tensor is named 1, w; among"):
        rpc.subscribe("policy", narrow={1: None, "w": None})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match=r"'x' has the shape \(100, 80\)"):
        rpc.subscribe("policy", narrow={"x": (0, 90, 20)})
    with pytest.raises(ArgumentTypeError, match="narrow is a mapping of names"):
        rpc.subscribe("policy", narrow=["x"])  # type: ignore[arg-type]
    with rpc.subscribe("policy", narrow={}, timeout=math.inf) as nothing:
        assert (nothing.version, nothing.tensors) == (1, {})
    with pytest.raises(
        ArgumentTypeError, match="changed must be a list of names of tensors, not the str 'x'"
    ):
        rpc.publish("policy", {"x": x}, changed="x")


def test_who_reads_a_part_as_well_still_passes_on_the_whole() -> None:
    """Worker 1 fetches for its host; a part arrives there before the whole does."""
    with cluster(3, hosts="abb") as c:
        rpc.publish("policy", state(1.0))
        readers = []
        for rank in (1, 2):
            with c.acting(rank):
                readers.append(rpc.subscribe("policy"))
        before = c.workers[0].mailbox.statistics()["bytes_sent"]
        with c.network.hold(MessageType.RESULT, 1, source=0, target=1) as whole:
            rpc.publish("policy", state(2.0))
            whole.wait()
            eventually(lambda: calls_between(c, 2, 1), lambda n: n == 2)
            with c.acting(1), rpc.subscribe("policy", narrow={"b": None}) as part:
                assert (part.version, values(part.tensors)) == (2, {2.0})
        assert [values(reader.wait(1)) for reader in readers] == [{2.0}, {2.0}]
        size = sum(t.nbytes for t in state(2.0).values())
        assert c.workers[0].mailbox.statistics()["bytes_sent"] - before < 1.5 * size


@pytest.mark.parametrize("how", ["its callback runs", "it reads a part only"])
def test_nobody_waits_for_a_reader_that_passes_nothing_on(how: str) -> None:
    """Worker 1 has fetched the first version for its host."""
    done = threading.Event()
    with cluster(3, hosts="abb") as c:
        rpc.publish("policy", state(1.0))
        with c.acting(1):
            if how == "its callback runs":
                rpc.subscribe("policy", callback=lambda _: done.wait(WAIT))
            else:
                with rpc.subscribe("policy"):
                    rpc.subscribe("policy", narrow={"b": None})
                    assert c.workers[1].shelf.newest("policy")
        with c.acting(2):
            reader = rpc.subscribe("policy")
        rpc.publish("policy", state(2.0))
        assert values(reader.wait(1, timeout=WAIT / 2)) == {2.0}
        assert not done.is_set()
        done.set()


def calls_between(c: Cluster, source: int, target: int) -> int:
    """How many calls ``source`` has sent to ``target``."""
    kinds = [(m.envelope.type, m.envelope.source, m.target) for m in list(c.network.history)]
    return kinds.count((MessageType.CALL, source, target))


def test_a_callback_and_an_iterator_get_the_versions(trio: Cluster) -> None:
    heard: SimpleQueue[Any] = SimpleQueue()
    rpc.publish("policy", state(1.0))
    with trio.acting(2):
        watching = rpc.subscribe("policy", callback=lambda tensors: heard.put(tensors.version))
    assert heard.get(timeout=WAIT) == 1

    async def follow() -> list[int]:
        seen = []
        async for tensors in watching:
            seen.append(tensors.version)
            if len(seen) == 3:
                return seen
            await asyncio.to_thread(rpc.publish, "policy", state(1.0))
        return seen

    assert asyncio.run(asyncio.wait_for(follow(), WAIT)) == [1, 2, 3]
    assert [heard.get(timeout=WAIT), heard.get(timeout=WAIT)] == [2, 3]


def test_a_callback_that_wants_to_end_the_process_gets_the_next_version_all_the_same(trio: Cluster) -> None:
    heard: SimpleQueue[Any] = SimpleQueue()

    def leave(tensors: rpc.PublishedTensors) -> None:
        heard.put(tensors.version)
        sys.exit(3)

    rpc.publish("policy", state(1.0))
    with trio.acting(2):
        rpc.subscribe("policy", callback=leave)
    assert heard.get(timeout=WAIT) == 1
    rpc.publish("policy", state(2.0))
    assert heard.get(timeout=WAIT) == 2


def test_what_a_callback_does_not_get_is_logged(trio: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    heard: SimpleQueue[int] = SimpleQueue()
    rpc.publish("policy", state(1.0))
    rpc.subscribe("policy", narrow={"b": None}, callback=lambda tensors: heard.put(tensors.version))
    assert heard.get(timeout=WAIT) == 1
    rpc.publish("policy", {"a": torch.ones(3)})
    eventually(lambda: "does not get version 2 of 'policy': no tensor is named b" in caplog.text)
    rpc.publish("policy", state(3.0))
    assert heard.get(timeout=WAIT) == 3


def test_an_iterator_that_waits_can_be_cancelled_and_ends_with_the_subscription(trio: Cluster) -> None:
    rpc.publish("policy", state(1.0))
    subscription = rpc.subscribe("policy")

    async def follow(seen: list[int]) -> None:
        async for tensors in subscription:
            seen.append(tensors.version)

    async def run() -> list[int]:
        seen: list[int] = []
        first, second = asyncio.create_task(follow(seen)), asyncio.create_task(follow(seen))
        while len(seen) < 2:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.to_thread(rpc.publish, "policy", state(2.0))
        await asyncio.to_thread(eventually, lambda: len(seen) == 3)
        subscription.close()
        with pytest.raises(NotInitializedError, match="was closed"):
            await second
        assert first.cancelled()
        return seen

    assert asyncio.run(asyncio.wait_for(run(), WAIT)) == [1, 1, 2]


def test_waits_for_a_first_version(trio: Cluster) -> None:
    waiting = in_thread(lambda: values(rpc.subscribe("policy").tensors), trio, 2)
    rpc.publish("policy", state(4.0))
    assert waiting.get(timeout=WAIT) == {4.0}


def test_nothing_is_published(trio: Cluster) -> None:
    with pytest.raises(RpcTimeoutError, match=r"'policy' after 0.01 s; nothing is published in this group"):
        rpc.subscribe("policy", timeout=0.01)
    rpc.publish("value", state(1.0))
    with pytest.raises(RpcTimeoutError, match=r"'policy' after 0.01 s; the names are value"):
        rpc.subscribe("policy", timeout=0.01)
    with (
        rpc.subscribe("value") as subscription,
        pytest.raises(RpcTimeoutError, match="worker0 has published"),
    ):
        subscription.wait(timeout=0.01)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (3, ArgumentTypeError, "a module or its state_dict"),
        ([torch.ones(1)], ArgumentTypeError, "a module or its state_dict"),
        (torch.nn.ReLU(), ArgumentTypeError, "there are no tensors"),
        ({"step": 3}, ArgumentTypeError, "'step' is a int.*Leave it out"),
        ({3: torch.ones(1)}, ArgumentTypeError, "tensors with a name"),
        ({"a": {"b": torch.ones(1)}}, ArgumentTypeError, "'a' is a dict"),
        ({"s": torch.eye(3).to_sparse()}, PayloadError, "'s' is a torch.sparse_coo.*to_dense"),
        ({"d": MaskedTensor()}, PayloadError, "'d' is a MaskedTensor.*plain tensor"),
        ({"f": freed()}, PayloadError, "storage holds 0 bytes"),
        ({"m": torch.ones(3, device="meta")}, PayloadError, "on meta.*cpu"),
    ],
)
def test_what_cannot_be_published(trio: Cluster, given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        rpc.publish("policy", given)
    assert rpc.publish("policy", state(1.0)) == 1


def test_one_worker_publishes_a_name_until_it_is_lost(trio: Cluster) -> None:
    rpc.publish("policy", state(1.0))
    with trio.acting(2):
        subscription = rpc.subscribe("policy")
    with trio.acting(1), pytest.raises(DuplicateNameError, match=r"worker0 .* publishes 'policy'"):
        rpc.publish("policy", state(2.0))
    lose(trio, 0)
    with trio.acting(2):
        assert values(subscription.tensors) == {1.0}
        with pytest.raises(RpcTimeoutError, match="worker0 has published version 1, which is lost"):
            subscription.wait(timeout=0.05)
    with trio.acting(1):
        assert rpc.publish("policy", state(2.0)) == 2
    with trio.acting(2):
        assert values(subscription.wait(1)) == {2.0}


class LostStore:
    """A store that is lost before it has announced anything; ``announces``: before it replies."""

    def __init__(self, store: Any, announces: bool) -> None:
        self.store, self.announces = store, announces

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Fail, if this would set something."""
        if expected == desired:
            found: bytes = self.store.compare_set(key, expected, desired)
            return found
        if self.announces:
            self.store.compare_set(key, expected, desired)
        raise StoreTimeoutError("no reply")

    def list_keys(self, prefix: str) -> list[str]:
        """Fail."""
        raise StoreTimeoutError("no reply")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_what_has_arrived_is_read_though_its_publisher_is_lost_then(
    trio: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trio.acting(1):
        rpc.publish("weights", state(1))

    def ended(peer: int) -> bool:
        raise ClosedError(f"worker0 sends nothing more to worker {peer}: it was unplugged")

    monkeypatch.setattr(trio.workers[0].mailbox, "is_local", ended)
    with rpc.subscribe("weights") as weights:
        assert values(weights.tensors) == {1.0}


def test_a_wait_times_out_though_the_store_is_lost(trio: Cluster) -> None:
    rpc.publish("policy", state(1.0))
    subscription, directory = rpc.subscribe("policy"), trio.workers[0].directory
    store = directory.shared()
    directory.store = LostStore(store, announces=False)  # type: ignore[assignment]
    with pytest.raises(RpcTimeoutError, match=r"no version of 'policy' is announced after 0.01 s: no reply"):
        subscription.wait(timeout=0.01)
    directory.store = store


@pytest.mark.parametrize("next_publisher", [0, 1])
def test_no_reader_has_a_version_that_was_never_announced(trio: Cluster, next_publisher: int) -> None:
    """The next version, also of another worker, has its number."""
    directory, size = trio.workers[0].directory, 10
    rpc.publish("policy", state(1.0, size))
    store = directory.shared()
    directory.store = LostStore(store, announces=False)  # type: ignore[assignment]
    with pytest.raises(StoreTimeoutError):
        rpc.publish("policy", state(2.0, size))
    directory.store = store
    with trio.acting(2):
        reader = rpc.subscribe("policy")
    assert (reader.version, values(reader.tensors)) == (1, {1.0})
    if next_publisher == 1:
        lose(trio, 0)
    with trio.acting(next_publisher):
        assert rpc.publish("policy", state(3.0, size)) == 2
    assert values(reader.wait(1)) == {3.0}


def test_an_announced_version_is_read_though_its_publisher_does_not_know(trio: Cluster) -> None:
    directory, size = trio.workers[0].directory, 10
    rpc.publish("policy", state(1.0, size))
    with trio.acting(2):
        reader = rpc.subscribe("policy")
    store = directory.shared()
    directory.store = LostStore(store, announces=True)  # type: ignore[assignment]
    with pytest.raises(StoreTimeoutError):
        rpc.publish("policy", state(2.0, size))
    directory.store = store
    assert values(reader.wait(1)) == {2.0}
    assert rpc.publish("policy", state(3.0, size), changed=["b"]) == 3
    third = reader.wait(2)
    assert (values({"a": third["a"]}), values({"b": third["b"]})) == ({2.0}, {3.0})


def test_a_timeout_is_also_that_of_a_publisher_who_does_not_reply() -> None:
    with cluster(2, rpc.RpcBackendOptions(rpc_timeout=0)) as c:
        rpc.publish("policy", state(1.0))
        with c.network.hold(MessageType.CALL, 2, source=1, target=0) as asked:
            publishing = in_thread(lambda: rpc.publish("policy", state(2.0), timeout=0.05), c, 1)
            assert isinstance(publishing.get(timeout=WAIT), RpcTimeoutError)
            waiting = in_thread(lambda: rpc.publish("policy", state(2.0)), c, 1)
            asked.wait(2)
            second = in_thread(lambda: rpc.publish("other", state(2.0), timeout=0.05), c, 1)
            assert "another thread of this worker" in str(second.get(timeout=WAIT))
        assert isinstance(waiting.get(timeout=WAIT), DuplicateNameError)


def test_a_reader_that_gives_up_asks_no_more(trio: Cluster) -> None:
    """The thread that fetches for it ends, though the publisher does not reply."""
    rpc.publish("policy", state(1.0))
    with trio.network.hold(MessageType.CALL, source=1, target=0):
        with trio.acting(1), pytest.raises(RpcTimeoutError):
            rpc.subscribe("policy", timeout=0.05)
        eventually(trio.workers[1].is_idle)


def test_shutdown_ends_a_wait_and_leaves_the_tensors() -> None:
    with cluster(2) as c:
        rpc.publish("policy", state(1.0))
        with c.acting(1):
            subscription = rpc.subscribe("policy")
        waiting = in_thread(lambda: subscription.wait(timeout=0), c, 1)
    assert isinstance(waiting.get(timeout=WAIT), NotInitializedError)
    assert values(subscription.tensors) == {1.0}


def test_versions_are_whole_while_others_are_published(trio: Cluster) -> None:
    rpc.publish("policy", state(0.0))
    stop = threading.Event()
    seen: list[list[int]] = []

    def read(rank: int) -> int:
        with trio.acting(rank), rpc.subscribe("policy") as subscription:
            versions = []
            while not stop.is_set() or versions[-1:] < [50]:
                tensors = subscription.wait(0)
                assert values(tensors) == {float(tensors.version - 1)}
                versions.append(tensors.version)
        seen.append(versions)
        return len(versions)

    readers = [in_thread(lambda rank=rank: read(rank), trio, rank) for rank in (0, 1, 2)]
    for number in range(1, 50):
        rpc.publish("policy", state(float(number)))
    stop.set()
    for reader in readers:
        assert isinstance(reader.get(timeout=WAIT), int)
    assert all(versions == sorted(versions) for versions in seen)


def test_a_closed_subscription_is_dropped(trio: Cluster) -> None:
    rpc.publish("policy", state(1.0))
    subscription = rpc.subscribe("policy")
    assert repr(subscription) == "<Subscription to 'policy', version 1>"
    subscription.close()
    subscription.close()
    rpc.publish("policy", state(2.0))
    with pytest.raises(NotInitializedError, match="was closed"):
        subscription.wait()
    assert repr(subscription) == "<Subscription to 'policy', closed, version 1>"
    eventually(lambda: trio.workers[0].is_idle())


def test_a_trace_shows_what_is_published_and_fetched(tmp_path: Path) -> None:
    with record(tmp_path), cluster(2) as c:
        rpc.publish("policy", state(1.0))
        rpc.publish("policy", state(2.0), changed=["b"])
        with c.acting(1):
            rpc.subscribe("policy").close()
    job = Job(tmp_path)
    published = [each.event for each in job.events() if isinstance(each.event, Published)]
    assert [(e.name, e.version, e.bytes) for e in published] == [("policy", 1, 200_128), ("policy", 2, 128)]
    assert all(e.nanoseconds > 0 for e in published)
    names = {str(event.get("name")) for event in Timeline(job).events()}
    assert "publish policy" in names
    assert any("fetch_version" in name for name in names), names
