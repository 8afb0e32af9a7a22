"""Hooks of MkDocs (``hooks`` in mkdocs.yml): add the generated pages, and the code that pages quote."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

from tools.docs.charts import draw_ratios
from tools.docs.pages import PAGES
from tools.docs.sources import ROOT, link_examples, quote_sources

PACKAGES = ROOT / "build" / "npm"
SCRIPTS = {
    "assets/mermaid.min.js": PACKAGES / "mermaid" / "dist" / "mermaid.min.js",
    "assets/iframe-worker.js": PACKAGES / "iframe-worker" / "shim" / "index.js",
}
"""What draws the diagrams, and what searches without a server. ``make docs`` fetches them; otherwise, pages
load them from a CDN."""
DIAGRAM = (
    '```mermaid\n%%{init: {"fontSize": 13, "themeVariables": {"signalColor": "#8890a8"}, '
    '"sequence": {"useMaxWidth": false, "diagramMarginX": 4, "actorMargin": 10, "width": 70}, '
    '"state": {"useMaxWidth": false, "nodeSpacing": 20}, '
    '"flowchart": {"useMaxWidth": false, "padding": 8, "nodeSpacing": 20, '
    '"rankSpacing": 20, "subGraphTitleMargin": {"top": 4, "bottom": 12}}}}%%\n'
)
"""Diagrams are as wide as they need to be, and scroll: shrunk to a phone's width, nobody can read them.
The theme does not color the arrowheads of messages: ``signalColor`` is visible on light and on dark pages."""


def on_config(config: Any, /, **_: Any) -> Any:
    """Let the pages load scripts from the site itself."""
    if all(source.is_file() for source in SCRIPTS.values()):
        mermaid, worker = SCRIPTS
        config.extra_javascript.append(mermaid)
        config.extra["polyfills"] = [worker]
    return config


def on_files(files: Files, /, *, config: Any, **_: Any) -> Files:
    """Add the pages that code generates, and the examples. They exist in the built site only."""
    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    for program in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{program.name}", content=program.read_text()))
    for path, source in SCRIPTS.items():
        if source.is_file():
            files.append(File.generated(config, path, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, /, **_: Any) -> str:
    """Quote code, draw charts, size diagrams, and link to the site's copies of the examples."""
    page = draw_ratios(link_examples(quote_sources(markdown)))
    return page.replace("```mermaid\n", DIAGRAM)
