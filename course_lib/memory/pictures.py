"""Pictures of lesson 01, of which each returns a figure and its alt text.

Model states by recipe, the tensors that a layer saves, saved bytes by sequence, memory over steps,
ways to make a model fit.

Notebook 01_memory.
"""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from course_lib.core.errors import CourseError
from course_lib.core.recipes import BF16, RECIPES
from course_lib.core.records import Ledger
from course_lib.core.specs import ModelSpec
from course_lib.core.units import MIB, format_bytes
from course_lib.cost.hardware import find_device
from course_lib.display import KIND, Voices, compare, memory
from course_lib.display.colours import QUIET, SERIES, WHITE
from course_lib.display.page import SMALL_PT, Margins, page
from course_lib.memory.calculator import read_setup
from course_lib.memory.formulas import model_states
from course_lib.memory.layer_bytes import Pass, total

SAVED_BY = (  # the operation that saves each tensor of `Pass.layer`, in the order of forward
    *("norm", "q, k, v: products", "scores: q · kᵀ", "q · kᵀ, and · v", "softmax", "dropout"),
    *("product with v", "out: product", "norm", "product h to f", "GELU", "product f to h"),
    "dropout, twice",
)
SCORES = ("softmax", "weights' mask", "weights after dropout")
WAYS_TO_FIT = {
    "as it is": "--model llama-8b",
    "full recompute": "--model llama-8b --recompute full",
    "8 ranks, ZeRO-1": "--model llama-8b --dp 8 --zero 1",
    "8 ranks, ZeRO-3": "--model llama-8b --dp 8 --zero 3",
    "8 ranks, tensor and\nsequence parallel": "--model llama-8b --tp 8 --sequence-parallel",
}


def states_by_recipe(num_params: int, gpu: str = "h100") -> tuple[Figure, str]:
    """Draw the model states of that many parameters under each recipe, beside a GPU's memory."""
    limit_bytes = find_device(gpu).memory_bytes
    bars = {name: Ledger() for name in RECIPES}
    for name, bar in bars.items():
        bar.add(0.0, **model_states(num_params, name))
    fit = [name for name, bar in bars.items() if bar.peak_bytes() <= limit_bytes]
    who = f"only {fit[0]} fits" if len(fit) == 1 else f"{len(fit)} of {len(bars)} fit"
    title = (
        f"Of these recipes, {who} the states of {num_params / 1e9:.0f}B parameters "
        f"into {format_bytes(limit_bytes)}"
    )
    usual = format_bytes(bars[BF16.name].peak_bytes())
    return memory(bars, title, limit_bytes=limit_bytes), f"{title}: the usual one takes {usual}"


def layer_tensors(spec: ModelSpec, batch: int, seq: int) -> tuple[Figure, str]:
    """Draw a GPT layer, unfused, in bf16: its operations, and the tensors that each one saves.

    Raises: CourseError for a layer with other operations, such as a gated MLP
    """
    rows = Pass(spec=spec, batch=batch, seq=seq, flash=False, dropout=True).layer()
    if len(rows) != len(SAVED_BY):
        raise CourseError(f"layer_tensors: need a layer with GELU; got {len(rows)} tensors.")
    scores = sum(row.num_bytes for row in rows if row.name in SCORES)
    title = (
        f"{scores / total(rows):.0%} of the {format_bytes(total(rows))} that this layer saves "
        "are scores: a number per pair of tokens"
    )
    note = f"{batch} x {seq:,} tokens, {spec.num_heads} heads, hidden {spec.hidden:,}, bf16"
    figure, (axes,) = page(
        title, [0.27 * len(rows)], note=note, margins=Margins(left=0, right=0, bottom=0.1)
    )
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.plot([14, 14], [0, len(rows) - 1], color=QUIET, linewidth=1, zorder=0)  # the layer's order
    most = max(row.num_bytes for row in rows)
    numbers, pairs = batch * seq * spec.hidden, batch * spec.num_heads * seq**2
    for y, (row, operation) in enumerate(zip(rows, SAVED_BY, strict=True)):
        box = {"boxstyle": "round,pad=0.25", "facecolor": WHITE, "edgecolor": QUIET}
        axes.text(14, y, operation, ha="center", va="center", fontsize=SMALL_PT, bbox=box)
        axes.barh(y, 38 * row.num_bytes / most, left=30, height=0.7, color=KIND["activations"].fill)
        unit, name = (pairs, "as²b") if row.name in SCORES else (numbers, "sbh")
        words = f" {row.name}: {row.num_bytes / unit:g} {name} = {format_bytes(row.num_bytes)}"
        axes.text(30 + 38 * row.num_bytes / most, y, words, va="center", fontsize=SMALL_PT)
    return figure, f"{title}. The largest: {format_bytes(most)}"


