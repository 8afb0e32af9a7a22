"""Hooks of MkDocs (``hooks`` in mkdocs.yml): add the generated pages, and the code that pages quote."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

from tools.docs.charts import draw_ratios
from tools.docs.pages import PAGES
from tools.docs.sources import ROOT, quote_sources

MERMAID = ROOT / "build" / "npm" / "package" / "dist" / "mermaid.min.js"
"""The library that draws the diagrams; ``make docs`` fetches it. Without it, pages load it from a CDN."""


def on_config(config: Any, /, **_: Any) -> Any:
    """Let the pages load the library for diagrams from the site itself."""
    if MERMAID.is_file():
        config.extra_javascript.append("assets/mermaid.min.js")
    return config


def on_files(files: Files, /, *, config: Any, **_: Any) -> Files:
    """Add the pages that code generates, and the examples. They exist in the built site only."""
    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    for program in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{program.name}", content=program.read_text()))
    if MERMAID.is_file():
        files.append(File.generated(config, "assets/mermaid.min.js", abs_src_path=str(MERMAID)))
    return files


def on_page_markdown(markdown: str, /, **_: Any) -> str:
    """Quote code, draw the charts of a page, and link to the site's copies of the examples."""
    return draw_ratios(quote_sources(markdown)).replace("](../examples/", "](examples/")
