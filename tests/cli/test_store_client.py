"""``zmqgrad store get`` and its like, as typed at a prompt."""

from __future__ import annotations

import _thread
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.support.waiting import eventually
from tools.ports import free_port
from zmqgrad.__main__ import main
from zmqgrad.cli.store_client import endpoint_of, show
from zmqgrad.errors import ConfigurationError
from zmqgrad.store import TCPStore

PATIENCE = 20.0

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def store() -> Iterator[TCPStore]:
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE) as store:
        yield store


@pytest.fixture
def ask(store: TCPStore, capsysbinary: pytest.CaptureFixture[bytes]) -> Ask:
    """Exit code, stdout and stderr of one command."""

    def run(name: str, *arguments: str) -> tuple[int, str, str]:
        code = main(["store", name, "--endpoint", f":{store.port}", "--timeout", f"{PATIENCE}", *arguments])
        out, err = capsysbinary.readouterr()
        return code, out.decode(errors="surrogateescape"), err.decode()

    return run


def test_values_in_and_out(ask: Ask, store: TCPStore) -> None:
    assert ask("set", "k", "tëxt") == (0, "", "")
    assert store.get("k") == "tëxt".encode()
    assert ask("get", "k") == (0, "tëxt\n", "")
    code, out, _ = ask("get", "k", "--json")
    assert (code, json.loads(out)) == (0, {"key": "k", "value": "tëxt"})
    assert ask("add", "n") == (0, "1\n", "")
    assert ask("add", "n", "-5") == (0, "-4\n", "")
    assert json.loads(ask("add", "n", "1", "--json")[1]) == {"key": "n", "value": -3}


def test_host_and_port_options_are_those_of_serve(
    store: TCPStore, capsys: pytest.CaptureFixture[str]
) -> None:
    where = "--host", "127.0.0.1", "--port", f"{store.port}"
    assert main(["store", "set", "k", "v", *where]) == 0
    assert main(["store", "get", "k", "--port", f"{store.port}"]) == 0
    assert capsys.readouterr().out == "v\n"
    assert main(["store", "get", "k", "--endpoint", ":1", "--port", "1"]) == 2
    assert "pass --endpoint, or --host and --port, not both" in capsys.readouterr().err
    assert main(["store", "get", "k", "--port", "70000"]) == 2
    assert "the port 70000 is not between 0 and 65535" in capsys.readouterr().err


