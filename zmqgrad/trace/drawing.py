"""Draws a sequence diagram: as text for a terminal, and as Mermaid. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from zmqgrad.trace.labels import show_time
from zmqgrad.trace.sequence import Diagram, Step

_LEAST_GAP = 14
_TIME_WIDTH = 11


def as_text(diagram: Diagram, width: int = 110) -> Iterator[str]:
    """Yields lines: the time since the first step, and arrows between the lanes, which are ``width`` wide."""
    longest = max(map(len, diagram.lanes), default=0)
    gap = max(_LEAST_GAP, longest + 2, (width - _TIME_WIDTH) // max(1, len(diagram.lanes)))
    middles = {lane: _TIME_WIDTH + gap // 2 + i * gap for i, lane in enumerate(diagram.lanes)}
    yield diagram.title
    yield _overlay("", [(middles[lane] - len(lane) // 2, lane) for lane in diagram.lanes])
    rails = [(x, "|") for x in middles.values()]
    start = diagram.steps[0].time if diagram.steps else 0
    for step in diagram.steps:
        time = show_time(step.time - start).rjust(_TIME_WIDTH - 2)
        text = _caption(step)
        here = middles[step.source]
        if not step.target or step.target == step.source:
            before = here - len(text) - 1  # where it fits neither after nor before its lane, it is too long
            is_after = here + len(text) + 2 <= width or before < _TIME_WIDTH
            yield _overlay(time, [*rails, (here, f"* {text}") if is_after else (before, f"{text} *")])
            continue
        there = middles[step.target]
        low, high = min(here, there), max(here, there)
        line = ("." if step.reply else "-") * (high - low - 1)
        head = (there - 1, ">") if there > here else (there + 1, "<")
        inside = text if len(text) <= high - low - 5 else ""
        label = (low + 1 + (high - low - 1 - len(inside) - 2) // 2, f" {inside} ") if inside else (0, "")
        if not inside:  # above the arrow, from its left end, as far as there is room
            yield _overlay("", [*rails, (max(_TIME_WIDTH, min(low + 2, width - len(text))), text)])
        yield _overlay(time, [*rails, (low + 1, line), label, head])


def _overlay(base: str, parts: list[tuple[int, str]]) -> str:
    """``base`` with each text of ``parts`` written over it at its column."""
    line = list(base)
    for column, text in parts:
        line += " " * (column + len(text) - len(line))
        line[column : column + len(text)] = text
    return "".join(line).rstrip()


def _caption(step: Step) -> str:
    if step.nanoseconds is not None:
        took = f" {show_time(step.nanoseconds)}"
    else:
        took = " (not received)" if step.target else ""
    return f"{step.text}{took}{' FAILED' if step.failed else ''}"


def as_mermaid(diagram: Diagram) -> Iterator[str]:
    """Yields the lines of a Mermaid ``sequenceDiagram``."""
    ids = {lane: f"p{i}" for i, lane in enumerate(diagram.lanes)}
    yield "sequenceDiagram"
    yield f"    %% {_plain(diagram.title)}"
    for lane, name in ids.items():
        yield f"    participant {name} as {_plain(lane)}"
    for step in diagram.steps:
        text = _plain(_caption(step))
        if not step.target:
            yield f"    Note over {ids[step.source]}: {text}"
        else:
            lost = "x" if step.nanoseconds is None else ">>"
            arrow = ("--" if step.reply else "-") + lost
            yield f"    {ids[step.source]}{arrow}{ids[step.target]}: {text}"


def _plain(text: str) -> str:
    """Without what Mermaid takes for the end of a statement, an entity or a tag."""
    return text.translate(_ENTITIES)


_ENTITIES = str.maketrans({"#": "#35;", ";": "#59;", "<": "#lt;", ">": "#gt;", "\n": " "})
