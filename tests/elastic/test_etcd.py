"""The etcd backend, against real etcd."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support.etcd import EtcdCluster, needs_etcd
from tests.support.waiting import eventually
from tools.ports import free_port
from zmqgrad.elastic import (
    EtcdBackend,
    EtcdOptions,
    Rendezvous,
    RendezvousHandler,
    RendezvousState,
    create_handler,
)
from zmqgrad.elastic.state import encode
from zmqgrad.errors import (
    ConfigurationError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
)
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store.etcd.store import open_url

pytestmark = [pytest.mark.processes, pytest.mark.slow]

WAIT = 30.0
CONF = {"last_call_timeout": 0.3, "keep_alive_interval": 0.3, "join_timeout": WAIT}

Make = Callable[..., EtcdBackend]


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster() as made:
        yield made


@pytest.fixture
def backend(cluster: EtcdCluster, request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[EtcdBackend] = []

    def make(timeout: float = 5.0) -> EtcdBackend:
        options = EtcdOptions(timeout)
        made.append(EtcdBackend([("127.0.0.1", cluster.ports[0])], request.node.name, options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@needs_etcd
def test_the_cases_of_reading_and_writing(backend: Make) -> None:
    one, other = backend(), backend()
    assert one.get_state() is None
    _, first, has_set = one.set_state(b"1") or (b"", 0, False)
    assert has_set
    assert other.get_state() == (b"1", first)
    assert other.set_state(b"2") == (b"1", first, False), "there is a state already"
    _, second, has_set = other.set_state(b"2", first) or (b"", 0, False)
    assert has_set
    assert second > first
    assert one.set_state(b"3", first) == (b"2", second, False), "a stale token"
    assert one.set_state(b"2", first) == (b"2", second, True), "as after a reply that was lost"
    with pytest.raises(RendezvousStateError, match="token of another backend: b'1'"):
        one.set_state(b"3", b"1")


@needs_etcd
def test_a_state_that_was_deleted_is_not_written_again(backend: Make, cluster: EtcdCluster) -> None:
    import etcd3gw

    one = backend()
    _, token, _ = one.set_state(b"1") or (b"", 0, False)
    client = etcd3gw.client(port=cluster.ports[0])
    assert client.delete("zmqgrad/rendezvous/test_a_state_that_was_deleted_is_not_written_again")
    client.session.close()
    assert one.set_state(b"2", token) is None
    assert one.get_state() is None


@needs_etcd
@pytest.mark.parametrize("size", [10, 100_000])
def test_a_change_wakes_a_node_that_waits(backend: Make, size: int) -> None:
    waiting, other = backend(), backend()
    assert waiting.get_state() is None
    woken = threading.Event()

    def wait(token: Any) -> None:
        waiting.wait_for_change(token, WAIT)
        woken.set()

    threads = [threading.Thread(target=wait, args=(None,))]
    threads[0].start()
    _, token, _ = other.set_state(b"x" * size) or (b"", 0, False)
    assert woken.wait(WAIT / 2)
    found = waiting.get_state()
    assert found == (b"x" * size, token)
    other.set_state(b"y" * size, token)
    woken.clear()
    threads.append(threading.Thread(target=wait, args=(token,)))
    threads[1].start()
    assert woken.wait(WAIT / 2), "a change before the wait began counts"
    for thread in threads:
        thread.join()


@needs_etcd
def test_waiting_without_a_change_ends_in_time(backend: Make) -> None:
    one = backend()
    one.get_state()
    one.wait_for_change(None, 0.05)


@needs_etcd
def test_what_a_wait_was_to_continue_from_is_dropped(backend: Make, cluster: EtcdCluster) -> None:
    """It may have changed. Without a pause, a node would read it as fast as it can."""
    one = backend()
    _, token, _ = one.set_state(b"1") or (b"", 0, False)
    _, newer, _ = one.set_state(b"2", token, announce=False) or (b"", 0, False)
    one.set_state(b"3", newer, announce=False)
    cluster.compact()
    limit = Deadline.after(WAIT)
    began = limit.left()
    assert one.wait_for_change(token, WAIT)
    assert 0.1 <= began - limit.left() < WAIT / 2


def test_an_endpoint_that_nobody_serves() -> None:
    backend = EtcdBackend([("127.0.0.1", free_port())] * 2, "job", EtcdOptions(0.3))
    with pytest.raises(RendezvousConnectionError, match=r"no member of etcd .* within 0\.3 s .*refused"):
        backend.get_state()
    backend.wait_for_change(None, 0.01)
    backend.close()


def test_a_server_of_another_kind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def reply() -> None:
            while not stop.is_set():
                connection, _ = server.accept()
                with connection:
                    if not stop.is_set() and connection.recv(4096):
                        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")

        thread = threading.Thread(target=reply)
        thread.start()
        port = server.getsockname()[1]
        backend = EtcdBackend([("127.0.0.1", port)], "job", EtcdOptions(0.5))
        with pytest.raises(RendezvousConnectionError, match=f"127.0.0.1:{port}: TypeError"):
            backend.get_state()
        backend.close()
        stop.set()
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join()


def test_without_the_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd3gw", None)
    with pytest.raises(ConfigurationError, match=r"pip install zmqgrad\[etcd\]"):
        create_handler("etcd", "127.0.0.1", "job", 1, 1)


# ---- whole rounds -----------------------------------------------------------------------------------------


class Nodes:
    """Handlers of one job, and threads in which they join."""

    def __init__(self, cluster: EtcdCluster, run_id: str) -> None:
        self.cluster = cluster
        self.run_id = run_id
        self.pool = ThreadPoolExecutor(8)
        self.handlers: list[RendezvousHandler] = []

    def handler(self, least: int = 2, most: int = 4, **conf: Any) -> RendezvousHandler:
        made = create_handler("etcd", self.cluster.endpoint, self.run_id, least, most, **{**CONF, **conf})
        self.handlers.append(made)
        return made

    def join(self, *handlers: RendezvousHandler) -> list[Future[Rendezvous]]:
        return [self.pool.submit(handler.next_rendezvous) for handler in handlers]

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *error: object) -> None:
        # At once, as the nodes of a job do: the one that serves the store of the round waits for the others.
        for closed in [self.pool.submit(handler.close) for handler in self.handlers]:
            closed.result()
        self.pool.shutdown()


@pytest.fixture
def nodes(cluster: EtcdCluster, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with Nodes(cluster, request.node.name) as made:
        yield made


def results(futures: list[Future[Rendezvous]]) -> list[Rendezvous]:
    return [future.result(WAIT) for future in futures]


@needs_etcd
def test_the_store_of_a_round_lives_until_all_have_left(nodes: Nodes) -> None:
    """As in the exit barrier of torch's agents: whoever is told last still needs the store."""
    formed = [(handler, f.result(WAIT)) for handler, f in _joined(nodes, 2)]
    (first, _), (other, its) = sorted(formed, key=lambda each: each[1].rank)
    leaving = nodes.pool.submit(first.close)
    with pytest.raises(FutureTimeoutError):
        leaving.result(1.0)
    its.store.set("key", "value")
    assert its.store.get("key") == b"value"
    other.close()
    leaving.result(WAIT)


