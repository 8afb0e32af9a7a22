"""The faults that are planted to test the simulation still fit the library."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import zmqgrad
from tools.mutants import MUTANTS, plant


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
