"""Draw a flat parameter: its tensors side by side, and below them the equal shards of the ranks.

The upper bar shows where each tensor lies, the lower one who owns it, in the pale colors of the
ranks; padding is hatched. Notebook 09_zero.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_lib.core.errors import CourseError
from course_lib.display.colours import KIND, QUIET, WHITE, rank_colour
from course_lib.display.page import SMALL_PT, TEXT_PT, WIDTH_IN, Margins, page, plain
from course_lib.zero.flat_layout import FlatLayout

_HIGH, _LETTER_IN = 0.8, 0.078


def flat_param_shards(layout: FlatLayout, names: Sequence[str], title: str) -> Figure:
    """Draw the tensors of a layout by name and size, and the shards of its ranks."""
    if len(names) != len(layout.numels) or not layout.numel:
        raise CourseError(
            f"flat_param_shards: need a name for each of {len(layout.numels)} tensors, and numbers "
            f"in them; got {len(names)} names."
        )
    margins = Margins(left=0.85, right=0.3)
    figure, (axes,) = page(title, [1.25], margins=margins)
    plain(axes, x_label="place in the flat parameter (numbers)", grid="")
    axes.set_xlim(0, layout.padded_numel)
    axes.set_ylim(0, 2)
    axes.set_yticks([1.5, 0.5], ["tensors", "ranks"])
    axes.tick_params(axis="y", length=0)
    letter = _LETTER_IN / (WIDTH_IN - margins.left - margins.right) * layout.padded_numel
    for name, start, numel in zip(names, layout.starts, layout.numels, strict=False):
        _box(axes, (start, 1.5), numel, [f"{name} [{numel}]", name, str(numel)], WHITE, letter)
    for rank in range(layout.group_size):
        mine = layout.shard_slice(rank)
        colour = rank_colour(rank, layout.group_size)
        words = [f"rank {rank}", str(rank)]
        _box(axes, (mine.start, 0.5), layout.shard_numel, words, colour, letter)
    ink, filled = KIND["wait"], layout.padded_numel - layout.numel
    look = {"facecolor": "none", "edgecolor": QUIET, "hatch": ink.hatch * 2, "lw": 0.9}
    for y in (0.5, 1.5) if filled else ():
        corner = layout.numel, y - _HIGH / 2
        axes.add_patch(Rectangle(corner, filled, _HIGH, **look))  # type: ignore[arg-type]
    return figure


def _box(
    axes: Axes,
    at: tuple[float, float],
    width: float,
    words: Sequence[str],
    fill: str,
    letter: float,
) -> None:
    """Draw a box with the longest label that fits into it."""
    x, y = at
    corner = x, y - _HIGH / 2
    axes.add_patch(Rectangle(corner, width, _HIGH, facecolor=fill, edgecolor=QUIET, lw=0.9))
    fitting = [word for word in words if len(word) * letter < width]
    size = TEXT_PT if fill != WHITE else SMALL_PT
    for word in fitting[:1]:
        axes.text(x + width / 2, y, word, ha="center", va="center", fontsize=size)
