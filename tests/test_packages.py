"""What an index would offer: the sdist, and the wheel made from it, in an environment of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

from zmqgrad import __version__

pytestmark = [pytest.mark.slow, pytest.mark.processes]

ROOT = Path(__file__).parent.parent
PARTS = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "zmqgrad", "examples")
LIMIT = 120.0

PROGRAM = """
import os, torch, zmqgrad
from zmqgrad import rpc
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    print(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist(), zmqgrad.__file__)
rpc.shutdown()
"""


def run(*command: str | Path, cwd: Path) -> str:
    """What ``command`` prints; without the PYTHONPATH that would let it find the source."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"{command} exited with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """Make the sdist or wheel as pip would, but with the setuptools of this environment."""
    code = f"import sys, setuptools.build_meta as b; b.build_{kind}(sys.argv[1])"
    run(sys.executable, "-c", code, target, cwd=source)
    [found] = target.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from a copy, because building writes into its source."""
    source = tmp_path_factory.mktemp("source")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    return target / f"zmqgrad-{__version__}"


@pytest.fixture(scope="module")
def environment(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with torch and the other dependencies of this one."""
    root = tmp_path_factory.mktemp("environment")
    wheel = build("wheel", unpacked, tmp_path_factory.mktemp("wheel"))
    venv.create(root, symlinks=True)
    python = root / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel)
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=root)
    # A path in a .pth file is searched, but its own .pth files are not read: an editable install stays out.
    paths = sysconfig.get_paths(vars={"base": str(root), "platbase": str(root)})
    Path(paths["purelib"], "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return root


def test_the_sdist_has_all_files_of_the_package(unpacked: Path) -> None:
    names = {str(path.relative_to(ROOT)) for path in (ROOT / "zmqgrad").rglob("*.*") if path.suffix != ".pyc"}
    missing = {name for name in names | set(PARTS) if not (unpacked / name).exists()}
    assert not missing


def test_the_command_of_the_wheel(environment: Path) -> None:
    command = environment / "bin" / "zmqgrad"
    assert run(command, "--version", cwd=environment) == f"zmqgrad {__version__}\n"
    assert f"zmqgrad {__version__}" in run(command, "doctor", "--no-self-test", cwd=environment)


def test_two_workers_of_the_wheel(environment: Path) -> None:
    (environment / "call.py").write_text(PROGRAM)
    command = (environment / "bin" / "zmqgrad", "run", "--nproc-per-node", "2", "call.py")
    output = run(*command, cwd=environment)
    assert f"[2.0, 2.0] {environment}" in output


def test_the_examples_of_the_wheel(environment: Path) -> None:
    command = environment / "bin" / "zmqgrad"
    run(command, "examples", "copies", cwd=environment)
    copies = {path.name for path in (environment / "copies").iterdir()}
    assert copies == {path.name for path in (ROOT / "examples").glob("*.py")}
    output = run(command.with_name("python"), "copies/dist_autograd_simple.py", cwd=environment)
    assert "worker1: the sum went from" in output


def test_type_checkers_and_the_report_find_their_files(environment: Path) -> None:
    code = """from importlib.resources import files
scripts = [f"trace/report/script/{name}" for name in ("data.js", "filter.js", "timeline.js", "page.js")]
for name in ("py.typed", "trace/report/page.html", "trace/report/page.css", *scripts):
    assert files("zmqgrad").joinpath(name).is_file(), name
from importlib.metadata import metadata
print(metadata("zmqgrad")["Version"], metadata("zmqgrad")["License-Expression"])"""
    python = environment / "bin" / "python"
    assert run(python, "-P" if sys.version_info >= (3, 11) else "-I", "-c", code, cwd=environment) == (
        f"{__version__} BSD-3-Clause\n"
    )
