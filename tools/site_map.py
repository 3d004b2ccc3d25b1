"""Draw the README's map of the lessons, which GitHub draws from Mermaid, as an SVG with links."""

import html
import re
from itertools import pairwise
from statistics import fmean

MERMAID = re.compile(r"```mermaid\n(.*?)```\n", re.DOTALL)
NAMED = re.compile(r"(\d\d[a-z]?)\[([^\]]+)\]")
WIDE, HIGH, COLUMN, ROW = 118, 28, 142, 50  # a box, and from one to the next


def with_map(page: str, stems: list[str]) -> str:
    """Return a page of Markdown with a drawing in the place of its Mermaid graph."""
    return MERMAID.sub(lambda found: drawn(found[1], stems), page)


def after_what(graph: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the names of the lessons by number, and after which others each comes."""
    names: dict[str, str] = dict(sorted(NAMED.findall(graph)))
    before: dict[str, list[str]] = {number: [] for number in names}
    for line in graph.splitlines()[1:]:
        steps = [re.findall(r"\b\d\d[a-z]?\b(?! \w)", step) for step in line.split("-->")]
        for sources, targets in pairwise(steps):
            for target in targets:
                before[target] += sources
    return names, before


def drawn(graph: str, stems: list[str]) -> str:
    """Return the drawing: each lesson to the right of those that it builds on."""
    names, before = after_what(graph)
    place: dict[str, tuple[int, int]] = {}  # column and row
    free: dict[int, int] = {}  # rows that are taken, by column
    while waiting := names.keys() - place.keys():
        ready = [one for one in waiting if place.keys() >= {*before[one]}]
        for row, number in sorted((mean_row(before[one], place), one) for one in ready):
            column = 1 + max((place[one][0] for one in before[number]), default=-1)
            place[number] = column, max(int(row), free.get(column, 0))
            free[column] = place[number][1] + 1
    at = {  # every other column is half a row lower: a wire past a column goes between its boxes
        number: (2 + COLUMN * column, 2 + ROW * (row + column % 2 / 2))
        for number, (column, row) in place.items()
    }
    wires = [wire(*at[one], *at[number]) for number in names for one in before[number]]
    boxes = [
        box(*at[n], names[n], next(s for s in stems if s.partition("_")[0] == n)) for n in names
    ]
    size = f"0 0 {COLUMN * len(free)} {ROW * (max(free.values()) + 0.5)}"
    label = "The lessons; each stands to the right of those that it builds on"
    lines = [f'<div class="map"><svg viewBox="{size}" role="group" aria-label="{label}">']
    return "\n".join([*lines, *wires, *boxes, "</svg></div>", ""])


def mean_row(before: list[str], place: dict[str, tuple[int, int]]) -> float:
    """Return the mean row of the lessons before one, near which it is drawn."""
    return fmean(place[one][1] for one in before) if before else 0.0


def wire(x0: float, y0: float, x1: float, y1: float) -> str:
    """Return a curve from the right of one box to the left of another."""
    start, end, middle = x0 + WIDE, x1, (x0 + WIDE + x1) / 2
    y0, y1 = y0 + HIGH / 2, y1 + HIGH / 2
    return f'<path d="M{start} {y0} C{middle} {y0} {middle} {y1} {end} {y1}"/>'


def box(x: float, y: float, name: str, stem: str) -> str:
    """Return the box of a lesson, a link to its page."""
    return (
        f'<a href="notebooks/{stem}.html"><rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" '
        f'rx="4"/><text x="{x + WIDE / 2}" y="{y + HIGH / 2}">{html.escape(name)}</text></a>'
    )
