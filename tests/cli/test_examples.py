"""``zmqgrad examples``: copies the programs, and overwrites nothing. test_packages.py tries a wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from zmqgrad.__main__ import main

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def test_all_programs_are_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "examples"
    assert main(["examples", str(target)]) == 0
    assert {each.name: each.read_bytes() for each in target.iterdir()} == {
        each.name: each.read_bytes() for each in EXAMPLES
    }
    assert f"python {target}/parameter_server.py" in capsys.readouterr().out


def test_a_program_of_the_user_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "parameter_server.py"
    mine.write_text("mine")
    assert main(["examples", str(tmp_path)]) == 2
    assert f"zmqgrad examples: {tmp_path} has parameter_server.py already" in capsys.readouterr().err
    assert mine.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [mine]


def test_a_directory_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    occupied = tmp_path / "occupied"
    occupied.write_text("")
    assert main(["examples", str(occupied)]) == 2
    assert f"zmqgrad examples: cannot write {occupied}: " in capsys.readouterr().err
