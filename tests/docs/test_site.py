"""The documentation site builds without warnings, and its links work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.docs import links, pages, site

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 300


@pytest.mark.timeout(LIMIT_SECONDS + 60)
def test_the_site_builds() -> None:
    """Strictly, as ``make docs``: links of Markdown, then those of the pages that were built."""
    pytest.importorskip("zensical", reason="needs Python 3.11")
    command = [sys.executable, "-m", "tools.docs.site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {path.relative_to(site.SITE).with_suffix(".md").as_posix() for path in site.SITE.rglob("*.html")}
    assert built == {*_pages(), "404.md"}


def test_the_navigation_has_every_page() -> None:
    named = re.findall(r"^ +- [^\n]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(_pages())


def _pages() -> set[str]:
    docs = ROOT / "docs"
    return {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} | set(pages.PAGES)


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "there.html").write_text(
        '<h1 id="top">There</h1><a href="../here.html#part">here</a>'
    )
    (tmp_path / "here.html").write_text(
        '<p id="part"><a href="deep/there.html#top">good</a> <a href="https://example.org/">elsewhere</a>'
        '<a href="#part">good</a> <a href="deep/there.html#bottom">bad</a> <a href="gone.html">bad</a>'
        '<img src="gone.png">'
    )
    assert list(links.faults_of_links(tmp_path)) == [
        "here.html: deep/there.html#bottom has no such anchor",
        "here.html: gone.html does not exist",
        "here.html: gone.png does not exist",
    ]


def test_what_is_gathered_is_complete_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "left over.md").write_text("of a page that has been renamed")
    site.gather(tmp_path)
    assert not (tmp_path / "left over.md").exists()
    assert "<!-- readme -->" not in (tmp_path / "index.md").read_text()
    assert (tmp_path / "examples" / "cartpole.py").is_file()
    assert _pages() == {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
