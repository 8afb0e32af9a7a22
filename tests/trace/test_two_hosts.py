"""A job of two hosts, each with its own clocks and its own directory, whose logs were copied into one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.trace.test_job import SECOND, Writer, call
from tests.trace.test_report import data_of
from zmqgrad.__main__ import main
from zmqgrad.trace import log
from zmqgrad.trace.events import ActorStopped, ClockSample, ProcessInfo, tag_of

CALLS = 50
MS = 1_000_000


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """The second host booted later, its wall clock is 3 s ahead, and is set back by 2 s in the middle."""
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    for host in hosts:
        host.mkdir()
    a, b = Writer(hosts[0], 0), Writer(hosts[1], 1, skew=-7 * SECOND)
    b.path.write_bytes(log.header(ProcessInfo("h1", 101, 53 * SECOND, -7 * SECOND)))
    a.knows(b)
    b.knows(a)
    for i in range(CALLS):
        call(*((a, b) if i % 2 else (b, a)), i + 1, i * 10 * MS)
        if i == CALLS // 2:
            b.rows.append((tag_of(ClockSample), b.skew + i * 10 * MS, 51 * SECOND + i * 10 * MS))
    for each in (a, b):
        each.rows.append((tag_of(ActorStopped), each.skew + SECOND, 1))
        each.write()
        shutil.copy(each.path, tmp_path)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["trace", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_stats_have_true_latencies_and_say_how_well_the_clocks_agree(
    merged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = json.loads(shown(capsys, "stats", merged, "--json"))
    (function,) = stats["functions"]
    assert function["calls"] == CALLS
    assert abs(function["transfer"]["p50"] - 20_000) <= 200, "10 us each way"
    bounds = sorted(process["clock_bound"] for process in stats["processes"])
    assert bounds[0] == 0
    assert 0 < bounds[1] < MS
    assert sum(process["clock_jumps"] for process in stats["processes"]) == 1


def test_tail_prints_both_hosts_in_order(merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in shown(capsys, "tail", merged, "--json").splitlines()]
    assert [line["id"] for line in lines] == [i + 1 for i in range(CALLS) for _ in range(2)]
    assert {line["source"] for line in lines} == {"w0", "w1"}
    assert all(0 <= line["received"] - line["sent"] < MS for line in lines)


def test_the_report_shows_both_hosts_on_one_clock(merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, "report", merged)
    head, columns = data_of((merged / "report.html").read_bytes())
    assert {actor["host"] for actor in head["actors"]} == {"h0", "h1"}
    assert len(columns["step"]) == 2 * CALLS
    assert max(columns["flight"]) * head["tick"] < MS
    assert "The wall clock of h1 was set 1 times" in [finding["title"] for finding in head["findings"]]
