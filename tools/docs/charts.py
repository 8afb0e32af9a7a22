"""Bar charts of the measured ratios, drawn from the tables that pages show, so that both agree.

A table with the columns ``zmqgrad``, ``torch`` and ``ratio`` gets a chart below it. The colours are those of
the theme.
"""

from __future__ import annotations

import re

_TABLE = re.compile(
    r"^\| (?P<title>[^|\n]+) \| zmqgrad \| torch \| ratio \|\n\|[-|]+\|\n(?P<rows>(?:\|.*\|\n)+)",
    re.MULTILINE,
)
_ROW = re.compile(r"^\| `(\w+)` \|.*\| ([\d.]+) \|$", re.MULTILINE)
_LEFT, _UNIT, _STEP = 130, 300, 20
"""Pixels: where bars begin, the length of ratio 1, and the height of a row."""


def draw_ratios(markdown: str) -> str:
    """``markdown`` with a chart below each table of ratios."""
    return _TABLE.sub(
        lambda found: f"{found[0]}\n{chart([(n, float(r)) for n, r in _ROW.findall(found['rows'])])}\n",
        markdown,
    )


def chart(ratios: list[tuple[str, float]]) -> str:
    """The chart of some rows, as SVG.

    Args:
        ratios: name and ratio of each row; below 1, zmqgrad is faster.
    """
    height = _STEP * (len(ratios) + 1)
    right = _LEFT + _UNIT * max(1.0, *(ratio for _, ratio in ratios)) + 50
    bars = "".join(_bar(number, name, ratio) for number, (name, ratio) in enumerate(ratios))
    middle = _LEFT + _UNIT
    return (
        f'<svg class="ratios" role="img" aria-label="The ratios of the table above, as bars" '
        f'viewBox="0 0 {right:.0f} {height}"><line x1="{middle}" x2="{middle}" y1="0" y2="{height - _STEP}"/>'
        f'{bars}<text x="{middle}" y="{height - 6}" text-anchor="middle">torch: 1</text></svg>\n'
    )


def _bar(number: int, name: str, ratio: float) -> str:
    y, length = _STEP * number, _UNIT * ratio
    kind = "faster" if ratio <= 1 else "slower"
    return (
        f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{name}</text>'
        f'<rect class="{kind}" x="{_LEFT}" y="{y + 3}" width="{length:.0f}" height="{_STEP - 6}"/>'
        f'<text x="{_LEFT + length + 6:.0f}" y="{y + 14}">{ratio:g}</text>'
    )
