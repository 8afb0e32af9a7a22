"""On which address a worker listens."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from zmqgrad.errors import ConfigurationError
from zmqgrad.rpc.membership.bootstrap import join_group, worker_address
from zmqgrad.rpc.membership.group import Group
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import EtcdStore, FileStore, HashStore, PrefixStore
from zmqgrad.transport import bind_policy, host_address

OURS = "203.0.113.5"  # as is the next, of documentation: nobody has it
MASTER = "198.51.100.7"


@pytest.fixture
def facing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Which address is chosen where workers meet by a file, with what the environment says."""

    def from_here(host: str, port: int) -> str:
        if host == "no-such-host":
            raise OSError("nobody knows it")
        return "127.0.0.1" if bind_policy.is_loopback(host) else OURS

    monkeypatch.setattr(host_address, "facing_address", from_here)

    def chosen(path: Path, **variables: str) -> str:
        for name in ("MASTER_ADDR", "ZMQGRAD_ALLOW_INSECURE", "ZMQGRAD_SECRET", "ZMQGRAD_SECRET_FILE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with FileStore(str(path / "store")) as store:
            return worker_address(PrefixStore("rpc", store)).listen

    return chosen


def test_with_a_file_the_listening_address_is_reachable(
    facing: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert facing(tmp_path) == "127.0.0.1", "nobody has allowed more"
    assert facing(tmp_path, MASTER_ADDR="localhost", ZMQGRAD_ALLOW_INSECURE="1") == "127.0.0.1"
    assert facing(tmp_path, MASTER_ADDR=MASTER, ZMQGRAD_ALLOW_INSECURE="1") == OURS
    assert facing(tmp_path, ZMQGRAD_ALLOW_INSECURE="1") == OURS
    assert facing(tmp_path, ZMQGRAD_SECRET="0123456789abcdef" * 2) == OURS
    with pytest.raises(ConfigurationError, match=f"will not listen on tcp://{OURS}"):
        facing(tmp_path, MASTER_ADDR=MASTER)
    with pytest.raises(ConfigurationError, match="no route to no-such-host"):
        facing(tmp_path, MASTER_ADDR="no-such-host")
    monkeypatch.setattr(host_address, "_UNASSIGNED_ADDRESSES", ("no-such-host",))
    monkeypatch.setattr(host_address, "interface_addresses", lambda: [("lo", "127.0.0.1"), ("eth1", OURS)])
    assert facing(tmp_path, ZMQGRAD_ALLOW_INSECURE="1") == OURS, "there may be hosts beside this one"
    monkeypatch.setattr(host_address, "interface_addresses", lambda: [("lo", "127.0.0.1")])
    assert facing(tmp_path, ZMQGRAD_ALLOW_INSECURE="1") == "127.0.0.1", "there is no other host"


def test_a_store_in_memory_is_met_on_this_host() -> None:
    with HashStore() as store:
        assert worker_address(store).listen == "127.0.0.1"


def test_with_etcd_the_listening_address_leads_to_a_member(
    facing: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facing(tmp_path)
    monkeypatch.setenv("ZMQGRAD_SECRET", "0123456789abcdef" * 2)
    with EtcdStore(f"127.0.0.1,{MASTER}", "job") as store:
        assert worker_address(store).listen == OURS, "others cannot reach the loopback of this host"
    with EtcdStore("127.0.0.1", "job") as store:
        assert worker_address(store).listen == "127.0.0.1"


def test_a_worker_may_join_again_after_it_failed_when_all_had_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a store that lives on, as a launcher's."""

    def refuse(worker: Worker, serving: bool = True) -> NoReturn:
        raise RuntimeError("can't start new thread")

    def join(**maps: dict[str, str]) -> Group:
        options = RpcBackendOptions(init_method="tcp://127.0.0.1:1", device_maps=maps)
        return join_group(PrefixStore("job", store), "alone", 0, 1, options, Deadline.after(10.0))

    with HashStore() as store:
        with pytest.raises(ConfigurationError, match="no such worker as nobody"):
            join(nobody={"cpu": "cpu"})
        with monkeypatch.context() as patched:
            patched.setattr(Worker, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                join()
        join().close()


@pytest.mark.parametrize("world_size", [1, None])
def test_a_worker_that_cannot_be_made_leaves_nothing_open(
    world_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(socket, "gethostname", interrupted)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt) as interrupt:
        join_group(HashStore(), "alone", 0, world_size, RpcBackendOptions(), Deadline.after(10.0))
    del interrupt
    gc.collect()  # a wake-up stays open as long as anything may write to it
    assert len(os.listdir("/proc/self/fd")) == before