def saved_by_sequence(
    seqs: Sequence[int], saved: Mapping[str, Mapping[str, Sequence[int]]]
) -> tuple[Figure, str]:
    """Draw the bytes that autograd saves, with unfused and with flash attention, by sequence.

    saved   bytes at each length: by way, then by "formula", maybe "simulation", and "measurement",
            which may end at a shorter length than the others
    """
    in_mib = {
        name: {voice: [size / MIB for size in sizes] for voice, sizes in way.items()}
        for name, way in saved.items()
    }
    curves = {
        name: Voices(formula=way["formula"], simulation=way.get("simulation"))
        for name, way in in_mib.items()
    }
    measured = [len(way["measurement"]) for way in saved.values()]
    pairs = (zip(way["formula"], way["measurement"], strict=False) for way in saved.values())
    off = max(abs(one - other) for pair in pairs for one, other in pair)
    agree = f"differ by up to {off:,} bytes" if off else "agree to the byte"
    title = f"Formula and autograd {agree}; with flash attention, growth is linear"
    note = f"dots: measured, up to {seqs[max(measured) - 1]:,} tokens"
    x_label, y_label = "tokens in a sequence", "saved (MiB)"
    figure = compare(seqs, curves, title, note=note, x_label=x_label, y_label=y_label)
    for index, way in enumerate(in_mib.values()):
        dots = way["measurement"]
        figure.axes[0].plot(seqs[: len(dots)], dots, "o", color=SERIES[index], markersize=4.5)
    most = ", ".join(f"{name} {sizes['formula'][-1]:,.0f} MiB" for name, sizes in in_mib.items())
    return figure, f"{title}; at {seqs[-1]:,} tokens: {most}"


def first_steps(ledger: Ledger) -> tuple[Figure, str]:
    """Draw the memory of a model's first steps, as it was measured."""
    title = "Adam's moments appear at the end of step 1; step 2 is first to reach the peak"
    return memory(ledger, title), f"{title}, {format_bytes(ledger.peak_bytes())}"


def graphs_kept(ledger: Ledger, num_losses: int) -> tuple[Figure, str]:
    """Draw the memory of forward passes whose losses stay in a list."""
    title = f"{num_losses} losses in a list keep {num_losses} graphs alive"
    return memory(ledger, title), f"{title}: {format_bytes(ledger.peak_bytes())} at the end"


def ways_to_fit(gpu: str = "h100") -> tuple[Figure, str]:
    """Draw one model's peak on its fullest rank in the setups of WAYS_TO_FIT."""
    ledgers = {name: read_setup(line).fullest for name, line in WAYS_TO_FIT.items()}
    title = "With the usual recipe, recomputing is not enough for 8B on 80 GiB: shard states"
    figure = memory(ledgers, title, limit_bytes=find_device(gpu).memory_bytes)
    peak = format_bytes(ledgers["8 ranks, ZeRO-3"].peak_bytes())
    return figure, f"{title}; ZeRO-3 on 8 ranks takes {peak}"
