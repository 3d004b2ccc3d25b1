"""Draw what bf16 does to losses and to a sum over many ranks; published runs. Notebook 10_fsdp."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from course_lib.cost.published import rows
from course_lib.display.compare import Voices, compare
from course_lib.fsdp.lab import ring_sum_error_percent

_RANKS = [4, 16, 64, 256, 1024]


def losses_beside_fp32(losses: Mapping[str, Sequence[float]]) -> tuple[Figure, str]:
    """Draw losses minus those of the first run, which is in fp32, and say how far they differ."""
    (_, exact), *others = losses.items()
    apart = {
        name: [one - other for one, other in zip(values, exact, strict=True)]
        for name, values in others
    }
    most = max(abs(value) for values in apart.values() for value in values)
    title = f"In {len(exact)} steps the loss stays within {most:.2g} of fp32's"
    curves = {name: Voices(measurement=values) for name, values in apart.items()}
    figure = compare(
        range(1, len(exact) + 1),
        curves,
        title,
        x_label="step",
        y_label="loss minus fp32's (rank 0)",
    )
    return figure, f"{title}, from {exact[0]:.2f} to {exact[-1]:.2f}"


def ring_sums() -> tuple[Figure, str]:
    """Draw the error of a sum in bf16 over the number of ranks in it, and say what it shows."""
    off = [ring_sum_error_percent(p) for p in _RANKS]
    title = f"A ring sum in bf16 is off by {off[0]:.1f} % on 4 ranks, by {off[-1]:.1f} % on 1,024"
    figure = compare(
        _RANKS,
        {"bf16": Voices(simulation=off)},
        title,
        x_label="ranks in the sum",
        y_label="error of the sum (%)",
        log_x=True,
    )
    return figure, f"{title}: 16 times as many ranks, 4 times the error"


def runs_at_scale() -> dict[str, dict[int, float]]:
    """Return the tokens/s per GPU, by number of GPUs, of published runs on H100s.

    With FSDP a GPU has as many tokens per step in all runs of a series (weak scaling). The last
    series is plain DP: its GPUs share 256 sequences of 4,096 tokens (strong scaling).
    """
    titan = {
        int(row["gpus"]): float(row["TPS_per_GPU"])
        for row in rows("torchtitan")
        if row["table"] in ("1", "3") and row["compile"] == "1" and row["float8"] == "0"
    }
    of_1b, of_70b = (
        {
            int(row["# GPUs"]): float(row["Throughput (T/s/GPU)"])
            for row in rows("llm_foundry")
            if row["Model"] == model and "Large Scale" in row["section"]
        }
        for model in ("1b", "70b")
    )
    plain_dp = {
        int(row["x"]): float(row["value"])
        for row in rows("ultrascale_figures")
        if row["figure"].startswith("dp_scaling (1B") and row["series"] == "tokens_per_s_per_gpu"
    }
    return {
        "8B, 16,384 tokens per GPU": titan,
        "70B, 16,384 per GPU": of_70b,
        "1B, 24,576 per GPU": of_1b,
        "1B, plain DP, 1,048,576 in all": plain_dp,
    }


def fsdp_at_scale() -> tuple[Figure, str]:
    """Draw what a GPU keeps of its tokens/s as GPUs are added: published runs on H100s."""
    kept = {
        name: {p: 100 * found[p] / found[min(found)] for p in sorted(found)}
        for name, found in runs_at_scale().items()
    }
    curves = {name: Voices(published=([*found], [*found.values()])) for name, found in kept.items()}
    titan, *_, plain_dp = kept.values()
    title = f"FSDP, 8B: on 128 H100 a GPU keeps {titan[128]:.0f} % of its tokens/s on 8"
    figure = compare(
        [],
        curves,
        title,
        x_label="GPUs",
        y_label="tokens/s per GPU (% of the series' first)",
        log_x=True,
        source="8B: TorchTitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3; 70B, "
        "1B: MosaicML, LLM Foundry, scripts/train/benchmarking; plain DP: Tazi et al. 2025",
    )
    return (
        figure,
        f"{title}; plain DP of a 1B, with one batch for all GPUs, keeps {plain_dp[128]:.0f} %",
    )
