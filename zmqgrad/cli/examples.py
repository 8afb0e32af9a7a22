"""``zmqgrad examples``: copies the example programs, which a wheel installs beside the package."""

from __future__ import annotations

import argparse
import os
import shutil
from importlib.metadata import files
from pathlib import Path

import zmqgrad
from zmqgrad.cli.parser import describe
from zmqgrad.errors import ConfigurationError

_INSTALLED = "share/zmqgrad/examples/"
"""Where pyproject.toml puts them in an environment."""

_NOTES = """\
The first lines of each program say what it shows and how to start it. The extra 'examples' has what some of
them need: pip install 'zmqgrad[examples]'."""

_EXAMPLES = ("zmqgrad examples examples && python examples/parameter_server.py",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad examples``."""
    parser.epilog = _NOTES
    describe(parser, _EXAMPLES)
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="where to copy them to; is made if necessary"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Copy the programs, and return the exit code.

    Raises:
        ConfigurationError: if one of them exists in the directory already, or cannot be written.
    """
    programs = _programs()
    target: Path = arguments.directory
    if existing := [program.name for program in programs if os.path.exists(target / program.name)]:
        raise ConfigurationError(
            f"{target} has {existing[0]} already, and nothing is overwritten: choose another directory"
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        for program in programs:
            shutil.copyfile(program, target / program.name)
    except OSError as error:
        raise ConfigurationError(f"cannot write {target}: {error.strerror or error}") from error
    print(f"{len(programs)} programs in {target}; for example: python {target / 'parameter_server.py'}")
    return 0


def _programs() -> list[Path]:
    """The example programs: those of the clone that this is part of, or of the installed distribution."""
    clone = Path(zmqgrad.__file__).parents[1]
    if (clone / "pyproject.toml").is_file():
        found = list((clone / "examples").glob("*.py"))
    else:
        listed = files("zmqgrad") or []
        found = [Path(str(path.locate())) for path in listed if _INSTALLED in path.as_posix()]
    if not found:
        raise ConfigurationError(
            "this installation has no examples: install a wheel of zmqgrad, or take them from a clone"
        )
    return sorted(found)
