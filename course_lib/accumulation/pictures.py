"""Pictures of accumulation: the worked graph, the missing division, peaks, times, batch sizes.

Each returns a figure and its alt text, except `graph`: it draws a computational graph with the
values of forward and the gradients of backward. A node is a box: its name (white on dark for
parameters), its value on the color of forward, its gradient on the color of backward. Nodes that
have just changed have a heavy outline.
Notebook 02_accumulation.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Rectangle

from course_lib.accumulation.batch_sizes import NoisePoint, Sweep, noise_windows
from course_lib.accumulation.noise_scale import Tradeoff, fit_tradeoff
from course_lib.accumulation.worked_graph import GRAPH, GraphState, number_text
from course_lib.accumulation.worked_graph import PARAMS as PARAM_NAMES
from course_lib.core.errors import CourseError
from course_lib.core.units import MIB
from course_lib.display.colours import BACKWARD, BLACK, FORWARD, PARAMS, QUIET, SERIES, WHITE, Ink
from course_lib.display.compare import Voices, compare
from course_lib.display.page import (
    SMALL_PT,
    Margins,
    page,
    plain,
    powers_of_ten,
    swatches,
)

# (column, row) of each node in the drawing; both may be fractions
POSITIONS = {
    "x1": (0, 0.0),
    "w1": (0, 1.0),
    "x2": (0, 2.0),
    "w2": (0, 3.0),
    "x1 * w1": (1, 0.5),
    "x2 * w2": (1, 2.5),
    "b": (1, 3.6),
    "y_pred": (2, 1.5),
    "target": (2, 3.0),
    "error": (3, 1.5),
    "loss": (4, 1.5),
}
# Tokens per second and GPU by micro-batches per step, on H100 nodes: a Llama-like model of 1.3B
# parameters, a global batch of 256 sequences of 4,096 tokens, no ZeRO, no pipeline. Source: Tazi et
# al. 2025, The Ultra-Scale Playbook, benchmark results (github vinjn/nanotron-ultrascale-playbook).
WHOLE = {16: 40150, 32: 39273}  # 8 GPUs, dp = 8: 2 or 1 sequences at a time
SPLIT_OVER_4 = {4: 34809, 8: 33862, 16: 32617, 32: 24916, 64: 14260}  # 16 GPUs, dp = 4, tp = 4
_WIDTH, _HEIGHT, _STRIP = 1.14, 0.63, 0.21  # inches
_COLUMN, _ROW = 1.56, 0.78
_LABEL = Ink(name="name", fill=WHITE, line=QUIET)


def graph(state: GraphState, title: str) -> Figure:
    """Draw the worked graph in one of its states.

    Raises: CourseError for a node that the graph does not have
    """
    unknown = [name for name in {**state.values, **state.grads} if name not in POSITIONS]
    if unknown:
        raise CourseError(f"graph: need nodes out of {', '.join(POSITIONS)}; got {unknown}.")
    inks = [PARAMS, FORWARD, BACKWARD]
    legend = swatches(inks, ["parameter", "value", "gradient"])
    margins = Margins(left=0.15, right=0.15, top=0.12, bottom=0.15)
    rows = max(row for _, row in POSITIONS.values())
    figure, (axes,) = page(title, [rows * _ROW + _HEIGHT], legend=legend, margins=margins)
    axes.set_xlim(-0.06, 8.0 - 0.36)
    axes.set_ylim(rows * _ROW + _HEIGHT + 0.03, -0.03)
    axes.set_axis_off()
    for name, sources in GRAPH.items():
        for source in sources:
            _arrow(axes, source, name)
    for name in POSITIONS:
        _node(axes, name, state)
    return figure


def without_division(
    sgd: Sequence[float],
    sgd_summed: Sequence[float],
    adamw: Sequence[float],
    adamw_summed: Sequence[float],
) -> tuple[Figure, str]:
    """Draw what a missing division does to the losses of SGD, and to those of AdamW.

    Above: the losses of SGD with and without the division, a cross where a loss is not a number.
    Below: AdamW's loss without the division minus its loss with it, as the two curves coincide.
    """
    with_it, without_it = SERIES[0], SERIES[1]
    legend = [
        Line2D([], [], color=with_it, marker="o", ms=3, label="SGD"),
        Line2D([], [], color=without_it, marker="s", ms=3, label="SGD, not divided"),
        Line2D([], [], color=without_it, marker="x", ms=6, ls="", label="not a number"),
        Line2D([], [], color=SERIES[2], marker="^", ms=3, label="AdamW, not divided minus divided"),
    ]
    gaps = [(other - one) * 1e6 for one, other in zip(adamw, adamw_summed, strict=True)]
    most = f"{math.ceil(round(max(map(abs, gaps)), 3))}\u00b710\u207b\u2076"
    title = f"Without the division, SGD diverges; AdamW's loss changes by at most {most}"
    figure, (above, below) = page(title, [2.2, 1.5], legend=legend, margins=Margins(left=0.95))
    plain(above, y_label="loss of SGD", grid="both")
    above.set_yscale("log")
    for curve, colour, mark in ((sgd, with_it, "o"), (sgd_summed, without_it, "s")):
        above.plot(range(len(curve)), curve, marker=mark, ms=3, lw=1.2, color=colour)
        gone = [step for step, loss in enumerate(curve) if not math.isfinite(loss)]
        top = [0.95] * len(gone)
        above.plot(gone, top, "x", ms=6, color=colour, transform=above.get_xaxis_transform())
    plain(below, x_label="step", y_label="difference / 10\u207b\u2076", grid="both")
    below.plot(range(len(gaps)), gaps, marker="^", ms=3, lw=1.2, color=SERIES[2])
    above.tick_params(labelbottom=False)
    for axes in (above, below):
        axes.set_xlim(-1, len(sgd))
    return figure, title


def peak_by_parts(
    parts: Sequence[int], formula_bytes: Sequence[int], measured_bytes: Sequence[int]
) -> tuple[Figure, str]:
    """Draw the peak of the activations by the number of micro-batches, formula and measurement."""
    formula, measured = (
        [size / MIB for size in sizes] for sizes in (formula_bytes, measured_bytes)
    )
    title = (
        f"In {parts[-1]} micro-batches the peak is {measured[-1]:.1f} MiB "
        f"instead of {measured[0]:.0f} MiB"
    )
    figure = compare(
        parts,
        Voices(formula=formula, measurement=measured),
        title,
        x_label="micro-batches m",
        y_label="peak of the activations (MiB)",
        log=True,
    )
    off = max(abs(a - b) for a, b in zip(formula_bytes, measured_bytes, strict=True))
    agree = f"differ by up to {off:,} bytes" if off else "agree to the byte"
    return figure, f"{title}; formula and measurement {agree}"


def part_times(parts: Sequence[int], times: Sequence[Sequence[float]]) -> tuple[Figure, str]:
    """Draw times of a step by the number of micro-batches, here and as published for H100 GPUs.

    times   as multiples of the time of the smallest number of micro-batches, with repetitions
    """
    whole, split = (Voices(published=published_times(one)) for one in (WHOLE, SPLIT_OVER_4))
    curves = {
        "this machine, 1 core": Voices(formula=lambda _: 1.0, measurement=times),
        "8 H100s, the whole model on each (2, 1 sequences at a time)": whole,
        "16 H100s, each matrix split over 4 (16, 8, 4, 2, 1 sequences)": split,
    }
    longer = median(times[-1]) / median(times[0])
    title = f"The same FLOPs take {longer:.2f} times as long in {parts[-1]} parts here"
    figure = compare(
        parts,
        curves,
        title,
        x_label="micro-batches m",
        y_label="time / time at the smallest m",
        log_x=True,
        names={"formula": "FLOPs alone"},
        source="Ultra-Scale Playbook (Tazi et al. 2025), 1.3B model, 256 sequences of 4,096 tokens "
        "per step",
    )
    most = max(published_times(SPLIT_OVER_4)[1])
    return figure, f"{title}; on H100s up to {most:.1f} times, each matrix split over 4 GPUs"


def noise_growth(runs: Mapping[float, Sequence[Sequence[NoisePoint]]]) -> tuple[Figure, str]:
    """Draw the noise scale over the steps of runs with several seeds: estimates and exact values.

    runs   by learning rate (at most four), one run per seed
    """
    marks, growth = ("o", "s", "^", "D"), list[str]()
    title = "The noise scale grows during training, and depends on the learning rate"
    names = [f"learning rate {rate:g}" for rate in runs]
    legend = _noise_legend(names, marks)
    figure, (axes,) = page(title, [2.9], legend=legend, margins=Margins(left=0.85))
    plain(axes, x_label="step", y_label="noise scale (items)", grid="both")
    axes.set_yscale("log")
    for name, by_seed, colour, mark in zip(names, runs.values(), SERIES, marks, strict=False):
        steps, exact, seen = zip(*noise_windows(by_seed), strict=True)
        axes.plot(steps, exact, color=colour, lw=1.6)
        middle = [median(each) for each in seen]
        low = [one - min(each) for one, each in zip(middle, seen, strict=True)]
        high = [max(each) - one for one, each in zip(middle, seen, strict=True)]
        axes.errorbar(steps, middle, [low, high], fmt="none", ecolor=colour, lw=1.1, capsize=3)
        axes.plot(steps, middle, mark, color=colour, ms=5, label=name)
        growth.append(f"from {exact[0]:.0f} to {exact[-1]:.0f} at {name}")
    powers_of_ten(axes, ("y",))
    return figure, f"{title}: the exact value goes {', '.join(growth)}"


def batch_tradeoff(sweep: Sweep, noise_scale: float) -> tuple[Figure, str]:
    """Draw measured steps and items to a loss by batch size, and what the noise scale predicts.

    The prediction takes the noise scale as critical batch size, and agrees with the mean number of
    steps at the largest batch.
    """
    steps, fitted = sweep.mean_steps(), fit_tradeoff(sweep.batches, sweep.mean_steps())
    least = steps[-1] / (1 + noise_scale / sweep.batches[-1])
    predicted = Tradeoff(min_steps=least, critical_batch=noise_scale)
    title = (
        f"The fitted critical batch size is {fitted.critical_batch:.0f} items, "
        f"the noise scale {noise_scale:.0f}"
    )
    curves = {
        "steps": Voices(formula=predicted.steps, measurement=sweep.steps),
        "items": Voices(formula=predicted.examples, measurement=sweep.examples()),
    }
    figure = compare(
        sweep.batches,
        curves,
        title,
        x_label="batch size B (items)",
        y_label="steps, items",
        log=True,
        names={"formula": "from the noise scale and the steps at the largest B"},
    )
    axes, words = figure.axes[0], f" noise scale {noise_scale:.0f}"
    axes.axvline(noise_scale, color=QUIET, lw=1.2, ls="--")
    top = axes.get_xaxis_transform()
    axes.text(noise_scale, 0.97, words, transform=top, fontsize=SMALL_PT, color=QUIET, va="top")
    return figure, f"{title}; beyond it, steps hardly fall"


def published_times(tokens_per_s: Mapping[int, int]) -> tuple[list[int], list[float]]:
    """Return numbers of micro-batches, and their times as multiples of the first one.

    tokens_per_s   per GPU, by the number of micro-batches; the tokens of a step are always the same
    """
    first = next(iter(tokens_per_s.values()))
    return list(tokens_per_s), [first / speed for speed in tokens_per_s.values()]


def _noise_legend(names: Sequence[str], marks: Sequence[str]) -> list[Artist]:
    keys: list[Artist] = [
        Line2D([], [], color=colour, marker=mark, ms=5, lw=1.6, label=name)
        for name, colour, mark in zip(names, SERIES, marks, strict=False)
    ]
    estimate = "estimate (median, range over seeds)"
    keys.append(Line2D([], [], color=QUIET, marker="o", ms=5, ls="", label=estimate))
    return [*keys, Line2D([], [], color=QUIET, lw=1.6, label="exact")]


def _node(axes: Axes, name: str, state: GraphState) -> None:
    x, y = _corner(name)
    _strip(axes, (x, y), name, PARAMS if name in PARAM_NAMES else _LABEL)
    if name in state.values:
        _strip(axes, (x, y + _STRIP), f"value {number_text(state.values[name])}", FORWARD)
    if name in state.grads:
        _strip(axes, (x, y + 2 * _STRIP), f"grad {number_text(state.grads[name])}", BACKWARD)
    heavy = name in state.fresh
    edge, wide = (BLACK, 2.2) if heavy else (QUIET, 0.8)
    box = Rectangle((x, y), _WIDTH, _HEIGHT, facecolor="none", edgecolor=edge, linewidth=wide)
    axes.add_patch(box)


def _strip(axes: Axes, corner: tuple[float, float], words: str, ink: Ink) -> None:
    axes.add_patch(Rectangle(corner, _WIDTH, _STRIP, facecolor=ink.fill, linewidth=0))
    x, y = corner[0] + _WIDTH / 2, corner[1] + _STRIP / 2 + 0.005
    axes.text(x, y, words, ha="center", va="center", fontsize=SMALL_PT, color=ink.text)


def _arrow(axes: Axes, source: str, target: str) -> None:
    """Draw an arrow from the right side of one box to the left side of another."""
    (x1, y1), (x2, y2) = _corner(source), _corner(target)
    ends = (x1 + _WIDTH, y1 + _HEIGHT / 2), (x2, y2 + _HEIGHT / 2)
    arrow = FancyArrowPatch(
        *ends,
        arrowstyle="-|>",
        mutation_scale=9,
        color=QUIET,
        linewidth=1.1,
        shrinkA=0,
        shrinkB=0,
    )
    axes.add_patch(arrow)


def _corner(name: str) -> tuple[float, float]:
    column, row = POSITIONS[name]
    return column * _COLUMN, row * _ROW
