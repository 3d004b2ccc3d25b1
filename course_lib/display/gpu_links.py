"""The link matrix of a machine's GPUs, from `nvidia-smi topo -m`, as a picture."""

import re
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from course_lib.core.errors import CourseError
from course_lib.display.colours import BLACK, QUIET, WHITE
from course_lib.display.page import SMALL_PT, TEXT_PT, WIDTH_IN, Margins, page
from course_lib.ranks.machine import LINK_WORDS

_SHADES = ("#333333", "#757575", "#9A9A9A", "#BBBBBB", "#D5D5D5", "#EEEEEE")
GREYS = dict(zip(LINK_WORDS, _SHADES, strict=True))
_CELL_IN = 0.5


def links(matrix: Sequence[Sequence[str]], title: str) -> Figure:
    """Draw the kind of link between each pair of GPUs, nearer ones darker; row i, column j: i to j.

    Raises: CourseError for a matrix without rows, or one that is not square
    """
    count = len(matrix)
    if not count or any(len(row) != count for row in matrix):
        raise CourseError(f"links: need a row and a column for each GPU; got {count} rows.")
    there = {_kind(cell) for row in matrix for cell in row}
    found = [kind for kind in LINK_WORDS if kind in there]
    legend = [Patch(facecolor=GREYS[kind], label=f"{kind}: {LINK_WORDS[kind]}") for kind in found]
    side = min(_CELL_IN, (WIDTH_IN - 1.5) / count)
    margins = Margins(left=1.0, top=0.3, bottom=0.15)
    figure, (axes,) = page(title, [side * count], legend=legend, margins=margins)
    axes.set_xlim(0, (WIDTH_IN - 1.3) / side)
    axes.set_ylim(count, 0)
    names = [f"GPU{number}" for number in range(count)]
    axes.set_xticks([at + 0.5 for at in range(count)], names, fontsize=SMALL_PT)
    axes.set_yticks([at + 0.5 for at in range(count)], names, fontsize=SMALL_PT)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    for row, cells in enumerate(matrix):
        for column, cell in enumerate(cells):
            fill = GREYS.get(_kind(cell), WHITE)
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=fill, edgecolor=WHITE))
            ink = WHITE if fill in _SHADES[:2] else BLACK if fill != WHITE else QUIET
            middle = (column + 0.5, row + 0.5)
            axes.text(*middle, cell, ha="center", va="center", fontsize=TEXT_PT - 1, color=ink)
    return figure


def _kind(cell: str) -> str:
    return re.sub(r"\d+$", "", cell)
