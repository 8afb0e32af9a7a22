"""What must be true after each run of the drawn programs, whatever happens."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from zmqgrad.testing.simulation.linearizability import Operation, explain

LAG_SECONDS = 1.0
"""How long a notification takes at most if nothing is lost. A client asks what it missed only after 5 s."""


def check(run: Any, copies: list[Any]) -> None:
    """Checks what must be true after each run.

    Args:
        run: a :class:`~zmqgrad.testing.simulation.campaign.Run`.
        copies: :mod:`~zmqgrad.testing.simulation.programs` as each process has it, killed ones included.

    Raises:
        AssertionError: if something is not.
    """
    if run.losses:
        raise AssertionError(f"the programs handle losses, but these were raised: {run.losses}")
    _check_calls(run, [token for copy in copies for token in copy.executed])
    _check_partings(run, [token for copy in copies for token in copy.parted])
    _check_meetings(copies)
    _check_store([each for copy in copies for each in copy.operations])
    lag = max((lag for copy in copies for lag in copy.lags), default=0.0)
    if lag > LAG_SECONDS and run.faults.loses_nothing:
        raise AssertionError(f"a watch showed the last state after {lag:.3f} s, though nothing was lost")


def _check_calls(run: Any, ran: list[str]) -> None:
    twice = sorted({token for token in ran if ran.count(token) > 1})
    if twice:
        raise AssertionError(f"these calls ran more than once: {', '.join(twice)}")
    for rank, found in run.values.items():
        for token, outcome in found.items():
            if outcome == "ok" and token.count(".") == 2 and token not in ran:
                raise AssertionError(f"worker{rank} got a result of call {token}, which nobody ran")
            if outcome != "ok" and not run.faults.loses_workers:
                raise AssertionError(f"worker{rank}: {token} failed, although nobody was lost: {outcome}")
            # Whoever waits for a lost worker is told of the loss. Only the last meeting may be given up.
            late = "RpcTimeoutError" in outcome and not token.startswith("shutdown")
            if late or "AssertionError" in outcome or "not ended" in outcome:
                raise AssertionError(f"worker{rank}: {token}: {outcome}")


def _check_partings(run: Any, replied: list[str]) -> None:
    """What a worker on the same host sent before it died has arrived, and comes before its loss."""
    for token in replied:
        caller = int(token.partition(".")[0])
        outcome = run.values.get(caller, {}).get(token, "ok")
        if outcome != "ok":
            raise AssertionError(f"worker{caller}: {token} failed, although its reply had arrived: {outcome}")


def _check_meetings(copies: list[Any]) -> None:
    """Nobody leaves a meeting before all have come, and each gets what these have brought to it."""
    for copy in copies:
        for number, (left, values) in copy.left.items():
            for name, value in values.items():
                entered = copies[int(name.removeprefix("worker"))].entered.get(number)
                if value != f"{number}.{name}" or entered is None or entered > left:
                    raise AssertionError(
                        f"of meeting {number}, {name} came at {entered}; its value is {value}"
                    )


def _check_store(found: list[list[Any]]) -> None:
    """The operations on each key are linearizable. So are those on all keys (Herlihy and Wing)."""
    histories: defaultdict[str, list[Operation]] = defaultdict(list)
    for key, operation in found:
        histories[key].append(operation)
    for key, history in histories.items():
        report = explain(history, None, _step)
        if report:
            raise AssertionError(f"key {key} is {report}")


def _step(value: str | None, call: tuple[Any, ...]) -> tuple[str | None, Any]:
    """The specification: returns the next value of a key, and the result of ``call``."""
    match call:
        case "set", after:
            return after, None
        case "append", more:
            return (value or "") + more, None
        case "compare_set", expected, desired:
            if (value or "") == expected:
                return desired, desired
            return value, expected if value is None else value
        case "add", amount:
            total = int(value or 0) + amount
            return str(total), total
        case ("delete",):
            return None, value is not None
        case ("check",):
            return value, value is not None
    return value, value
