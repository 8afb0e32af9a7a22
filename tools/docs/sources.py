"""What pages show of source files: code and docstrings.

A directive names a function or class of a program, so that no copy can be outdated:

    <!-- source: examples/parameter_server.py ParameterServer.push -->

becomes a code block. On GitHub the directive is invisible; the text around it links to the program. The
home page begins with the first screen of the README, where it says:

    <!-- readme -->
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]

_DIRECTIVE = re.compile(r"<!-- source: (\S+) (\S+) -->")


def quote_sources(markdown: str) -> str:
    """``markdown`` with a code block for each directive, and with the first screen of the README.

    Raises:
        LookupError: if a program has no function or class of that name.
    """
    quoted = _DIRECTIVE.sub(lambda found: f"```python\n{source_of(found[1], found[2])}\n```", markdown)
    return quoted.replace("<!-- readme -->", first_screen())


def first_screen() -> str:
    """What the README says between its title and its first heading, with links as in ``docs``."""
    readme = (ROOT / "README.md").read_text()
    return readme.partition("\n")[2].partition("\n## ")[0].replace("](docs/", "](").strip()


def link_examples(markdown: str) -> str:
    """``markdown`` with links to the site's copies of the examples, which are within ``docs`` there."""
    return re.sub(r"\]\(\.\./((?:\.\./)*examples/)", r"](\1", markdown)


def source_of(path: str, name: str) -> str:
    """The source of a function or class, with its decorators.

    Args:
        path: of the program, relative to the repository.
        name: qualified name in that program.

    Raises:
        LookupError: if the program has no such function or class.
    """
    text = (ROOT / path).read_text()
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        node = _member(node, part, f"{path} has no function or class {name}")
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def _member(node: ast.AST, name: str, problem: str) -> ast.AST:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and child.name == name:
            return child
    raise LookupError(problem)


def to_markdown(docstring: str) -> str:
    """``docstring`` with Sphinx's roles and literal blocks in the syntax of Markdown."""
    text = re.sub(r":\w+:`([^`<]+) <[^`>]+>`|:mod:`([\w.]+)`", r"`\1\2`", docstring)
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)
