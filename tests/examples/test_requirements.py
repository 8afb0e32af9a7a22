"""The extra ``examples`` brings all that the examples import."""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import requires
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
DISTRIBUTIONS = {"sklearn": "scikit-learn"}
"""Of modules with another name."""
CORE = {"torch", "zmqgrad"}
FOR_COMPARISON = {"ray"}
"""What the versions for comparison need, which come with no extra for users."""


def imported() -> set[str]:
    """The modules that the examples import and do not have themselves, without those of Python."""
    found: set[str] = set()
    for path in EXAMPLES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    own = {path.stem for path in EXAMPLES.rglob("*.py")}
    return found - own - CORE - FOR_COMPARISON - set(sys.stdlib_module_names)


def brought(extra: str) -> set[str]:
    """The distributions of an extra of zmqgrad, also of those that it names."""
    found: set[str] = set()
    for requirement in requires("zmqgrad") or ():
        if re.search(rf"extra == .{extra}\b", requirement):
            nested = re.match(r"zmqgrad\[([\w,-]+)\]", requirement)
            names = nested[1].split(",") if nested else ()
            found |= {name for each in names for name in brought(each)}
            found.add(re.split(r"[ ;<>=\[]", requirement)[0])
    return found


def test_the_extra_has_what_the_examples_import() -> None:
    needed = {DISTRIBUTIONS.get(name, name) for name in imported()}
    assert {"rich", "matplotlib", "scikit-learn"} <= needed, "it finds what they import"
    assert needed <= brought("examples")
