"""Compares what happened in a cell with what is promised. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tools.faults.model import Effect, History, Step, Verdict

SLACK_SECONDS = 3.0
"""Added to the limits of detection: the machine that runs the table is small and busy."""


@dataclass(frozen=True)
class Promise:
    """What holds for a cell.

    Args:
        effect: on the steps.
        notice_seconds: limit until the loss is noticed; None: nobody need notice.
        guarantees: the numbers of docs/guarantees.md.
        restarts: the victim is started again, and steps succeed from then on.
        exactly_once: whether the runs of numbered functions are counted (P1).
    """

    effect: Effect
    guarantees: str
    notice_seconds: float | None = None
    restarts: bool = False

    def __str__(self) -> str:
        text = f"{self.guarantees}: {self.effect.value}"
        if self.notice_seconds is not None:
            text += f" (within {self.notice_seconds:g} s)"
        return text


def judge(promise: Promise, history: History) -> Verdict:
    """The verdict on one cell."""
    if history.struck is None:
        return Verdict(str(promise), "the moment did not occur", history.problems, reached=False)
    notice, recovery = _notice(promise, history), _recovery(history)
    broken = [*history.problems, *_broken_steps(promise, history), *_repeated(history)]
    if promise.notice_seconds is not None:
        limit = promise.notice_seconds + SLACK_SECONDS
        if notice is None:
            broken.append("P2: nobody noticed the loss")
        elif notice > limit:
            broken.append(f"P2: noticed after {notice:.1f} s, allowed were {limit:g} s")
    if (promise.effect is not Effect.LOSS or promise.restarts) and recovery is None:
        broken.append("no step succeeded after the fault")
    return Verdict(str(promise), _seen(history), broken, notice, recovery)


def _notice(promise: Promise, history: History) -> float | None:
    """Until a survivor learned of it: by an error, or by the callback for losses."""
    assert history.struck is not None
    times = [step.ended for step in history.steps if step.error and step.ended >= history.struck]
    times += [time for time, _, _, why in history.lost if time >= history.struck and "left" not in why]
    return min(times) - history.struck if times and promise.effect is not Effect.DELAY else None


def _recovery(history: History) -> float | None:
    """From the end of the fault (or the restart) to the end of the first step that began afterwards."""
    since = history.restarted or history.over
    if since is None:
        return None
    after = [s.ended for s in history.steps if s.needs_victim and s.began >= since and not s.error]
    return min(after) - since if after else None


def _broken_steps(promise: Promise, history: History) -> list[str]:
    return [
        f"{step.worker}, step {step.number}: {step.error}"
        for step in history.steps
        if step.error and not _is_allowed(promise, history, step)
    ][:5]


def _is_allowed(promise: Promise, history: History, step: Step) -> bool:
    assert history.struck is not None
    during = step.ended >= history.struck and step.needs_victim and step.library_error
    if promise.effect is Effect.REFUSAL:
        return during and (history.over is None or step.began <= history.over + SLACK_SECONDS)
    return during and promise.effect is Effect.LOSS


def _repeated(history: History) -> list[str]:
    return [f"P1: call {number} ran {runs} times" for number, runs in history.runs.items() if runs > 1][:5]


def _seen(history: History) -> str:
    assert history.struck is not None
    after = [step for step in history.steps if step.ended >= history.struck]
    errors = Counter(step.error.split(":")[0] for step in after if step.error)
    parts = [f"{sum(not step.error for step in after)} steps succeeded"]
    parts += [f"{count} raised {name}" for name, count in errors.most_common(3)]
    if history.lost:
        parts.append(f"{history.lost[0][1]} lost {history.lost[0][2]} ({history.lost[0][3]})")
    return ", ".join(parts)
