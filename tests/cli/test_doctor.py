"""``zmqgrad doctor``: what it finds, how it shows that, and with which code it ends."""

from __future__ import annotations

import importlib.metadata
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from zmqgrad.__main__ import main
from zmqgrad.cli import checks
from zmqgrad.cli.checks import Check, Status, all_checks
from zmqgrad.cli.doctor import table
from zmqgrad.transport import capabilities, host_address


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "ZMQGRAD_SECRET",
        "ZMQGRAD_SECRET_FILE",
        "ZMQGRAD_ALLOW_INSECURE",
    ):
        monkeypatch.delenv(name, raising=False)


def found(name: str) -> Check:
    """How that check came out."""
    return next(check for check in all_checks(self_test=False) if check.name == name)


def test_a_fit_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-self-test"]) == 0
    out = capsys.readouterr().out
    assert "workers can run here" in out
    for name in (
        "versions",
        "packages",
        "libsodium",
        "ipc",
        "memfd",
        "interfaces",
        "launcher",
        "address",
        "port",
        "secret",
    ):
        assert re.search(rf"^ *(ok|--|WARN) +{name} ", out, re.MULTILINE), out


def test_a_host_that_fails_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        if name == "msgspec":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["doctor", "--no-self-test"]) == 1
    out = capsys.readouterr().out
    assert " BAD  packages    missing: msgspec\n" in out
    assert "-> pip install msgspec\n" in out
    assert "workers cannot run well here: see packages" in out


def test_missing_system_features_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "arena_problem", lambda: "no memfd")
    monkeypatch.setattr(capabilities, "ipc_problem", lambda: "no ipc")
    monkeypatch.setattr(capabilities, "has_curve", lambda: False)
    assert [found(name).status for name in ("memfd", "ipc", "libsodium")] == [Status.WARNING] * 3


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield s.getsockname()[1]


@pytest.mark.parametrize("name", ["a..b", "x" * 70, "\udc80"])
def test_a_master_that_is_no_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", name)
    assert main(["doctor", "--no-self-test"]) == 1
    assert "no route to MASTER_ADDR" in capsys.readouterr().out


def test_the_variables_of_a_launcher(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(taken))
    assert found("address") == Check("address", Status.OK, "127.0.0.1 (the store is at 127.0.0.1)")
    assert found("port").status is Status.WARNING
    assert str(taken) in found("port").found
    monkeypatch.setenv("MASTER_PORT", "many")
    assert found("launcher").status is Status.BAD
    assert "MASTER_PORT" in found("launcher").found
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    assert found("address").status is Status.BAD


def test_the_worker_that_a_launcher_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    assert found("launcher") == Check("launcher", Status.OK, "RANK 2, WORLD_SIZE is not set")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert found("launcher")[:3] == ("launcher", Status.BAD, "RANK 2, WORLD_SIZE 2")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert found("launcher") == Check("launcher", Status.OK, "SLURM_PROCID 1, SLURM_STEP_NUM_TASKS 4")


def test_a_public_address_without_a_secret_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "198.51.100.7")  # of documentation: nobody has it
    monkeypatch.setattr(host_address, "facing_address", lambda host, port: "203.0.113.5")
    check = found("address")
    assert check.status is Status.BAD
    assert "ZMQGRAD_ALLOW_INSECURE" in check.advice
    monkeypatch.setenv("ZMQGRAD_ALLOW_INSECURE", "1")
    assert found("address") == Check("address", Status.OK, "203.0.113.5 (faces 198.51.100.7)")


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.resource, "getrlimit", lambda which: (256, 4096))
    assert found("limits") == Check("limits", Status.WARNING, "256 open files allowed", "ulimit -n 4096")


def test_the_table_is_aligned() -> None:
    shown = table([Check("a", Status.OK, "one"), Check("longer", Status.BAD, "two", "do this")])
    assert shown == "  ok  a       one\n BAD  longer  two\n              -> do this\n"


@pytest.mark.slow
@pytest.mark.processes
def test_the_self_test_runs_two_workers() -> None:
    check = all_checks()[-1]
    assert check.name == "self-test"
    assert check.status is Status.OK, check.found
    assert re.search(r"\d+ us per empty call, [\d.]+ ms per round trip of 64 MB by", check.found)


RESULT = json.dumps({"call_us": 50.0, "tensor_ms": 9.0, "tensor_right": True, "path": "arena"})


@pytest.mark.parametrize(("result", "status"), [(RESULT, Status.OK), ("nothing", Status.BAD)])
def test_what_else_workers_print_is_no_part_of_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: str, status: Status
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho loading modules\necho '{result}'\necho bye\n")
    python.chmod(0o700)
    monkeypatch.setattr(checks.sys, "executable", str(python))
    assert all_checks()[-1].status is status


@pytest.mark.slow
@pytest.mark.processes
def test_workers_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setattr(checks.sys, "executable", "/bin/false")
    check = all_checks()[-1]
    assert check.status is Status.BAD
    assert "worker 0 failed" in check.found
