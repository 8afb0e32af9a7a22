"""Help, usage errors and completion: the same of every subcommand, whichever they are."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.interpreter import run_python
from zmqgrad.__main__ import main
from zmqgrad.cli import colours, doctor
from zmqgrad.cli.checks import Check, Status
from zmqgrad.cli.commands import COMMANDS, command_parser
from zmqgrad.cli.parser import CommandParser


def with_children(parser: CommandParser) -> Iterator[CommandParser]:
    parser.declare()
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from with_children(child)


PROGRAMS = [parser.prog for parser in with_children(command_parser())]
LEAVES = [one for one in PROGRAMS if not any(other.startswith(f"{one} ") for other in PROGRAMS)]


def help_of(program: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([*program.split()[1:], "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_has_examples_and_exit_codes(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(program, capsys)
    examples, codes = text.split("\nexamples:\n")[1].split("\nexit codes:\n")
    assert {"0", "2"} <= set(re.findall(r"^  (\d+) ", codes, re.MULTILINE))
    commands = re.findall(r"(?<![\w/.=])zmqgrad ((?!secret\))[^|)&>#<\n]+)", examples)
    assert commands
    for line in commands:
        if "--help" not in line:
            command_parser().parse_args(shlex.split(line))  # exits if the example is wrong


@pytest.mark.parametrize("program", LEAVES)
def test_an_unknown_option_shows_the_usage_of_its_subcommand(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    required = {
        "run": ["x.py"],
        "get": ["k"],
        "set": ["k", "v"],
        "add": ["k"],
        "completion": ["bash"],
        "examples": ["x"],
    }
    required |= {name: ["k"] for name in ("delete", "wait", "watch")}
    words = program.split()[1:]
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--no-such-option", *required.get(words[-1], [])])
    error = capsys.readouterr().err
    assert error.startswith(f"usage: {program} ")
    assert f"{program}: error: unrecognized arguments: --no-such-option" in error


def test_a_directory_for_traces_that_cannot_be_made_is_an_option_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, occupied = tmp_path / "x.py", tmp_path / "occupied"
    script.write_text("")
    occupied.write_text("")
    assert main(["run", "--trace", str(occupied / "traces"), str(script)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"zmqgrad run: --trace {occupied / 'traces'}: ")


@pytest.mark.slow
@pytest.mark.parametrize("words", [["completion", "bash"], ["doctor", "--no-self-test", "--json"]])
def test_output_may_be_cut_by_its_reader(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "zmqgrad", *words],
            stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("option", ["--nproc", "--nprocs"])
def test_an_option_that_is_not_finished(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", option, "2", "x.py"])
    assert f"{option}; did you mean --nproc-per-node?" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize("words", [["store", "--help"], ["trace", "--help"], ["trace", "--hepl"]])
def test_groups_of_commands_load_none_of_them(words: list[str]) -> None:
    code = """import sys
from zmqgrad.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit:
    print([name for name in ("zmq", "msgspec", "zmqgrad.trace", "rich", "shtab") if name in sys.modules])"""
    assert run_python(code, *words).endswith("[]\n")


# ---- doctor and colours -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "code"), [(Status.OK, 0), (Status.NOTE, 0), (Status.BAD, 1)])
def test_doctor_as_json(
    status: Status, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "all_checks", lambda self_test: [Check("memfd", status, "found", "do this")])
    assert main(["doctor", "--json", "--no-self-test"]) == code
    assert json.loads(capsys.readouterr().out) == {
        "fit": code == 0,
        "checks": [{"name": "memfd", "status": status.name.lower(), "found": "found", "advice": "do this"}],
    }


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert colours.paint("BAD", colours.RED) == "BAD"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert colours.paint("BAD", colours.RED) == "\x1b[31mBAD\x1b[0m"
    assert colours.paint("--", None) == "--"
    monkeypatch.setenv("NO_COLOR", "1")
    assert colours.paint("BAD", colours.RED) == "BAD"


# ---- completion -------------------------------------------------------------------------------------------


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last of ``words``, by the function that the script registers."""
    program = f"""{script}
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${{#COMP_LINE}}
function_name=$(complete -p zmqgrad | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$function_name" zmqgrad "${{@: -1}}" "${{@: -2:1}}"
printf '%s\\n' "${{COMPREPLY[@]}}" """
    done = subprocess.run(
        ["bash", "-c", program, "bash", *words], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.split()


@pytest.mark.slow
def test_bash_completes_commands_options_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert set(completed(script, "zmqgrad", "")) >= set(COMMANDS)
    assert completed(script, "zmqgrad", "st") == ["store"]
    assert completed(script, "zmqgrad", "trace", "sh") == ["show"]
    assert completed(script, "zmqgrad", "run", "--nproc-p") == ["--nproc-per-node"]
    assert completed(script, "zmqgrad", "trace", "stats", "--sort", "p9") == ["p99"]


def test_completion_without_shtab(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "zsh"]) == 2
    assert "pip install 'zmqgrad[completion]'" in capsys.readouterr().err
