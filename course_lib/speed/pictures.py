"""Pictures of lesson 01b, of which each returns a figure and its alt text.

The MFU of published runs, measured products under the roof, operations on the roof of a GPU.

Notebook 01b_speed.
"""

from statistics import median
from typing import Any

from matplotlib.figure import Figure

from course_lib.core.presets import MODELS
from course_lib.core.specs import ModelSpec
from course_lib.cost.flops import mfu, six_n_d, train_step_flop
from course_lib.cost.hardware import find_device
from course_lib.cost.params import active_params, count_params
from course_lib.cost.published import rows
from course_lib.cost.roofline import Roof, matmul_intensity, roof_of
from course_lib.display import Voices, compare
from course_lib.display.colours import QUIET, SERIES
from course_lib.display.page import SMALL_PT
from course_lib.speed import lab
from course_lib.speed.operations import OPERATIONS

GPUS = ("a100-80", "h100", "h200", "b200")
# beside which side of its mark an operation's name begins or ends, and how many points away
LABELS = (*[("left", 8, -4)] * 4, *[("right", -8, 3)] * 2, ("left", -4, -14), ("center", 0, 7))

# models of today, and where the name stands beside its mark: points to the right and up
DENSE = dict.fromkeys(("qwen3-0.6b", "llama-8b", "llama2-13b", "mistral-small-24b"), (6, -13))
DENSE |= {"llama-70b": (-20, -16)}
ROUTED = {"qwen3-30b-a3b": (8, -4), "gpt-oss-20b": (8, -4), "mixtral-8x7b": (8, -4)}
ROUTED |= {"llama4-scout": (8, 0), "deepseek-v3": (8, -4)}
STATE_BYTES = 16  # of a parameter: bf16 weight and gradient, fp32 master copy and two moments

# MPT-7B in LLM Foundry's benchmarks: its counts of parameters are those of these sizes
MPT_7B = ModelSpec(
    name="mpt-7b",
    hidden=4096,
    num_layers=32,
    num_heads=32,
    ffn_hidden=16384,
    vocab=50368,
    max_seq=2048,
)


def mpt_runs() -> list[tuple[int, float, float]]:
    """Return (seq, tokens/s per GPU, reported MFU in percent) of MPT-7B on 8 H100s in bf16."""
    found = [
        (int(row["SeqLen (T)"]), float(row["Throughput (T/s/GPU)"]), float(row["MFU"]))
        for row in rows("llm_foundry")
        if row["Model"] == "7b" and row["# GPUs"] == "8" and row["section"] == "H100 80GB BF16"
    ]
    return sorted(found)


def mfu_of_run(seq: int, tokens_per_s: float, count: str) -> float:
    """Return the MFU in percent of MPT-7B on an H100, by one way to count FLOP.

    count   "all scores", "half of the scores" or "6ND"
    """
    if count == "6ND":
        flop = six_n_d(count_params(MPT_7B), seq)
    else:
        flop = train_step_flop(MPT_7B, 1, seq, causal=count == "half of the scores")
    return 100 * mfu(flop, seq / tokens_per_s, find_device("h100").peak("bf16"))


def mfu_by_convention() -> tuple[Figure, str]:
    """Draw the MFU of the same published runs by three ways to count the FLOP."""
    runs = mpt_runs()
    seqs, told = [seq for seq, _, _ in runs], [reported for _, _, reported in runs]
    curves = {
        count: Voices(
            formula=[mfu_of_run(seq, speed, count) for seq, speed, _ in runs],
            published=(seqs, told) if count == "all scores" else None,
        )
        for count in ("all scores", "half of the scores", "6ND")
    }
    longest, speed, _ = runs[-1]
    ends = [f"{mfu_of_run(longest, speed, count):.0f} %" for count in curves]
    title = f"At {longest:,} tokens the same run has an MFU of {', '.join(ends[:2])} or {ends[2]}"
    figure = compare(
        seqs,
        curves,
        title,
        x_label="tokens in a sequence",
        y_label="MFU (%)",
        log_x=True,
        note="formula: FLOP of the published tokens/s",
        source="MPT-7B on 8 H100s: MosaicML, LLM Foundry, scripts/train/benchmarking",
    )
    return figure, f"{title}. All scores is what LLM Foundry reports"


