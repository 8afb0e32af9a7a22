"""Finding each other: by environment and by URL, and every way in which that fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import run_processes
from tests.support.waiting import eventually
from tools.ports import free_port
from zmqgrad import rendezvous as module
from zmqgrad.errors import (
    ConfigurationError,
    RendezvousError,
    RendezvousTimeoutError,
    StoreError,
    StoreTimeoutError,
)
from zmqgrad.rendezvous import (
    Group,
    has_world_size,
    open_store,
    register_rendezvous_handler,
    rendezvous,
    rendezvous_beside,
    sidecar,
)
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import HashStore, PrefixStore, Store, TCPStore

PATIENCE = 20.0

VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"),
    *("SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "ZMQGRAD_ALLOW_INSECURE"):
        monkeypatch.delenv(name, raising=False)


def set_up(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def meet_in_threads(urls: list[str]) -> list[tuple[Store, int, int]]:
    met: list[tuple[Store, int, int] | None] = [None] * len(urls)

    def meet(n: int) -> None:
        met[n] = next(iter(rendezvous(urls[n], timeout=PATIENCE)))

    threads = [threading.Thread(target=meet, args=(n,)) for n in range(len(urls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return [one for one in met if one is not None]


def test_by_tcp() -> None:
    port = free_port()
    urls = [f"tcp://127.0.0.1:{port}?rank={rank}&world_size=3" for rank in (2, 1, 0)]
    met = meet_in_threads(urls)
    assert [(rank, size) for _, rank, size in met] == [(2, 3), (1, 3), (0, 3)]
    for store, rank, _ in met:
        store.set(str(rank), "here")
    assert met[0][0].multi_get(["0", "1", "2"]) == [b"here"] * 3
    for store, _, _ in met:
        store.close()


def test_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, MASTER_ADDR="localhost", MASTER_PORT=free_port(), RANK=0, WORLD_SIZE=2)
    store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=PATIENCE))))
    assert (rank, size) == (0, 2)
    assert store.timeout == timedelta(seconds=PATIENCE)
    other, rank, size = next(iter(rendezvous("env://", rank=1, timeout=PATIENCE)))
    assert (rank, size) == (1, 2)
    again, rank, size = next(iter(rendezvous("env://?rank=1&world_size=5", world_size=3, timeout=PATIENCE)))
    assert (rank, size) == (1, 3), "arguments win over the URL, and that over the environment"
    store.set("k", "1")
    assert other.get("k") == again.get("k") == b"1"
    for each in (other, again, store):
        each.close()


def test_by_file(tmp_path: Path) -> None:
    path = tmp_path / "a file"
    met = meet_in_threads([f"file://{path}?rank={rank}&world_size=2" for rank in (1, 0)])
    assert [(rank, size) for _, rank, size in met] == [(1, 2), (0, 2)]
    met[0][0].set("k", "1")
    assert met[1][0].get("k") == b"1"
    assert met[1][0].timeout == timedelta(seconds=PATIENCE)
    met[0][0].close()
    assert path.exists()
    met[1][0].close()
    assert not path.exists(), "it goes with the last"


def test_by_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(
        monkeypatch,
        SLURM_JOB_ID=7,
        SLURM_STEP_ID=0,
        SLURM_PROCID=0,
        SLURM_STEP_NUM_TASKS=2,
        SLURM_STEP_NODELIST="localhost,other",
        MASTER_PORT=free_port(),
    )
    store, rank, size = next(iter(rendezvous("env://", timeout=PATIENCE)))
    assert (rank, size) == (0, 2)
    store.close()
    set_up(monkeypatch, SLURM_PROCID=2)
    said = failure("env://")
    assert "the rank is 2 (the rank from SLURM_PROCID, the world size from SLURM_STEP_NUM_TASKS)" in said


def test_rank_0_may_meet_twice_in_one_process() -> None:
    """As with torch: RPC beside a process group, both by the same address."""
    url = f"tcp://127.0.0.1:{free_port()}?rank=0&world_size=1"
    stores = [next(iter(rendezvous(url, timeout=PATIENCE)))[0] for _ in range(2)]
    stores[0].set("k", "1")
    stores[0].close()
    assert stores[1].get("k") == b"1"
    stores[1].close()
    next(iter(rendezvous(url, timeout=PATIENCE)))[0].close()


def test_no_worker_serves_the_store_if_the_agent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE) as agent:
        set_up(
            monkeypatch,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=agent.port,
            RANK=0,
            WORLD_SIZE=1,
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        for url in ("env://", f"tcp://127.0.0.1:{agent.port}?rank=0&world_size=1"):
            store, _, _ = next(iter(rendezvous(url, timeout=PATIENCE)))
            assert isinstance(store, PrefixStore)
            store.set("k", url)
            assert agent.get("/worker/k") == url.encode()
            store.close()
        agent.set("k", "goes on")


class TorchStoreDouble(dict[str, bytes]):
    """The part of torch's store that sidecars use, for the threads of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self.opened: list[tuple[str, int, bool]] = []

    def open(self, host: str, port: int, serve: bool, deadline: Deadline) -> TorchStoreDouble:
        self.opened.append((host, port, serve))
        return self

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        with self._changed:
            if not self._changed.wait_for(lambda: key in self, PATIENCE):
                raise RuntimeError(f"no {key}")
            return self[key]

    def set_timeout(self, timeout: timedelta) -> None: ...