def test_bytes_that_are_no_text(ask: Ask, store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\x1b[2J\n")))
    assert ask("set", "k", "-")[0] == 0
    assert store.get("k") == b"\xff\x1b[2J\n"
    assert ask("get", "k")[1] == "\\xff\\x1b[2J\n\n", "a terminal is not told to clear itself"
    assert ask("get", "k", "--raw")[1] == "\udcff\x1b[2J\n"
    assert json.loads(ask("get", "k", "--json")[1]) == {"key": "k", "value_base64": "/xtbMkoK"}


def test_keys(ask: Ask, store: TCPStore) -> None:
    assert ask("keys") == (0, "", "")
    store.multi_set(["b", "a/long", "a"], ["2\n3", "x" * 100, "1"])
    assert ask("keys")[1] == "a\na/long\nb\n"
    assert ask("keys", "a")[1] == "a\na/long\n"
    lines = ask("keys", "--values")[1].splitlines()
    assert lines == ["a       1", f"a/long  {'x' * 69}...", "b       2\\n3"]
    found = [json.loads(line) for line in ask("keys", "--values", "--json")[1].splitlines()]
    assert found[0] == {"key": "a", "value": "1"}


def test_json_is_valid_in_all_encodings_and_does_not_command_the_terminal(
    ask: Ask, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.set("k", "\x9b2Jé\U0001f600")
    for encoding in ("utf-8", "ascii"):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["store", "get", "k", "--endpoint", f":{store.port}", "--json"]) == 0
        stdout.seek(0)
        text = stdout.read()
        assert json.loads(text)["value"] == "\x9b2Jé\U0001f600"
        assert "\x9b" not in text


def test_a_value_from_a_closed_stdin(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = ask("set", "k", "-")
    assert code == 2
    assert "stdin, which is closed" in err


def test_keys_do_not_command_the_terminal(ask: Ask, store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = TCPStore.watch_prefix

    def then_change(self: TCPStore, prefix: str, callback: Callable[..., None]) -> None:
        watch(self, prefix, callback)
        store.set("k\x1b[2J\n", "1")

    monkeypatch.setattr(TCPStore, "watch_prefix", then_change)
    code, out, err = ask("watch", "--prefix", "k\x1b", "--count", "1")
    assert (code, out) == (0, "+ k\\x1b[2J\\n = 1\n")
    assert err == "watching k\\x1b*; Ctrl-C ends this\n"
    assert ask("keys")[1] == "k\\x1b[2J\\n\n"
    assert ask("keys", "--values")[1] == "k\\x1b[2J\\n  1\n"


def test_missing_keys(ask: Ask, store: TCPStore) -> None:
    store.set("k", "1")
    assert ask("get", "nope") == (3, "", "zmqgrad store get: no such key: 'nope'\n")
    store.queue_push("q", "1")
    assert ask("get", "q") == (3, "", "zmqgrad store get: no such key: 'q'\n")
    assert ask("wait", "k") == (0, "", "")
    assert ask("wait", "k", "x", "y", "--timeout", "0.01") == (
        3,
        "",
        "zmqgrad store wait: no such key after 0.01 s: 'x', 'y'\n",
    )
    assert ask("delete", "k", "x") == (3, "", "zmqgrad store delete: no such key: 'x'\n")
    assert not store.check(["k"])


def test_ctrl_c_ends_a_wait_without_a_traceback(ask: Ask, store: TCPStore) -> None:
    def interrupt() -> None:
        eventually(store.statistics, lambda found: found["parked"] == 1, PATIENCE)
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert ask("wait", "k") == (130, "", "")
    thread.join(PATIENCE)


def test_a_refusal(ask: Ask, store: TCPStore) -> None:
    store.set("k", "text")
    code, out, err = ask("add", "k")
    assert (code, out) == (1, "")
    assert "no 64-bit number but b'text'" in err


def test_watching(ask: Ask, store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens after the watch is in place, which the command tells."""
    watching = threading.Event()
    watch = TCPStore.watch_key

    def told(self: TCPStore, key: str, callback: Callable[..., None]) -> None:
        watch(self, key, callback)
        if key == "b":
            watching.set()

    monkeypatch.setattr(TCPStore, "watch_key", told)

    def change() -> None:
        assert watching.wait(PATIENCE)
        store.set("a", "1")
        store.set("a", "2")
        store.delete_key("a")

    for options, expected in (
        ((), ["+ a = 1", "~ a: 1 -> 2", "- a (was 2)"]),
        (("--json",), [(None, "1"), ("1", "2"), ("2", None)]),
    ):
        watching.clear()
        thread = threading.Thread(target=change)
        thread.start()
        code, out, err = ask("watch", "a", "b", "--count", "3", *options)
        thread.join(PATIENCE)
        lines = out.splitlines()
        if options:
            assert err == ""
            seen = [json.loads(line) for line in lines]
            assert [(one["old"], one["new"]) for one in seen] == expected
        else:
            assert err == "watching a, b; Ctrl-C ends this\n"
            assert lines == expected
        assert code == 0


def test_watching_all_that_begin_so(ask: Ask, store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = TCPStore.watch_prefix

    def then_change(self: TCPStore, prefix: str, callback: Callable[..., None]) -> None:
        watch(self, prefix, callback)
        store.multi_set(["other", "job/1", "job/2"], ["", "a", "b"])

    monkeypatch.setattr(TCPStore, "watch_prefix", then_change)
    code, out, err = ask("watch", "--prefix", "job/", "--count", "2")
    assert (code, err) == (0, "watching job/*; Ctrl-C ends this\n")
    assert out.splitlines() == ["+ job/1 = a", "+ job/2 = b"]


def test_no_store_at_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(["store", "get", "k", "--endpoint", f"127.0.0.1:{port}", "--timeout", "0.05"]) == 1
    assert f"no store answered at 127.0.0.1:{port} within 0.05 s" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["host", "host:", "host:x", "host:-1", "host:٣"])
def test_an_endpoint_that_cannot_be(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "get", "k", "--endpoint", text]) == 2
    assert f"--endpoint must be HOST:PORT, not {text!r}" in capsys.readouterr().err


def test_the_store_address_from_options_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert endpoint_of(None) == ("127.0.0.1", 29500)
    assert endpoint_of("[::1]:5") == ("[::1]", 5)
    monkeypatch.setenv("MASTER_ADDR", "there")
    monkeypatch.setenv("MASTER_PORT", "7")
    assert endpoint_of(None) == ("there", 7)
    monkeypatch.setenv("MASTER_PORT", "x")
    with pytest.raises(ConfigurationError, match="MASTER_PORT"):
        endpoint_of(None)


def test_a_value_is_shown_on_one_line() -> None:
    assert show(b"a\nb\x1b" + b"c" * 10, 10) == "a\\nb\\x1..."
    assert show("ü".encode() * 20, 10) == "üüüüüüü..."
