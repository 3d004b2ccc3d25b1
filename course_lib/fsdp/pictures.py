"""Pictures of lesson 10: memory and timelines of a step, losses, bf16 sums, published runs.

Each returns a figure and its alt text. Notebook 10_fsdp.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from matplotlib.figure import Figure

from course_lib.core.links import Link, TwoLevelLink
from course_lib.core.records import Event, Ledger
from course_lib.core.units import KIB, MIB
from course_lib.cost.published import playbook_data_parallel, rows
from course_lib.display.compare import Voices, compare
from course_lib.display.memory import memory
from course_lib.display.on_ranks import measured_over
from course_lib.display.timeline import timelines
from course_lib.fsdp.cost import fsdp_ledger, peak_param_bytes
from course_lib.fsdp.lab import ring_sum_error_percent
from course_lib.fsdp.moves import UnitSizes
from course_lib.ranks.timing import Measured

EventsByWay = Mapping[str, Sequence[Event]]
_RANKS = [4, 16, 64, 256, 1024]


def params_over_step(predicted: Ledger, measured: Ledger) -> tuple[Figure, str]:
    """Draw a rank's bytes of parameters over a step, measured beside the formula."""
    paper, held = (_levels(one, KIB) for one in (predicted, measured))
    title = f"Gather, use, free: at most {max(held):.0f} KiB; the formula says {max(paper):.0f}"
    figure = _sawtooth(Voices(formula=paper, measurement=held), len(held), title, "KiB")
    off = max(abs(a - b) for a, b in zip(paper, held, strict=True))
    return figure, f"{title}; {'each dot lies on the line' if off < 0.5 else f'{off:.0f} KiB off'}"


def params_by_formula(sizes: UnitSizes, model: str) -> tuple[Figure, str]:
    """Draw a rank's bytes of parameters over a step of a large model, by formula."""
    paper, whole = _levels(fsdp_ledger(sizes), 1e6), sum(sizes.numels) * sizes.compute_bytes
    peak = peak_param_bytes(sizes) / 1e6
    title = f"{model} on {sizes.p} ranks: a rank holds at most {peak:.0f} of {whole / 1e6:.0f} MB"
    return _sawtooth(Voices(formula=paper), len(paper), title, "MB"), title


def freed_beside_kept(held: Mapping[str, Ledger], times_dp: float) -> tuple[Figure, str]:
    """Draw the memory at the peak of a step if blocks are freed after forward, and if kept.

    times_dp   bytes sent if they are freed, divided by those of plain data parallelism
    """
    title = f"Freeing blocks sends {times_dp:.2f} times the bytes of DP, but holds less"
    return memory(held, title), f"{title}: memory at the peak of a step, freed and kept"


def prefetch_steps(
    predicted: EventsByWay, link: Link | str, measured: Mapping[str, Measured] | None = None
) -> tuple[Figure, str]:
    """Draw rank 0's step on demand and with prefetch, both predicted, or measured beside one."""
    on_demand, prefetch = predicted
    runs: dict[str, Sequence[Event]] = dict(predicted)
    steps_s = [_last_s(events) for events in predicted.values()]
    if measured is not None:
        runs = {
            f"measured, {on_demand}": measured[on_demand].events,
            f"predicted, with {prefetch}": predicted[prefetch],
            f"measured, with {prefetch}": measured[prefetch].events,
        }
        steps_s = [measured[name].step_s for name in predicted]
    title = f"Prefetch {_shortens(steps_s)}"
    over = measured_over(link) if measured else link
    return timelines(_of_rank_0(runs), title, link=over), f"{title}: gathers overlap with computing"


def hybrid_steps(
    predicted: EventsByWay, link: TwoLevelLink | str, measured: Mapping[str, Measured] | None = None
) -> tuple[Figure, str]:
    """Draw rank 0's step sharded over all ranks and with hybrid sharding, also as measured."""
    runs: dict[str, Sequence[Event]] = dict(predicted)
    steps_s = [_last_s(events) for events in predicted.values()]
    if measured is not None:
        runs = {f"{name}, predicted": events for name, events in predicted.items()}
        runs |= {f"{name}, measured": one.events for name, one in measured.items()}
        steps_s = [measured[name].step_s for name in predicted]
    title = f"Hybrid sharding {_shortens(steps_s)}"
    over = measured_over(link) if measured else link
    return timelines(_of_rank_0(runs), title, link=over), title


