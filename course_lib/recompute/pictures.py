"""Pictures of recomputation and of number formats: bytes, times, errors, losses.

Each returns a figure and its alt text.
Published values are those of Korthikanti et al. 2022: activation memory of models that are split
over 8 GPUs by tensor parallelism (figure 7, which the authors computed), and times of one layer on
8 A100 GPUs (table 4, measured). Errors and losses of number formats are those of `lab`. Notebook
03_recompute.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import MODELS
from course_lib.core.records import Ledger
from course_lib.cost.flops import forward_flop, recompute_flop
from course_lib.cost.published import rows
from course_lib.display.colours import QUIET, SERIES
from course_lib.display.compare import Voices, compare
from course_lib.display.memory import memory
from course_lib.display.page import page, plain, powers_of_ten, short
from course_lib.memory.layer_bytes import Pass, total
from course_lib.recompute.lab import losses_behind, product_error

PAPER = "Korthikanti et al. 2022"
SIZES = ("22B", "175B", "530B", "1T")  # of the models in the paper
_BILLIONS = (22, 175, 530, 1000)
_ROWS = {  # in table 4
    "none": "Baseline no recompute",
    "selective": "Selective Recompute",
    "full": "Baseline with recompute",
}

OUTLIERS = [10.0**power for power in range(7)]
RUIN = 50.0  # percent: a product with a larger error is ruined
WINDOW = 10  # steps whose differences are averaged


def segment_peaks(
    num_layers: int, formula: Mapping[int, float], measured: Mapping[int, float]
) -> tuple[Figure, str]:
    """Draw the peak, in tensors, of a chain of layers by the number of layers in a segment."""
    best = min(measured, key=lambda k: measured[k])
    title = f"Segments of {best} layers need {measured[best]:.0f} tensors instead of {num_layers}"
    figure = compare(
        list(measured),
        Voices(formula=[formula[k] for k in measured], measurement=list(measured.values())),
        title,
        x_label="layers in a segment, k",
        y_label="peak (tensors)",
        log_x=True,
    )
    return figure, f"{title}; the peak is lowest at k = {best}"


def strategies(predicted: Mapping[str, int], measured: Mapping[str, Ledger]) -> tuple[Figure, str]:
    """Draw the peak of each strategy twice: as the formula predicts it, and as it was measured."""
    bars: dict[str, Ledger] = {}
    for how, ledger in measured.items():
        formula = Ledger()
        formula.add(0.0, activations=predicted[how])
        bars |= {f"{how}: formula": formula, f"{how}: measured": ledger}
    part = measured["full"].peak_bytes() / measured["none"].peak_bytes()
    off = max(abs(predicted[how] - measured[how].peak_bytes()) for how in measured)
    agree = f"the formula is off by up to {off:,} bytes" if off else "as the formula says"
    title = f"Full recompute needs {100 * part:.0f} % of the activation bytes, {agree}"
    return memory(bars, title), title


def published_memory() -> tuple[Figure, str]:
    """Draw the activation memory of large models by strategy: our formula, and the paper's."""
    shares = {
        how: {size: share_of_none(size, how) for size in SIZES} for how in ("selective", "full")
    }
    told = {how: [published_share(size, how) for size in SIZES] for how in shares}
    curves = {
        how: Voices(formula=list(share.values()), published=(_BILLIONS, told[how]))
        for how, share in shares.items()
    }
    span = {how: f"{min(s.values()):.0f} to {max(s.values()):.0f} %" for how, s in shares.items()}
    title = (
        f"Large models keep {span['full']} with full recompute, {span['selective']} with selective"
    )
    figure = compare(
        _BILLIONS,
        curves,
        title,
        x_label="parameters (billion)",
        y_label="% of the bytes without recompute",
        log_x=True,
        names={"published": "published (computed by the authors)"},
        note="activations of one GPU out of 8, with tensor parallelism; sequences of 2,048 tokens",
        source=f"{PAPER}, figure 7, as read off in Calculon's validation.py (calculon-ai)",
    )
    pairs = (zip(shares[how].values(), told[how], strict=True) for how in shares)
    off = max(abs(ours - theirs) for pair in pairs for ours, theirs in pair)
    return (
        figure,
        f"{title}; formula and published values differ by at most {off:.1f} percentage points",
    )


def share_of_none(size: str, how: str) -> float:
    """Return the bytes that one layer of a model of the paper keeps, in % of those without."""
    layer = Pass(
        spec=MODELS[f"megatron-{size.lower()}"],
        batch=1,
        seq=2048,
        flash=False,
        dropout=True,
        parallelism=Parallelism(tp=8),
    )
    return 100 * total(layer.kept_layer(how)) / total(layer.kept_layer())


def published_share(size: str, how: str) -> float:
    """Return the same percentage as the paper has it."""
    (row,) = (
        row
        for row in rows("korthikanti22")
        if row["table"].startswith("Figure 7") and (row["model"], row["method"]) == (size, how)
    )
    return float(row["value"])


