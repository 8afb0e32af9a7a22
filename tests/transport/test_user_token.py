"""The token of a user: made once, read by his processes, and by nobody else."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zmqgrad.errors import ConfigurationError
from zmqgrad.transport.security import keys_for_store, load_keys
from zmqgrad.transport.user_token import read_token


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the token is, but for problems; the second place is in ``tmp_path / "tmp"``."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "state" / "zmqgrad"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_made_once_and_for_this_user_alone(state: Path) -> None:
    old = os.umask(0)
    try:
        with ThreadPoolExecutor(8) as pool:
            tokens = {token for token in pool.map(lambda _: read_token(), range(50))}
    finally:
        os.umask(old)
    assert [len(token) for token in tokens] == [32]
    assert (mode(state), mode(state / "token")) == (0o700, 0o600)
    assert [each.name for each in state.iterdir()] == ["token"]


def test_keys_of_the_user_are_not_those_of_a_secret(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZMQGRAD_ALLOW_INSECURE", raising=False)
    keys = keys_for_store()
    assert keys is not None
    assert not keys.from_secret
    assert keys == keys_for_store()
    secret = "0123456789abcdef"
    assert keys_for_store(secret) not in (None, keys, load_keys(secret))
    monkeypatch.setenv("ZMQGRAD_ALLOW_INSECURE", "1")
    assert keys_for_store() is None


def test_what_others_can_read_or_change_is_not_used(state: Path, tmp_path: Path) -> None:
    """Then it is in the second place; if that is not fit either, the error names both, and the remedy."""
    state.mkdir(parents=True, mode=0o700)
    second = tmp_path / "tmp" / f"zmqgrad-{os.geteuid()}"
    token = state / "token"
    token.write_bytes(bytes(32))
    token.chmod(0o644)
    assert read_token() == (second / "token").read_bytes() != bytes(32)
    token.unlink()
    token.symlink_to(second / "token")
    assert read_token() == (second / "token").read_bytes()
    token.unlink()
    state.chmod(0o755)
    assert read_token() == (second / "token").read_bytes()
    state.rmdir()
    state.symlink_to(second)
    second.chmod(0o770)
    with pytest.raises(
        ConfigurationError, match=r"is a link.*other users have access to .*: chmod go=.*ZMQGRAD_SECRET"
    ):
        read_token()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_what_belongs_to_another_user_is_not_used(state: Path, tmp_path: Path) -> None:
    read_token()
    os.chown(state / "token", 65534, 65534)
    assert len(read_token()) == 32
    other = tmp_path / "tmp" / f"zmqgrad-{os.geteuid()}"
    os.chown(other, 65534, 65534)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        read_token()


def test_a_damaged_token_is_named(state: Path, tmp_path: Path) -> None:
    read_token()
    (state / "token").write_bytes(b"short")
    (tmp_path / "tmp").rmdir()
    (tmp_path / "tmp").write_text("")
    with pytest.raises(ConfigurationError, match=r"token has not 32 bytes: remove it"):
        read_token()
