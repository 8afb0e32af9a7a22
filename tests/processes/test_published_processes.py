"""Published tensors between real processes: mapped, of killed publishers and readers, and of full memory."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes.test_dynamic_processes import WAIT, join
from tests.processes.test_lifecycle import what_is_open
from tests.support.namespaces import Hosts, enter, hosts
from tests.support.processes import run_processes
from tests.support.waiting import eventually
from tools.ports import free_port
from zmqgrad import rpc
from zmqgrad.errors import RpcTimeoutError
from zmqgrad.rpc.current import current_worker
from zmqgrad.store import TCPStore
from zmqgrad.transport.shared_memory.segment import supported

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not supported(), reason="this system has no sealed shared memory"),
]

__all__ = ["hosts"]

PUBLISHES = int(os.environ.get("ZMQGRAD_TEST_PUBLISHES", "90"))
"""How many versions are published while publishers are killed."""

PUBLISHERS = 3

MB = 1 << 20


def state(value: float, size: int = 100_000) -> dict[str, torch.Tensor]:
    """Tensors that all have one value, so that a mixture shows; one travels beside the header elsewhere."""
    return {"a": torch.full((size,), value), "b": torch.full((7,), value), "c": torch.full((300, 100), value)}


def values(tensors: dict[str, torch.Tensor]) -> set[float]:
    """The values that are in ``tensors``."""
    return {float(x) for t in tensors.values() for x in t.unique()}


def mapped() -> list[str]:
    """The lines of this process's memory map that are private mappings of shared memory of ours."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/memfd:zmqgrad" in line and line.split()[1] == "rw-p"]


