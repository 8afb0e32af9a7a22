"""Options whose defaults come from ``PET_<OPTION>``, as torchrun's do, and the types of their values.

Types raise ``ValueError``. What is displayed names the option, and the variable if that is the source.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from zmqgrad import environment

DEVICES = ("gpu", "xpu", "cpu", "auto")
"""What workers may be counted by."""

BACKENDS = ("zmqgrad", "c10d", "etcd", "static")
"""Names of rendezvous backends that the command accepts."""


def add_option(
    group: argparse._ActionsContainer,
    name: str,
    parse: Callable[[str], Any],
    default: str | None,
    help: str = argparse.SUPPRESS,
    short: Sequence[str] = (),
    **keywords: Any,
) -> None:
    """Declare the option ``name``, spelled with - and with _; ``PET_<NAME>`` overrides its default."""
    given = environment.torchrun_default(name)
    parse = _naming_errors(parse, name, given)
    shown = f"--{name.replace('_', '-')}"
    group.add_argument(
        *short, shown, type=parse, default=default if given is None else given, help=help, **keywords
    )
    if "_" in name:  # torchrun's other spelling, which would double the length of the help
        hidden = argparse.SUPPRESS
        group.add_argument(f"--{name}", type=parse, default=hidden, help=hidden, **keywords)


def add_flag(
    group: argparse._ActionsContainer, name: str, help: str = argparse.SUPPRESS, short: Sequence[str] = ()
) -> None:
    """Declare the option ``name`` without a value; ``PET_<NAME>=1`` sets it."""
    add_option(group, name, _switch, "0", help, short, action=_Flag)


class _Flag(argparse.Action):
    """An option without a value, whose default is parsed: ``PET_STANDALONE=1``."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(nargs=0, **keywords)

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, True)


def _naming_errors(parse: Callable[[str], Any], name: str, given: str | None) -> Callable[[str], Any]:
    """``parse``, with errors that argparse displays, and that name the variable if it set the value."""

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            source = f"(from PET_{name.upper()}) " if text is given else ""
            raise argparse.ArgumentTypeError(f"{source}{error}") from None

    return checked


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """A type: integers within the bounds."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"invalid number: {text!r}") from None
        if number < least or (most is not None and number > most):
            bounds = f"at least {least}" if most is None else f"between {least} and {most}"
            raise ValueError(f"must be {bounds}, not {number}")
        return number

    return parse


def worker_count(text: str) -> int | str:
    """A number of workers, or the name of what to count."""
    if text in DEVICES:
        return text
    try:
        return integer(1)(text)
    except ValueError as error:
        raise ValueError(f"{error}; a number, gpu, xpu, cpu or auto is expected") from None


def node_range(text: str) -> tuple[int, int]:
    """The least and the greatest number of nodes: ``4``, ``1:4``."""
    least, colon, most = text.partition(":")
    low = integer(1)(least)
    high = integer(1)(most) if colon else low
    if high < low:
        raise ValueError(f"write MIN:MAX, not {text}: MAX must be at least {low}, not {high}")
    return low, high


def name_value_pairs(text: str) -> dict[str, str]:
    """``name=value,name=value``."""
    pairs = [pair.partition("=") for pair in text.split(",")] if text.strip() else []
    for name, _, value in pairs:
        if not name.strip() or not value.strip():
            raise ValueError(f"{text!r} is not of the form name=value,name=value")
    return {name.strip(): value.strip() for name, _, value in pairs}


def backend_name(text: str) -> str:
    """The name of a rendezvous backend; others than :data:`BACKENDS` are refused, also on one host."""
    if text in ("etcd-v2", "zeus-adapter"):
        raise ValueError(f"{text!r} is not supported: use zmqgrad, or etcd (version 3)")
    if text not in BACKENDS:
        raise ValueError(f"there is no backend {text!r}: use one of {', '.join(BACKENDS)}")
    return text


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"must be 1 or 0, not {text!r}")
    return text == "1"
