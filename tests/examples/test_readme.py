"""The README says what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zmqgrad import __version__

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs/concepts/architecture.md").read_text()


def test_the_picture_of_the_layers_is_what_import_linter_checks() -> None:
    tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [floors] = [contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers"]
    [picture] = re.findall(r"```text\n(__main__.*?errors\n)```", ARCHITECTURE, re.DOTALL)
    drawn = picture.replace("->", "\n").splitlines()
    words = [sorted(re.findall(r"\w+", line)) for line in drawn if line.strip()]
    assert words == [sorted(re.findall(r"\w+", floor)) for floor in floors]


def test_ci_runs_its_test_command() -> None:
    assert "bash tools/test" in README
    assert "\nexec bash tools/test" in (ROOT / ".ci" / "run").read_text()


def test_files_that_it_names_are_there() -> None:
    for name in re.findall(r"(?:examples|tools)/[\w.]+", README):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"\]\(([^)#]+)", README):
        assert (ROOT / name).is_file(), name


def test_modules_that_the_architecture_names_are_there() -> None:
    names = re.findall(r"`((?:wire|store|rpc|autograd|transport)/[\w/]+)`", ARCHITECTURE)
    assert len(names) > 4
    for name in names:
        module = ROOT / "zmqgrad" / name
        assert module.with_suffix(".py").is_file() or (module / "__init__.py").is_file(), name


def test_the_wheel_that_it_names_is_of_this_version() -> None:
    for page in (README, (ROOT / "docs/start.md").read_text()):
        assert re.findall(r"zmqgrad-([\d.]+)-py3", page) == [__version__]
