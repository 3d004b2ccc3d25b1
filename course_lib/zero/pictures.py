"""Draw a flat parameter with the equal shards of its ranks, and published peaks of ZeRO stage 1.

Of a flat parameter, the upper bar shows where each tensor lies, the lower one who owns it, in the
pale colors of the ranks; padding is hatched. Notebook 09_zero.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_lib.core.errors import CourseError
from course_lib.core.units import GIB
from course_lib.display.colours import KIND, QUIET, WHITE, rank_colour
from course_lib.display.compare import Voices, compare
from course_lib.display.page import SMALL_PT, TEXT_PT, WIDTH_IN, Margins, page, plain
from course_lib.zero.flat_layout import FlatLayout
from course_lib.zero.lab import H100_NUM_PARAMS, H100_PEAK_GIB, H100_SOURCE

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
        _box(axes, (start, 1.5), numel, [f"{name} [{numel}]", name, f"[{numel}]"], WHITE, letter)
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


def stage_1_on_gpus() -> tuple[Figure, str]:
    """Draw published peaks without ZeRO and with stage 1, and what stage 1 should leave."""
    plain_gib, sharded_gib = H100_PEAK_GIB[0], H100_PEAK_GIB[1]
    counts = [*plain_gib]
    paper = [plain_gib[p] - saved_by_stage_1(H100_NUM_PARAMS, p) / GIB for p in counts]
    curves = {
        "data parallelism": Voices(published=(counts, [*plain_gib.values()])),
        "with stage 1": Voices(formula=paper, published=(counts, [*sharded_gib.values()])),
    }
    title = (
        f"Stage 1 on 8 H100 saves {plain_gib[8] - sharded_gib[8]:.1f} GiB of {plain_gib[8]:g}; "
        f"formula: {plain_gib[8] - paper[0]:.1f}"
    )
    axes = {"x_label": "GPUs p", "y_label": "peak memory of a GPU (GiB)", "source": H100_SOURCE}
    figure = compare(counts, curves, title, log_x=True, **axes)  # type: ignore[arg-type]
    return figure, f"{title}; on 256, {sharded_gib[256]:g} GiB are left, formula {paper[-1]:.1f}"


def saved_by_stage_1(num_params: int, p: int) -> float:
    """Return the bytes that stage 1 saves on each of p ranks: 12 N (1 - 1/p), Adam in fp32."""
    return 12 * num_params * (1 - 1 / p)


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
