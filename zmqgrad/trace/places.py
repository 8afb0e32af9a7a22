"""Where a request is that was sent and has no reply yet, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from zmqgrad.trace.labels import actor_label, show_time, worker_label
from zmqgrad.trace.model import Actor, Call
from zmqgrad.trace.stacks import innermost
from zmqgrad.trace.waits import Wait, Waits


def target_label(wait: Wait) -> str:
    """The name of the worker that ``wait`` waits for; its rank if it left no log."""
    return worker_label(wait.target, wait.rank)


def thread_label(wait: Wait) -> str:
    """The name of the thread that waits."""
    return wait.waiter.process.thread_name(wait.thread)


def locate(wait: Wait, waits: Waits) -> str:
    """Where the request is that ``wait`` waits for, in words."""
    now, call, target = waits.until(wait), wait.call, wait.target
    if call is None:
        return "no request of it is under way" if wait.context else "its request was not recorded"
    name = target_label(wait)
    thread = target.process.thread_name(call.thread) if target is not None else f"thread {call.thread}"
    text = place(call, now, name, thread, waits.queue_of(call))
    if call.reply is None and not waits.was_interrupted(wait):
        text += _why_not(target) if call.request.received is None else _end_of(target)
    return text


def headline(wait: Wait, waits: Waits) -> str:
    """Who waits (or waited) for what, and how long."""
    who, peer = f"{actor_label(wait.waiter)} ({thread_label(wait)})", target_label(wait)
    until = ", until the job was interrupted" if waits.was_interrupted(wait) else ""
    took = f"{'waits' if wait.until is None else 'waited'} {show_time(wait.duration(waits.now))}"
    if wait.context and wait.call is None:
        return f"{who} {took} for a backward pass{until}"
    if not wait.is_blocking:
        had = f"{'has' if wait.until is None else 'had'} no reply for {show_time(wait.duration(waits.now))}"
        return f"{actor_label(wait.waiter)} {had} from {peer}: {wait.function}"
    return f"{who} {took} for {peer}{until}: {wait.function}"


def describe(wait: Wait, waits: Waits) -> Iterator[str]:
    """Yields lines: who waits for what, where the request is, and the code at both ends, if it is known."""
    yield headline(wait, waits)
    yield f"    {locate(wait, waits)}"
    call, target, places = wait.call, wait.target, []
    if wait.is_blocking:
        places.append(("waits at", wait.waiter, wait.thread))
    if call is not None and target is not None:
        places.append(("runs", target, call.thread))
    for where, actor, thread in places:
        stack = waits.stack_of(actor.process, thread)
        for i, frame in enumerate(innermost(stack, 2, actor.process.info.library)):
            yield f"    {'called from' if i else where} {frame}"


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
