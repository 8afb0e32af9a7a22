"""What a group costs as it grows: the traffic of members and store, and real workers in numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import scale
from tools.bench.scale_simulation import Simulation


def simulate(size: int, idle_seconds: float = 0.0) -> dict[str, dict[str, float]]:
    return Simulation(size, lambda text: None).run(idle_seconds)


def test_traffic_at_the_store_as_a_group_grows() -> None:
    small, large = simulate(5), simulate(20)
    # A join costs each member a notification, and only the new worker asks the store anything.
    assert small["one more joins"]["queries"] == large["one more joins"]["queries"]
    assert large["one more joins"]["notifications"] == 20 + 1
    # A loss costs each member a notification and a query for the reason; nobody reads the list again. A few
    # more queries evict the worker that crashed; the last of them may be counted in the next step.
    for step, members in (("one crashes", 20), ("one leaves", 19)):
        assert members <= large[step]["notifications"] <= members + 1
        assert members - 3 <= large[step]["queries"] <= members + 10


def test_nobody_is_monitored_by_all() -> None:
    idle = simulate(12, 2.5)["idle"]
    assert idle["queries"] == idle["notifications"] == 0
    # Each pings the next in the order of ids about once a second, and is pinged by the one before it.
    assert idle["heartbeats"] <= 13 * 4
    assert 0 < idle["heartbeats of the busiest worker"] <= 8


def test_the_command_simulates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for sizes in ("3", "2,4"):
        assert scale.main(["--simulate", sizes, "--idle", "0", "--out", str(tmp_path)]) == 0
    assert set(json.loads((tmp_path / "scale.json").read_text())["found"]["simulation"]) == {"2", "3", "4"}
    assert (tmp_path / "scale.png").stat().st_size > 0
    assert "one crashes" in capsys.readouterr().out


def test_the_slowest_worker_and_the_mean_of_all_else() -> None:
    workers = [{"joined seconds": 1.0, "all pss": 10.0}, {"joined seconds": 3.0, "all pss": 20.0}]
    assert scale.summary(workers) == {"joined seconds": 3.0, "all pss": 15.0}


@pytest.mark.parametrize("sizes", ["1", "2,0"])
def test_groups_that_are_none(sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scale.main(["--workers", sizes])
    assert "at least 2 workers" in capsys.readouterr().err


@pytest.mark.processes
def test_twenty_four_workers_call_one_another(tmp_path: Path) -> None:
    """Real processes: all start, each calls each, all leave; the figures do not depend on the machine."""
    assert scale.main(["--workers", "24", "--no-torch", "--idle", "0.1", "--out", str(tmp_path)]) == 0
    figures = json.loads((tmp_path / "scale.json").read_text())["found"]["zmqgrad"]["24"]
    assert figures["joined descriptors"] < 40, "a worker that was told of 23 others connects to none of them"
    assert figures["all descriptors"] < 40 + 8 * 23
    assert figures["all threads"] <= 24, "16 of the pool and a few more, but none for each peer"
