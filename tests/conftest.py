"""What every test gets: a check that nothing is left behind, a seed, and a temporary directory of our own.

A test that starts something must end it. What is ending is waited for, up to ``PATIENCE`` seconds.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing.util
import os
import random
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests.support import processes
from tests.support.leaks import REGISTRIES, Bomb, Watcher
from zmqgrad.runtime.clock import ManualClock

SEED_VARIABLE = "ZMQGRAD_TEST_SEED"

hypothesis.settings.register_profile("dev", print_blob=True, deadline=None, database=None, max_examples=25)
_dev = hypothesis.settings.get_profile("dev")
# The same examples each time: a failure is then due to the last change. The other profiles look for new ones.
hypothesis.settings.register_profile("ci", parent=_dev, max_examples=100, derandomize=True)
hypothesis.settings.register_profile("soak", parent=_dev, max_examples=5000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

_seed = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    # A shell has its background jobs ignore Ctrl-C and SIGQUIT, and nohup SIGHUP; some tests send them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # Files of other test runs on this machine are none of our business, so ours get a place of their own.
    directory = tempfile.mkdtemp(prefix="zg-tests-")
    os.environ["TMPDIR"] = tempfile.tempdir = directory
    # After those of multiprocessing itself (-100), whose own directory is in there, too.
    multiprocessing.util.Finalize(None, shutil.rmtree, (directory, True), exitpriority=-101)


SPREAD = ("tests/examples/test_examples.py", "tests/docs/test_code_blocks.py")
"""Long files whose tests share nothing."""

FIRST = (
    "tests/tools/test_attacks.py",
    "tests/test_ray.py",
    "tests/examples/test_elastic_digits.py",
    "tests/tools/test_faults.py",
    *SPREAD,
)
"""Few tests that take minutes. At the end, one process would have them, and the others nothing to do."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Runs the tests of a file one after another in one process; those of ``SPREAD`` where there is room."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return nodeid if file in SPREAD else file

    config.option.loadscopereorder = False  # by the number of their tests
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {file: number for number, file in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(FIRST)))


def pytest_collection_finish(session: pytest.Session) -> None:
    processes.preload()  # tools.bench has asked for its own modules
    _spare_modules()


_spared = 0


def _spare_modules() -> None:
    """Have the garbage collector pass over modules from now on, for they stay to the end anyway.

    Those of torch are a million objects: without them a collection takes a millisecond instead of a hundred.
    """
    global _spared
    if len(sys.modules) > _spared + 50:
        _spared = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After the test: no thread, child process, ZeroMQ socket or context, or file that it started or made."""
    watcher = Watcher()
    yield
    _spare_modules()
    left = watcher.what_is_left()
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def every_outcome_set(request: pytest.FixtureRequest, nothing_left_behind: None) -> Iterator[None]:
    """Every ``Promise`` made during the test is set at its end, unless marked ``open_outcomes``."""
    with Bomb() as bomb:
        yield
        if request.node.get_closest_marker("open_outcomes") is None:
            open_ones = bomb.open_outcomes()
            if open_ones:
                pytest.fail("outcomes never set, made at: " + "; ".join(open_ones), pytrace=False)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this test, already given to ``random`` and torch; shown where the test fails.

    It follows from the test's name and from ``ZMQGRAD_TEST_SEED`` (0 if unset).
    """
    value = zlib.crc32(f"{os.environ.get(SEED_VARIABLE, '0')} {request.node.nodeid}".encode())
    request.node.stash[_seed] = value
    random.seed(value)
    torch = sys.modules.get("torch")
    if torch is not None:  # of the CPU alone: torch.manual_seed keeps a stack trace for each kind of device
        torch.default_generator.manual_seed(value)
    return value


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test may register schemes of rendezvous and backends: they are gone after it."""
    for module, registry in REGISTRIES:
        imported = importlib.import_module(module)
        monkeypatch.setattr(imported, registry, dict(getattr(imported, registry)))
    backends = importlib.import_module("zmqgrad.rpc.backend_registry")
    monkeypatch.setattr(backends, "BackendType", backends.BackendType)


@pytest.fixture
def rng(seed: int) -> random.Random:
    """A source of random numbers of the test's own."""
    return random.Random(seed)


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands still until told to advance."""
    return ManualClock()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.failed and _seed in item.stash:
        run = os.environ.get(SEED_VARIABLE, "0")
        report.sections.append(("seed", f"{item.stash[_seed]} (of {SEED_VARIABLE}={run})"))
    return report
