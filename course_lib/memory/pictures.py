"""Pictures of lesson 01, of which each returns a figure and its alt text.

Model states by recipe, saved bytes by sequence, memory over steps, ways to make a model fit,
published runs, rooflines.

Notebook 01_memory.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

from matplotlib.figure import Figure

from course_lib.core.recipes import BF16, RECIPES
from course_lib.core.records import Ledger
from course_lib.core.specs import ModelSpec
from course_lib.core.units import MIB, format_bytes
from course_lib.cost.flops import mfu, six_n_d, train_step_flop
from course_lib.cost.hardware import find_device
from course_lib.cost.params import count_params
from course_lib.cost.published import rows
from course_lib.cost.roofline import Roof, add_intensity, matmul_intensity, roof_of
from course_lib.display import Voices, compare, memory
from course_lib.memory import lab
from course_lib.memory.calculator import read_setup
from course_lib.memory.formulas import model_states

GPUS = ("a100-80", "h100", "h200", "b200")

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


def saved_by_sequence(
    seqs: Sequence[int], saved: Mapping[str, Mapping[str, Sequence[int]]]
) -> tuple[Figure, str]:
    """Draw the bytes that autograd saves, written out and with flash attention, by sequence.

    saved   bytes at each length: by way, then by "formula", "measurement" and maybe "simulation"
    """
    in_mib = {
        name: {voice: [size / MIB for size in sizes] for voice, sizes in way.items()}
        for name, way in saved.items()
    }
    curves = {
        name: Voices(
            formula=way["formula"],
            simulation=way.get("simulation"),
            measurement=way["measurement"],
        )
        for name, way in in_mib.items()
    }
    pairs = (zip(way["formula"], way["measurement"], strict=True) for way in saved.values())
    off = max(abs(one - other) for pair in pairs for one, other in pair)
    agree = f"differ by up to {off:,} bytes" if off else "agree to the byte"
    title = f"Formula and autograd {agree}; with flash attention, growth is linear"
    figure = compare(seqs, curves, title, x_label="tokens in a sequence", y_label="saved (MiB)")
    most = ", ".join(f"{name} {sizes['formula'][-1]:.3g} MiB" for name, sizes in in_mib.items())
    return figure, f"{title}; at {seqs[-1]} tokens: {most}"


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


def real_runs() -> dict[str, list[tuple[int, float]]]:
    """Return (GPUs, reported MFU in percent) of published runs, by study."""
    foundry = [
        (int(row["# GPUs"]), float(row["MFU"]))
        for row in rows("llm_foundry")
        if row["Model"] == "7b"
        and row["SeqLen (T)"] == "2048"
        and row["Precision"] == "amp_bf16"
        and row["section"].startswith("H100 80GB BF16")
    ]
    return {
        "Megatron, 22B to 1T, A100": sorted(
            (int(row["gpus"]), float(row["mfu_pct"]))
            for row in rows("korthikanti22")
            if row["mfu_pct"] and row["table"] in ("Table 5", "text sec 6.3")
        ),
        "LLM Foundry, 7B, H100": sorted(foundry),
        "Llama 3 405B, H100": sorted(
            (int(row["gpus"]), float(row["bf16_mfu_pct"])) for row in rows("llama3")
        ),
    }


def mfu_of_real_runs() -> tuple[Figure, str]:
    """Draw the MFU that three studies report, against the number of GPUs."""
    runs = real_runs()
    curves = {
        name: Voices(published=([gpus for gpus, _ in found], [told for _, told in found]))
        for name, found in runs.items()
    }
    told = [share for found in runs.values() for _, share in found]
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
    most = max(gpus for found in runs.values() for gpus, _ in found)
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


def _tera(roof: Roof, intensity: float) -> float:
    return roof.attainable(intensity) / 1e12


def gpu_roofs(dtype: str = "bf16") -> tuple[Figure, str]:
    """Draw the roofs of four GPUs by their data sheets."""
    roofs = {name: roof_of(find_device(name), dtype) for name in GPUS}
    xs = [2.0**k for k in range(-3, 13)]
    curves = {name: Voices(formula=partial(_tera, roof)) for name, roof in roofs.items()}
    ridges = [roof.ridge for roof in roofs.values()]
    title = (
        f"These GPUs need {min(ridges):.0f} to {max(ridges):.0f} FLOP per byte to reach their peak"
    )
    figure = compare(
        xs,
        curves,
        title,
        x_label=f"arithmetic intensity (FLOP per byte), {dtype}",
        y_label="TFLOP/s, at most",
        log=True,
        source="data sheets: course_lib/cost/hardware.py names each",
    )
    return figure, f"{title}; an add has {add_intensity():.2g}"


def roof_rows(dtype: str = "bf16") -> str:
    """Return a table: where common operations stand on each GPU."""
    operations = {
        "add of two tensors": add_intensity(),
        "product, 1 token": matmul_intensity(1, lab.WIDTH, lab.WIDTH),
        "product, 128 tokens": matmul_intensity(128, lab.WIDTH, lab.WIDTH),
        "product, 4,096 tokens": matmul_intensity(4096, lab.WIDTH, lab.WIDTH),
    }
    lines = ["FLOP per byte".rjust(36) + "".join(f"{name:>10}" for name in GPUS)]
    for name, intensity in operations.items():
        bounds = [roof_of(find_device(gpu), dtype).bound(intensity) for gpu in GPUS]
        lines.append(f"{name:<22}{intensity:>14,.2f}" + "".join(f"{b:>10}" for b in bounds))
    return "\n".join(lines)
