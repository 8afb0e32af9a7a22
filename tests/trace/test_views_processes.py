"""The views of a job of real processes, with a backward pass, shared memory and a store."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.processes import run_processes
from tests.trace.test_trace_processes import train
from zmqgrad.__main__ import main
from zmqgrad.trace import launch_environment

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["trace", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_each_view_shows_what_the_job_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_processes(train, 2, env=launch_environment(tmp_path))

    stats = json.loads(shown(capsys, "stats", tmp_path, "--json"))
    functions = {row["name"]: row for row in stats["functions"]}
    served = functions["posix:getpid"]
    assert (served["calls"], served["failed"], served["unanswered"]) == (300, 0, 0)
    for part in ("whole", "transfer", "queued", "running"):
        assert served[part]["count"] == 300
        assert served[part]["p50"] <= served[part]["p99"] <= served[part]["max"]
    assert (stats["lost"], stats["dropped"]) == (0, 0)
    assert [p["name"] for p in stats["processes"]].count("worker0") == 1

    lines = shown(capsys, "tail", tmp_path, "--json", "--function", "posix:getpid").splitlines()
    messages = [json.loads(line) for line in lines]
    assert [m["type"] for m in messages].count("CALL") == 300
    replies = [m for m in messages if m["type"] == "RESULT"]
    assert len(replies) == 300
    assert all(m["sent"] <= m["received"] and m["latency"] > 0 for m in replies)

    tail = shown(capsys, "tail", tmp_path, "--json", "--type", "FORWARD_AUTOGRAD_REQ")
    context = json.loads(tail)["context"]
    diagram = json.loads(shown(capsys, "show", tmp_path, "--context", context, "--json"))
    assert diagram["lanes"] == ["worker0", "worker1"]
    texts = [step["text"] for step in diagram["steps"]]
    begins = next(i for i, text in enumerate(texts) if re.fullmatch(r"backward pass \S+ begins", text))
    ends = next(i for i, text in enumerate(texts) if re.fullmatch(r"backward pass \S+ ends", text))
    assert any("BACKWARD_AUTOGRAD_REQ" in text for text in texts[begins:ends])
    assert [step["time"] for step in diagram["steps"]] == sorted(step["time"] for step in diagram["steps"])
