"""Exceptions across workers: serialized where they are raised, rebuilt at the caller.

The caller catches an exception of the original type, whose text names the worker and contains the remote
traceback. If the type cannot be rebuilt, it is a :class:`~zmqgrad.errors.RemoteError` with that text.
"""

from __future__ import annotations

import logging
import os
import pickle
import traceback
import types
from pathlib import Path

import torch

from zmqgrad.errors import RemoteError
from zmqgrad.rpc.raising import (
    PickledException,
    StrippedException,
    args_of,
    set_args,
    set_cause,
    traceback_of,
)
from zmqgrad.rpc.serialization.pickler import dumps
from zmqgrad.wire.messages import MAX_TEXT, ExceptionReply

logger = logging.getLogger(__name__)

_MAX_TEXT_CHARS = MAX_TEXT // 4

_PACKAGE_PATH = str(Path(__file__).parents[1]) + os.sep


class ScriptError(RemoteError, torch.jit.Error):
    """A remote TorchScript error. A RuntimeError as with torch's RPC, and a ``torch.jit.Error``."""


MAX_PICKLE_BYTES = 1 << 20
"""An exception with a larger pickle (it holds a large tensor) is sent without its attributes."""


def describe_exception(error: BaseException, worker: str, same_program: bool = False) -> ExceptionReply:
    """Serialize an exception as the reply to a request. Never fails.

    Args:
        worker: where the exception was raised, for its text.
        same_program: the requester runs the same ``__main__``, so its classes are sent by name.
    """
    trace = _show_trace(error)
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return ExceptionReply(
        worker, shorten(kind), shorten(show_exception(error)), shorten(trace), _pickle(error, same_program)
    )


def _show_trace(error: BaseException) -> str:
    """The traceback of an exception, with those of its causes if its class allows that. Never fails."""
    shown = _from_user_code(error)
    try:
        return "".join(traceback.format_exception(type(error), error, shown))
    except BaseException as e:  # a ``__getattr__`` of the program, which is asked for ``__notes__``
        logger.debug("a traceback cannot be shown whole: %s", type(e).__name__)
        head = "Traceback (most recent call last):\n"
        return f"{head}{''.join(traceback.format_tb(shown))}{show_exception(error)}\n"


def _from_user_code(error: BaseException) -> types.TracebackType | None:
    """The traceback from the first frame outside of this package; all of it if there is no such frame."""
    raised = shown = traceback_of(error)
    while shown is not None and shown.tb_frame.f_code.co_filename.startswith(_PACKAGE_PATH):
        shown = shown.tb_next
    return shown or raised


def show_exception(error: BaseException) -> str:
    """The ``repr`` of an exception, whose text may be made by code of the program. Never fails."""
    try:
        text = str(error)
        # repr would escape the line breaks.
        return f"{type(error).__qualname__}({text})" if "\n" in text else repr(error)
    except BaseException as e:  # user code, whose SystemExit, too, would leave the request without a reply
        return f"{type(error).__qualname__} (whose repr fails: {type(e).__name__})"


def _pickle(error: BaseException, same_program: bool) -> bytes:
    """Pickle ``error`` in the first form that can be read back, and is not too large; empty if none is."""
    forms = (PickledException, StrippedException) if PickledException.fits(error) else (StrippedException,)
    for form in (lambda whole: whole, *forms):
        try:
            data = dumps(form(error), same_program)
            read = pickle.loads(data)  # fails for an exception with required arguments, which pickles well
            if form is StrippedException:
                str(read)  # it may be made of attributes that are not sent
        except BaseException as e:  # as above
            logger.debug("cannot send %s in every form: %s", type(error).__qualname__, type(e).__name__)
            continue
        if len(data) <= MAX_PICKLE_BYTES:
            return data
    return b""


def rebuild_exception(reply: ExceptionReply) -> BaseException:
    """Rebuild the exception that the caller raises."""
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
    args = args_of(error)
    has_text = all(isinstance(a, str) for a in args) and len(args) <= 1
    if has_text and not isinstance(error, KeyError):  # its argument is a key, shown by repr
        set_args(error, (text,))
    # For exceptions whose text is not their only argument.
    set_cause(error, None if text in _text_of(error) else RemoteError(text))
    return error


def summarize(error: BaseException) -> str:
    """Type and text of ``error`` in one line, without a remote traceback. Never fails."""
    lines = _text_of(error).splitlines() or [""]
    if len(lines) > 1 and lines[0].startswith("On "):  # as rebuild_exception writes it
        return lines[1]
    return f"{type(error).__qualname__}: {lines[0]}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # user code, whose SystemExit, too, must not end this process
        return f"(no text: {type(e).__name__})"


def _unpickled(reply: ExceptionReply) -> BaseException | None:
    if not reply.pickled:
        return None
    try:
        error = pickle.loads(reply.pickled)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # SystemExit, too, must not end this process
        logger.debug("cannot rebuild %s here (%s): its text will do", reply.kind, type(e).__name__)
        return None
    return error if isinstance(error, BaseException) else None


def shorten(text: str) -> str:
    """Make ``text`` fit a message: cut the middle of a long text, escape lone surrogates."""
    # Lone surrogates (from file names that are not UTF-8) cannot be encoded.
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= _MAX_TEXT_CHARS:
        return text
    half = _MAX_TEXT_CHARS // 2
    return f"{text[:half]}\n...\n{text[-half:]}"
