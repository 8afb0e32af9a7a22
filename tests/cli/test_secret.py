"""``zmqgrad secret``: what it makes can be used, and nobody else can read it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from zmqgrad.__main__ import main
from zmqgrad.transport.security import keys_for_store, load_keys, read_secret


def test_a_file_that_only_its_owner_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "secret"
    mask = os.umask(0)
    try:
        assert main(["secret", "--write", str(path)]) == 0
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(read_secret(str(path))) == 64
    assert capsys.readouterr() == ("", "")


def test_two_secrets_differ_and_can_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["secret"]) == main(["secret"]) == 0
    first, second = capsys.readouterr().out.split()
    assert load_keys(first) not in (None, load_keys(second))


def test_an_existing_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "secret"
    path.write_text("in use")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for there in (path, link):
        assert main(["secret", "--write", str(there)]) == 2
        assert f"zmqgrad secret: {there} exists, and processes of a job may use" in capsys.readouterr().err
    assert path.read_text() == "in use"
    assert not (tmp_path / "elsewhere").exists()


def test_a_path_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["secret", "--write", str(tmp_path / "no" / "such")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_one_for_clients_of_the_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ZMQGRAD_SECRET_FILE", raising=False)
    monkeypatch.delenv("ZMQGRAD_SECRET", raising=False)
    assert main(["secret", "--role", "store"]) == 2
    assert "set ZMQGRAD_SECRET_FILE" in capsys.readouterr().err
    job = tmp_path / "job"
    assert main(["secret", "--write", str(job)]) == 0
    monkeypatch.setenv("ZMQGRAD_SECRET_FILE", str(job))
    assert main(["secret", "--role", "store"]) == 0
    theirs = capsys.readouterr().out.strip()
    assert keys_for_store(theirs) == keys_for_store(read_secret(str(job)))
    assert load_keys(theirs) != load_keys(read_secret(str(job)))