def real_runs() -> dict[str, list[tuple[int, float, str]]]:
    """Return (GPUs, reported MFU in percent, what is special) of published runs, by study."""
    foundry = [
        (int(row["# GPUs"]), float(row["MFU"]), "")
        for row in rows("llm_foundry")
        if row["Model"] == "7b"
        and row["SeqLen (T)"] == "2048"
        and row["Precision"] == "amp_bf16"
        and row["section"].startswith("H100 80GB BF16")
    ]
    length = {"8192": "", "131072": "131,072 tokens"}
    return {
        "Megatron, A100": sorted(
            (int(row["gpus"]), float(row["mfu_pct"]), row["model"])
            for row in rows("korthikanti22")
            if row["mfu_pct"] and row["table"] in ("Table 5", "text sec 6.3")
        ),
        "LLM Foundry, 7B, H100": sorted(foundry),
        "Llama 3 405B, H100": sorted(
            (int(row["gpus"]), float(row["bf16_mfu_pct"]), length[row["seq_len"]])
            for row in rows("llama3")
        ),
    }


def mfu_of_real_runs() -> tuple[Figure, str]:
    """Draw the MFU that three studies report, against the number of GPUs."""
    runs = real_runs()
    curves = {
        name: Voices(published=([run[0] for run in found], [run[1] for run in found]))
        for name, found in runs.items()
    }
    flat = [run for found in runs.values() for run in found]
    told = [share for _, share, _ in flat]
    title = f"These training runs report an MFU of {min(told):.0f} to {max(told):.0f} %"
    figure = compare(
        [],
        curves,
        title,
        x_label="GPUs",
        y_label="MFU (%)",
        log_x=True,
        source="Korthikanti et al. 2022, table 5 and section 6.3; MosaicML, LLM Foundry, "
        "scripts/train/benchmarking; Llama team 2024, table 4",
    )
    for gpus, share, label in flat:
        side = "right" if len(label) > 5 else "center"
        style: dict[str, Any] = {"ha": side, "va": "top", "fontsize": SMALL_PT}
        figure.axes[0].annotate(label, (gpus, share), (0, -8), textcoords="offset points", **style)
    most = max(gpus for gpus, _, _ in flat)
    return figure, f"{title}, on up to {most:,} GPUs"


def measured_roof(roof: Roof, rates: dict[int, list[float]]) -> tuple[Figure, str]:
    """Draw measured products under the measured roof."""
    intensity = [matmul_intensity(m, lab.WIDTH, lab.WIDTH, lab.FP32_BYTES) for m in rates]
    gflop = [[rate / 1e9 for rate in found] for found in rates.values()]
    speeds = [median(found) for found in gflop]
    under = all(y <= roof.attainable(x) / 1e9 for x, y in zip(intensity, speeds, strict=True))
    curve = Voices(formula=lambda x: roof.attainable(x) / 1e9, measurement=gflop)
    stay = "stay under the roof, and approach its" if under else "approach the roof's"
    title = f"Measured products {stay} peak with more tokens"  # a large cache can lift them above
    figure = compare(
        intensity,
        {f"[m, {lab.WIDTH}] @ [{lab.WIDTH}, {lab.WIDTH}] in fp32": curve},
        title,
        x_label="arithmetic intensity (FLOP per byte): about m / 2",
        y_label="GFLOP/s",
        log=True,
        note=f"one thread; the roof: {roof.flop_per_s / 1e9:.0f} GFLOP/s of the fastest product, "
        f"{roof.bytes_per_s / 1e9:.1f} GB/s of an add",
        names={"formula": "roof"},
    )
    ends = f"{speeds[0]:,.0f} GFLOP/s for {min(rates)} token, {speeds[-1]:,.0f} for {max(rates)}"
    return figure, f"{title}: {ends}"


