"""What the views of `zmqgrad trace` accept, and what they say when nothing fits."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.trace.test_job import SECOND, Writer, two
from tests.trace.test_waits import finish, waits_for, workers
from zmqgrad.__main__ import main
from zmqgrad.runtime.clock import wall_ns
from zmqgrad.trace import Job
from zmqgrad.trace.events import ActorStarted, ClockSample, MessageSent, RendezvousStep, Role, tag_of
from zmqgrad.trace.follow import Follower
from zmqgrad.trace.live import is_live
from zmqgrad.trace.sequence import call_diagram
from zmqgrad.trace.tail import Filter, recorded
from zmqgrad.wire.ids import join_id, parse_id, show_id
from zmqgrad.wire.messages import MessageType


def run(view: str, directory: Path, *arguments: str) -> int:
    return main(["trace", view, str(directory), *arguments])


@pytest.mark.parametrize("value", [0, 7, join_id(3, 9), join_id(65535, 1)])
def test_ids_are_read_as_they_are_shown_and_as_numbers(value: int) -> None:
    assert parse_id(show_id(value)) == parse_id(str(value)) == value


@pytest.mark.parametrize("text", ["", "1.", ".2", "x", "1.2.3", "70000.1", "-1.2"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_id(text)


def test_a_call_is_found_by_the_id_that_tail_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two(tmp_path, 3, skew=0, clock="boot")
    assert run("tail", tmp_path, "--no-follow") == 0
    assert "#0.2 " in capsys.readouterr().out
    assert run("show", tmp_path, "--call", "0.2") == 0
    assert "call #0.2 m:f" in capsys.readouterr().out


def test_a_call_that_is_stuck_is_shown_before_the_slowest(tmp_path: Path) -> None:
    a, b = workers(tmp_path, 2)
    waits_for(a, b, 8, SECOND)
    waits_for(a, b, 9, 2 * SECOND)
    a.add(RendezvousStep, 31 * SECOND, 1, "later", 0, 0)
    finish(a, b)
    assert call_diagram(Job(tmp_path)).title == "call #0.8 m:f"


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        (Filter(types=["RES"]), 3),
        (Filter(types=["CALL"]), 3),
        (Filter(functions=["f"]), 6),
        (Filter(functions=["g"]), 0),
        (Filter(without=["ALL"]), 3),
        (Filter(workers=["w"]), 0),
    ],
)
def test_patterns_without_wildcards_match_parts_of_functions_and_types(
    tmp_path: Path, wanted: Filter, count: int
) -> None:
    two(tmp_path, 3, skew=0, clock="boot")
    assert sum(wanted.matches(line.message) for line in recorded(Job(tmp_path).messages())) == count


def test_a_filter_that_matches_nothing_says_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two(tmp_path, 3, skew=0, clock="boot")
    assert run("tail", tmp_path, "--no-follow", "--function", "nothing") == 0
    printed = capsys.readouterr()
    assert not printed.out
    assert "note: 0 of 6 messages match; functions: m:f; types: " in printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("stats", "--top", "-1"),
        ("top", "--interval", "0"),
        ("top", "--interval", "nan"),
        ("show", "--limit", "-2"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    two(tmp_path, 3, skew=0, clock="boot")
    with pytest.raises(SystemExit) as caught:
        run(arguments[0], tmp_path, *arguments[1:])
    assert caught.value.code == 2


def test_a_part_outside_of_the_job_makes_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two(tmp_path, 3, skew=0, clock="boot")
    assert run("report", tmp_path, "--since", "900") == 1
    assert "has nothing of the chosen time" in capsys.readouterr().err


def test_a_log_or_a_directory_above_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    below = tmp_path / "first"
    below.mkdir()
    a, _ = two(below, 3, skew=0, clock="boot")
    assert run("stats", a.path) == 1
    assert f"is a file: pass the directory of the logs, {below}" in capsys.readouterr().err
    assert run("stats", tmp_path) == 1
    assert f"but below it: pass {below}" in capsys.readouterr().err


def test_a_log_that_was_removed_ends_no_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two(tmp_path, 3, skew=0, clock="boot")
    with Follower(tmp_path) as follower:  # of another host
        follower.poll()
        assert follower.is_recording()
        a.path.unlink()
        b.path.rename(tmp_path / "kept")
        assert not follower.is_recording()
    (tmp_path / "kept").rename(b.path)
    a.path.symlink_to(tmp_path / "kept")
    assert run("stats", tmp_path) == 0
    assert f"left out: cannot open the trace log {a.path}" in capsys.readouterr().err


def test_a_process_of_another_host_is_live_after_its_clock_was_set(tmp_path: Path) -> None:
    behind = 3600 * SECOND
    a = Writer(tmp_path, 0, clock="of another host", wall=wall_ns() - behind)
    a.rows.append((tag_of(ClockSample), SECOND, wall_ns()))
    a.write()
    (process,) = Job(tmp_path).processes
    assert is_live(process)


def test_a_list_of_no_contexts_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two(tmp_path, 3, skew=0, clock="boot")
    assert run("show", tmp_path, "--list") == 0
    assert "has no autograd contexts" in capsys.readouterr().err


def with_store(directory: Path) -> None:
    """A call, and a query of a store by its client."""
    a, _ = two(directory, 1, skew=0, clock="boot")
    a.rows.append((tag_of(ActorStarted), 0, 2, Role.STORE_CLIENT, "", 0, 0, "", "tcp://h:1"))
    a.rows.append((tag_of(MessageSent), SECOND, 1, 2, int(MessageType.STORE_SET), 9, 1, 0, 1, 100, 0))
    a.write()


def test_messages_of_stores_are_shown_only_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_store(tmp_path)
    for view, form in (
        ("tail", "--no-follow"),
        ("top", "--once"),
        ("stats", "--last=9"),
        ("timeline", "-o-"),
    ):
        for asked in (False, True):
            assert run(view, tmp_path, form, *["--stores"] * asked) == 0
            assert ("STORE_SET" in capsys.readouterr().out) is asked, view
    assert run("tail", tmp_path, "--no-follow", "--type", "STORE_*") == 0
    assert "STORE_SET" in capsys.readouterr().out


def test_a_directory_without_a_view_shows_the_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two(tmp_path, 3, skew=0, clock="boot")
    for words in ([str(tmp_path)], ["--all", str(tmp_path)]):
        assert main(["trace", *words]) == 0
        assert ("did not shut down" in capsys.readouterr().out) is ("--all" in words)
    monkeypatch.setenv("ZMQGRAD_TRACE", str(tmp_path))
    assert main(["trace"]) == 0
    assert capsys.readouterr().out == "nothing stands out\n"


def test_functions_come_first_and_stores_only_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two(tmp_path, 3, skew=0, clock="boot")
    assert run("stats", tmp_path) == 0
    printed = capsys.readouterr().out
    assert printed.index("\nfunction ") < printed.index("\ntype ") < printed.index("\nfrom > to ")
    assert "transfer" in printed


def test_names_of_jobs_do_not_command_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Writer(tmp_path, 0, job="j\x1b[2J\x9b31m").write()
    assert run("stats", tmp_path, "--jobs") == 0
    assert run("stats", tmp_path, "--job", "other") == 1
    out, err = capsys.readouterr()
    assert out.startswith("j\\x1b[2J\\x9b31m  ")
    assert "it has j\\x1b[2J\\x9b31m\n" in err


def test_more_logs_are_read_than_a_process_may_open_at_first(tmp_path: Path) -> None:
    for rank in range(150):
        Writer(tmp_path, rank, clock="boot").write()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, before[1]))
    try:
        assert run("stats", tmp_path) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
