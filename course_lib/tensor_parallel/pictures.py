"""Pictures of matrix products on several ranks, and of what splitting them costs and saves.

A matrix is whole on every rank, split by columns or rows, or a partial sum. A shard has the pale
color and the number of the rank that holds it; white is whole on every rank. Sheets behind one
another are partial sums: each rank has a tensor of the full shape. The pictures of the lesson come
with their alt text. Notebook 07_tensor_parallel.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_lib.core.errors import CourseError
from course_lib.core.links import Link
from course_lib.core.presets import MODELS
from course_lib.core.specs import ModelSpec
from course_lib.core.units import KIB
from course_lib.cost.hardware import H100
from course_lib.display.colours import QUIET, WHITE, rank_colour
from course_lib.display.compare import Voices, compare
from course_lib.display.page import SMALL_PT, TEXT_PT, WIDTH_IN, Margins, page
from course_lib.display.timeline import timelines
from course_lib.tensor_parallel.cost import (
    H100_RUN,
    H100Scaling,
    break_even_hidden,
    h100_scaling,
    kept_layer_bytes,
    megatron_widths,
)
from course_lib.tensor_parallel.lab import OverlapRuns

WAYS = {
    "": "whole on every rank",
    "columns": "by columns",
    "rows": "by rows",
    "sum": "partial sums",
}
_SIDE_IN, _WORD_IN, _CHARACTER_IN, _SHEET_IN = 0.5, 0.12, 0.08, 0.07
_SMALL_CHARACTER_IN = 0.07  # of the terms of a sum


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Matrix of a product: name, drawn size, its size in words, and how it is split.

    split   "" (whole on every rank), "columns", "rows", or "sum" (each rank has a partial sum)

    Raises: CourseError for a size of 0 or less, or another split
    """

    name: str
    height: float
    width: float
    words: str = ""
    split: str = ""

    def __post_init__(self) -> None:
        if self.split not in WAYS or min(self.height, self.width) <= 0:
            raise CourseError(
                f"Matrix {self.name}: need sizes above 0, and split as one of "
                f"{', '.join(repr(way) for way in WAYS)}; got {self.height, self.width} and "
                f"{self.split!r}."
            )


def matrices(row: Sequence[Matrix | str], title: str, *, ranks: int, note: str = "") -> Figure:
    """Draw matrices, and the words between them (a times sign, GELU), from left to right.

    Raises: CourseError without a matrix or a rank
    """
    drawn = [item for item in row if isinstance(item, Matrix)]
    if not drawn or ranks < 1:
        raise CourseError(f"matrices: need a matrix and a rank; got {len(drawn)} and {ranks}.")
    words_in = sum(_words_in(item) for item in row if isinstance(item, str))
    free_in = WIDTH_IN - 2 * _SIDE_IN - words_in
    inch = min(free_in / sum(matrix.width for matrix in drawn), 1.9 / max(m.height for m in drawn))
    tall_in = max(matrix.height for matrix in drawn) * inch
    margins = Margins(left=0.0, right=0.0, top=0.1, bottom=0.1)
    figure, (axes,) = page(title, [tall_in + 0.7], note=note, margins=margins)
    axes.set_xlim(0, WIDTH_IN)
    axes.set_ylim(-0.35, tall_in + 0.35)
    axes.set_axis_off()
    total_in = words_in + sum(matrix.width for matrix in drawn) * inch
    x, middle = (WIDTH_IN - total_in) / 2, tall_in / 2
    for item in row:
        if isinstance(item, str):
            wide = _words_in(item)
            axes.text(x + wide / 2, middle, item, ha="center", va="center", fontsize=TEXT_PT + 1)
        else:
            wide = item.width * inch
            _matrix(axes, item, (x, middle - item.height * inch / 2), inch, ranks)
        x += wide
    return figure


def _words_in(words: str) -> float:
    return 2 * _WORD_IN + _CHARACTER_IN * len(words)


