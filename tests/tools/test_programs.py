"""The benchmark of whole programs: ratios, and a run that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import programs
from tools.bench.programs import ProgramFailed, Row, Run, geometric_mean, print_table, run_program, save_json
from tools.bench.sides import OURS, TORCH


def row() -> Row:
    ours = [Run(1.0, 2.0, 3.0, 4.0), Run(1.0, 2.0, 1.0, 4.0), Run(1.0, 2.0, 2.0, 4.0)]
    return Row("program", 4, {OURS: ours, TORCH: [Run(3.0, 2.0, 4.0, 8.0)]})


def test_ratios_are_those_of_the_medians() -> None:
    assert row().ratio("wall") == pytest.approx(0.5)
    assert row().ratio("cpu") == pytest.approx(0.5)
    assert row().ratio("total_wall") == pytest.approx(3 / 7)
    assert row().ratio("total_cpu") == pytest.approx(0.6)
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


def test_the_table_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_table([row()])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1].startswith("program 4 2.00 / 4.00 = 0.50 4.00 / 8.00 = 0.50")
    assert lines[2].startswith("geometric mean of the ratios 0.50 0.50")
    save_json([row()], tmp_path / "new" / "programs.json")
    saved = json.loads((tmp_path / "new" / "programs.json").read_text())
    assert saved["rows"][0]["runs"][TORCH] == [
        {"import_wall": 3.0, "import_cpu": 2.0, "wall": 4.0, "cpu": 8.0}
    ]
    assert saved["geometric means"]["wall"] == pytest.approx(0.5)


@pytest.mark.slow
@pytest.mark.processes
def test_a_program_is_measured() -> None:
    run = run_program("batch_parameter_server", OURS, workers=2)
    assert min(run.import_wall, run.import_cpu, run.wall, run.cpu) > 0


@pytest.mark.slow
@pytest.mark.processes
def test_a_program_that_fails_or_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProgramFailed, match="No module named 'no_such_program'"):
        run_program("no_such_program", OURS, workers=1)
    monkeypatch.setattr(programs, "LIMIT_SECONDS", 0.0)
    with pytest.raises(ProgramFailed):
        run_program("batch_parameter_server", OURS, workers=2)
