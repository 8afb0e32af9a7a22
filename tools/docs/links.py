"""Checks the links of a built site: every page, anchor, image, style and script that a page names exists.

Zensical checks the links between pages as they stand in Markdown. This checks what was built from them, which
includes links of the theme and of the generated reference, and images.
"""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_NAMING = {"href", "src", "poster"}


class _Names(HTMLParser):
    """What one page names, and what it is named by others: its anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in _NAMING and value:
                self.targets.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def faults_of_links(site: Path) -> Iterator[str]:
    """The broken links of all pages below ``site``, one line each.

    404.html is not checked: its links are those of a site on a server, as its readers see them.
    """
    pages = {path: _Names(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    for page, names in pages.items():
        for target in dict.fromkeys(names.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not path.is_file() and not (path / "index.html").is_file():
                yield f"{page.relative_to(site)}: {target} does not exist"
            elif parts.fragment and path in pages and unquote(parts.fragment) not in pages[path].anchors:
                yield f"{page.relative_to(site)}: {target} has no such anchor"
