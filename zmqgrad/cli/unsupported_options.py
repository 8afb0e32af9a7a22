"""Options of torchrun that have no counterpart here: accepted at their defaults, else ignored or refused."""

from __future__ import annotations

import argparse
import logging
from typing import NamedTuple

from zmqgrad.cli.option_values import add_flag, add_option
from zmqgrad.errors import ConfigurationError

logger = logging.getLogger(__name__)


class _Unsupported(NamedTuple):
    """An option without a counterpart.

    Attributes:
        default: the value that changes nothing; False: the option is a flag.
        refused: whether any other value is an error. Otherwise it is ignored, with a warning: the job
            computes the same without it.
        reason: what there is instead.
    """

    default: str | bool | None
    refused: bool
    reason: str


_IN_FILES = "--log-dir keeps all output in files"

_UNSUPPORTED = {
    "event_log_handler": _Unsupported("null", False, "events go to Python's logging, under zmqgrad.elastic"),
    "local_ranks_filter": _Unsupported("", False, "the output of all workers is displayed, with labels"),
    "log_line_prefix_template": _Unsupported("", False, "the label of a line has the rank of its worker"),
    "duplicate_stdout_filters": _Unsupported("", False, _IN_FILES),
    "duplicate_stderr_filters": _Unsupported("", False, _IN_FILES),
    "numa_binding": _Unsupported(None, False, "workers may be bound by --no-python numactl ..."),
    "logs_specs": _Unsupported(None, True, "its classes are written for torchrun; use --log-dir, -r and -t"),
    "virtual_local_rank": _Unsupported(False, True, "let the program use the device of its LOCAL_RANK"),
    "signals_to_handle": _Unsupported(
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT", True, "the signals that are forwarded to the workers are fixed"
    ),
    "shutdown_timeout": _Unsupported(None, True, "the time between SIGTERM and SIGKILL is fixed"),
}


def declare_unsupported(parser: argparse.ArgumentParser) -> None:
    """Declare these options, without help."""
    for name, option in _UNSUPPORTED.items():
        if isinstance(option.default, bool):
            add_flag(parser, name)
        else:
            add_option(parser, name, str, option.default)
    add_option(parser, "print_completion", _refuse_completion, None)


def _refuse_completion(shell: str) -> None:
    """A type, because it speaks before the parser asks for the script that is missing here."""
    raise ValueError(f"not supported: use `zmqgrad completion {shell}`")


def check_unsupported(arguments: argparse.Namespace) -> None:
    """Warn of the options that are ignored.

    Raises:
        ConfigurationError: if one is refused.
    """
    for name, option in _UNSUPPORTED.items():
        if (getattr(arguments, name) or option.default) == option.default:
            continue
        spelling = f"--{name.replace('_', '-')}"
        if option.refused:
            raise ConfigurationError(f"{spelling} is not supported: {option.reason}")
        logger.warning("%s is ignored: %s", spelling, option.reason)