def _joined(nodes: Nodes, count: int) -> list[tuple[RendezvousHandler, Future[Rendezvous]]]:
    handlers = [nodes.handler(count, count, keep_alive_max_attempt=20) for _ in range(count)]
    return list(zip(handlers, nodes.join(*handlers), strict=True))


@needs_etcd
def test_each_round_has_a_store_that_its_rank_0_serves(nodes: Nodes) -> None:
    made = [nodes.handler(2, 3) for _ in range(3)]
    formed = results(nodes.join(*made))
    assert sorted(r.rank for r in formed) == [0, 1, 2]
    assert [r.store.is_master for r in sorted(formed, key=lambda r: r.rank)] == [True, False, False]
    formed[0].store.set("k", "1")
    assert formed[1].store.get("k") == formed[2].store.get("k") == b"1"

    zero = min(range(3), key=lambda n: formed[n].rank)
    made[zero].stop()  # as if its host was lost
    rest = [h for n, h in enumerate(made) if n != zero]
    eventually(lambda: rest[0].lost_nodes(), lambda lost: lost == [made[zero].node])
    again = results(nodes.join(*rest))
    assert {(r.world_size, r.round) for r in again} == {(2, 1)}
    again[0].store.set("k", "2")
    assert again[1].store.get("k") == b"2"