@pytest.fixture
def torch_store() -> Iterator[TorchStoreDouble]:
    double = TorchStoreDouble()
    previous = sidecar.set_torch_store_opener(double.open)
    yield double
    sidecar.set_torch_store_opener(previous)


TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "run"}


def test_beside_the_agent_of_torchrun(monkeypatch: pytest.MonkeyPatch, torch_store: TorchStoreDouble) -> None:
    """Its agent serves a store of torch's; rank 0 serves ours elsewhere, and publishes the port there."""
    set_up(monkeypatch, MASTER_ADDR="localhost", MASTER_PORT=1, TORCHELASTIC_RESTART_COUNT=3, **TORCHRUN)
    urls = [f"env://?rank={r}&world_size=2" for r in (0, 1)]
    group = Group("test", 7)

    def join(rank: int) -> Store:
        return rendezvous_beside(urls[rank], timeout=PATIENCE, group=group)[0]

    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(join, (0, 1)))
    stores[0].set("k", "1")
    assert stores[1].get("k") == b"1"
    assert torch_store.opened == [("localhost", 1, False)] * 2
    assert list(torch_store) == ["zmqgrad/attempt_3/test/7"]
    for store in stores:
        store.close()
    next(iter(rendezvous("env://?rank=0&world_size=1", timeout=PATIENCE)))[0].close()
    next(iter(rendezvous("env://?rank=0&world_size=1", timeout=PATIENCE)))[0].close()
    assert len(torch_store) == 3, "each group has a store of its own"
    opened = len(torch_store.opened)
    next(iter(rendezvous(f"tcp://127.0.0.1:{free_port()}", 0, 1, timeout=PATIENCE)))[0].close()
    assert len(torch_store.opened) == opened, "the agent is not at this address"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_link_local_address_is_refused_at_each_worker(
    monkeypatch: pytest.MonkeyPatch, torch_store: TorchStoreDouble, rank: int
) -> None:
    """Rank 0 could not listen there, and the others waited for it."""
    monkeypatch.setenv("ZMQGRAD_SECRET", "the secret of this job, of 33 bytes")
    with pytest.raises(ConfigurationError, match=r"fe80::1%eth0 is link-local.*another address"):
        rendezvous_beside("tcp://[fe80::1%eth0]:1", rank, 2, PATIENCE, group=Group("test"))
    assert torch_store.opened == []


def test_torchs_store_requires_torch(monkeypatch: pytest.MonkeyPatch, torch_store: TorchStoreDouble) -> None:
    set_up(monkeypatch, **COMPLETE, **TORCHRUN)
    sidecar.set_torch_store_opener(None)
    with pytest.raises(ConfigurationError, match=r"served by torch's store.*import\s+zmqgrad\.interop"):
        next(iter(rendezvous("env://", timeout=PATIENCE)))

    def refuse(*args: object) -> TorchStoreDouble:
        raise StoreError("an HTTP server is there")

    sidecar.set_torch_store_opener(refuse)
    assert "an HTTP server is there" in failure("env://")


