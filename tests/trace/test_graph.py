"""The autograd graph of a context: sends, passes, groups, unused sends; as text, DOT and pictures."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from tests.trace.test_job import SECOND, Writer
from zmqgrad.__main__ import main
from zmqgrad.cli.trace_graph import draw
from zmqgrad.errors import TraceError
from zmqgrad.trace import Job
from zmqgrad.trace.events import Tag
from zmqgrad.trace.graph import Send, contexts, dot, graph, text
from zmqgrad.wire.ids import join_id
from zmqgrad.wire.messages import MessageType

REQUEST, CONTEXT, PASS = int(MessageType.FORWARD_AUTOGRAD_REQ), 4, 9
USED, RESULT, UNUSED = join_id(0, 11), join_id(1, 12), join_id(1, 13)
MS = 1_000_000


def record(directory: Path, *, finished: bool = True) -> None:
    """w0 calls w1 with a tensor and gets one; another result is never used. Then a backward pass."""
    a, b = Writer(directory, 0, clock="boot"), Writer(directory, 1, clock="boot")
    for worker in (a, b):
        worker.add(Tag.CONTEXT_CREATED, SECOND, CONTEXT)
    a.add(Tag.MESSAGE_SENT, SECOND, REQUEST, 1, 5, CONTEXT, 1, 100, 0)
    a.add(Tag.SEND_RECORDED, SECOND, CONTEXT, USED, 1, 5, False)
    a.add(Tag.MESSAGE_SENT, SECOND, REQUEST, 1, 6, CONTEXT, 0, 100, 0)
    a.add(Tag.REQUEST_DESCRIBED, SECOND, 6, "<lambda>", "")
    b.add(Tag.SEND_RECORDED, SECOND + MS, CONTEXT, RESULT, 0, 5, True)
    b.add(Tag.SEND_RECORDED, SECOND + 2 * MS, CONTEXT, UNUSED, 0, 6, True)
    a.add(Tag.PASS_STARTED, 2 * SECOND, CONTEXT, PASS)
    a.add(Tag.GROUP_EXECUTED, 2 * SECOND + MS, CONTEXT, PASS, MS, (), ((RESULT, 1),))
    b.add(Tag.GROUP_EXECUTED, 2 * SECOND + 3 * MS, CONTEXT, PASS, MS, (RESULT,), ((USED, 0),))
    a.add(Tag.GROUP_EXECUTED, 2 * SECOND + 5 * MS, CONTEXT, PASS, MS, (USED,), ())
    if finished:
        a.add(Tag.PASS_FINISHED, 2 * SECOND + 7 * MS, CONTEXT, PASS, False)
    a.write()
    b.write()


def test_sends_groups_and_passes_of_a_context(tmp_path: Path) -> None:
    record(tmp_path)
    found = graph(Job(tmp_path), CONTEXT)
    assert found.workers == ["w0", "w1"]
    assert found.sends == [
        Send(USED, "w0", "w1", SECOND, "m:f", False, [PASS]),
        Send(RESULT, "w1", "w0", SECOND + MS, "m:f", True, [PASS]),
        Send(UNUSED, "w1", "w0", SECOND + 2 * MS, "<lambda>", True, []),
    ]
    (only,) = found.passes
    assert (only.worker, only.nanoseconds, only.failed) == ("w0", 7 * MS, False)
    assert [(g.order, g.worker, g.sends, g.recvs) for g in only.groups] == [
        (1, "w0", (), (RESULT,)),
        (2, "w1", (RESULT,), (USED,)),
        (3, "w0", (USED,), ()),
    ]
    assert [send.id for send in found.unused()] == [UNUSED]
    (row,) = contexts(Job(tmp_path))
    assert (row.context, row.workers, row.sends, row.passes, row.unused) == (CONTEXT, 2, 3, 1, 1)


def test_the_text_tells_the_order_the_times_and_the_unused(tmp_path: Path) -> None:
    record(tmp_path)
    lines = list(text(graph(Job(tmp_path))))
    assert "│  ├─ 2. w1 at +3.00 ms for 1.00 ms: send 1.12 -> w0 (send 0.11)" in lines
    assert "│  └─ 3. w0 at +5.00 ms for 1.00 ms: send 0.11 -> leaves" in lines
    assert lines[-1] == "└─ 1 of 3 sends went unused: 1.13 (w1 -> w0, result of <lambda>)"


def test_no_send_is_unused_while_no_pass_has_finished(tmp_path: Path) -> None:
    record(tmp_path, finished=False)
    found = graph(Job(tmp_path))
    assert found.unused() == []
    assert any("not finished" in line for line in text(found))


def test_what_a_lost_log_knew_is_named_unknown(tmp_path: Path) -> None:
    record(tmp_path)
    (tmp_path / "w1-1001.zgtrace").unlink()
    found = graph(Job(tmp_path))
    assert found.workers == ["w0"]
    assert [send.target for send in found.sends] == ["worker 1"]
    assert any("unknown (send 1.12)" in line for line in text(found))


def test_dot_has_a_box_for_each_worker_and_an_edge_for_each_gradient(tmp_path: Path) -> None:
    record(tmp_path)
    drawn = dot(graph(Job(tmp_path)))
    assert drawn.count("subgraph cluster_") == 2
    for edge in (f"g1 -> s{RESULT}", f"s{RESULT} -> g2", f"g2 -> s{USED}", f"s{USED} -> g3"):
        assert edge in drawn
    assert drawn.count("style=dashed") == 1


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_pictures_without_graphviz(
    tmp_path: Path, suffix: str, start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("PATH", str(tmp_path))
    record(tmp_path)
    path = tmp_path / f"graph.{suffix}"
    draw(graph(Job(tmp_path)), path)
    assert path.read_bytes().startswith(start)
    if suffix == "svg":
        content = path.read_text()
        assert "<!-- send 1.13 to w0 unused: -->" in content
        assert "<!-- w1 -->" in content


def test_graphviz_draws_if_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "dot"
    program.write_text('#!/bin/sh\necho "$1" >"$3"\nexec cat >>"$3"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    record(tmp_path)
    found = graph(Job(tmp_path))
    draw(found, tmp_path / "graph.svg")
    assert (tmp_path / "graph.svg").read_text() == "-Tsvg\n" + dot(found)
    program.write_text("#!/bin/sh\ncat >/dev/null\necho syntax error >&2\nexit 1\n")
    with pytest.raises(TraceError, match=r"Graphviz cannot draw .*: syntax error"):
        draw(found, tmp_path / "graph.svg")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path)
    output = tmp_path / "graph.dot"
    assert main(["trace", "graph", str(tmp_path), "-o", str(output), "--number", "1"]) == 0
    assert "went unused" in capsys.readouterr().out
    assert output.read_text().startswith("digraph")
    assert main(["trace", "graph", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context"] == CONTEXT
    assert main(["trace", "graph", str(tmp_path), "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["unused"] == 1
    assert main(["trace", "graph", str(tmp_path), "--context", "5"]) == 1
    assert "no autograd context 0.5" in capsys.readouterr().err
    assert main(["trace", "graph", str(tmp_path), "-o", str(output), "--number", "2"]) == 2
    assert "has 1 backward passes" in capsys.readouterr().err


def test_a_job_without_contexts_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Writer(tmp_path, 0, clock="boot").write()
    assert main(["trace", "graph", str(tmp_path)]) == 1
    assert "used no autograd.context()" in capsys.readouterr().err
