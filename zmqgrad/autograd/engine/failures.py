"""Errors of a backward pass, as the caller of ``backward`` catches them.

Torch raises ``RuntimeError("Error on Node 2: ...")`` for any error on any worker, and programs catch that.
Here an error keeps its type. If it is not a RuntimeError, its class also inherits from RuntimeError.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import msgspec

from zmqgrad.autograd.graph.node import FORWARD_NOTE
from zmqgrad.errors import AutogradError
from zmqgrad.rpc.remote_errors import describe_exception, rebuild_exception, shorten
from zmqgrad.wire.messages import ExceptionReply

logger = logging.getLogger(__name__)


def describe_failure(
    error: BaseException, worker: int, info: str, same_program: bool = False
) -> ExceptionReply:
    """Serialize an error of this worker for the coordinator of the pass.

    Args:
        error: the error.
        worker: the id of this worker.
        info: this worker, as the traceback shows it.
        same_program: see :func:`~zmqgrad.rpc.remote_errors.describe_exception`.
    """
    reply = describe_exception(error, info, same_program)
    try:
        text = str(error)
    except BaseException as e:  # user code, whose SystemExit, too, would leave the coordinator waiting
        logger.debug("an error of a backward pass has no text: %s", type(e).__name__)
        text = reply.text
    forward = error.__dict__.pop(FORWARD_NOTE, "")
    return msgspec.structs.replace(reply, text=shorten(f"Error on Node {worker}: {text}{forward}"))


class ReportedFailure(Exception):
    """An error that a worker has reported. To rebuild it is left to the thread that raises it.

    That may import modules and run code of the program, for which the thread that reads must not wait.
    """

    def __init__(self, reply: ExceptionReply) -> None:
        self.reply = reply


def rebuild_failure(reply: ExceptionReply) -> BaseException:
    """Return the exception that ``backward`` raises."""
    error = rebuild_exception(reply)
    if isinstance(error, RuntimeError):
        return error
    kind: Any = type(error)
    try:
        both = _also_runtime_error(kind)
        made: BaseException = both.__new__(both, *error.args)
        made.args = error.args
        made.__dict__.update(error.__dict__)
    except Exception as e:  # the class may have any constructor
        logger.debug("%s cannot be a RuntimeError as well: %s", kind.__name__, e)
        made = AutogradError(str(error))
        made.__cause__ = error
        return made
    made.__cause__ = error.__cause__
    return made


@functools.lru_cache(maxsize=256)
def _also_runtime_error(kind: Any) -> Any:
    """Return a class that inherits from ``kind`` and RuntimeError."""
    if issubclass(RuntimeError, kind):  # Exception
        return AutogradError
    body: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    if issubclass(kind, KeyError):
        body["__str__"] = Exception.__str__  # its own would escape line ends
    return type(kind.__name__, (kind, RuntimeError), body)