def test_the_store_does_not_take_the_port_that_the_workers_know(
    monkeypatch: pytest.MonkeyPatch, torch_store: TorchStoreDouble
) -> None:
    """Where the system would choose it for the store, nothing could listen there for the others."""
    port = free_port()
    monkeypatch.setenv("ZMQGRAD_PORT_RANGE", f"{port}-{min(port + 20, 65535)}")
    store, _, _ = rendezvous_beside(f"tcp://127.0.0.1:{port}", 0, 1, PATIENCE, group=Group("test"))
    with store:
        assert isinstance(store, TCPStore)
        assert store.port != port


def test_a_worker_that_reads_an_old_address_reads_it_again(
    monkeypatch: pytest.MonkeyPatch, torch_store: TorchStoreDouble
) -> None:
    """Rank 0 gave up and starts again, after this worker has read where it was."""
    monkeypatch.setattr(sidecar, "STALE_ADDRESS_SECONDS", 0.2)
    url, group = "tcp://127.0.0.1:1", Group("test")
    torch_store.set("zmqgrad/attempt_0/test/0", str(free_port()))
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(rendezvous_beside, url, 1, 2, PATIENCE, group=group)
        eventually(lambda: len(torch_store.opened), lambda opened: opened == 1)
        first, _, _ = rendezvous_beside(url, 0, 2, PATIENCE, group=group)
        second, _, _ = late.result(PATIENCE)
    assert torch_store.opened == [("127.0.0.1", 1, False), ("127.0.0.1", 1, True)]
    second.set("k", "1")
    assert first.get("k") == b"1"
    second.close()
    first.close()


def test_a_store_that_is_far_away_gets_more_time(
    monkeypatch: pytest.MonkeyPatch, torch_store: TorchStoreDouble
) -> None:
    """A first reply takes five round trips. If these took longer than that, the worker never joined."""
    monkeypatch.setattr(sidecar, "STALE_ADDRESS_SECONDS", 0.1)
    monkeypatch.setattr(sidecar, "TCPStore", FarStore)
    url, group = "tcp://127.0.0.1:1", Group("test")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(rendezvous_beside, url, 1, 2, PATIENCE, group=group)
        first, _, _ = rendezvous_beside(url, 0, 2, PATIENCE, group=group)
        second, _, _ = late.result(PATIENCE)
    assert isinstance(second, FarStore)
    second.close()
    first.close()


class FarStore(TCPStore):
    """No reply arrives within half a second."""

    def __init__(self, host: str, port: int, *args: Any, timeout: float, **options: Any) -> None:
        if timeout < 0.5:
            raise StoreTimeoutError("no store answered")
        super().__init__(host, port, *args, timeout=timeout, **options)


def test_rendezvous_yields_once() -> None:
    meetings = iter(rendezvous(f"tcp://127.0.0.1:{free_port()}", 0, 1, timeout=PATIENCE))
    store, _, _ = next(meetings)
    store.close()
    with pytest.raises(RendezvousError, match="does not support re-rendezvous"):
        next(meetings)


# ---- other schemes ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("registries")
def test_handlers_of_others() -> None:
    asked = []

    def handler(url: str, **kwargs: object) -> Iterator[tuple[Store, int, int]]:
        asked.append((url, kwargs))
        yield HashStore(), 4, 5

    register_rendezvous_handler("mine", handler)
    _, rank, size = next(iter(rendezvous("mine://there?x=1", 1, 2, timeout=3.0, more="7")))
    assert (rank, size) == (4, 5)
    assert asked == [("mine://there?x=1&rank=1&world_size=2", {"timeout": 3.0, "more": "7"})]
    with pytest.raises(RendezvousError, match="a handler for mine:// already"):
        register_rendezvous_handler("mine", handler)


@pytest.mark.parametrize("url", ["nowhere://x", "env", "", "127.0.0.1:29500"])
def test_an_unknown_scheme(url: str) -> None:
    with pytest.raises(
        RendezvousError,
        match=re.escape(f"No rendezvous handler for {url!r}") + ".*env://, etcd://, file://, tcp://",
    ):
        rendezvous(url)


