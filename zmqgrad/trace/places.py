"""Where a request is that was sent and has no reply yet, in words. Pure."""

from __future__ import annotations

from zmqgrad.trace.labels import actor_label, show_time
from zmqgrad.trace.model import Actor, Call
from zmqgrad.trace.waits import Wait, Waits


def target_label(wait: Wait) -> str:
    """The name of the worker that ``wait`` waits for; its rank if it left no log."""
    return actor_label(wait.target) if wait.target is not None else f"worker {wait.rank}"


def thread_label(wait: Wait) -> str:
    """The name of the thread that waits."""
    return wait.waiter.process.thread_name(wait.thread)


def locate(wait: Wait, waits: Waits) -> str:
    """Where the request is that ``wait`` waits for, in words."""
    now, call, target = waits.now if wait.until is None else wait.until, wait.call, wait.target
    if call is None:
        return "no request of it is under way" if wait.context else "its request was not recorded"
    name = target_label(wait)
    thread = target.process.thread_name(call.thread) if target is not None else f"thread {call.thread}"
    text = place(call, now, name, thread, waits.queue_of(call))
    if call.reply is None:
        text += _why_not(target) if call.request.received is None else _end_of(target)
    return text


def place(call: Call, now: int, name: str, thread: str, queue: tuple[int, int]) -> str:
    """Where the request of ``call`` is (or was) at time ``now``, in words.

    Args:
        name: of the worker that it was sent to.
        thread: the name of ``call.thread``.
        queue: how many requests are queued before it there, and how many run.
    """
    reply, received = call.reply, _until(now, call.request.received)
    replied = _until(now, reply.sent) if reply is not None else None
    started, finished = _until(now, call.started), _until(now, call.finished)
    if reply is not None and _until(now, reply.received) is not None:
        return "its reply has arrived"
    if replied is not None:
        return f"{name} replied {show_time(now - replied)} before; the reply has not arrived"
    late = (
        f"; its reply came {show_time(reply.sent - now)} too late" if reply is not None and reply.sent else ""
    )
    if received is None:
        return f"{name} has not received it" + late
    if finished is not None:
        return (
            f"{name} has run it for {show_time(finished - (started or finished))}, and has not replied" + late
        )
    if started is not None:
        return f"{name} has run it for {show_time(now - started)}, in thread {thread}" + late
    return (
        f"{name} received it {show_time(now - received)} before, and has not begun it: "
        f"{queue[0]} are queued before it, {queue[1]} run" + late
    )


def _until(now: int, time: int | None) -> int | None:
    """``time`` if it has come."""
    return time if time is not None and time <= now else None


def _why_not(target: Actor | None) -> str:
    if target is None:
        return ", or has no log here"
    return _end_of(target) or ", as far as its log shows"


def _end_of(target: Actor | None) -> str:
    return ", and has ended since" if target is not None and target.stopped is not None else ""
