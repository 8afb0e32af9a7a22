"""The benchmark of elastic rendezvous and launchers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import elastic, elastic_launchers, elastic_nodes
from tools.bench.processes import PieceFailed

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_both_sides_meet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "elastic.json"
    assert elastic.main(["-k", "rendezvous_2", "-r", "1", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert all(seconds[0] > 0 for seconds in row["seconds"].values())
    assert row["ratio"] > 0
    assert "rendezvous_2" in capsys.readouterr().out


def test_a_restart_is_measured() -> None:
    assert elastic_launchers.restart("torchrun-zmqgrad") > 0


def test_a_launcher_that_fails_shows_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_launchers, "LIMIT_SECONDS", 10.0)
    monkeypatch.setitem(elastic_launchers.LAUNCHERS, "broken", ("sh", "-c", "echo no such launcher"))
    with pytest.raises(PieceFailed, match="no such launcher"):
        elastic_launchers.restart("broken")


def test_traffic_of_keep_alives_is_counted() -> None:
    """Each node renews its heartbeat every five seconds."""
    found = elastic_nodes.measure(3, 6.0)
    assert found["seconds until all know the round"] > 0
    assert found["bytes per second"] > 100
    assert found["notifications per second"] < 1, "heartbeats wake no other node"
