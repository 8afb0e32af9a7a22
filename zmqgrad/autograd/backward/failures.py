"""What failed in a backward pass, as the caller of ``backward`` catches it: by its own type, or torch's.

Torch raises ``RuntimeError("Error on Node 2: ...")`` for whatever went wrong on any worker, and programs
catch that. Here an error keeps its type; one that is no RuntimeError becomes one besides.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import msgspec

from zmqgrad.errors import AutogradError
from zmqgrad.rpc.remote_errors import describe_exception, rebuild_exception, shorten
from zmqgrad.wire.messages import ExceptionReply

logger = logging.getLogger(__name__)


def describe_failure(
    error: BaseException, worker: int, info: str, same_program: bool = False
) -> ExceptionReply:
    """An error of this worker (``info``: how it is shown), for the root of the pass.

    ``same_program``: as :func:`~zmqgrad.rpc.remote_errors.describe_exception` has it.
    """
    reply = describe_exception(error, info, same_program)
    try:
        said = str(error)
    except Exception as e:  # user code; the reply shows what can be shown of it
        logger.debug("an error of a backward pass has no text: %s", type(e).__name__)
        said = reply.text
    return msgspec.structs.replace(reply, text=shorten(f"Error on Node {worker}: {said}"))


def rebuild_failure(reply: ExceptionReply) -> BaseException:
    """The exception to raise at the root."""
    error = rebuild_exception(reply)
    if isinstance(error, RuntimeError):
        return error
    kind: Any = type(error)
    try:
        both = _also_runtime_error(kind)
        made: BaseException = both.__new__(both, *error.args)
        made.args = error.args
        made.__dict__.update(error.__dict__)
    except Exception as e:  # a class with rules of its own
        logger.debug("%s cannot be a RuntimeError as well: %s", kind.__name__, e)
        made = AutogradError(str(error))
        made.__cause__ = error
        return made
    made.__cause__ = error.__cause__
    return made


@functools.lru_cache(maxsize=256)
def _also_runtime_error(kind: Any) -> Any:
    """The class of those that are of ``kind`` and RuntimeErrors."""
    if issubclass(RuntimeError, kind):  # Exception
        return AutogradError
    body: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    if issubclass(kind, KeyError):
        body["__str__"] = Exception.__str__  # its own shows line ends as \n
    return type(kind.__name__, (kind, RuntimeError), body)
