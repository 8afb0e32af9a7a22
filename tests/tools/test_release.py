"""The README for a package index has no link that leads nowhere. test_packages.py tries the packages."""

from __future__ import annotations

import re
from pathlib import Path

from tools.release import index_readme, project_urls

ROOT = Path(__file__).parents[2]
URLS = {"Documentation": "https://docs.example.org/", "Changelog": "https://example.org/changes"}
PAGE = """\
![What it
shows](docs/images/overview.svg)

See [two
hosts](docs/hosts.md#1-the-secret), the [changelog](CHANGELOG.md) and [torch](https://torch.example.org/).
"""


def test_links_become_absolute() -> None:
    assert index_readme(PAGE, URLS) == PAGE.replace(
        "docs/images/overview.svg", "https://docs.example.org/images/overview.svg"
    ).replace("docs/hosts.md", "https://docs.example.org/hosts.html").replace(
        "CHANGELOG.md", "https://example.org/changes"
    )


def test_without_an_address_their_text_stays() -> None:
    assert (
        index_readme(PAGE, {}).strip()
        == "See two\nhosts, the changelog and [torch](https://torch.example.org/)."
    )


def test_none_of_the_readme_is_relative() -> None:
    for urls in (URLS, {}):
        text = index_readme((ROOT / "README.md").read_text(), urls)
        assert not re.search(r"\]\((?!https://)", text)


SETTINGS = """\
[project]
name = "x"

[project.urls]
Documentation = "https://a.example.org"
"Bug tracker" = "https://b.example.org"

[tool.x]
y = "z"
"""


def test_the_urls_of_a_project() -> None:
    assert project_urls(SETTINGS) == {
        "Documentation": "https://a.example.org",
        "Bug tracker": "https://b.example.org",
    }
    assert project_urls("[project]\n") == {}
