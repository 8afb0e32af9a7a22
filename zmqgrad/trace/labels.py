"""Short names for what takes part in a trace, equal in all views. Pure."""

from __future__ import annotations

import re

from zmqgrad.trace.events import Role
from zmqgrad.trace.kinds import is_store
from zmqgrad.trace.model import Actor, Message, Process
from zmqgrad.wire.ids import show_id

_METHOD = re.compile(r"^rref:\d+:")


def actor_label(actor: Actor) -> str:
    """The name of a worker; ``store``; ``w0/store`` for the store client in the process of worker w0."""
    if actor.role is Role.STORE_SERVER:
        return "store"
    if actor.role is Role.STORE_CLIENT:
        return f"{process_label(actor.process)}/store"
    return actor.name or f"{actor.role.name.lower()} {actor.rank}"


def worker_label(actor: Actor | None, rank: int) -> str:
    """The name of the worker of this rank; its rank if it left no log."""
    return actor_label(actor) if actor is not None else f"rank {rank}"


def process_label(process: Process) -> str:
    """The names of its workers, or of its rendezvous nodes, or ``pid N``."""
    role = min((actor.role for actor in process.named), default=Role.WORKER)
    names = dict.fromkeys(actor.name for actor in process.named if actor.role is role)
    return "+".join(names) or f"pid {process.info.pid}"


def ends(message: Message) -> tuple[str, str]:
    """Labels of the source and the target of a message."""
    source, target = message.source, message.target
    known = source or target
    if known is not None and known.role is Role.WORKER:
        return worker_label(source, message.peer), worker_label(target, message.peer)
    missing = "store" if known is not None and known.role is Role.STORE_CLIENT else "?"
    return actor_label(source) if source else missing, actor_label(target) if target else missing


def size(count: float) -> str:
    """Bytes with a unit that fits, such as ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def show_time(nanoseconds: float | None) -> str:
    """A duration with a unit that fits, such as ``12.3 us``; ``-`` for None."""
    if nanoseconds is None:
        return "-"
    for unit, factor in (("s", 1e9), ("ms", 1e6)):
        if abs(nanoseconds) >= factor:
            return f"{nanoseconds / factor:.1f} {unit}"
    return f"{nanoseconds / 1e3:.1f} us"


def id_label(message: Message) -> str:
    """The id of a message as all views show it: ``rank.number``; the number of a query of a store."""
    return str(message.message_id) if is_store(message.kind) else show_id(message.message_id)


def tidy(function: str) -> str:
    """The name of a function; methods of remote values are called by an id, which says nothing."""
    return _METHOD.sub("RRef.", function)
