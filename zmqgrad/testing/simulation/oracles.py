"""What must be true after each run of the drawn programs, whatever happens."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import Any

from zmqgrad.testing.simulation.linearizability import Operation, explain

GONE = ("PeerLostError", "UnknownWorkerError", "NotInitializedError", "was shut down")
"""What tells that a worker has left."""

MEET_SECONDS = 5.0
"""How long two nodes wait at the same time, at most, until they take part in a round."""

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


def check_members(run: Any, copies: list[Any]) -> None:
    """As :func:`check`, of programs of dynamic groups.

    Args:
        run: as there.
        copies: :mod:`~zmqgrad.testing.simulation.dynamic_programs` as each process has it.

    Raises:
        AssertionError: if something is not true.
    """
    if run.losses and 0 not in run.killed:  # it serves the store
        raise AssertionError(f"worker 0 lives, but these were raised: {run.losses}")
    lives = [life for copy in copies for life in copy.lives]
    killed = {f"worker{rank}" for rank in run.killed}
    if 2 in run.stopped:  # worker 1 may have lost it, and worker 2 cannot refute that
        killed |= {"worker1", "worker2"}
    _check_ran_once([token for copy in copies for token in copy.executed])
    _check_store([each for copy in copies for each in copy.operations])
    for rank, copy in enumerate(copies):
        if copy.unresolved:
            raise AssertionError(f"nothing was learned of these calls: {', '.join(copy.unresolved)}")
        for failure in copy.failures if rank not in run.killed and 0 not in run.killed else ():
            _check_failure(failure, lives, killed, run.faults.partitions > 0)
        for life in copy.lives:
            _check_events(life, lives, killed)
            if life.error and 0 not in run.killed:
                _check_leaving(life, lives)


def check_rounds(run: Any, copies: list[Any]) -> None:
    """As :func:`check`, of :mod:`~zmqgrad.testing.simulation.elastic_programs`.

    One round has one state, its ranks are unique (the program checks it), and nobody waits for ever.
    """
    rounds: defaultdict[str, list[Any]] = defaultdict(list)
    for copy in copies:
        for stay in copy.stays:
            if stay.store:
                rounds[stay.store].append(stay)
            if stay.error and not run.faults.loses_workers:
                _check_stay(stay, copies)
    for number, stays in rounds.items():
        if len({stay.size for stay in stays}) > 1 or not all(0 <= stay.rank < stay.size for stay in stays):
            raise AssertionError(f"the nodes of round {number} do not agree: {stays}")


def _check_stay(stay: Any, copies: list[Any]) -> None:
    """Nothing fails, except that whoever is alone waits in vain for a round of two."""
    if stay.least > 1 and math.isinf(stay.joined) and "RendezvousTimeoutError" in stay.error:
        others = [
            each for copy in copies for each in copy.stays if each is not stay and math.isinf(each.joined)
        ]
        if all(min(each.ended, stay.ended) - max(each.began, stay.began) < MEET_SECONDS for each in others):
            return
    raise AssertionError(f"a node could not take part, or not to the end: {stay}")


def _check_failure(failure: Any, lives: list[Any], killed: set[str], cut: bool) -> None:
    """A step fails only if its worker or one that the error names leaves or has left, or is out of reach."""
    own = failure.life
    if own.name in killed:
        return
    gone = {life.name for life in lives if life.leaving <= failure.ended} | killed
    gone |= {life.name for life in lives if cut and life.host not in (own.host, lives[0].host)}
    named = set(re.findall(r"worker\d+", failure.error)) - {own.name}
    told = any(kind in failure.error for kind in GONE)
    # Another worker may call by the name what this one was before: it cannot know yet that it has come back.
    earlier = {f"{own.name} (worker {life.number})" for life in lives if life.ended <= own.began}
    named_before = any(each in failure.error for each in earlier)
    if own.leaving > failure.ended and not (told and (named & gone or named_before)):
        raise AssertionError(f"{own.name}: {failure.token} failed at {failure.ended}: {failure.error}")
    if "evicted" in failure.error:
        raise AssertionError(f"{own.name} was evicted, though others could reach it: {failure.error}")


def _check_leaving(life: Any, lives: list[Any]) -> None:
    """Leaving fails only if this worker was evicted: it knows that, or the group has ended without it."""
    first = next(each for each in lives if each.name == "worker0")
    told = any(kind == "loss" and name == first.name for kind, _, name, _ in life.events)
    if not told and first.leaving > life.ended:
        raise AssertionError(f"{life.name} could not leave at {life.ended}: {life.error}")


def _check_events(observer: Any, lives: list[Any], killed: set[str]) -> None:
    """Each worker is told of each other one at most once that it joins, and then once that it is lost."""
    holders: dict[str, int] = {}
    known = {life.number: life for life in lives}
    told = [(kind, number) for kind, number, *_ in observer.events]
    if len(set(told)) < len(told):
        raise AssertionError(f"{observer.name} was told twice: {observer.events}")
    for kind, number, name, when in observer.events:
        life = known.get(number)
        if (life is not None and life.name != name) or (kind == "join" and name in holders):
            raise AssertionError(f"{observer.name} was told of the wrong worker: {observer.events}")
        if kind == "join":
            holders[name] = number
        elif holders.pop(name, number) != number or ("join", number) in told[told.index((kind, number)) :]:
            raise AssertionError(f"{observer.name} was told of the wrong loss: {observer.events}")
        elif (
            life is not None
            and when < life.leaving
            and name not in killed
            and observer.host == lives[0].host
            and not _is_lost_to_others(observer, lives, when)
        ):
            raise AssertionError(f"{observer.name} was told of the loss of {name}, which had not left")


def _is_lost_to_others(observer: Any, lives: list[Any], when: float) -> bool:
    """Whether others have lost ``observer`` before, which is told of it by each of them."""
    return any(
        kind == "loss" and number == observer.number and told < when
        for life in lives
        for kind, number, _, told in life.events
    )


def _check_ran_once(ran: list[str]) -> None:
    twice = sorted({token for token in ran if ran.count(token) > 1})
    if twice:
        raise AssertionError(f"these calls ran more than once: {', '.join(twice)}")


def _check_calls(run: Any, ran: list[str]) -> None:
    _check_ran_once(ran)
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
