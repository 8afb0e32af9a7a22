"""Extension of griffe, which reads the docstrings for the reference: they use Sphinx's roles."""

from __future__ import annotations

import re
from typing import Any

import griffe

from tools.docs.sources import to_markdown


class Roles(griffe.Extension):  # type: ignore[misc]
    """Writes roles such as ``:func:`` as code, and names the section of examples as griffe does."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of ``obj``, which has just been loaded."""
        self._rewrite(obj)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite the docstring of the package itself, which is no event of `on_object`."""
        self._rewrite(pkg)

    def _rewrite(self, obj: griffe.Object) -> None:
        if obj.docstring:
            text = to_markdown(obj.docstring.value)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
