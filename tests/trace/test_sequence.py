"""Sequence diagrams: which messages they have, in which order, and how they are drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trace.test_job import CALL, RESULT, SECOND, Writer, call, two
from zmqgrad.__main__ import main
from zmqgrad.errors import TraceError
from zmqgrad.trace import Job, events
from zmqgrad.trace.drawing import as_mermaid, as_text
from zmqgrad.trace.events import tag_of
from zmqgrad.trace.sequence import Diagram, Step, call_diagram, context_diagram, round_diagram
from zmqgrad.wire.ids import join_id
from zmqgrad.wire.messages import MessageType


def run(*arguments: object) -> int:
    return main(["trace", "show", *map(str, arguments)])


def nested(directory: Path) -> None:
    """w0 calls w1, whose function calls w2; another thread of w1 calls w2 meanwhile."""
    a, b, c = (Writer(directory, rank, clock="boot") for rank in range(3))
    for writer in (a, b, c):
        writer.knows(*(other for other in (a, b, c) if other is not writer))
    a.message(True, 1000, CALL, 1, 5, 1)
    b.message(False, 2000, CALL, 0, 5, 1)
    b.add(events.RequestStarted, 3000, 0, 5)
    b.message(True, 4000, CALL, 2, 6, 1)
    b.rows.append((tag_of(events.MessageSent), 4500, 2, 1, CALL, 2, 7, 0, 1, 10, 0))
    c.message(False, 5000, CALL, 1, 6, 1)
    c.message(False, 5500, CALL, 1, 7, 1)
    c.message(True, 6000, RESULT, 1, 6)
    b.message(False, 7000, RESULT, 2, 6)
    b.message(True, 8000, RESULT, 0, 5)
    b.add(events.RequestFinished, 8500, 0, 5, False)
    a.message(False, 9000, RESULT, 1, 5)
    for writer in (a, b, c):
        writer.write()


def arrows(diagram: Diagram) -> list[tuple[int, str, str, bool]]:
    return [(step.time, step.source, step.target, step.reply) for step in diagram.steps if step.target]


def test_a_call_is_shown_with_what_it_caused_and_nothing_else(tmp_path: Path) -> None:
    nested(tmp_path)
    diagram = call_diagram(Job(tmp_path), 5)
    assert diagram.lanes == ["w0", "w1", "w2"]
    assert arrows(diagram) == [
        (1000, "w0", "w1", False),
        (4000, "w1", "w2", False),
        (6000, "w2", "w1", True),
        (8000, "w1", "w0", True),
    ]
    assert notes(diagram) == [("w1", "queued", 1000), ("w1", "ran m:f", 5500)]


def test_without_a_choice_it_is_the_slowest_call(tmp_path: Path) -> None:
    nested(tmp_path)
    assert call_diagram(Job(tmp_path)).title == "call #0.5 m:f"
    assert call_diagram(Job(tmp_path), worker="w1").title == "call #0.6 m:f"


def test_calls_of_one_number_are_told_apart_by_their_worker(tmp_path: Path) -> None:
    a, b = two(tmp_path, 1, skew=0, clock="boot")
    call(b, a, 1, SECOND)
    a.write()
    b.write()
    with pytest.raises(TraceError, match=r"several workers made a call #0\.1, choose one: w0, w1"):
        call_diagram(Job(tmp_path), 1)
    assert arrows(call_diagram(Job(tmp_path), 1, "w1"))[0][1:3] == ("w1", "w0")
    with pytest.raises(TraceError, match=r"does not have call #0\.9 of w1"):
        call_diagram(Job(tmp_path), 9, "w1")


def test_a_call_without_reply_is_not_shown_to_end(tmp_path: Path) -> None:
    a, b = two(tmp_path, 0, skew=0, clock="boot")
    call(a, b, 3, 0, reply=False)
    a.write()
    b.write()
    diagram = call_diagram(Job(tmp_path), 3)
    assert [(s.text, s.nanoseconds) for s in diagram.steps][-1] == ("runs m:f", None)
    with pytest.raises(TraceError, match="a call with a reply"):
        call_diagram(Job(tmp_path))


def test_a_context_has_its_passes_and_groups(tmp_path: Path) -> None:
    a, b = Writer(tmp_path, 0, clock="boot"), Writer(tmp_path, 1, clock="boot")
    a.knows(b)
    b.knows(a)
    backward = int(MessageType.BACKWARD_AUTOGRAD_REQ)
    a.add(events.PassStarted, 1, 40, 2)
    a.add(events.MessageSent, 2, backward, 1, 9, 40, 0, 50, 0)
    b.add(events.MessageReceived, 3, backward, 0, 9, 40, 0, 50, 0)
    b.add(events.GroupExecuted, 4, 40, 2, 100, (7,), ((8, 0),))
    a.add(events.PassFinished, 200, 40, 2, True)
    a.add(events.PassStarted, 300, 41, 3)
    a.write()
    b.write()
    diagram = context_diagram(Job(tmp_path), 40)
    assert [(s.time, s.source, s.target) for s in diagram.steps] == [
        (1, "w0", ""),
        (2, "w0", "w1"),
        (4, "w1", ""),
        (200, "w0", ""),
    ]
    assert diagram.steps[-1].failed
    with pytest.raises(TraceError, match=r"no autograd context 0\.99"):
        context_diagram(Job(tmp_path), 99)


REQUEST, CONTEXT, PASS = int(MessageType.FORWARD_AUTOGRAD_REQ), 4, 9
USED, RETURNED, UNUSED = join_id(0, 11), join_id(1, 12), join_id(1, 13)
MS = 1_000_000


def backward(directory: Path, *, finished: bool = True) -> None:
    """w0 calls w1 with a tensor and gets one; another result is never used. Then a backward pass."""
    a, b = Writer(directory, 0, clock="boot"), Writer(directory, 1, clock="boot")
    a.knows(b)
    b.knows(a)
    for worker in (a, b):
        worker.add(events.ContextCreated, SECOND, CONTEXT)
    a.add(events.MessageSent, SECOND, REQUEST, 1, 5, CONTEXT, 1, 100, 0)
    a.add(events.SendRecorded, SECOND, CONTEXT, USED, 1, 5, False)
    a.add(events.MessageSent, SECOND, REQUEST, 1, 6, CONTEXT, 0, 100, 0)
    a.add(events.RequestDescribed, SECOND, 6, "<lambda>", "")
    b.add(events.SendRecorded, SECOND + MS, CONTEXT, RETURNED, 0, 5, True)
    b.add(events.SendRecorded, SECOND + 2 * MS, CONTEXT, UNUSED, 0, 6, True)
    a.add(events.PassStarted, 2 * SECOND, CONTEXT, PASS)
    a.add(events.GroupExecuted, 2 * SECOND + MS, CONTEXT, PASS, MS, (), ((RETURNED, 1),))
    b.add(events.GroupExecuted, 2 * SECOND + 3 * MS, CONTEXT, PASS, MS, (RETURNED,), ((USED, 0),))
    a.add(events.GroupExecuted, 2 * SECOND + 5 * MS, CONTEXT, PASS, MS, (USED,), ())
    if finished:
        a.add(events.PassFinished, 2 * SECOND + 7 * MS, CONTEXT, PASS, False)
    a.write()
    b.write()


def notes(diagram: Diagram) -> list[tuple[str, str, int | None]]:
    return [(step.source, step.text, step.nanoseconds) for step in diagram.steps if not step.target]


def test_the_groups_of_a_pass_have_their_order_their_causes_and_where_their_gradients_went(
    tmp_path: Path,
) -> None:
    backward(tmp_path)
    diagram = context_diagram(Job(tmp_path))
    assert diagram.title == ("autograd context 0.4: 2 workers, 3 sends, 1 unused: 1.13 (result of <lambda>)")
    assert notes(diagram) == [
        ("w0", "backward pass 0.9 begins", None),
        ("w0", "ran group 1: roots -> send 1.12 of w1", MS),
        ("w1", "ran group 2: send 1.12 -> send 0.11 of w0", MS),
        ("w0", "ran group 3: send 0.11 -> leaves", MS),
        ("w0", "backward pass 0.9 ends", 7 * MS),
    ]
    assert diagram.steps[0].text == "FORWARD_AUTOGRAD_REQ m:f #0.5, send 0.11"


def test_no_send_is_unused_while_no_pass_has_finished(tmp_path: Path) -> None:
    backward(tmp_path, finished=False)
    diagram = context_diagram(Job(tmp_path), CONTEXT)
    assert "unused" not in diagram.title
    assert "backward pass 0.9 ends" not in [text for _, text, _ in notes(diagram)]


def test_what_a_lost_log_knew_is_named_unknown(tmp_path: Path) -> None:
    backward(tmp_path)
    (tmp_path / "w1-1001.zgtrace").unlink()
    diagram = context_diagram(Job(tmp_path))
    assert diagram.lanes == ["w0", "rank 1"]
    assert notes(diagram)[1][1] == "ran group 1: roots -> send 1.12 of unknown"


def test_contexts_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backward(tmp_path)
    assert run(tmp_path, "--list", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {
        "context": "0.4", "workers": 2, "sends": 3, "unused": 1, "passes": 1, "backward": 7 * MS,
    }  # fmt: skip
    assert run(tmp_path, "--list") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["0.4", "2", "3", "1", "1", "7.0", "ms"]
    assert run(tmp_path, "--context") == 0
    assert "1 unused" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        run("--context", tmp_path)
    assert "a directory comes first" in capsys.readouterr().err


def test_a_context_in_which_nothing_was_sent_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = Writer(tmp_path, 0, clock="boot")
    a.add(events.ContextCreated, SECOND, 7)
    a.write()
    assert run(tmp_path, "--context") == 0
    assert "autograd context 0.7: 1 workers, 0 sends" in capsys.readouterr().out


def test_a_job_without_contexts_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Writer(tmp_path, 0, clock="boot").write()
    assert run(tmp_path, "--context") == 1
    assert "used no autograd.context()" in capsys.readouterr().err


def test_a_round_has_the_actions_of_its_nodes(tmp_path: Path) -> None:
    a = Writer(tmp_path, 0)
    a.add(events.RendezvousStep, 5, 3, "ADD_TO_PARTICIPANTS", 2, 0)
    a.add(events.RendezvousStep, 6, 4, "MARK_COMPLETE", 2, 0)
    a.write()
    diagram = round_diagram(Job(tmp_path), 3)
    assert [step.text for step in diagram.steps] == ["ADD_TO_PARTICIPANTS (2 participants, 0 waiting)"]
    with pytest.raises(TraceError, match="no round 7"):
        round_diagram(Job(tmp_path), 7)


# ---- drawing -----------------------------------------------------------------------------------------------

DIAGRAM = Diagram(
    "a <b>",
    ["w0", "w1; x"],
    [
        Step(0, "w0", "w1; x", "CALL f #1", 10_000),
        Step(5, "w1; x", "", "ran f", 3_000, failed=True),
        Step(9, "w1; x", "w0", "RESULT #1", None, reply=True),
    ],
)


def test_text_has_an_arrow_per_message() -> None:
    title, heads, *lines = as_text(DIAGRAM, 100)
    assert title == "a <b>"
    assert heads.split() == ["w0", "w1;", "x"]
    assert "-- CALL f #1 10.0 us --" in lines[0]
    assert lines[0].rstrip("|").endswith(">")
    assert "* ran f 3.0 us FAILED" in lines[1]
    assert "<.." in lines[2]
    assert "RESULT #1 (not received)" in lines[2]


def test_lines_keep_to_the_width_if_their_texts_can() -> None:
    steps = [
        Step(0, "w0", "w1", "a call of a function", 10_000),
        Step(5, "w1", "", "a note that is rather long", 3_000),
    ]
    _, _, *lines = as_text(Diagram("t", ["w0", "w1"], steps), 59)
    assert max(map(len, lines)) <= 59
    assert lines[-1].endswith("a note that is rather long 3.0 us *")


def test_text_that_does_not_fit_stands_above_its_arrow() -> None:
    lines = list(as_text(DIAGRAM, 20))
    assert len(lines) == 2 + 2 + 1 + 2


def test_mermaid_escapes_what_would_end_a_statement() -> None:
    text = "\n".join(as_mermaid(DIAGRAM))
    assert text.startswith("sequenceDiagram\n")
    assert "participant p1 as w1#59; x" in text
    assert "p0->>p1: CALL f #35;1 10.0 us" in text
    assert "p1--xp0: RESULT" in text
    assert "Note over p1: ran f 3.0 us FAILED" in text


def test_the_command_prints_each_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nested(tmp_path)
    assert run(tmp_path, "--call", 5) == 0
    assert "call #0.5 m:f" in capsys.readouterr().out
    assert run(tmp_path, "--call", 5, "--mermaid") == 0
    assert capsys.readouterr().out.startswith("sequenceDiagram")
    assert run(tmp_path, "--call", 5, "--json", "--limit", 2) == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["steps"]) == 2
    assert "the last 4 steps are left out" in printed.err
    assert run(tmp_path, "--call", 77) == 1
