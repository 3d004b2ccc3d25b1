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
from course_lib.display.colours import KIND, QUIET, WHITE, Ink, rank_colour
from course_lib.display.compare import Voices, compare
from course_lib.display.on_ranks import measured_over
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
    """Draw two split matrices between tokens that are split: all_gather in front, then the sum."""
    narrow = partial(Matrix, words="[tokens, h]", height=4, width=2)
    row: list[Matrix | str] = [
        *(narrow(name="X", split="rows"), "all-gather →", narrow(name="X"), "× A →"),
        *(Matrix(name="", words="[tokens, f]", height=4, width=6, split="columns"), "× B →"),
        *(narrow(name="Y", split="sum"), "   reduce-scatter →", narrow(name="Y", split="rows")),
    ]
    title = "Sequence parallelism: all-gather before the two matrices, reduce-scatter after them"
    alt = f"{title}; before and after them a rank has 1/{ranks} of the tokens"
    return matrices(row, title, ranks=ranks), alt


_PASSES = {
    "forward": r"X|f: identity|$\times\, A_r$|GELU|$\times\, B_r$|g: all-reduce|Y",
    "backward": r"∂L/∂X|f: all-reduce|$\times\, A_r^T$|GELU′|$\times\, B_r^T$|g: identity|∂L/∂Y",
}


def f_and_g() -> tuple[Figure, str]:
    """Draw one rank's forward and backward pass through f, its part of an MLP, and g."""
    title = "Every rank takes part in one sum in forward (g) and in one in backward (f)"
    figure, (axes,) = page(title, [2.2], margins=Margins(left=0.0, right=0.0, bottom=0.0))
    axes.set(xlim=(0, WIDTH_IN), ylim=(0, 2.2))
    axes.set_axis_off()
    look = dict[str, Any](ha="center", va="center", fontsize=TEXT_PT)
    for (kind, words), y, arrow in zip(_PASSES.items(), (1.4, 0.3), "→←", strict=True):
        axes.text(0.1, y + 0.58, f"{kind} pass on rank r", fontsize=TEXT_PT)
        for n, word in enumerate(words.split("|")):
            ink = KIND["all_reduce" if "reduce" in word else kind]
            if word[0] in "X∂Y" or "identity" in word:
                ink = Ink(name="", fill=WHITE, line=QUIET)
            x = 0.1 + 1.13 * n
            box = dict[str, Any](facecolor=ink.fill, edgecolor=ink.line, hatch=ink.hatch)
            axes.add_patch(Rectangle((x, y), 0.95, 0.45, lw=0.9, **box))
            axes.text(x + 0.475, y + 0.225, word, color=ink.text, **look)
            axes.text(x + 1.04, y + 0.225, arrow if n < 6 else "", **look)
    axes.text(5.6, 1.24, "a partial sum of Y ↗", color=QUIET, **look)
    axes.text(2.4, 0.14, "↖ one of p gradient terms", color=QUIET, **look)
    return figure, f"{title}: the backward of a copy is a sum, and of a sum a copy"


def overlapped_backward(runs: OverlapRuns, link: Link) -> tuple[Figure, str]:
    """Draw the backward pass of a stack of split MLPs, without and with overlap."""
    saved_ms, predicted_ms = 1e3 * runs.saved_s, 1e3 * runs.predicted_s
    title = f"Overlap saves {saved_ms:.0f} ms in two MLPs"
    title += f"; predicted {predicted_ms:.0f} ms" * (not math.isnan(predicted_ms))
    figure = timelines(runs.timelines(), title, link=measured_over(link))
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

    def kib(name: str, p: float) -> float:
        return kept_layer_bytes(spec, batch, seq, p, whole[name]) / KIB

    p_values = [*next(iter(kept.values()))]
    curves = {
        name: Voices(
            formula=partial(kib, name),
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

    Above a link's line it computes longer. Stars are published runs, each with its model's size.
    """
    curves = {
        f"{name}, {rate / 1e9:.0f} GB/s": Voices(
            formula=partial(break_even_hidden, flop_per_s=H100.peak(), bytes_per_s=rate)
        )
        for name, rate in H100.links.items()
    }
    models = [(name, *at) for name, at in megatron_widths().items()]
    models += [("3B", p, MODELS["llama-3b"].hidden) for p in h100_scaling().ranks]
    curves["models"] = Voices(published=([p for _, p, _ in models], [h for *_, h in models]))
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
        source="16B to 462B: NVIDIA, Megatron-LM's README, July 2024, 42 to 49 % of the peak; "
        f"3B: {H100_RUN}",
    )
    look = dict[str, Any](textcoords="offset points", fontsize=SMALL_PT)
    for name, p, hidden in models:
        figure.axes[0].annotate(name, (p, hidden), (9, -4), **look)
    return figure, f"{title}; NVIDIA's models lie above NVLink's line"


def h100_picture(scaling: H100Scaling) -> tuple[Figure, str]:
    """Draw published tokens/s per GPU over the ranks, beside the formula; all H100."""
    curves = {
        "tensor parallel": Voices(
            simulation=scaling.formula, published=(scaling.ranks, scaling.published)
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
        names={"simulation": "formula"},
    )
    pairs = zip(scaling.ranks, scaling.formula, scaling.published, strict=True)
    off = max(abs(paper / told - 1) for p, paper, told in pairs if p <= 8)
    return figure, f"{title}; up to 8 ranks the formula is within {100 * off:.0f} %"
