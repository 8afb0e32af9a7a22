"""The support matrix: no result of an earlier run is lost, and a crash of a cell's tests is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import matrix

PASSED = {
    "state": "passed",
    "date": "2026-11-23",
    "tests": "tests",
    "versions": "torch 2.5.0",
    "counts": "3 passed",
}
NOT_TRIED = {"state": "not tried", "date": "2026-11-24", "tests": "tests", "why": "error: no network"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "support.json")
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "support.md")


def test_each_result_is_written_beside_those_of_earlier_runs() -> None:
    results = {"3.10 lowest": PASSED}
    matrix.save(results, "3.12 newest", NOT_TRIED)
    assert json.loads(matrix.RESULTS.read_text()) == {"3.10 lowest": PASSED, "3.12 newest": NOT_TRIED}
    assert "| 3.10 | passed (2.5.0) | not tried | not tried |" in matrix.PAGE.read_text()
    assert "| 3.12 newest | 2026-11-24 |  | error: no network |" in matrix.PAGE.read_text()


def test_a_cell_that_cannot_be_tried_now_keeps_its_result() -> None:
    results = {"3.10 lowest": PASSED}
    matrix.save(results, "3.10 lowest", NOT_TRIED)
    assert results == {"3.10 lowest": PASSED}


@pytest.mark.parametrize(
    "last", ["374 passed, 1 warning in 58.43s", "== 374 passed, 1 warning in 58.43s (0:00:58) =="]
)
def test_what_pytest_counted_is_found_before_what_libraries_print_at_exit(last: str) -> None:
    assert matrix.counts(f"....\n{last}\nnanobind: leaked 3 functions!") == "374 passed, 1 warning"
    assert matrix.counts("....\nFatal Python error: Segmentation fault") == ""


def test_the_pins_of_installed_packages_give_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(matrix, "PINS", tmp_path / "constraints.txt")
    matrix.PINS.write_text("sympy==1.14.0\ntyping_extensions==4.16.0\npytest==9.2.0\n")
    assert matrix.pins_without(["sympy==1.13.1", "typing-extensions==4.15.0"]) == ["pytest==9.2.0"]
