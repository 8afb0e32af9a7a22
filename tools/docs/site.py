"""Builds the documentation site in ``build/site``: ``make docs``.

Zensical renders the Markdown of one directory. This fills it (``build/docs``) with the pages of ``docs``,
with those that code generates, and with the examples, and completes what pages quote; then it starts
Zensical, and checks the links, images and anchors of all pages that it wrote.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.docs.charts import draw_ratios
from tools.docs.links import faults_of_links
from tools.docs.pages import PAGES
from tools.docs.sources import ROOT, link_examples, quote_sources

PACKAGES = ROOT / "build" / "npm"
SOURCES, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"
SCRIPTS = {
    "assets/mermaid.min.js": (PACKAGES / "mermaid" / "dist" / "mermaid.min.js", ""),
    "assets/iframe-worker.js": (
        PACKAGES / "iframe-worker" / "shim" / "index.js",
        "document.write('<script src=\"https://unpkg.com/iframe-worker/shim\"></scr' + 'ipt>')",
    ),
}
"""What draws the diagrams, and what searches without a server. ``make docs`` fetches both; where that failed,
these texts take their place, and pages load both from a CDN (the theme does so by itself for diagrams)."""
DIAGRAM = (
    '```mermaid\n%%{init: {"fontSize": 13, "themeVariables": {"signalColor": "#8890a8"}, '
    '"sequence": {"useMaxWidth": false, "diagramMarginX": 4, "actorMargin": 10, "width": 70}, '
    '"state": {"useMaxWidth": false, "nodeSpacing": 20}, '
    '"flowchart": {"useMaxWidth": false, "padding": 8, "nodeSpacing": 20, '
    '"rankSpacing": 20, "subGraphTitleMargin": {"top": 4, "bottom": 12}}}}%%\n'
)
"""Diagrams are as wide as they need to be, and scroll: shrunk to a phone's width, nobody can read them.
The theme does not color the arrowheads of messages: ``signalColor`` is visible on light and on dark pages."""


def gather(directory: Path) -> None:
    """Write everything that the site is built from to ``directory``, which is replaced.

    Files that do not change keep their times, so that Zensical renders only what did.
    """
    texts = {path.relative_to(ROOT / "docs"): path.read_bytes() for path in _files(ROOT / "docs")}
    texts |= {Path("examples", path.name): path.read_bytes() for path in (ROOT / "examples").glob("*.py")}
    texts |= {Path(path): write().encode() for path, write in PAGES.items()}
    for name, (source, otherwise) in SCRIPTS.items():
        texts[Path(name)] = source.read_bytes() if source.is_file() else otherwise.encode()
    for path, text in texts.items():
        _update(directory / path, complete(text.decode()).encode() if path.suffix == ".md" else text)
    for path in _files(directory):
        if path.relative_to(directory) not in texts:
            path.unlink()


def complete(markdown: str) -> str:
    """``markdown`` with quoted code, charts, sizes of diagrams, and links to copies of the examples."""
    return draw_ratios(link_examples(quote_sources(markdown))).replace("```mermaid\n", DIAGRAM)


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def _update(path: Path, text: bytes) -> None:
    if not path.is_file() or path.read_bytes() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


def main() -> int:
    gather(SOURCES)
    shutil.rmtree(SITE, ignore_errors=True)
    # The reference is read from the modules of this directory, also by the extension for griffe.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    if code := subprocess.run(command, cwd=ROOT, env=environment).returncode:
        return code
    faults = list(faults_of_links(SITE))
    print("\n".join(faults), file=sys.stderr, end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