@needs_etcd
def test_rank_0_that_is_lost_before_it_serves_the_store(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [nodes.handler(2, 2) for _ in range(3)]

    def die(*args: object) -> None:
        raise KeyboardInterrupt

    first = min(made[:2], key=lambda h: h.node)  # gets rank 0
    other = made[0] if first is made[1] else made[1]
    monkeypatch.setattr(first._stores, "serve", die)
    dying = nodes.pool.submit(first.next_rendezvous)
    joining = nodes.join(other)
    assert isinstance(dying.exception(WAIT), KeyboardInterrupt)
    formed = results(joining + nodes.join(made[2]))
    assert {r.world_size for r in formed} == {2}
    assert {r.round for r in formed} == {1}


@needs_etcd
def test_a_closed_job_is_refused(nodes: Nodes) -> None:
    one = nodes.handler(1, 1)
    one.next_rendezvous()
    assert one.shutdown()
    with pytest.raises(RendezvousClosedError):
        nodes.handler(1, 1).next_rendezvous()


@needs_etcd
def test_a_state_of_another_version(nodes: Nodes, cluster: EtcdCluster) -> None:
    backend = EtcdBackend([("127.0.0.1", cluster.ports[0])], nodes.run_id)
    backend.set_state(encode(RendezvousState()).replace(b'"version":4', b'"version":9'))
    backend.close()
    with pytest.raises(RendezvousStateError, match="has version 9, not 4"):
        nodes.handler().next_rendezvous()


@needs_etcd
@pytest.mark.parametrize("frozen", [False, True])
def test_a_member_that_dies_in_the_middle_of_rounds(frozen: bool) -> None:
    with EtcdCluster(3) as cluster, Nodes(cluster, "job") as nodes:
        made = [nodes.handler(3, 3, read_timeout=6.0, keep_alive_interval=2.0) for _ in range(3)]
        done = threading.Barrier(3)

        def run(handler: RendezvousHandler) -> list[Rendezvous]:
            formed = []
            for n in range(6):
                formed.append(handler.next_rendezvous())
                if done.wait(WAIT) == 0 and n == 2:
                    cluster.freeze(0) if frozen else cluster.kill(0)
            return formed

        formed = [future.result(60) for future in [nodes.pool.submit(run, handler) for handler in made]]
        for of_a_round in zip(*formed, strict=True):
            assert sorted(r.rank for r in of_a_round) == [0, 1, 2]
            assert len({r.round for r in of_a_round}) == 1
        assert all(handler.lease_left() > 0 for handler in made)


@needs_etcd
def test_no_majority_is_an_error_at_first_and_no_second_group() -> None:
    """A node that has taken part tries again until there is a majority."""
    with EtcdCluster(3) as cluster, Nodes(cluster, "job") as nodes:
        one = nodes.handler(1, 1, read_timeout=1.0)
        one.next_rendezvous()
        cluster.kill(0)
        cluster.kill(1)
        with pytest.raises(RendezvousConnectionError, match="no member of etcd"):
            nodes.handler(1, 1, read_timeout=1.0).next_rendezvous()
        eventually(one.lease_left, lambda left: left <= 0)
        said: list[str] = []
        one.notify = said.append
        joining = nodes.join(one)
        eventually(lambda: said)
        cluster.start(0)
        assert joining[0].result(WAIT).round >= 1
        assert "no member of etcd could be used" in said[0]


@needs_etcd
def test_users_and_passwords(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("pw\n")
    import etcd3gw

    with EtcdCluster() as cluster, Nodes(cluster, "job") as nodes:
        client = etcd3gw.client(port=cluster.ports[0])
        for path, body in [
            ("user/add", {"name": "root", "password": "pw"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ]:
            client.post(client.get_url(f"/auth/{path}"), json=body)
        client.session.close()
        with pytest.raises(RendezvousConnectionError, match="user name is empty"):
            nodes.handler(1, 1, read_timeout=WAIT).next_rendezvous()
        wrong = nodes.handler(1, 1, read_timeout=WAIT, user="root")
        with pytest.raises(RendezvousConnectionError, match="authentication failed, invalid user"):
            wrong.next_rendezvous()
        known = nodes.handler(1, 1, user="root", password_file=str(password))
        assert known.next_rendezvous().world_size == 1
        with open_url(f"etcd://{cluster.endpoint}/job?user=root&password_file={password}", WAIT) as store:
            seen: list[bytes | None] = []
            store.watch_key("k", lambda old, new: seen.append(new))
            cluster.kill(0)  # forgets its tokens
            cluster.start(0)
            cluster.await_health(0)
            assert known.next_rendezvous().round == 1
            store.clone().set("k", "1")
            eventually(lambda: seen, lambda found: found == [b"1"], WAIT)


@needs_etcd
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates")
def test_certificates(tmp_path: Path) -> None:
    cert, key = str(tmp_path / "cert"), str(tmp_path / "key")
    subject = ["-subj", "/CN=etcd", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert]
    subprocess.run([*command, *subject], check=True, capture_output=True)
    options = ["--cert-file", cert, "--key-file", key, "--trusted-ca-file", cert, "--client-cert-auth"]
    tls = {"protocol": "https", "ca_cert": cert}
    with EtcdCluster(1, options, "https") as cluster, Nodes(cluster, "job") as nodes:
        known = nodes.handler(1, 1, ssl_cert=cert, ssl_cert_key=key, **tls)
        assert known.next_rendezvous().world_size == 1
        settings = urlencode({"ssl_cert": cert, "ssl_cert_key": key, **tls})
        with open_url(f"etcd://{cluster.endpoint}/job?{settings}", WAIT) as store:
            assert store.add("n", 1) == 1
        for conf, what in [(tls, "tls|ssl|SSL|reset"), ({"protocol": "https"}, "CERTIFICATE_VERIFY_FAILED")]:
            with pytest.raises(RendezvousConnectionError, match=what):
                nodes.handler(1, 1, read_timeout=0.5, **conf).next_rendezvous()


@pytest.mark.parametrize("options", [{"user": "root", "password": "pw"}, {"ssl_cert": "cert.pem"}])
def test_no_password_goes_by_http(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZMQGRAD_ALLOW_INSECURE", raising=False)
    with pytest.raises(ConfigurationError, match=r"etcd at 192\.0\.2\.7 needs protocol=https"):
        EtcdBackend([("127.0.0.1", 2379), ("192.0.2.7", 2379)], "job", EtcdOptions(**options))
