"""What a scenario observes, as plain data that can be pickled and compared across implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Raised:
    """An exception.

    Attributes:
        kind: the name of its class.
        bases: the names of all classes that an ``except`` clause may use to catch it.
        missing: the parts that its text should contain, and does not.
        text: its text, for reports.
    """

    kind: str
    bases: frozenset[str]
    missing: tuple[str, ...] = ()
    text: str = field(default="", compare=False)

    @classmethod
    def of(cls, error: BaseException, parts: tuple[str, ...] = ()) -> Raised:
        """Describe ``error``, whose text is expected to contain ``parts``."""
        text = str(error)
        bases = frozenset(c.__qualname__ for c in type(error).__mro__)
        return cls(type(error).__qualname__, bases, tuple(p for p in parts if p not in text), text)

    def __repr__(self) -> str:
        missing = f" without {', '.join(map(repr, self.missing))}" if self.missing else ""
        return f"raises {self.kind}{missing}"


def attempt(call: Callable[..., Any], *parts: str) -> Any:
    """Call ``call`` and return what it returns, or a :class:`Raised`.

    Args:
        parts: texts that programs match on. Each must be in the text of torch's exception and in ours.
    """
    try:
        return call()
    except Exception as e:
        return Raised.of(e, parts)


def plain(value: Any) -> Any:
    """Convert ``value`` to plain data: tensors to descriptions, other objects to names of their classes."""
    if value is None or isinstance(value, (bool, int, str, bytes, Raised)):
        return value
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, complex):
        return complex(round(value.real, 5), round(value.imag, 5))
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if isinstance(value, Mapping):
        return {plain(k): plain(v) for k, v in value.items()}
    if isinstance(value, (Set, frozenset)):
        return sorted(map(plain, value), key=repr)
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, list):
        return ("list", *map(plain, value))
    if isinstance(value, type):
        return f"class {value.__qualname__}"
    return f"<{type(value).__qualname__}>"


def _plain_tensor(value: torch.Tensor) -> Any:
    shown = value.detach()
    strides = tuple(value.stride()) if value.layout == torch.strided else None
    elements = plain(shown.to_dense().tolist())
    grad = "requires grad" if value.requires_grad else "constant"
    return (
        type(value).__name__,
        str(value.dtype),
        tuple(value.shape),
        strides,
        str(value.layout),
        grad,
        elements,
    )


def compare(theirs: Any, ours: Any, where: str = "result") -> list[str]:
    """Compare two outcomes. Returns a line for each difference that a program written for torch sees.

    An exception agrees if an ``except`` clause for torch's catches it and its text has all promised parts.
    It is also reported if torch's own text lacks a part: then torch does not promise it.
    """
    if isinstance(theirs, Raised) and isinstance(ours, Raised):
        if theirs.kind in ours.bases and not theirs.missing and not ours.missing:
            return []
    elif type(theirs) is type(ours) and isinstance(theirs, tuple) and len(theirs) == len(ours):
        pairs = enumerate(zip(theirs, ours, strict=True))
        return [line for i, pair in pairs for line in compare(*pair, f"{where}[{i}]")]
    elif isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        return [line for key in theirs for line in compare(theirs[key], ours[key], f"{where}[{key!r}]")]
    elif type(theirs) is type(ours) and theirs == ours:
        return []
    return [f"{where}: torch {_show(theirs)}, here {_show(ours)}"]


def _show(value: Any) -> str:
    return f"{value!r}: {value.text[:300]!r}" if isinstance(value, Raised) else repr(value)
