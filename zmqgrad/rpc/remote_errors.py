"""Exceptions across workers: serialized on the callee, rebuilt on the caller.

The exception that the caller catches has the original type; its text has the name of the worker and the
remote traceback. Where the type cannot be rebuilt the caller gets a :class:`~zmqgrad.errors.RemoteError`
with the same text.
"""

from __future__ import annotations

import logging
import os
import pickle
import traceback
import types
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from zmqgrad.errors import RemoteError
from zmqgrad.rpc.raising import PickledException, StrippedException
from zmqgrad.wire.messages import MAX_TEXT, ExceptionReply

logger = logging.getLogger(__name__)

_LONGEST = MAX_TEXT // 4

_OURS = str(Path(__file__).parents[1]) + os.sep


class ScriptError(RemoteError, torch.jit.Error):
    """An error of TorchScript on the callee; a RuntimeError, as with torch's RPC."""


LARGEST = 1 << 20
"""An exception whose pickle has more bytes (it holds a large tensor) is sent as its type and text only."""


def describe_exception(error: BaseException, worker: str, same_program: bool = False) -> ExceptionReply:
    """What to send instead of an answer. ``worker`` is shown as where it happened. Never fails.

    ``same_program``: its reader runs the same ``__main__``, so that a class of that is the reader's own.
    """
    trace = "".join(traceback.format_exception(type(error), error, _from_user_code(error)))
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return ExceptionReply(
        worker, shorten(kind), shorten(_show(error)), shorten(trace), _pickled(error, same_program)
    )


def _from_user_code(error: BaseException) -> types.TracebackType | None:
    """Its traceback from the first frame outside this package; all of it if there is no such frame."""
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename.startswith(_OURS):
        shown = shown.tb_next
    return shown or error.__traceback__


def _show(error: BaseException) -> str:
    try:
        text = str(error)
        # Keep line breaks, which repr would escape.
        return f"{type(error).__qualname__}({text})" if "\n" in text else repr(error)
    except Exception as e:  # user code
        return f"{type(error).__qualname__} (whose repr fails: {type(e).__name__})"


def _pickled(error: BaseException, same_program: bool) -> bytes:
    forms: list[Any] = [error]
    if PickledException.fits(error):
        forms.append(PickledException(error))
    # Cloudpickle sends classes of __main__ by value: no ``except`` on the caller would match such a copy.
    ways = (pickle.dumps, cloudpickle.dumps) if same_program else (cloudpickle.dumps,)
    for dumps, form in ((dumps, form) for dumps in ways for form in forms):
        try:
            data: bytes = dumps(form, protocol=5)
            pickle.loads(data)  # an exception with required arguments pickles well and fails here
        except Exception as e:
            logger.debug("cannot send %s as %r: %s", type(error).__qualname__, form, e)
        else:
            if len(data) <= LARGEST:
                return data
            if not PickledException.fits(error):
                return b""
            stripped: bytes = dumps(StrippedException(error), protocol=5)
            return stripped
    return b""


def rebuild_exception(reply: ExceptionReply) -> BaseException:
    """The exception to raise at the caller."""
    text = f"On {reply.worker}:\n{reply.text}\n{reply.traceback}"
    error = _unpickled(reply)
    if error is None or not isinstance(error, Exception):
        # a remote SystemExit or KeyboardInterrupt must not end this process
        return RemoteError(
            f"Failed to create original exception type: {reply.kind} cannot be rebuilt here. "
            f"Original exception on remote side was:\n{text}"
        )
    if type(error) is torch.jit.Error:
        return ScriptError(text)
    has_text = all(isinstance(a, str) for a in error.args) and len(error.args) <= 1
    if has_text and not isinstance(error, KeyError):  # its argument is a key, shown by repr
        error.args = (text,)
    # For exceptions whose text is not their single string argument.
    error.__cause__ = None if text in _text_of(error) else RemoteError(text)
    return error


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as e:  # user code
        return f"(no text: {type(e).__name__})"


def _unpickled(reply: ExceptionReply) -> BaseException | None:
    if not reply.pickled:
        return None
    try:
        error = pickle.loads(reply.pickled)
    except Exception as e:
        logger.debug("cannot rebuild %s here (%s): its text will do", reply.kind, e)
        return None
    return error if isinstance(error, BaseException) else None


def shorten(text: str) -> str:
    """``text`` as it can be sent: encodable, and without the middle if it is very long."""
    # A lone surrogate (from a file name that is not valid text) cannot be encoded as UTF-8.
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _LONGEST else text[: _LONGEST // 2] + "\n...\n" + text[-_LONGEST // 2 :]
