"""Hooks of MkDocs (``hooks`` in mkdocs.yml): add the generated pages, and the code that pages quote."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

from tools.docs.pages import PAGES
from tools.docs.sources import ROOT, quote_sources


def on_files(files: Files, /, *, config: Any, **_: Any) -> Files:
    """Add the pages that code generates, and the examples. They exist in the built site only."""
    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    for program in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{program.name}", content=program.read_text()))
    return files


def on_page_markdown(markdown: str, /, **_: Any) -> str:
    """Replace the directives of a page that quote code, and link to the site's copies of the examples."""
    return quote_sources(markdown).replace("](../examples/", "](examples/")
