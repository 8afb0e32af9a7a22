"""The names, signatures and defaults of the installed torch, and the table of deliberate differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tools import api_differences
from tools.api_comparison import differences, lacks, parameters_of


def test_the_table_lists_exactly_the_differences() -> None:
    found = list(differences())
    missing = {(each.module, each.name) for each in found if each.is_missing}
    listed = api_differences.missing_names()
    assert sorted(missing - listed) == [], "missing here, and not in the table"
    if torch.__version__.startswith(api_differences.TORCH):
        assert sorted(listed - missing) == [], "in the table, but not missing"
    signatures = {(each.module, each.name): each.detail for each in found if not each.is_missing}
    deliberate = {(each.module, each.name) for each in api_differences.SIGNATURES}
    assert {k: v for k, v in signatures.items() if k not in deliberate} == {}
    assert deliberate <= signatures.keys()


def test_no_name_is_listed_twice() -> None:
    names = [
        (module, name)
        for each in api_differences.MISSING
        for module, names in each.names.items()
        for name in names.split()
    ]
    assert len(names) == len(set(names))


def test_the_page_shows_the_table() -> None:
    assert api_differences.PAGE.read_text() == api_differences.page(), "run python -m tools.api_differences"


# ---- the comparison itself -------------------------------------------------------------------------------


def wanted(a: int, b: int = 1, *, c: int = 2) -> None:
    """Stands for a function of torch."""


@pytest.mark.parametrize(
    ("offered", "problem"),
    [
        (wanted, ""),
        (lambda a, b=1, extra=None, *, c=2, more=3: None, ""),
        (lambda a, *args, **kwargs: None, ""),
        (lambda a, b=1: None, "no c"),
        (lambda a, b=1, c=2: None, ""),
        (lambda x, b=1, *, c=2: None, "a is named x"),
        (lambda a, b=5, *, c=2: None, "the default of b is 5, not 1"),
        (lambda a, b, *, c=2: None, "the default of b is missing, not 1"),
        (lambda a, b=1, *, c=2, d: None, "d is required"),
    ],
)
def test_what_a_signature_lacks(offered: Callable[..., Any], problem: str) -> None:
    mine, theirs = parameters_of(offered), parameters_of(wanted)
    assert mine is not None
    assert theirs is not None
    assert lacks(theirs, mine) == problem


def documented(text: str) -> Any:
    """A function of C++ with this docstring, as far as the comparison can tell."""

    def function(*args: Any, **kwargs: Any) -> None:
        pass

    function.__doc__ = text
    return function


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("f(self: a.B, x: int, y: a.C = 3) -> None\n\nText (more) -> x.", "x, y=3"),
        (
            "f(*args, **kwargs)\nOverloaded function.\n\n1. f(self: B) -> None\n\n2. f(self: B, z: int) -> C",
            "z",
        ),
        ("f(arg0: typing.SupportsInt) -> None", "arg0, /"),
        ("f() -> None", ""),
    ],
)
def test_signatures_of_cpp(text: str, parameters: str) -> None:
    found = parameters_of(documented(text))
    assert found is not None
    positional = ", /" if any(p.kind is p.POSITIONAL_ONLY for p in found) else ""
    assert ", ".join(str(p) for p in found) + positional == parameters


def test_unknown_signatures() -> None:
    assert parameters_of(documented("No signature.")) is None
    assert parameters_of(documented("f(x: <broken>) -> None")) is None
    assert parameters_of(3) is None