def operations_on_roof(gpu: str = "h100", dtype: str = "bf16") -> tuple[Figure, str]:
    """Draw the roof of a GPU by its data sheet, and where common operations can stand on it."""
    roof = roof_of(find_device(gpu), dtype)
    below = [one for one in OPERATIONS if roof.bound(one.intensity) == "memory"]
    title = f"{len(below)} of these {len(OPERATIONS)} operations cannot reach the {gpu}'s peak"
    figure = compare(
        [2.0**k for k in range(-3, 13)],
        {f"roof of the {gpu}": Voices(formula=lambda x: roof.attainable(x) / 1e12)},
        f"{title}: memory is too slow",
        x_label=f"arithmetic intensity (FLOP per byte), {dtype}; ridge point: {roof.ridge:.0f}",
        y_label="TFLOP/s, at most",
        log=True,
        names={"formula": f"roof of the {gpu}"},
        source="data sheets: course_lib/cost/hardware.py names each",
    )
    axes = figure.axes[0]
    axes.set_ylim(top=roof.flop_per_s / 1e12 * 2)
    axes.axvline(roof.ridge, color=QUIET, linestyle="--", linewidth=1, zorder=0)
    for one, (side, dx, dy) in zip(OPERATIONS, LABELS, strict=True):
        x, y = one.intensity, roof.attainable(one.intensity)
        axes.plot([x], [y / 1e12], "o", color=SERIES[0], markersize=5)
        words = f"{one.name} ({y / roof.flop_per_s:.1%})"
        style: dict[str, Any] = {"ha": side, "fontsize": SMALL_PT}
        axes.annotate(words, (x, y / 1e12), (dx, dy), textcoords="offset points", **style)
    shares = f"{OPERATIONS[0].name} at most {OPERATIONS[0].intensity / roof.ridge:.2%} of it"
    return figure, f"{title}; {shares}"


def roof_rows(dtype: str = "bf16") -> str:
    """Return a table: the share of each GPU's peak that its memory lets operations reach."""
    lines = ["FLOP per byte".rjust(36) + "".join(f"{name:>10}" for name in GPUS)]
    for one in OPERATIONS:
        ridges = [roof_of(find_device(gpu), dtype).ridge for gpu in GPUS]
        shares = [f"{min(1.0, one.intensity / ridge):>10.1%}" for ridge in ridges]
        lines.append(f"{one.name:<22}{one.intensity:>14,.2f}" + "".join(shares))
    return "\n".join(lines)


def bytes_against_flop() -> tuple[Figure, str]:
    """Draw the bytes of the states of dense models and of those with experts against their FLOP."""
    twins = MODELS["mixtral-8x7b"], MODELS["llama2-13b"]
    times = count_params(twins[0]) / count_params(twins[1])
    title = f"For the FLOP of a 13B model, Mixtral has {times:.1f} times its bytes"
    line = [1e9 * 2.0**k for k in range(1, 10)]
    figure = compare(
        line,
        {"dense": Voices(formula=lambda flop: STATE_BYTES * flop / 6 / 1e9)},
        title,
        x_label="FLOP of a token, forward and backward: 6 times the active parameters",
        y_label="parameters, gradients and optimizer state (GB)",
        log=True,
        names={"formula": "16 bytes per 6 FLOP: all parameters are active"},
        source="config.json of the published models",
    )
    axes = figure.axes[0]
    for marker, group in (("o", DENSE), ("^", ROUTED)):
        for name, (dx, dy) in group.items():
            x, y = 6 * active_params(MODELS[name]), STATE_BYTES * count_params(MODELS[name]) / 1e9
            axes.plot([x], [y], marker, color=SERIES[marker == "^"], markersize=6)
            axes.annotate(name, (x, y), (dx, dy), textcoords="offset points", fontsize=SMALL_PT)
    return figure, f"{title}; triangles are models with experts, dots are dense models"
