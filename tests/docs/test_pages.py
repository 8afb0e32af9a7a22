"""The generated pages of the site are complete, and what pages quote exists."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

import pytest

from tools.docs import charts, pages, reference, remedies, sources
from zmqgrad.wire.messages import MessageType

DOCS = Path(__file__).parents[2] / "docs"


def test_every_exception_has_a_remedy() -> None:
    assert set(remedies.REMEDIES) == {each.__name__ for each in remedies.classes()}


def test_the_page_of_errors_has_every_exception() -> None:
    page = pages.errors_page()
    for error in remedies.classes():
        assert f"## {error.__name__}\n" in page


def test_troubleshooting_links_to_every_exception() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    for error in remedies.classes():
        assert f"(reference/errors.md#{error.__name__.lower()})" in page


def test_texts_of_troubleshooting_are_those_of_errors() -> None:
    """A text may span the lines of a string: quotes between them are removed from the sources."""
    sources_of_errors = "".join(each.read_text() for each in (DOCS.parent / "zmqgrad").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources_of_errors)
    table = (DOCS / "troubleshooting.md").read_text().partition("## By text of the error")[2]
    texts = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\|((?: `[^`]+`,?)+) \|", table, re.MULTILINE)))
    assert len(texts) > 30
    for text in texts:
        assert all(part in joined for part in re.split(r" ?\.\.\. ?|RANK", text)), text


def test_the_page_of_messages_has_every_type() -> None:
    listed = re.findall(r"^\| `([A-Z_]+)`", pages.messages_page(), re.MULTILINE)
    assert sorted(listed) == sorted(MessageType.__members__)


def test_the_page_of_commands_has_every_command_and_option() -> None:
    page = pages.command_line_page()
    for parser in pages.parsers():
        assert f"`{parser.prog}`" in page
        shown = (action for action in parser._actions if action.help != argparse.SUPPRESS)
        assert all(option in page for action in shown for option in action.option_strings)


@pytest.mark.slow
def test_the_page_of_names_has_every_public_name_of_torch() -> None:
    import torch.distributed.rpc

    page = pages.PAGES["porting/names.md"]()
    for name in torch.distributed.rpc.__all__:
        if not name.startswith("_"):
            assert f"| `rpc.{name}` |" in page
    statuses = set(re.findall(r"^\| `[\w.]+` \| ([\w ]+) \|", page, re.MULTILINE))
    assert statuses <= {"same", "better", "different", "missing", "only here"}


def test_roles_become_code() -> None:
    text = "See :func:`~zmqgrad.rpc.remote` and :class:`RRef`, as follows::\n\n    x"
    assert sources.to_markdown(text) == "See `remote` and `RRef`, as follows:\n\n    x"
    text = "Import :mod:`zmqgrad.interop`, :mod:`~zmqgrad.store` or :mod:`a sidecar <zmqgrad.store.sidecar>`."
    assert sources.to_markdown(text) == "Import `zmqgrad.interop`, `store` or `a sidecar`."


@pytest.mark.parametrize("module", pages.MODULES)
def test_the_reference_has_every_public_name(module: str) -> None:
    offered = {name for name in getattr(importlib.import_module(module), "__all__", ()) if name[:1] != "_"}
    prefix = module.replace("zmqgrad", "", 1) + "."
    shown = {f".{name}".rpartition(".")[2] for name in reference.shown() if f".{name}".startswith(prefix)}
    assert offered <= shown | set(reference.NOT_SHOWN.get(module, "").split())


def test_members_that_the_reference_names_exist() -> None:
    for name, members in reference.MEMBERS.items():
        assert set(members.split()) <= set(dir(reference.shown()[name])), name


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_a_blank_line_precedes_each_list(page: Path) -> None:
    """Without it, the site shows the list as text of the paragraph, although GitHub does not."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    item = r"(?:[-*]|\d+\.) "
    assert not re.findall(rf"^(?!\s|{item}).+\n{item}.*", text, re.MULTILINE)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_quoted_code_exists(page: Path) -> None:
    sources.quote_sources(page.read_text())


def test_a_chart_follows_each_table_of_ratios() -> None:
    page = (DOCS / "benchmarks.md").read_text()
    drawn = charts.draw_ratios(page)
    assert drawn.count("<svg") == page.count("| zmqgrad | torch | ratio |") == 3
    for name, ratio, length in (("call", "0.19", 57), ("wake", "1.45", 435)):
        assert f">{name}</text>" in drawn
        assert f'width="{length}"' in drawn
        assert f">{ratio}</text>" in drawn


def test_a_quote_of_missing_code_is_refused() -> None:
    with pytest.raises(LookupError, match=r"cartpole\.py has no function or class CartPole\.fly"):
        sources.source_of("examples/cartpole.py", "CartPole.fly")


def test_the_home_page_begins_with_the_readme() -> None:
    home = sources.quote_sources((DOCS / "index.md").read_text())
    for part in ("**Why**", "pip install", "**When not**", "](guarantees.md)", "](images/overview.svg)"):
        assert part in home
    assert "](docs/" not in home


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_links_to_examples_work_in_the_site(page: Path) -> None:
    """There, the examples are in the directory of the pages."""
    for link in re.findall(r"\]\(([./]*examples/\w+\.py)\)", sources.link_examples(page.read_text())):
        target = (page.parent / link).resolve()
        assert target.parent == DOCS / "examples", link
        assert (DOCS.parent / "examples" / target.name).is_file(), link


@pytest.mark.parametrize("page", sorted(DOCS.glob("tutorials/*.md")), ids=lambda page: page.stem)
def test_a_tutorial_links_to_the_whole_of_its_programs(page: Path) -> None:
    text = page.read_text()
    shown = set(re.findall(r"examples/(\w+\.py)", text))
    assert shown
    assert shown == set(re.findall(r"\]\(\.\./\.\./examples/(\w+\.py)\)", text))
