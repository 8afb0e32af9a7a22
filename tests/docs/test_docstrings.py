"""Docstrings of public functions describe arguments, results and errors.

An argument is described if the section ``Args`` or the text names it, a result if the section ``Returns``
or the first line says what it is, and an error if a function that raises one has the section ``Raises``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tools.docs import pages

MODULES = (*pages.MODULES, "zmqgrad.errors", "zmqgrad.runtime.clock", "zmqgrad.trace.findings",
           "zmqgrad.trace.otel", "zmqgrad.trace.prometheus")  # fmt: skip

_SECTION = re.compile(r"^(?:Returns|Yields):$", re.MULTILINE)
_NAMES_A_VALUE = re.compile(
    r"^(?:The|An?|All|Another|As|Whether|What|How|Name|Number|Bytes|Seconds|Counters|References|Statistics|Iterate)\b"
    r"|\b(?:[Rr]eturn|yield|Context manager)s?\b"
)


def public_functions(module: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions of a module, and the methods that its public classes define."""
    loaded = importlib.import_module(module)
    own = [
        name for name, value in vars(loaded).items() if getattr(value, "__module__", "") == loaded.__name__
    ]
    for name in getattr(loaded, "__all__", own):
        value = getattr(loaded, name)
        if not name.startswith("_") and not getattr(value, "__module__", "").startswith("torch."):
            yield from _functions_of(name, value)


def _functions_of(name: str, value: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    if not inspect.isclass(value):
        if inspect.isfunction(value):
            yield name, inspect.unwrap(value)
        return
    for member, raw in vars(value).items():
        if raw.__doc__ is None and any(hasattr(base, member) for base in value.__mro__[1:]):
            continue  # an override, documented by the base class
        function = inspect.unwrap(getattr(raw, "fget", None) or getattr(raw, "__func__", raw))
        if inspect.isfunction(function) and not member.startswith("_"):
            yield f"{name}.{member}", function


def undescribed(function: Callable[..., Any]) -> Iterator[str]:
    """What the docstring of ``function`` does not describe."""
    doc = inspect.getdoc(function) or ""
    signature = inspect.signature(function)
    if signature.return_annotation == "NoReturn":
        return  # a method of torch that is not supported; its text says so
    for name in signature.parameters:
        if name not in ("self", "cls", "_") and not _is_named(name, doc):
            yield f"argument {name}"
    has_result = signature.return_annotation not in ("None", None, inspect.Signature.empty)
    if has_result and not _SECTION.search(doc) and not _NAMES_A_VALUE.search(doc.split("\n\n")[0]):
        yield "result"
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raises = any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))
    if raises and not re.search(r"^Raises:$|\b[Rr]aises?\b", doc, re.MULTILINE):
        yield "errors"


def _is_named(name: str, doc: str) -> bool:
    return bool(
        re.search(rf"``[^`]*\b{name}\b[^`]*``|^ +\*{{0,2}}(?:\w+, )*\*{{0,2}}{name}\b.*:", doc, re.MULTILINE)
    )


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_are_complete(module: str) -> None:
    functions = dict(public_functions(module))
    assert functions or module == "zmqgrad.errors"  # whose classes only have a docstring
    assert {name: found for name, each in functions.items() if (found := list(undescribed(each)))} == {}


@pytest.mark.parametrize("module", MODULES)
def test_placeholders_in_angle_brackets_are_code(module: str) -> None:
    """Otherwise the page of the reference takes them for HTML, and does not show them."""
    loaded = importlib.import_module(module)
    documented = {name: getattr(loaded, name) for name in getattr(loaded, "__all__", ())}
    texts = {name: inspect.getdoc(each) or "" for name, each in documented.items()}
    prose = {name: re.sub(r"``.*?``", "", text, flags=re.DOTALL) for name, text in texts.items()}
    torchs = {
        name for name, each in documented.items() if getattr(each, "__module__", "").startswith("torch.")
    }
    assert {name for name, text in prose.items() if re.search(r"<[a-z]\w*>", text)} <= torchs


def test_what_is_missing_is_found() -> None:
    def silent(a: int, b: int) -> int:
        """Add ``a`` to something."""
        if a < 0:
            raise ValueError(a)
        return a + b

    assert list(undescribed(silent)) == ["argument b", "result", "errors"]
