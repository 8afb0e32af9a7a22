"""The generated pages of the reference, each by its path below ``docs``."""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

from tools.docs import reference, remedies, torch_names
from tools.docs.sources import to_markdown
from zmqgrad import errors
from zmqgrad.cli.commands import command_parser
from zmqgrad.cli.parser import CommandParser
from zmqgrad.trace import prometheus
from zmqgrad.wire import messages

MODULES = (
    "zmqgrad",
    "zmqgrad.rpc",
    "zmqgrad.autograd",
    "zmqgrad.optim",
    "zmqgrad.nn",
    "zmqgrad.store",
    "zmqgrad.rendezvous",
    "zmqgrad.interop",
    "zmqgrad.elastic",
    "zmqgrad.ray",
    "zmqgrad.trace",
    "zmqgrad.testing",
)
"""The public modules, in the order of the reference."""

_MESSAGE = re.compile(r"^    ([A-Z_]+) +(.*)$")


def errors_page() -> str:
    """Reference of all exceptions: the hierarchy, and for each what it means and what to do."""
    return "\n".join(_errors()) + "\n"


def _errors() -> Iterator[str]:
    yield "# Errors"
    yield ""
    yield "Every exception of this library is in `zmqgrad.errors` and derives from `ZmqgradError`. The"
    yield "text of an error says what was wrong, where, and what to do. This page lists the classes; see"
    yield "[troubleshooting](../troubleshooting.md) for a list by symptom. An exception that a remote"
    yield "function raised is not one of these: the caller gets it with its own class."
    for error in remedies.classes():
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        yield from ("", f"## {error.__name__}", "")
        yield f"Bases: {bases}."
        yield from ("", f"**Meaning.** {to_markdown(inspect.getdoc(error) or '').splitlines()[0]}", "")
        yield f"**What to do.** {remedies.REMEDIES[error.__name__]}"
    yield from ("", "## Hierarchy", "")
    yield "In parentheses: the exception that torch or Python raises for the same mistake. It is a second"
    yield "base class, so that an `except` written for torch still works."
    yield from ("", "```text")
    yield from (line[4:] for line in (errors.__doc__ or "").splitlines() if line.startswith("    "))
    yield "```"


def command_line_page() -> str:
    """Reference of the ``zmqgrad`` command, from its parsers."""
    return "\n".join(_command_line()) + "\n"


def _command_line() -> Iterator[str]:
    yield from ("# Command line", "")
    yield "`python -m zmqgrad` is the same as `zmqgrad`. The help of each command lists its exit codes."
    with mock.patch.dict(os.environ, {"COLUMNS": "84"}):
        for parser in parsers():
            yield from ("", f"{'##' if ' ' in parser.prog else '## The command'} `{parser.prog}`", "")
            yield from ("```text", parser.format_help().rstrip(), "```")


def parsers() -> Iterator[argparse.ArgumentParser]:
    """The parser of the command, of its subcommands and of theirs, each before its own."""
    yield from _with_children(command_parser())


def _with_children(parser: CommandParser) -> Iterator[argparse.ArgumentParser]:
    parser.declare()
    yield parser
    actions = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for child in (child for action in actions for child in action.choices.values()):
        yield from _with_children(child)


def messages_page() -> str:
    """Reference of the message types, from the overview in :mod:`zmqgrad.wire.messages`."""
    return "\n".join(_messages()) + "\n"


def _messages() -> Iterator[str]:
    fields = {each.TYPE.name: ", ".join(each.__struct_fields__) for each in message_classes()}
    yield from ("# Messages", "")
    yield "Workers and stores send these messages. Programs do not use messages; traces and logs show"
    yield "them. A message is one ZeroMQ multipart: a frame with the envelope (protocol version, type,"
    yield "message id, sender) and the header, which has the fields listed here, then frames with"
    yield "tensors. `->` names the reply."
    for line in inspect.cleandoc(messages.__doc__ or "").splitlines():
        if line.endswith("::"):
            family, _, rest = line.removesuffix("::").partition(" (")
            yield from ("", f"## {family}", "")
            if "), " in rest:
                yield from (f"Sent from {rest.split('), ')[1]}.", "")
            yield from ("| message | fields | meaning |", "|---|---|---|")
        elif found := _MESSAGE.match(line):
            name, meaning = found.groups()
            yield f"| `{name}` | {fields.get(name, '')} | {meaning.replace('|', '&#124;')} |"


def metrics_page() -> str:
    """Reference of the counters for Prometheus, from the objects that count."""
    return "\n".join(_metrics()) + "\n"


def _metrics() -> Iterator[str]:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    prometheus.Metrics(registry)
    yield from ("# Metrics", "")
    yield "`zmqgrad.trace.prometheus.serve` and `count` export these metrics; see"
    yield "[tracing](../tracing.md#prometheus). `rpc.get_stats()` returns further counters as a dict."
    yield from ("", "| metric | type | meaning |", "|---|---|---|")
    for metric in registry.collect():
        suffix = "_total" if metric.type == "counter" else ""
        yield f"| `{metric.name}{suffix}` | {metric.type} | {metric.documentation} |"


def message_classes() -> list[type[messages.Message]]:
    """The header of each message type."""
    found = (value for value in vars(messages).values() if inspect.isclass(value))
    return [each for each in found if issubclass(each, messages.Message) and hasattr(each, "TYPE")]


PAGES: dict[str, Callable[[], str]] = {
    "reference/index.md": reference.overview,
    **{f"reference/{group.path}.md": partial(reference.page, group) for group in reference.GROUPS},
    "reference/command-line.md": command_line_page,
    "reference/errors.md": errors_page,
    "reference/messages.md": messages_page,
    "reference/metrics.md": metrics_page,
    "porting/names.md": torch_names.page,
}