def _matrix(
    axes: Axes, matrix: Matrix, corner: tuple[float, float], inch: float, ranks: int
) -> None:
    wide, tall = matrix.width * inch, matrix.height * inch
    pieces = _pieces(matrix.split, ranks, (*corner, wide, tall))
    for rank, (x, y, width, height) in pieces:
        fill = WHITE if rank is None else rank_colour(rank, ranks)
        axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=QUIET, lw=0.9))
        if rank is not None and matrix.split != "sum":
            center = x + width / 2, y + height / 2
            axes.text(*center, str(rank), ha="center", va="center", fontsize=TEXT_PT)
    (x, y), look = corner, dict[str, Any](ha="center", fontsize=SMALL_PT)
    if matrix.split == "sum":
        parts = "+".join(map(str, range(ranks)))
        if len(parts) * _SMALL_CHARACTER_IN > wide:
            parts = f"0+…+{ranks - 1}"
        axes.text(x + wide / 2, y + tall / 2, parts, ha="center", va="center", fontsize=7.5)
    top = y + tall + (_SHEET_IN * (ranks - 1) if matrix.split == "sum" else 0)
    axes.text(x + wide / 2, top + 0.08, f"{matrix.name}  {matrix.words}".strip(), **look)
    axes.text(x + wide / 2, y - 0.1, WAYS[matrix.split], va="top", color=QUIET, **look)


def _pieces(
    split: str, ranks: int, box: tuple[float, float, float, float]
) -> list[tuple[int | None, tuple[float, float, float, float]]]:
    """Return (rank, part of the box) in drawing order; rank None: all ranks hold the whole."""
    x, y, wide, tall = box
    if split == "columns":
        part = wide / ranks
        return [(rank, (x + rank * part, y, part, tall)) for rank in range(ranks)]
    if split == "rows":
        part = tall / ranks
        return [(rank, (x, y + tall - (rank + 1) * part, wide, part)) for rank in range(ranks)]
    if split == "sum":
        shifts = [(rank, _SHEET_IN * rank) for rank in reversed(range(ranks))]
        return [(rank, (x + shift, y + shift, wide, tall)) for rank, shift in shifts]
    return [(None, box)]


def split_mlp(ranks: int) -> tuple[Figure, str]:
    """Draw GELU(XA)B with A split by columns and B by rows: one sum over the ranks, at the end."""
    row: list[Matrix | str] = [
        *(Matrix(name="X", words="[tokens, h]", height=3, width=2), "×"),
        *(Matrix(name="A", words="[h, f]", height=2, width=6, split="columns"), "→ GELU →"),
        *(Matrix(name="", words="[tokens, f]", height=3, width=6, split="columns"), "×"),
        *(Matrix(name="B", words="[f, h]", height=6, width=2, split="rows"), "="),
        Matrix(name="Y", words="[tokens, h]", height=3, width=2, split="sum"),
    ]
    title = "Columns, then rows: each rank computes the input that its rows of B need"
    return matrices(row, title, ranks=ranks), f"{title}; 1 sum over {ranks} ranks at the end"


def sequence_region(ranks: int) -> tuple[Figure, str]:
    """Draw a parallel region between tokens that are split: all_gather in front, then the sum."""
    narrow = partial(Matrix, words="[tokens, h]", height=4, width=2)
    row: list[Matrix | str] = [
        *(narrow(name="X", split="rows"), "all-gather →", narrow(name="X"), "× A →"),
        *(Matrix(name="", words="[tokens, f]", height=4, width=6, split="columns"), "× B →"),
        *(narrow(name="Y", split="sum"), "   reduce-scatter →", narrow(name="Y", split="rows")),
    ]
    title = "Sequence parallelism: an all-gather before the region, a reduce-scatter after it"
    alt = f"{title}; outside the region a rank has 1/{ranks} of the tokens"
    return matrices(row, title, ranks=ranks), alt


def losses_apart(whole: Sequence[float], split: Sequence[float]) -> tuple[Figure, str]:
    """Draw in each step how far the losses of a split model lie from those of the whole one."""
    apart = [abs(a - b) for a, b in zip(whole, split, strict=True)]
    title = f"{len(apart)} steps in float64: split and whole model differ in the loss by at most "
    title += f"{_rounded_up(max(apart)):.0e}"
    voices, steps = Voices(measurement=apart), range(len(apart))
    return compare(steps, voices, title, x_label="step", y_label="difference of the losses"), title


def _rounded_up(number: float) -> float:
    """Return the next number of one significant digit: a bound, not an estimate."""
    unit = 10.0 ** math.floor(math.log10(number)) if number else 1.0
    return math.ceil(round(number / unit, 6)) * unit


