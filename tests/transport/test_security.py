"""Where a secret comes from, which ones are refused, and what follows from it."""

from __future__ import annotations

import os
import re
import socket
from contextlib import closing, suppress
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from zmqgrad.errors import ConfigurationError
from zmqgrad.store import StoreServer, TCPStore
from zmqgrad.transport.bind_policy import check_bind_address
from zmqgrad.transport.security import (
    keys_for_store,
    keys_for_worker,
    load_keys,
    read_secret,
    store_secret,
)
from zmqgrad.transport.sockets import MAX_FRAME_BYTES

SECRET = "the secret of this job"


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZMQGRAD_SECRET", "ZMQGRAD_SECRET_FILE", "ZMQGRAD_ALLOW_INSECURE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(f"{SECRET}\n")
    return path


def test_the_same_secret_from_any_place_derives_the_same_keys(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    assert load_keys() is None
    expected = load_keys(SECRET)
    assert load_keys(SECRET.encode()) == expected
    monkeypatch.setenv("ZMQGRAD_SECRET", SECRET)
    assert load_keys() == expected
    assert load_keys("another secret, which wins") != expected
    monkeypatch.delenv("ZMQGRAD_SECRET")
    monkeypatch.setenv("ZMQGRAD_SECRET_FILE", str(file))
    assert load_keys() == expected


def test_a_secret_need_not_be_text(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Such as raw random bytes."""
    secret = b"\xff\xfe" + bytes(range(1, 9)) * 2
    file.write_bytes(secret)
    monkeypatch.setenv("ZMQGRAD_SECRET", os.fsdecode(secret))
    assert load_keys() == load_keys(secret) == load_keys(read_secret(str(file)))


def test_keys_are_pairs_and_hidden_from_repr() -> None:
    keys = load_keys(SECRET)
    assert keys is not None
    for pair in (keys.server, keys.client):
        assert zmq.curve_public(z85.encode(pair.private)) == z85.encode(pair.public)
    assert len({*keys.server, *keys.client, keys.local}) == 5
    assert repr(keys) == "<Keys>"


@pytest.mark.parametrize("variable", ["ZMQGRAD_SECRET", "ZMQGRAD_SECRET_FILE"])
def test_a_secret_that_is_set_but_empty_is_an_error(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a command in a script that has failed: the job would run without protection."""
    monkeypatch.setenv(variable, "")
    with pytest.raises(ConfigurationError, match=f"{variable} is set, but empty"):
        load_keys()


def test_invalid_secrets(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    with pytest.raises(TypeError, match="must be str or bytes, not int"):
        load_keys(7)  # type: ignore[arg-type]
    for short in ("", "hunter2"):
        with pytest.raises(
            ConfigurationError, match=rf"the secret has {len(short)} bytes \(at least 16\).*zmqgrad secret"
        ):
            load_keys(short)
    monkeypatch.setenv("ZMQGRAD_SECRET", "hunter2")
    with pytest.raises(ConfigurationError, match="ZMQGRAD_SECRET has 7 bytes"):
        load_keys()
    monkeypatch.setenv("ZMQGRAD_SECRET_FILE", str(file))
    with pytest.raises(ConfigurationError, match="both ZMQGRAD_SECRET and ZMQGRAD_SECRET_FILE"):
        load_keys()
    monkeypatch.delenv("ZMQGRAD_SECRET")
    file.write_text("  hunter2\n\n")
    with pytest.raises(ConfigurationError, match=f"{re.escape(repr(str(file)))} has 7 bytes"):
        load_keys()
    file.unlink()
    with pytest.raises(ConfigurationError, match=r"cannot read the secret's file .*No such file"):
        load_keys()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o777])
def test_a_secret_to_which_others_have_access_is_refused(
    monkeypatch: pytest.MonkeyPatch, file: Path, mode: int
) -> None:
    monkeypatch.setenv("ZMQGRAD_SECRET_FILE", str(file))
    file.chmod(mode)
    if mode == 0o640 and os.getuid() == 0:
        os.chown(file, 65534, 65534)  # a group may read files of root, and of nobody else
    with pytest.raises(ConfigurationError, match=rf"other users .* \(mode {mode:04o}\): chmod 600 {file}"):
        load_keys()
    file.chmod(0o600)
    assert load_keys() == load_keys(SECRET)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file of root's")
def test_a_group_may_read_a_secret_that_root_mounts(file: Path) -> None:
    file.chmod(0o440)  # as Kubernetes, for a pod with a group of its own
    assert read_secret(str(file)) == SECRET.encode()


def test_a_secret_opens_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("tcp://127.0.0.1:1", "tcp://localhost:1", "ipc://@x"):
        check_bind_address(address, secured=False)
    check_bind_address("tcp://0.0.0.0:1", secured=True)
    with pytest.raises(ConfigurationError, match=r"0\.0\.0\.0:1 without a secret.*ZMQGRAD_SECRET"):
        check_bind_address("tcp://0.0.0.0:1", secured=False)
    monkeypatch.setenv("ZMQGRAD_ALLOW_INSECURE", "1")
    check_bind_address("tcp://0.0.0.0:1", secured=False)


@pytest.mark.parametrize("insecure", ["0", "1"])
def test_a_stranger_who_announces_much_is_cut_off(insecure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq allocates what a command or message announces, before the handshake as well."""
    monkeypatch.setenv("ZMQGRAD_ALLOW_INSECURE", insecure)
    mechanism = b"NULL" if insecure == "1" else b"CURVE"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
    with closing(StoreServer("tcp://127.0.0.1:*")) as server:
        for size in (MAX_FRAME_BYTES + 1, 1 << 30):
            with socket.create_connection(("127.0.0.1", server.port), 5) as stranger:
                stranger.sendall(greeting + b"\x06" + size.to_bytes(8, "big") + b"\x05HELLO")
                with suppress(ConnectionResetError):
                    while stranger.recv(4096):  # its greeting; then the end, before the limit for handshakes
                        pass
        with TCPStore("127.0.0.1", server.port, timeout=20) as store:  # what is larger goes in frames
            value = os.urandom(3 * MAX_FRAME_BYTES)
            store.set("large", value)
            assert store.get("large") == value


def test_a_secret_of_the_store_admits_to_the_store_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = store_secret(SECRET.encode())
    assert theirs.startswith(b"store-")
    assert store_secret(theirs) == theirs
    assert keys_for_store(SECRET) == keys_for_store(theirs) != load_keys(SECRET)
    with (
        TCPStore("127.0.0.1", 0, is_master=True, timeout=20, secret=SECRET) as store,
        TCPStore("127.0.0.1", store.port, timeout=20, secret=theirs) as client,
    ):
        client.set("key", "value")
        assert store.get("key") == b"value"
    monkeypatch.setenv("ZMQGRAD_SECRET", theirs.decode())
    with pytest.raises(ConfigurationError, match="one for clients of the store"):
        keys_for_worker(b"job")
    monkeypatch.delenv("ZMQGRAD_SECRET")
    assert keys_for_worker(b"job") is None


def test_workers_of_another_job_with_the_same_secret_have_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZMQGRAD_SECRET", SECRET)
    ours, theirs = keys_for_worker(b"ours"), keys_for_worker(b"theirs")
    assert ours == keys_for_worker(b"ours")
    for other in (theirs, load_keys(SECRET), keys_for_store(SECRET)):
        assert ours is not None
        assert other is not None
        assert not {ours.server, ours.client, ours.local} & {other.server, other.client, other.local}
