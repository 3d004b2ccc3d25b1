"""Pictures of ZeRO: what the stages keep and send, and a flat parameter with its ranks' shards.

Each picture of the lesson comes with its alt text. Of a flat parameter, the upper bar shows where
each tensor lies, the lower one who owns it, in the pale colors of the ranks; padding is hatched.
Notebook 09_zero.
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_lib.core.errors import CourseError
from course_lib.core.parallelism import Parallelism
from course_lib.core.records import Ledger
from course_lib.core.units import GIB, KIB
from course_lib.cost.traffic import sent_bytes
from course_lib.display.colours import KIND, QUIET, WHITE, rank_colour
from course_lib.display.compare import Voices, compare
from course_lib.display.memory import memory
from course_lib.display.page import SMALL_PT, TEXT_PT, WIDTH_IN, Margins, page, plain
from course_lib.memory.formulas import model_states
from course_lib.zero.cost import ParamTraffic, zero_traffic
from course_lib.zero.flat_layout import FlatLayout
from course_lib.zero.lab import (
    H100_NUM_PARAMS,
    H100_PEAK_GIB,
    H100_SOURCE,
    TABLE_1_GB,
    TABLE_1_SOURCE,
)
from course_lib.zero.live import FOUR, four_tensors_finding

STAGES = (1, 2, 3)
TABLE_1_RANKS, TABLE_1_PARAMS = (1, 4, 16, 64, 256, 1024), 7_500_000_000
_HIGH, _LETTER_IN = 0.8, 0.078


def held_bytes(num_params: int, zero: int, p: int) -> int:
    """Return the bytes that a rank holds under ZeRO stage `zero`, with Adam in mixed precision."""
    states = model_states(num_params, "bf16", parallelism=Parallelism(dp=p, zero=zero))
    return sum(states.values())


def states_on_paper() -> tuple[Figure, str]:
    """Draw the bytes that a rank holds at each stage, beside the arithmetic of the ZeRO paper."""
    paper_gb = {
        zero: [held_bytes(TABLE_1_PARAMS, zero, p) / 1e9 for p in TABLE_1_RANKS] for zero in STAGES
    }
    curves = {
        f"stage {zero}": Voices(formula=one, published=(TABLE_1_RANKS, TABLE_1_GB[zero]))
        for zero, one in paper_gb.items()
    }
    title = "Stage 1 tends to 4 bytes per parameter, stage 2 to 2, stage 3 to 0"
    figure = compare(
        TABLE_1_RANKS,
        curves,
        title,
        x_label="ranks p",
        y_label=f"GB on a rank ({TABLE_1_PARAMS / 1e9:g} billion parameters)",
        log=True,
        names={"published": "the paper's arithmetic"},
        source=TABLE_1_SOURCE,
    )
    *others, last = (f"{one[-1]:.3g}" for one in paper_gb.values())
    held = f"{', '.join(others)} and {last} of {paper_gb[1][0]:g} GB"
    return figure, f"{title}; on {TABLE_1_RANKS[-1]} ranks {held}"


def states_on_ranks(
    num_params: int, worlds: Sequence[int], held_kib: Mapping[int, Sequence[float]]
) -> tuple[Figure, str]:
    """Draw what a rank holds after backward at each stage, as measured and by formula, in KiB."""
    curves = {
        f"stage {zero}": Voices(
            formula=[held_bytes(num_params, zero, p) / KIB for p in worlds], measurement=found
        )
        for zero, found in held_kib.items()
    }
    alone = next(iter(held_kib.values()))[0]
    most = ", ".join(f"{found[-1]:.0f}" for found in held_kib.values())
    names = ", ".join(str(zero) for zero in held_kib)
    title = (
        f"One rank holds {alone:.0f} KiB, each of {worlds[-1]} ranks {most} KiB (stages {names})"
    )
    figure = compare(worlds, curves, title, x_label="ranks p", y_label="held by a rank (KiB)")
    return figure, f"{title}; measured and by formula"


def four_tensors(p: int) -> tuple[Figure, str]:
    """Draw a flat parameter of four small tensors, cut into equal shards for p ranks."""
    layout = FlatLayout(tuple(FOUR.values()), p)
    ranks = f"{p} rank{'s' * (p > 1)}"
    alt = f"{layout.numel} numbers in {len(FOUR)} tensors, cut into equal shards for {ranks}"
    return flat_param_shards(layout, [*FOUR], four_tensors_finding(p)), alt


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


def grads_over_time(ledger: Ledger, zero: int, scale_bytes: float = 0.0) -> tuple[Figure, str]:
    """Draw what a rank of stage 1 or 2 owned during a step, and tell its peak of gradients.

    scale_bytes   the axis reaches at least that far, to compare with another stage
    """
    most = f"at most {max(ledger.bytes_by_kind['grads']) / KIB:.0f} KiB of gradients"
    title = f"Stage 2's engine: {most}"
    if zero == 1:
        title = f"Stage 1: {most}, with the copy of one bucket"
    kept = "whole until the step" if zero == 1 else "buckets come and go"
    return memory(ledger, title, scale_bytes=scale_bytes), f"{title}; {kept}"


def params_over_time(ledger: Ledger, scale_bytes: float = 0.0) -> tuple[Figure, str]:
    """Draw what a rank of stage 3 owned during a step, and tell its range of parameters."""
    held = ledger.bytes_by_kind["params"]
    title = (
        f"Stage 3: {min(held) / KIB:.0f} KiB of parameters, at the peak {max(held) / KIB:.0f} KiB"
    )
    return memory(ledger, title, scale_bytes=scale_bytes), f"{title}; each tooth is a module"


def sent_by_stage(
    numbers: Sequence[int], counted: Mapping[int, Sequence[float]] | None = None
) -> tuple[Figure, str]:
    """Draw the bytes that each stage sends in a step of several micro-batches, divided by DDP's.

    counted   by stage, for each number of micro-batches; None: only the formula
    """
    flat = [ParamTraffic(num_bytes=2**20)]  # the ratio is the same for any size and any p
    ddp = sent_bytes(zero_traffic(0, flat), 2)
    paper = {
        zero: [sent_bytes(zero_traffic(zero, flat, m), 2) / ddp for m in numbers] for zero in STAGES
    }
    curves = {
        f"stage {zero}": Voices(formula=one, measurement=counted[zero] if counted else None)
        for zero, one in paper.items()
    }
    last = (counted or paper)[3]
    title = (
        f"Stage 3 sends {last[0]:g} times DDP's bytes with m = {numbers[0]}, "
        f"{last[-1]:g} times with m = {numbers[-1]}"
    )
    figure = compare(
        numbers,
        curves,
        title,
        x_label="micro-batches m in a step",
        y_label="bytes sent / bytes that DDP sends",
    )
    one, two = ((counted or paper)[zero][-1] for zero in (1, 2))
    return figure, f"{title}; stages 1 and 2 then send {one:g} and {two:g} times"


def moments_by_rank(
    num_params: int, ours_kib: Sequence[float], torch_kib: Sequence[float]
) -> tuple[Figure, str]:
    """Draw Adam's moments in float64 on each rank: our pieces beside PyTorch's whole tensors."""
    p = len(ours_kib)
    even_kib = 2 * 8 * num_params / p / KIB
    curves = {
        "ours: pieces": Voices(formula=[even_kib] * p, measurement=ours_kib),
        "PyTorch: whole tensors": Voices(measurement=torch_kib),
    }
    title = f"PyTorch's fullest rank keeps {max(torch_kib):.0f} KiB, ours {max(ours_kib):.0f}"
    figure = compare(range(p), curves, title, x_label="rank", y_label="Adam's moments (KiB)")
    return figure, f"{title}; each rank's equal part would be {even_kib:.0f} KiB"


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
