"""Runs the code blocks of README.md and of docs/ as written, apart from ports and paths below /tmp."""

from __future__ import annotations

import doctest
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.blocks import Block, blocks_of
from tests.support.processes import run_processes
from tools.ports import free_port
from zmqgrad.runtime.clock import Deadline

ROOT = Path(__file__).parents[2]
PAGES = {
    page.relative_to(ROOT).as_posix(): page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
UNTIL_SECONDS = 45.0
LANGUAGES = {"bash", "console", "python", "text", "mermaid", "yaml", "toml"}

BLOCK_SECONDS = 120.0


def is_run(block: Block) -> bool:
    return block.how != "not run" and block.language in {"python", "console"}


@pytest.mark.parametrize("name", PAGES)
def test_python_blocks_compile(name: str) -> None:
    for block in blocks_of(PAGES[name]):
        if block.language == "python":
            compile("\n" * block.line + block.text, name, "exec")


@pytest.mark.parametrize("name", PAGES)
def test_a_block_names_its_language_and_why_it_is_not_run(name: str) -> None:
    for block in blocks_of(PAGES[name]):
        place = f"{name}:{block.line}"
        assert block.language in LANGUAGES, f"{place}: no known language"
        assert block.how != "not run" or len(block.what.split()) >= 3, f"{place}: give the reason"
        assert block.language != "bash" or block.how == "not run", f"{place}: use 'console' for what is run"
        if block.language == "console":
            assert block.text.startswith("$ "), f"{place}: a command begins with '$ '"


@pytest.mark.parametrize("name", PAGES)
def test_code_is_fenced(name: str) -> None:
    """An indented block has no language, and would escape these tests."""
    text = re.sub(
        r"^( *)```.*?^\1```$|<!--.*?-->", "", PAGES[name].read_text(), flags=re.MULTILINE | re.DOTALL
    )
    paragraphs = text.split("\n\n")
    indented = [
        after
        for before, after in itertools.pairwise(paragraphs)
        if after.startswith("    ") and not re.search(r"^ *(?:[-*]|\d+\.|!!!|\?\?\?) ", before, re.MULTILINE)
    ]
    assert indented == []


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in PAGES if any(map(is_run, blocks_of(PAGES[name])))])
def test_blocks_run(name: str, tmp_path: Path) -> None:
    with PageRun(name, tmp_path) as page:
        for block in filter(is_run, blocks_of(PAGES[name])):
            page.run(block)
        page.run_python()


class PageRun:
    """Runs the blocks of one page in ``directory``; ports and paths are replaced by free ones."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        (directory / "examples").symlink_to(ROOT / "examples")
        self._port, self._other_port = str(free_port()), str(free_port())
        self._python: list[tuple[int, str]] = []
        self._background: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> PageRun:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._background:
            process.terminate()
            process.wait(20)

    def run(self, block: Block) -> None:
        """Run ``block``, or keep it for :meth:`run_python`."""
        text = self._own(block.text)
        if block.how == "file":
            (self.directory / block.what).write_text(text)
        elif block.how == "launch":
            self._in_processes(int(block.what), [(block.line, self._own(block.text, str(free_port())))])
        elif block.how == "background":
            command = text.removeprefix("$ ").strip()
            self._background.append(
                subprocess.Popen(
                    ["bash", "-c", f"exec {command}"], cwd=self.directory, env=self._environment()
                )
            )
        elif block.how == "exits":
            [(command, expected)] = commands_of(text)
            self._check(command, expected, self._until(command, int(block.what)))
        elif block.language == "console":
            for command, expected in commands_of(text):
                self._check(command, expected, self._command(["bash", "-c", command]))
        else:
            self._python.append((block.line, text))

    def run_python(self) -> None:
        """Run the kept blocks in one process. The program they make is its ``__main__``."""
        if self._python:
            self._in_processes(0, self._python)

    def _in_processes(self, workers: int, blocks: Sequence[tuple[int, str]]) -> None:
        """Run blocks one after another in each of ``workers``, which need not import torch again.

        0: in one that no launcher has started.
        """
        run_processes(
            run_blocks,
            workers or 1,
            (str(self.directory), self.name, blocks, workers > 0),
            timeout=BLOCK_SECONDS,
            env=None if workers else self._environment(),
        )

    def _own(self, text: str, port: str = "") -> str:
        own = text.replace("29500", port or self._port).replace("(9400)", f"({self._other_port})")
        return own.replace("/tmp/", f"{self.directory}/")

    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "MASTER_PORT": str(free_port()), "PATH": path, "PYTHONPATH": str(ROOT)}

    def _command(self, command: list[object]) -> str:
        done = self._run(command)
        assert done.returncode == 0, f"{self.name}: {command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _until(self, command: str, code: int) -> str:
        deadline = Deadline.after(UNTIL_SECONDS)
        while (done := self._run(["bash", "-c", command])).returncode != code:
            assert not deadline.passed(), f"{self.name}: {command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _run(self, command: list[object]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, command)),
            cwd=self.directory, env=self._environment(), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip

    def _check(self, command: str, expected: str, output: str) -> None:
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if expected.strip():
            found = doctest.OutputChecker().check_output(expected, output, flags)
            assert found, f"{self.name}: {command}\nexpected:\n{expected}\nprinted:\n{output}"


def run_blocks(
    rank: int, directory: str, name: str, blocks: Sequence[tuple[int, str]], is_launched: bool
) -> None:
    """Run the blocks of a page as a program of its own: what they define is in its ``__main__``."""
    if not is_launched:
        for variable in ("MASTER_ADDR", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
            del os.environ[variable]
    os.chdir(directory)
    sys.path.insert(0, directory)
    sys.argv = [name]
    sys.modules["__main__"] = main = ModuleType("__main__")
    for line, code in blocks:
        exec(compile("\n" * line + code, name, "exec"), main.__dict__)


def commands_of(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with the output that the page shows."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output
