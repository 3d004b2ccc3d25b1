"""Draw the README's map of the lessons, which GitHub draws from Mermaid, as an SVG with links."""

import html
import re
from itertools import pairwise

MERMAID = re.compile(r"```mermaid\n(.*?)```\n", re.DOTALL)
NAMED = re.compile(r"(\d\d)\[([^\]]+)\]")
WIDE, HIGH, COLUMN, ROW = 112, 30, 142, 62  # a box, and from one to the next


def with_map(page: str, stems: list[str]) -> str:
    """Return a page of Markdown with a drawing in the place of its Mermaid graph."""
    return MERMAID.sub(lambda found: drawn(found[1], stems), page)


def after_what(graph: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the names of the lessons by number, and after which others each comes."""
    names: dict[str, str] = dict(sorted(NAMED.findall(graph)))
    before: dict[str, list[str]] = {number: [] for number in names}
    for line in graph.splitlines()[1:]:
        steps = [re.findall(r"\b\d\d\b(?! \w)", step) for step in line.split("-->")]
        for sources, targets in pairwise(steps):
            for target in targets:
                before[target] += sources
    return names, before


def drawn(graph: str, stems: list[str]) -> str:
    """Return the drawing: each lesson to the right of those that it builds on."""
    names, before = after_what(graph)
    columns: dict[int, list[str]] = {}
    depth: dict[str, int] = {}
    while len(depth) < len(names):
        for number in names.keys() - depth.keys():
            if all(one in depth for one in before[number]):
                depth[number] = 1 + max((depth[one] for one in before[number]), default=-1)
    for number in names:
        columns.setdefault(depth[number], []).append(number)
    most = max(map(len, columns.values()))
    place = {
        number: (2 + COLUMN * column, 2 + ROW * (row + (most - len(numbers)) / 2))
        for column, numbers in columns.items()
        for row, number in enumerate(numbers)
    }
    wires = [wire(*place[one], *place[number]) for number in names for one in before[number]]
    boxes = [box(*place[n], names[n], next(s for s in stems if s[:2] == n)) for n in names]
    size = f"0 0 {COLUMN * len(columns)} {ROW * most}"
    label = "The lessons; each stands to the right of those that it builds on"
    lines = [f'<svg class="map" viewBox="{size}" role="group" aria-label="{label}">']
    return "\n".join([*lines, *wires, *boxes, "</svg>", ""])


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
