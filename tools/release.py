"""Builds the sdist and the wheel of the last commit, and tries them as a stranger would. ``make dist``.

    python -m tools.release             # to dist/
    python -m tools.release --out /tmp/dist

The wheel is installed in a new environment in an empty directory, without a path to the source, and the
commands of the README are run there. Needs the dependency group ``release``, and an index that has torch.
"""

from __future__ import annotations

import argparse
import doctest
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.docs.blocks import blocks_of
from zmqgrad import __version__

ROOT = Path(__file__).parents[1]
STEP_SECONDS = 1800  # torch with CUDA is gigabytes

_IMAGE = re.compile(r"!\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)\n?", re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)", re.DOTALL)

BY_HAND = (
    "write the date into the first heading of CHANGELOG.md, instead of 'unreleased', and commit",
    "bash tools/test, make bench, make docs-check and make matrix, on the commit that is released",
    f"git tag v{__version__}, and push it",
    "python -m twine upload dist/*",
    "raise __version__ in zmqgrad/__init__.py for what follows",
)
"""What no tool decides."""


class ReleaseError(Exception):
    """A step failed; the message says which, and what it printed."""


def main() -> int:
    """Returns 1 if a step failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description="Build and try a release.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR", help="default: dist")
    out: Path = parser.parse_args().out
    with tempfile.TemporaryDirectory(prefix="zmqgrad-release-") as directory:
        try:
            packages = build(Path(directory))
            try_out(packages, Path(directory))
        except ReleaseError as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        for package in packages:
            print(f"      {shutil.copy(package, out)}")
    print("\nBy hand:")
    for number, step in enumerate(BY_HAND, 1):
        print(f"  {number}. {step}")
    return 0


# ---- the packages -----------------------------------------------------------------------------------------


def build(directory: Path) -> list[Path]:
    """Build the last commit, and return the sdist and the wheel made from it.

    Raises:
        ReleaseError: if a file differs from the last commit, or a step fails.
    """
    if changed := run("what is committed", ["git", "status", "--porcelain", "-uno"], ROOT):
        raise ReleaseError(f"these files differ from the last commit:\n{changed}")
    first = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    if not first.startswith(f"## {__version__},"):
        raise ReleaseError(f"CHANGELOG.md begins with '{first}', and the version is {__version__}")

    source, packages = directory / "source", directory / "packages"
    source.mkdir()
    archive = directory / "source.tar"
    run("archive of the last commit", ["git", "archive", f"--output={archive}", "HEAD"], ROOT)
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    urls = project_urls((source / "pyproject.toml").read_text())
    if not urls:
        print("note  pyproject.toml has no [project.urls]: the README of the index has no links to pages")
    readme = source / "README.md"
    readme.write_text(index_readme(readme.read_text(), urls))
    run("sdist and wheel", [sys.executable, "-m", "build", "--outdir", packages, source], directory)
    found = sorted(packages.iterdir())
    run("metadata and README", [sys.executable, "-m", "twine", "check", "--strict", *found], directory)
    return found


def project_urls(settings: str) -> dict[str, str]:
    """The table ``[project.urls]`` of a pyproject.toml; empty if there is none."""
    found = re.search(r"^\[project\.urls\]$(.*?)(?=^\[|\Z)", settings, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r'^"?([\w -]+?)"? = "(.*)"', found[1], re.MULTILINE)) if found else {}


def index_readme(text: str, urls: Mapping[str, str]) -> str:
    """The README for a package index, where links relative to the repository lead nowhere.

    A link to a page of ``docs/`` leads to the site at the URL *Documentation*, one to ``CHANGELOG.md`` to
    that of *Changelog*. Without such a URL the text of the link stays, and pictures are left out.
    """

    def absolute(target: str) -> str | None:
        path, mark, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            return target
        if path == "CHANGELOG.md":
            return urls.get("Changelog")
        if path.startswith("docs/") and "Documentation" in urls:
            page = re.sub(r"\.md$", ".html", path.removeprefix("docs/"))
            return f"{urls['Documentation'].rstrip('/')}/{page}{mark}{anchor}"
        return None

    def link(found: re.Match[str]) -> str:
        target = absolute(found["target"])
        return f"[{found['text']}]({target})" if target else found["text"]

    def image(found: re.Match[str]) -> str:
        target = absolute(found["target"])
        return found[0].replace(f"({found['target']})", f"({target})") if target else ""

    return _LINK.sub(link, _IMAGE.sub(image, text))


# ---- as a stranger ----------------------------------------------------------------------------------------


def try_out(packages: Sequence[Path], directory: Path) -> None:
    """Install the wheel in a new environment, and do what the README says.

    Raises:
        ReleaseError: if a command fails, or prints something else than the README shows.
    """
    [wheel] = [package for package in packages if package.suffix == ".whl"]
    root, home = directory / "environment", directory / "home"
    home.mkdir()
    venv.create(root, with_pip=True)
    environment = outside_of_the_source(root)
    python = root / "bin" / "python"

    def step(what: str, *command: str | Path) -> str:
        return run(what, command, home, environment)

    [torch] = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    step("install torch", python, "-m", "pip", "install", "--quiet", torch)
    begun = time.monotonic()
    step("install the wheel", python, "-m", "pip", "install", "--quiet", f"{wheel}[examples]")
    step("dependencies fit together", python, "-m", "pip", "check")
    where = step("import", python, "-c", "import zmqgrad; print(zmqgrad.__version__, zmqgrad.__file__)")
    if not where.startswith(f"{__version__} {root}"):
        raise ReleaseError(f"not the version {__version__} of the new environment was imported: {where}")
    follow(ROOT / "README.md", home, step)
    print(f"      first gradient {time.monotonic() - begun:.0f} s after torch was there")
    step("zmqgrad doctor", "zmqgrad", "doctor")
    step("zmqgrad examples", "zmqgrad", "examples", "examples")
    train = ("zmqgrad", "run", "--trace", "traces", "--nproc-per-node", "3", "examples/digits_pipeline.py")
    step("the training of the README", *train)
    step("zmqgrad trace report", "zmqgrad", "trace", "report", "traces")


def follow(readme: Path, directory: Path, step: Callable[..., str]) -> None:
    """Save the programs that a page shows, run its commands, and compare their output."""
    for block in blocks_of(readme):
        if block.how == "file":
            (directory / block.what).write_text(block.text)
        elif block.language == "console" and not block.how:
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, expected = part.partition("\n")
                printed = step(command, "bash", "-c", command)
                flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
                if expected.strip() and not doctest.OutputChecker().check_output(expected, printed, flags):
                    raise ReleaseError(f"'{command}' printed\n{printed}\ninstead of\n{expected}")


def outside_of_the_source(root: Path) -> dict[str, str]:
    """The variables of a shell with the environment at ``root``, where nothing leads to the source."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "ZMQGRAD_", "VIRTUAL_ENV"))
    }
    return {**kept, "VIRTUAL_ENV": str(root), "PATH": f"{root / 'bin'}:{kept['PATH']}"}


def run(
    what: str, command: Sequence[str | Path], directory: Path, environment: Mapping[str, str] | None = None
) -> str:
    """Run a step, print its name and duration, and return what the command printed.

    Raises:
        ReleaseError: if the command fails, or takes longer than STEP_SECONDS.
    """
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=STEP_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ReleaseError(f"{what}: no end after {STEP_SECONDS} s") from None
    if done.returncode:
        raise ReleaseError(f"{what}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    print(f"ok    {what} ({time.monotonic() - begun:.1f} s)", flush=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
