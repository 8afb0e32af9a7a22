"""The fault table: the part that CI runs, and what its pure modules promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.faults.faults import FAULTS
from tools.faults.judging import Promise, judge
from tools.faults.model import BEFORE_SENDING, Cell, Effect, History, Moment, Step, Verdict
from tools.faults.plan import all_cells, choose, quick_cells
from tools.faults.results import Results
from tools.faults.roles import ROLES

QUICK_SECONDS = 400
"""Limit of the quick part, which takes less than 180 s where nothing else runs."""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(QUICK_SECONDS + 10)
def test_the_quick_part_keeps_every_promise(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.faults", "--quick", "--jobs", "3", "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=QUICK_SECONDS)
    results = json.loads((tmp_path / "results.json").read_text())
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(results) == len(quick_cells())
    assert sum(entry["verdict"] == "kept" for entry in results.values()) > len(results) / 2


# ---- judging ---------------------------------------------------------------------------------------------


def step(began: float, error: str = "", *, needs_victim: bool = True, library_error: bool = True) -> Step:
    return Step("w0", 1, needs_victim, began, began + 0.5, error, library_error)


DELAY = Promise(Effect.DELAY, "P1")
LOSS = Promise(Effect.LOSS, "P2", notice_seconds=3.0)
REFUSAL = Promise(Effect.REFUSAL, "P3")


def over(*steps: Step) -> History:
    """Struck at 10, over at 20."""
    return History(struck=10.0, over=20.0, steps=list(steps))


@pytest.mark.parametrize(
    ("promise", "history", "broken"),
    [
        (DELAY, over(step(9), step(25)), ""),
        (DELAY, over(step(9), step(15)), "no step succeeded after the fault"),
        (DELAY, over(step(15, "PeerLostError: x"), step(25)), "PeerLostError"),
        (REFUSAL, over(step(15, "StoreError: x"), step(25)), ""),
        (REFUSAL, over(step(15, "OSError: x", library_error=False), step(25)), "OSError"),
        (REFUSAL, over(step(9), step(30, "StoreError: x"), step(35)), "StoreError"),
        (LOSS, over(step(11, "PeerLostError: x")), ""),
        (LOSS, over(step(15.6, "PeerLostError: x")), "P2: noticed after 6.1 s"),
        (LOSS, over(step(11)), "P2: nobody noticed"),
        (LOSS, over(step(8, "PeerLostError: before"), step(11, "PeerLostError: x")), "before"),
        (LOSS, over(step(11, "PeerLostError: x", needs_victim=False)), "step 1: PeerLostError"),
    ],
)
def test_what_is_a_broken_promise(promise: Promise, history: History, broken: str) -> None:
    verdict = judge(promise, history)
    assert verdict.word == ("broken" if broken else "kept")
    assert broken in "; ".join(verdict.broken)


def test_a_call_that_ran_twice_is_a_broken_promise() -> None:
    history = over(step(25))
    history.runs.update({1: 1, 2: 2})
    assert judge(DELAY, history).broken == ["P1: call 2 ran 2 times"]


def test_times_to_notice_and_to_recover() -> None:
    verdict = judge(LOSS, over(step(12, "PeerLostError: x"), step(21)))
    assert (verdict.notice_seconds, verdict.recovery_seconds) == (2.5, 1.5)


def test_a_moment_that_did_not_occur_is_no_evidence() -> None:
    assert judge(LOSS, History()).word == "not reached"


# ---- cells and results -----------------------------------------------------------------------------------


@pytest.mark.slow  # it finds out what the network of this machine can do
def test_each_role_and_each_feasible_fault_has_cells_of_its_own() -> None:
    cells = all_cells(lambda role: [Moment(BEFORE_SENDING, "ACK")], every=True)
    assert {cell.role for cell in cells} == set(ROLES)
    assert {cell.fault for cell in cells} <= set(FAULTS)
    assert len({cell.key for cell in cells}) == len(cells)
    assert {cell.key for cell in quick_cells()} <= {cell.key for cell in cells}


def test_patterns_choose_cells() -> None:
    cells = [Cell("caller", "SIGKILL"), Cell("callee", "SIGKILL"), Cell("callee", "reset")]
    assert choose(cells, "callee*, * | SIGKILL | *") == cells
    assert choose(cells, "callee | r*") == cells[2:]


def test_results_are_kept_for_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    cell, moment = Cell("caller", "none"), Moment(BEFORE_SENDING, "CALL")
    Results(path).add(cell, Verdict("promised", "seen", []), History(moments={moment}))
    again = Results(path)
    assert cell.key in again
    assert again.moments("caller") == [moment]
    assert again.by_key[cell.key]["verdict"] == "kept"
