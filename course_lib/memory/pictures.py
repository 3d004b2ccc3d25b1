"""Pictures of lesson 01 that compare with published runs. Each returns a figure and its alt text.

Notebook 01_memory.
"""

from matplotlib.figure import Figure

from course_lib.core.specs import ModelSpec
from course_lib.cost.flops import mfu, six_n_d, train_step_flop
from course_lib.cost.hardware import find_device
from course_lib.cost.params import count_params
from course_lib.cost.published import rows
from course_lib.display import Voices, compare

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