def descriptors() -> int:
    """How many descriptors of shared memory this process has."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{entry}").startswith("/memfd:zmqgrad")
        except FileNotFoundError:
            continue
    return count


# ---- many versions, and killed publishers ------------------------------------------------------------------


def storm(rank: int, signals: int) -> dict[str, Any]:
    """0 kills all publishers but the last, and reads, as does the last one; those between publish."""
    with TCPStore("127.0.0.1", signals, is_master=rank == 0) as told:
        join(f"w{rank}")
        try:
            if 1 <= rank <= PUBLISHERS:
                return publish_until_killed(rank, told)
            return read_all(rank, told)
        finally:
            rpc.shutdown()


def publish_until_killed(rank: int, told: TCPStore) -> dict[str, Any]:
    told.wait([f"go{rank}"], 3 * WAIT)
    told.set(f"pid{rank}", str(os.getpid()))
    number, content = 0, state(0.0)
    while number < PUBLISHES or rank < PUBLISHERS:
        for t in content.values():
            t.add_(1.0)
        try:
            number = rpc.publish("policy", content, changed=["a", "c"] if number % 3 == 1 else None)
        except ValueError:  # the publisher before was killed, and not every trace of it is gone
            continue
    told.wait(["read0", f"read{PUBLISHERS + 1}"], WAIT)
    left = eventually(lambda: rpc.get_stats()["arena"]["blocks_leased"], lambda n: n <= 2)
    return {"blocks": left, "memory": rpc.get_stats()["arena"]["bytes_leased"]}


def read_all(rank: int, told: TCPStore) -> dict[str, Any]:
    """Read until the last version, and check each."""
    killed, versions, torn = 0, 0, []
    if rank == 0:
        told.set("go1", "")
    subscription = rpc.subscribe("policy", timeout=2 * WAIT)
    last = 0
    while last < PUBLISHES:
        tensors = subscription.wait(last, timeout=2 * WAIT)
        found = values({"a": tensors["a"], "c": tensors["c"]})
        if len(found) != 1 or not values(tensors) <= found | {next(iter(found)) - 1}:
            torn.append((tensors.version, values(tensors)))
        last, versions = tensors.version, versions + 1
        tensors["a"].zero_()  # nobody else sees it
        if rank == 0 and killed + 1 < PUBLISHERS and last >= PUBLISHES * (killed + 1) // PUBLISHERS:
            killed += 1
            os.kill(int(told.get(f"pid{killed}")), signal.SIGKILL)
            assert len(values({"c": tensors["c"]})) == 1  # the version stays with its readers
            told.set(f"go{killed + 1}", "")
        del tensors
    subscription.close()
    del subscription
    gc.collect()
    eventually(mapped, lambda lines: not lines)
    told.set(f"read{rank}", "")
    living = 1 if rank else 2
    return {"torn": torn, "versions": versions, "descriptors": descriptors() <= 2 * living + 2}


def test_no_version_is_torn_and_no_memory_stays_when_publishers_are_killed() -> None:
    n = PUBLISHERS + 2
    timeout = 60.0 + PUBLISHES / 10
    results = run_processes(storm, n, (free_port(),), timeout=timeout, may_die=range(1, PUBLISHERS))
    readers = results[0], results[-1]
    assert [r["torn"] for r in readers] == [[], []]
    assert all(r["versions"] > 1 and r["descriptors"] for r in readers)
    assert results[PUBLISHERS]["blocks"] <= 2


# ---- one host ----------------------------------------------------------------------------------------------

LIMIT = 16 * MB


def map_and_leave(rank: int) -> dict[str, Any]:
    """0 publishes to two readers, which hold versions until there is no memory for another one."""
    rpc.init_rpc(f"w{rank}", rpc_backend_options=rpc.RpcBackendOptions(arena_limit=LIMIT, rpc_timeout=WAIT))
    result: dict[str, Any] = {}
    if rank == 0:
        content = {"a": torch.full((MB,), 1.0)}  # 4 MB
        rpc.publish("policy", content)
    else:
        subscription = rpc.subscribe("policy")
        result["mapped"] = len(mapped())
        held = [subscription.tensors]
    rpc.barrier(["w0", "w1", "w2"])
    if rank == 0:
        result["copied"] = rpc.get_stats()["sent_by_path"]["frames"]
        for value in (2.0, 3.0):
            rpc.publish("policy", {"a": torch.full((MB,), value)})
            rpc.barrier(["w0", "w1", "w2"])
        try:
            for value in (4.0, 5.0):
                rpc.publish("policy", {"a": torch.full((MB,), value)}, timeout=0.5)
        except RpcTimeoutError as e:
            result["full"] = str(e)
        try:
            rpc.publish("policy", {"a": torch.zeros(LIMIT)}, timeout=0)
        except RpcTimeoutError as e:
            result["larger"] = str(e)
        rpc.barrier(["w0", "w1", "w2"])  # the readers drop what they hold
        result["next"] = rpc.publish("policy", {"a": torch.full((MB,), 6.0)})
        rpc.barrier(["w0", "w1", "w2"])
    else:
        for last in (1, 2):
            held.append(subscription.wait(last))
            rpc.barrier(["w0", "w1", "w2"])
        rpc.barrier(["w0", "w1", "w2"])
        result["held"] = [values(t) for t in held]
        held.clear()
        tensors = subscription.wait(4 if subscription.version < 5 else subscription.version)
        result["last"] = values(tensors)
        rpc.barrier(["w0", "w1", "w2"])
    rpc.shutdown()
    if rank:
        assert values(tensors) == {6.0}  # also after shutdown, and after the publisher has ended
        del tensors, subscription
        gc.collect()
        result["left"] = mapped(), descriptors(), what_is_open()[0]
    return result


def test_readers_map_versions_and_memory_is_bounded() -> None:
    publisher, *readers = run_processes(map_and_leave, 3)
    assert publisher["copied"] == 0
    assert "These workers hold versions: version 1 of 'policy': w" in publisher["full"]
    assert "Let readers drop" in publisher["full"]
    assert "arena_limit" in publisher["full"]
    assert "Raise RpcBackendOptions(arena_limit" in publisher["larger"]
    for reader in readers:
        assert reader["mapped"] >= 1
        assert reader["held"][:3] == [{1.0}, {2.0}, {3.0}]
        assert reader["last"] == {6.0}
        assert reader["left"] == ([], 0, [])


def die_with_versions(rank: int) -> int:
    """1 is killed while it holds a version: the publisher gets the memory back."""
    rpc.init_rpc(f"w{rank}", rpc_backend_options=rpc.RpcBackendOptions(arena_limit=LIMIT, rpc_timeout=WAIT))
    if rank == 1:
        subscription = rpc.subscribe("policy")
        assert subscription.version
        os.kill(os.getpid(), signal.SIGKILL)
    rpc.publish("policy", {"a": torch.zeros(2 * MB)})  # half of what there is
    for _ in range(4):
        rpc.publish("policy", {"a": torch.zeros(2 * MB - 8192)})
    rpc.shutdown(graceful=False)
    return 1


def test_memory_of_a_killed_reader_comes_back() -> None:
    assert run_processes(die_with_versions, 2, may_die=(1,)) == [1, None]


def publish_in_many_sizes(_: int) -> int:
    """How many blocks are noted then, of which one is used."""
    rpc.init_rpc("w0")
    for number in range(1, 200):
        rpc.publish("policy", {"a": torch.zeros(number * 7919 % 40_000)})
    noted = current_worker().hooks.extensions["published"].leases
    rpc.shutdown()
    return len(noted)


def test_nothing_is_noted_of_versions_that_are_gone() -> None:
    """Each ``publish`` looks through it all."""
    assert run_processes(publish_in_many_sizes, 1)[0] <= 3


# ---- two hosts ---------------------------------------------------------------------------------------------

SIZE = 1_500_000  # 6 MB


def sent() -> int:
    """How many bytes this worker has sent through sockets."""
    return int(rpc.get_stats()["sent_by_path"]["frames"])


def across(rank: int) -> dict[str, Any]:
    """0 publishes on host a; 1 and 3 read on host b, and 2 on host a; 1 is killed while it is the relay."""
    enter(rank)
    rpc.init_rpc(f"w{rank}", rpc_backend_options=rpc.RpcBackendOptions(rpc_timeout=60.0))
    everybody, living = ["w0", "w1", "w2", "w3"], ["w0", "w2", "w3"]
    result: dict[str, Any] = {}
    content = state(1.0, SIZE)
    if rank == 0:
        rpc.publish("policy", content)
        rpc.barrier(everybody)
        result["whole"] = sent()
        content["b"].fill_(2.0)
        rpc.publish("policy", content, changed=["b"])
        rpc.barrier(everybody)
        result["changed"] = sent() - result["whole"]
        rpc.barrier(everybody)  # from now on, 3 may get its part
        rpc.barrier(everybody)
        result["part"] = sent() - result["whole"] - result["changed"]
        rpc.publish("policy", state(3.0, SIZE))
        rpc.barrier(living)
        rpc.barrier(living)
        rpc.publish("policy", state(4.0, SIZE))
        rpc.barrier(living)
        rpc.shutdown(graceful=False)
        return result
    subscription = rpc.subscribe("policy")
    result["first"] = subscription.version >= 1 and values({"a": subscription.tensors["a"]}) == {1.0}
    result["mapped"] = bool(mapped())
    rpc.barrier(everybody)
    second = subscription.wait(1) if subscription.version < 2 else subscription.tensors
    result["second"] = values({"a": second["a"]}), values({"b": second["b"]})
    rpc.barrier(everybody)
    rpc.barrier(everybody)
    if rank == 3:
        subscription.close()
        with rpc.subscribe("policy", narrow={"a": (0, 5, 100_000), "b": None}) as part:
            result["part"] = {key: (len(t), values({key: t})) for key, t in part.tensors.items()}
    rpc.barrier(everybody)
    if rank == 1:
        subscription.wait(2)
        os.kill(os.getpid(), signal.SIGKILL)
    rpc.barrier(living)
    if rank == 3:  # is sent to worker 1, which is dead
        subscription = rpc.subscribe("policy")
        result["third"] = values(subscription.tensors)
    rpc.barrier(living)
    result["fourth"] = values(subscription.wait(3))
    rpc.barrier(living)
    rpc.shutdown(graceful=False)
    return result


@pytest.mark.timeout(150)
def test_each_other_host_fetches_a_version_once(hosts: Hosts) -> None:
    publisher, _, near, far = run_processes(across, 4, timeout=120, env=hosts.environment(), may_die=[1])
    size = 4 * SIZE
    assert size <= publisher["whole"] < 1.5 * size
    assert publisher["changed"] < size / 10
    assert 400_000 <= publisher["part"] < size / 5
    assert far["part"] == {"a": (100_000, {1.0}), "b": (7, {2.0})}
    assert far["third"] == {3.0}
    for reader in (near, far):
        assert reader["first"]
        assert reader["mapped"]
        assert reader["second"] == ({1.0}, {2.0})
        assert reader["fourth"] == {4.0}