def overlapped_backward(runs: OverlapRuns, link: Link) -> tuple[Figure, str]:
    """Draw the backward pass of a stack of split MLPs, without and with overlap."""
    saved_ms, predicted_ms = 1e3 * runs.saved_s, 1e3 * runs.predicted_s
    title = f"Overlap saves {saved_ms:.0f} ms in two MLPs; predicted {predicted_ms:.0f} ms"
    figure = timelines(runs.timelines(), title, link=link)
    return figure, f"{title}; the all-reduce runs beside the weight gradient"


def layer_memory(
    spec: ModelSpec,
    batch: int,
    seq: int,
    whole: Mapping[str, int],
    kept: Mapping[str, Mapping[int, int]],
) -> tuple[Figure, str]:
    """Draw the bytes that a layer keeps for backward on a rank, by formula and as measured.

    whole   by name, what is not divided by the number of ranks, in units of batch * seq * hidden
    kept    by name, the bytes measured on p ranks
    """
    p_values = [*next(iter(kept.values()))]
    curves = {
        name: Voices(
            formula=[kept_layer_bytes(spec, batch, seq, p, whole[name]) / KIB for p in p_values],
            measurement=[by_p[p] / KIB for p in p_values],
        )
        for name, by_p in kept.items()
    }
    plain, *_, last = kept
    ends = [f"{kept[name][p_values[-1]] / KIB:.0f} KiB ({name})" for name in (plain, last)]
    title = f"On {p_values[-1]} ranks a layer keeps {ends[0]}, or {ends[1]}"
    figure = compare(p_values, curves, title, x_label="ranks p", y_label="KiB on a rank")
    return figure, title


def width_picture(degrees: Sequence[int] = (2, 4, 8, 16, 32)) -> tuple[Figure, str]:
    """Draw the hidden size at which a layer on H100 communicates as long as it computes.

    Above a link's line it computes longer. Stars are published runs: NVIDIA's models (Megatron-LM),
    and those of the 3B model of `h100_scaling`.
    """
    curves = {
        f"{name}, {rate / 1e9:.0f} GB/s": Voices(
            formula=[break_even_hidden(p, H100.peak(), rate) for p in degrees]
        )
        for name, rate in H100.links.items()
    }
    ranks, widths = megatron_widths()
    of_3b = h100_scaling().ranks
    widths = [*widths, *[MODELS["llama-3b"].hidden] * len(of_3b)]
    curves["models"] = Voices(published=([*ranks, *of_3b], widths))
    needed = {name: break_even_hidden(8, H100.peak(), rate) for name, rate in H100.links.items()}
    title = f"At peak, 8 H100 compute longer than they send above h = {needed['NVLink']:,.0f} "
    title += f"(NVLink) or {needed['PCIe 5']:,.0f} (PCIe 5)"
    figure = compare(
        degrees,
        curves,
        title,
        x_label="ranks p",
        y_label="hidden size h",
        log=True,
        note="H100 at its peak, one InfiniBand adapter; above a line, computation takes longer",
        source="NVIDIA's models, h from 6,144: Megatron-LM's README, July 2024, 42 to 49 % of the "
        f"peak; h = 3,072: {H100_RUN}",
    )
    return figure, f"{title}; NVIDIA's models lie above NVLink's line"


def h100_picture(scaling: H100Scaling) -> tuple[Figure, str]:
    """Draw published tokens/s per GPU over the ranks, beside the formula; all H100."""
    curves = {
        "tensor parallel": Voices(
            formula=scaling.formula, published=(scaling.ranks, scaling.published)
        ),
        "with sequence parallelism": Voices(published=(scaling.ranks, scaling.sequence_parallel)),
    }
    drop, formula = scaling.kept(8, 16)
    title = f"From 8 to 16 ranks a GPU keeps {100 * drop:.0f} % of its speed; "
    title += f"the formula says {100 * formula:.0f} %"
    figure = compare(
        scaling.ranks,
        curves,
        title,
        x_label="ranks p, 8 per node",
        y_label="tokens/s per GPU",
        log_x=True,
        source=H100_RUN,
    )
    pairs = zip(scaling.ranks, scaling.formula, scaling.published, strict=True)
    off = max(abs(paper / told - 1) for p, paper, told in pairs if p <= 8)
    return figure, f"{title}; up to 8 ranks the formula is within {100 * off:.0f} %"
