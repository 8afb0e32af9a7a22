"""The faults that are planted to test the simulation still fit the library."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import zmqgrad
from tools.mutants import MUTANTS, ROOT, plant


@pytest.mark.parametrize("name", MUTANTS)
def test_each_fault_changes_the_one_place_it_names_and_leaves_a_module(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    source = Path(zmqgrad.__file__).parent / mutant.path
    planted = tmp_path / mutant.path
    planted.parent.mkdir(parents=True)
    shutil.copy(source, planted)

    plant(mutant, tmp_path)

    assert planted.read_text() != source.read_text()
    compile(planted.read_text(), mutant.path, "exec")


def test_the_page_names_the_seed_of_each_fault() -> None:
    lines = (ROOT / "docs/concepts/simulation.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| `") and "--seed" in line]
    named = [name for name, mutant in MUTANTS.items() if mutant.seed is not None]

    assert sorted(row.split("`")[1] for row in rows) == sorted(named)
    assert [row for row in rows if MUTANTS[row.split("`")[1]].found_by not in row] == []