def test_the_url_must_be_a_string() -> None:
    with pytest.raises(TypeError, match="not NoneType"):
        rendezvous(None)  # type: ignore[arg-type]


# ---- what is missing, malformed, or wrong -----------------------------------------------------------------

COMPLETE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2"}


def failure(url: str, rank: int = -1, world_size: int = -1) -> str:
    with pytest.raises(RendezvousError) as caught:
        next(iter(rendezvous(url, rank, world_size, timeout=0.02)))
    return str(caught.value)


@pytest.mark.parametrize("name", list(COMPLETE))
@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_variable_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None
) -> None:
    set_up(monkeypatch, **{**COMPLETE, name: value or ""})
    if value is None:
        monkeypatch.delenv(name)
    said = failure("env://")
    assert said.startswith(f"environment variable {name} expected, but not set: {name} (")
    assert "was not found in the environment" in said
    assert f"set {name}" in said


@pytest.mark.parametrize("name", ["MASTER_PORT", "RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("value", ["x", "-3", "1e3"])
def test_a_variable_that_is_malformed_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    set_up(monkeypatch, **{**COMPLETE, name: value})
    assert f"environment variable {name} " in failure("env://")
    assert repr(value) in failure("env://")


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("host", ["node1..cluster", "a" * 64, "node\udcff"])
def test_a_host_that_no_resolver_takes_is_named(
    monkeypatch: pytest.MonkeyPatch, host: str, rank: str
) -> None:
    """The resolver raises ``UnicodeError``."""
    set_up(monkeypatch, **{**COMPLETE, "MASTER_ADDR": host, "RANK": rank})
    assert "is not a host name or address (the environment, " in failure("env://")


@pytest.mark.parametrize(
    ("url", "rank", "size", "words"),
    [
        ("tcp://node1..cluster:1", 1, 2, "'node1..cluster' is not a host name or address"),
        ("tcp://127.0.0.1:1", 2, 2, "the rank is 2 .* it must be from 0 to 1"),
        ("tcp://127.0.0.1:1", -2, 2, "the rank is -2"),
        ("tcp://127.0.0.1:1", 0, 0, "the world size is 0 .*at least 1"),
        ("tcp://127.0.0.1:1", 0, -1, "world_size is neither an argument nor in 'tcp://"),
        ("tcp://127.0.0.1:1?world_size=2", -1, -1, "rank is neither an argument nor in"),
        ("tcp://127.0.0.1:1?rank=x&world_size=2", -1, -1, "rank is 'x' in .*must be a number"),
        ("tcp://127.0.0.1:1?rank", -1, -1, "cannot be read"),
        ("tcp://127.0.0.1", 0, 1, "lacks a host or a port"),
        ("tcp://:5", 0, 1, "lacks a host or a port"),
        ("zmq://127.0.0.1", 0, 1, "write zmq://host:port"),
        ("file:///", 0, 1, "names no file"),
        ("file://relative/path", 0, 1, "names no file; write file:///path"),
        ("file:///x", 0, -1, "world_size is neither"),
        ("file:///no/such/directory/x", 0, 1, "rendezvous by 'file:.*No such file or directory"),
        ("tcp://127.0.0.1:0", 0, 1, "the port is 0 .*from 1 to 65535"),
        ("tcp://127.0.0.1:70000", 0, 1, "cannot be read"),
        ("tcp://127.0.0.1:x", 0, 1, "cannot be read"),
    ],
)
def test_a_url_that_cannot_be_right(url: str, rank: int, size: int, words: str) -> None:
    assert re.search(words, failure(url, rank, size))


def test_a_rank_beyond_the_environments_world(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, **{**COMPLETE, "RANK": "2"})
    assert "the rank is 2 (the rank from RANK, the world size from WORLD_SIZE)" in failure("env://")
    assert "the rank is 5 (the rank from an argument, the world size from WORLD" in failure("env://", 5)


def test_a_port_in_use_is_named() -> None:
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE) as other:
        said = failure(f"tcp://127.0.0.1:{other.port}", 0, 1)
    assert f"rank 0 cannot serve the store at 127.0.0.1:{other.port}" in said
    assert "Choose another port" in said


def test_a_host_without_a_secret_does_not_wait_for_one_that_may_not_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zmqgrad.transport.host_address.facing_address", lambda host, port: "192.0.2.7")
    for name in ("ZMQGRAD_SECRET", "ZMQGRAD_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match=r"will not listen on tcp://192\.0\.2\.7:0 without a secret"):
        next(iter(rendezvous("tcp://192.0.2.1:29500?rank=1&world_size=2", timeout=PATIENCE)))


@pytest.mark.slow
def test_nothing_listens() -> None:
    port = free_port()
    url = f"tcp://127.0.0.1:{port}?rank=1&world_size=2"
    with pytest.raises(RendezvousTimeoutError, match=rf"at 127\.0\.0\.1:{port} within 0\.05 s") as caught:
        next(iter(rendezvous(url, timeout=0.05)))
    assert isinstance(caught.value, TimeoutError)


def test_the_network_needs_leave() -> None:
    with pytest.raises(ConfigurationError, match="ZMQGRAD_ALLOW_INSECURE"):
        next(iter(rendezvous("tcp://0.0.0.0:29500", 0, 1, timeout=PATIENCE)))


# ---- processes --------------------------------------------------------------------------------------------


def _meet(rank: int) -> tuple[int, int, list[bytes]]:
    store, mine, size = next(iter(rendezvous("env://", timeout=PATIENCE)))
    store.set(f"worker{mine}", f"hello from {mine}")
    everybody = store.multi_get([f"worker{n}" for n in range(size)])
    if store.add("left", 1) == size:
        store.set("all left", "")
    if mine == 0:
        store.wait(["all left"])
    store.close()
    return mine, size, everybody


@pytest.mark.processes
@pytest.mark.slow
def test_processes_meet() -> None:
    everybody = [f"hello from {n}".encode() for n in range(3)]
    assert run_processes(_meet, 3) == [(rank, 3, everybody) for rank in range(3)]


# ---- groups of no fixed size -----------------------------------------------------------------------------


def test_has_world_size_by_url_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for url in ("env://", "tcp://127.0.0.1:1", "zmq://127.0.0.1:1?rank=3", "file:///tmp/x", "etcd://a,b/job"):
        assert not has_world_size(url), url
        assert has_world_size(url + ("&" if "?" in url else "?") + "world_size=3"), url
    assert has_world_size("other://of-somebody-else"), "its handler will say"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert has_world_size("env://")
    assert not has_world_size("tcp://127.0.0.1:1")


def test_the_store_of_a_dynamic_group_is_served_by_rank_0() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    store, rank = open_store(url, 0, 5.0)
    other, free = open_store(url, None, 5.0)
    with store, other:
        assert (rank, free) == (0, None)
        other.set("key", "value")
        assert store.get("key") == b"value"
    with pytest.raises(RendezvousTimeoutError, match="no store answered"):
        open_store(url + "?rank=3", timeout=0.05)


def test_a_dynamic_group_needs_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch, whose texts these are, unless one says that any will do."""
    set_up(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    for url, text in (
        ("env://", "environment variable RANK expected"),
        ("tcp://127.0.0.1:1", "rank parameter missing"),
        ("file:///nowhere/at/all", "rank parameter missing"),
    ):
        with pytest.raises(ValueError, match=text):
            open_store(url, timeout=0.05)


@pytest.mark.parametrize("url", ["tcp://127.0.0.1", "tcp://:1", "file://", "file://host/path"])
def test_invalid_urls_of_a_dynamic_group(url: str) -> None:
    with pytest.raises(RendezvousError, match=re.escape(url)):
        open_store(url, 1, timeout=0.05)


UNDER_TORCHRUN = """
import os
from zmqgrad import rpc

for again in range(2):
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}")
    line = f"{rank}: {rpc.rpc_sync(f'worker{1 - rank}', max, args=(rank, 7))}\\n"
    os.write(1, line.encode())  # whole: torchrun's processes share one pipe, and print writes in pieces
    rpc.shutdown()
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(150)
def test_torchrun_starts_our_programs(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(UNDER_TORCHRUN)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "0: 7", "0: 7", "1: 7", "1: 7"]
