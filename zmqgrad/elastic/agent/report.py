"""The launcher's failure report, as text. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence

from zmqgrad.elastic.agent.consequences import lost_peer
from zmqgrad.elastic.agent.lifecycle import Result, describe_code, signal_name
from zmqgrad.elastic.agent.supervision import Outcome
from zmqgrad.elastic.agent.workers import Tail

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_QUOTED_LINES = 12
_MAX_SUMMARY = 300
_ON_WORKER = re.compile(r"On WorkerInfo\(id=\d+, name=(.*?)\)")
"""How the text of an exception of another worker begins, and the log of it there."""

_HINTS: dict[int, str] = {
    signal.SIGKILL: "the system may have run out of memory",
    signal.SIGSEGV: "PYTHONFAULTHANDLER=1 makes Python print the traceback",
    signal.SIGABRT: "PYTHONFAULTHANDLER=1 makes Python print the traceback",
    signal.SIGBUS: "PYTHONFAULTHANDLER=1 makes Python print the traceback; a full /dev/shm is a common cause",
}


def failure_report(outcome: Outcome, stderr_tail: Callable[[int], Tail]) -> list[str]:
    """The lines of the final report, with quoted output indented. Empty on success.

    Args:
        outcome: the supervisor's result.
        stderr_tail: returns the last lines that a worker wrote to stderr.
    """
    lines: list[str] = []
    if outcome.interrupted_by is not None:
        lines.append(f"stopped by {signal_name(outcome.interrupted_by)}")
    elif (failure := outcome.first_failure) is not None:
        tail = stderr_tail(failure.rank)
        lines.append(
            f"worker {failure.rank} failed first: {_describe_exit(failure.code)}{summary(tail.lines)}"
        )
        lines += _quote_stderr(failure.rank, tail)
        if (lost := lost_peer(tail.lines)) in outcome.succeeded:
            lines.append(
                f"worker {lost} had exited with 0 before: if others need it, let it call rpc.shutdown(), "
                f"which waits for them"
            )
        lines += _others(outcome)
    return lines + _abandoned(outcome)


def job_report(result: Result, stderr_tail: Callable[[int], Tail]) -> list[str]:
    """The lines of the final report of an agent; the last names the first fault. Empty on success.

    Args:
        result: see :class:`~zmqgrad.elastic.agent.lifecycle.Result`.
        stderr_tail: as for :func:`failure_report`.
    """
    last = [f"at fault first: {result.at_fault}; tried: {result.tried}"] if result.at_fault else []
    return _what_happened(result, stderr_tail) + last


def _what_happened(result: Result, stderr_tail: Callable[[int], Tail]) -> list[str]:
    if result.interrupted_by is not None:
        return [f"stopped by {signal_name(result.interrupted_by)}", *_abandoned(result.outcome)]
    if result.error is not None:
        return [str(result.error) or type(result.error).__name__]
    own = result.outcome.first_failure if result.outcome is not None else None
    failure = result.failure
    if failure is None or result.outcome is None or (own is not None and own.rank == failure.rank):
        return failure_report(result.outcome, stderr_tail) if result.outcome is not None else []
    lines = [
        f"worker {failure.rank} of node {failure.node_rank} failed first: {_describe_exit(failure.code)}"
        f"{summary(failure.lines)}"
    ]
    lines += [f"    {line}" for line in failure.lines]
    return lines + _others(result.outcome) + _abandoned(result.outcome)


def _others(outcome: Outcome) -> list[str]:
    """What became of the workers that still ran at the first failure."""
    lines = [f"worker {each.rank} failed later: {_describe_exit(each.code)}" for each in outcome.failed_later]
    failed = {each.rank for each in outcome.failed_later}
    ended = [rank for rank in outcome.ended if rank not in failed]
    return [*lines, f"{_workers(ended)} ended by the launcher"] if ended else lines


def _abandoned(outcome: Outcome | None) -> list[str]:
    if outcome is None or not outcome.given_up:
        return []
    return [f"{_workers(outcome.given_up)} still running: SIGKILL did not end them in time"]


def quoted(tail: Sequence[str]) -> list[str]:
    """The last traceback in the stderr of a worker, or its last lines."""
    return last_traceback(tail) or [line for line in tail if line.strip()][-_QUOTED_LINES:]


def last_traceback(lines: Sequence[str]) -> list[str]:
    """The last traceback in ``lines``, with its causes, up to the end; empty if there is none."""
    starts = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not starts:
        return []
    start = starts.pop()
    while starts and any(line in _CHAINED for line in lines[starts[-1] : start]):
        start = starts.pop()
    return list(lines[start:])


def _describe_exit(code: int) -> str:
    hint = _HINTS.get(-code)
    return describe_code(code) + (f" ({hint})" if hint else "")


def summary(lines: Sequence[str]) -> str:
    """The error of the last traceback, and the worker that raised it; empty if there is none."""
    chain = last_traceback(lines)
    last = ""
    for i, line in enumerate(chain):
        if line.startswith(_TRACEBACK):
            error = next((each for each in chain[i + 1 :] if not each.startswith(" ")), "")
            if error and (not last or lost_peer([error]) is None):  # a loss is the consequence of an error
                last = error
    if not last:
        return ""
    before = lines[: len(lines) - len(chain)]
    where = next((m[1] for each in before[:-4:-1] if (m := _ON_WORKER.search(each))), "")
    return f": {last[:_MAX_SUMMARY]}" + (f", on {where}" if where else "")


def _quote_stderr(rank: int, tail: Tail) -> list[str]:
    lines = quoted(tail.lines)
    if not lines:
        return [f"worker {rank} wrote nothing to stderr"]
    if tail.was_shown:
        return []
    return [f"the end of worker {rank}'s stderr:", *(f"    {line}" for line in lines)]


def _workers(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"worker {ranks[0]} was"
    *most, last = (str(rank) for rank in ranks)
    return f"workers {', '.join(most)} and {last} were"