def every_backward_or_the_last(
    every: Ledger, last: Ledger, times_sent: float
) -> tuple[Figure, str]:
    """Draw the memory at the peak of a step of several micro-batches, synchronized each or once.

    times_sent   bytes sent if every backward reduces, divided by those if only the last does
    """
    at_once, waiting = (one.peak_bytes() / MIB for one in (every, last))
    title = f"A rank holds {at_once:.2f} MiB if every backward reduces its gradients, "
    title += f"{waiting:.2f} MiB if only the last does"
    held = {"every backward": every, "only the last": last}
    return memory(held, title), f"{title}; the first sends {times_sent:.2f} times the bytes"


def losses_on_two_ranks(
    losses: Mapping[str, tuple[Sequence[float], Sequence[float]]],
) -> tuple[Figure, str]:
    """Draw the losses of each model: on one rank as lines, on two ranks as dots."""
    curves = {name: Voices(formula=one, measurement=two) for name, (one, two) in losses.items()}
    *_, (name, (one, _)) = losses.items()
    title = f"Two ranks reach the losses of one: from {one[0]:.1f} to {one[-1]:.1f} for {name}"
    figure = compare(
        range(len(one)),
        curves,
        title,
        x_label="step",
        y_label="loss",
        names={"formula": "one rank", "measurement": "two ranks"},
    )
    off = max(abs(a - b) for pair in losses.values() for a, b in zip(*pair, strict=True))
    return figure, f"{title}; {'the dots lie on the lines' if off < 0.01 else f'{off:.2g} apart'}"


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
    return {
        "8B, 16,384 tokens per GPU": titan,
        "70B, 16,384 per GPU": of_70b,
        "1B, 24,576 per GPU": of_1b,
        "1B, plain DP, 1,048,576 tokens in all": playbook_data_parallel(),
    }


def fsdp_at_scale() -> tuple[Figure, str]:
    """Draw the tokens/s per GPU of published runs on H100s over the number of GPUs."""
    runs = runs_at_scale()
    curves = {name: Voices(published=([*found], [*found.values()])) for name, found in runs.items()}
    titan, *_, plain_dp = runs.values()
    as_many, fewer = (100 * found[128] / found[8] for found in (titan, plain_dp))
    title = f"On 128 H100 instead of 8, a GPU keeps {as_many:.0f} % of its tokens/s if it has as "
    title += f"many tokens (FSDP, 8B), {fewer:.0f} % if it has fewer (plain DP, 1B)"
    figure = compare(
        [],
        curves,
        title,
        x_label="GPUs",
        y_label="tokens/s per GPU",
        log=True,
        source="8B: TorchTitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3; 70B "
        "(FULL_SHARD) and 1B (SHARD_GRAD_OP): MosaicML, LLM Foundry, scripts/train/benchmarking; "
        "plain DP: Tazi et al. 2025, The Ultra-Scale Playbook, micro-batches of one sequence",
    )
    return figure, f"{title}; plain DP on 256: {100 * plain_dp[256] / plain_dp[8]:.0f} %"


def _levels(ledger: Ledger, unit: float) -> list[float]:
    """Return the bytes of parameters after each change, in a unit."""
    return [held / unit for held, _ in groupby(ledger.bytes_by_kind["params"])]


def _sawtooth(voices: Voices, length: int, title: str, unit: str) -> Figure:
    return compare(
        range(length),
        voices,
        title,
        x_label="gathers, copies and frees",
        y_label=f"parameters on a rank ({unit})",
    )


def _of_rank_0(runs: EventsByWay) -> dict[str, list[Event]]:
    return {name: [one for one in events if one.rank == 0] for name, events in runs.items()}


def _last_s(events: Iterable[Event]) -> float:
    return max(event.end_s for event in events)


def _shortens(steps_s: Sequence[float]) -> str:
    before, after = (1e3 * one for one in steps_s)
    return f"shortens the step from {before:.0f} ms to {after:.0f} ms"