def price(flop: Mapping[str, float], time: Mapping[str, float]) -> tuple[Figure, str]:
    """Draw the time of a step against its FLOPs, both as multiples of those without recompute."""
    paper = published_price()
    title = f"Full recompute: {flop['full']:.2f} times the FLOPs, {time['full']:.2f} times the time"
    figure = compare(
        list(flop.values()),
        Voices(
            formula=lambda multiple: multiple,
            measurement=list(time.values()),
            published=([each[0] for each in paper.values()], [each[1] for each in paper.values()]),
        ),
        title,
        x_label="FLOPs, as a multiple of none",
        y_label="time, as a multiple of none",
        names={"formula": "if time grew like FLOPs"},
        note="from left to right: none, selective, full; the fastest of 10 steps",
        source=f"{PAPER}, table 4 (FLOPs: our count): one layer of a 22B model on 8 A100 GPUs",
    )
    return figure, f"{title}; selective: {flop['selective']:.2f} and {time['selective']:.2f}"


def published_price() -> dict[str, tuple[float, float]]:
    """Return FLOPs and time of one layer by strategy, as multiples of those without recompute."""
    ms = {
        row["method"]: float(row["value"])
        for row in rows("korthikanti22")
        if row["table"].startswith("Table 4") and row["value_name"] == "combined_ms"
    }
    layer = forward_flop(MODELS["megatron-22b"], 4, 2048) | {"logits": 0}
    none = 3 * sum(layer.values())
    return {
        how: (1 + recompute_flop(layer, how) / none, ms[row] / ms[_ROWS["none"]])
        for how, row in _ROWS.items()
    }


def number_formats(kinds: Mapping[str, Ledger]) -> tuple[Figure, str]:
    """Draw the activations of a GPT in "fp32", under "autocast" and in "bf16"."""
    peaks = {name: ledger.peak_bytes() for name, ledger in kinds.items()}
    of_fp32, of_bf16 = peaks["bf16"] / peaks["fp32"], peaks["autocast"] / peaks["bf16"]
    title = (
        f"bf16 keeps {100 * of_fp32:.0f} % of the bytes of fp32; "
        f"autocast keeps {of_bf16:.2f} times those of bf16"
    )
    return memory(kinds, title), title


def product_errors() -> tuple[Figure, str]:
    """Draw the error of a matrix product against the size of one outlier, by format."""
    names = ("E4M3, one scale", "MXFP8", "E2M1, one scale", "MXFP4")
    errors = {name: [100 * product_error(name, size) for size in OUTLIERS] for name in names}
    ruins_4, ruins_8 = (_first_ruin(errors[name]) for name in (names[2], names[0]))
    title = (
        f"With one scale, an outlier of {ruins_4} ruins E2M1, one of {ruins_8} ruins E4M3; "
        "blocks confine the damage"
    )
    figure = compare(
        OUTLIERS,
        {name: Voices(measurement=found) for name, found in errors.items()},
        title,
        x_label="outlier: one number of the left matrix (standard deviations of the others)",
        y_label="error of the product (%)",
        log=True,
        note="random matrices, 256 x 256; error of all rows but the one with the outlier",
    )
    most = {name: f"{name} has at most {max(errors[name]):.1f} %" for name in ("MXFP8", "MXFP4")}
    return figure, f"{title}: {', '.join(most.values())}"


def _first_ruin(errors: Sequence[float]) -> str:
    """Return the smallest outlier that ruins the product."""
    return short(next(size for size, error in zip(OUTLIERS, errors, strict=True) if error > RUIN))


def format_losses(losses: Mapping[str, Sequence[float]]) -> tuple[Figure, str]:
    """Draw the loss of the first run, and below how far the others are from it, by format.

    Formats whose names begin with the same word have one color: `FP8, current scaling`.
    """
    (first, whole), *others = losses.items()
    behind = losses_behind(losses, WINDOW)
    title = (
        f"The loss with MXFP4 ends {behind['MXFP4 in forward']:.3f} above that with {first}, "
        f"with MXFP8 {behind['MXFP8']:.3f}"
    )
    words = dict.fromkeys(name.split(",")[0] for name, _ in others)
    colours = dict(zip(words, SERIES, strict=True))
    styles: dict[str, dict[str, Any]] = {}
    for name, _ in others:
        colour = colours[name.split(",")[0]]
        solid = all(style["color"] != colour for style in styles.values())
        styles[name] = {"color": colour, "linestyle": "-" if solid else "--"}
    legend = [Line2D([], [], label=name, marker="o", ms=3, **styles[name]) for name in styles]
    note = f"below: root mean square of the differences of {WINDOW} steps"
    figure, (above, below) = page(title, [1.2, 2.3], legend=legend, note=note)
    plain(above, y_label=f"loss, {first}", grid="both")
    above.plot(range(1, len(whole) + 1), whole, color=QUIET, linewidth=1.6)
    plain(below, x_label="step", y_label=f"difference from {first}", grid="both")
    powers_of_ten(below, ("y",))
    for name, curve in others:
        apart = np.subtract(curve, whole).reshape(-1, WINDOW)
        steps = WINDOW * np.arange(1, len(apart) + 1)
        below.plot(steps, np.sqrt(np.mean(apart**2, axis=1)), marker="o", ms=3, **styles[name])
    below.set_xlim(above.get_xlim())
    return figure, f"{title}; bf16 differs by {abs(behind['bf16']):.0e}"
