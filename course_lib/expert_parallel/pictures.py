"""Pictures of experts: where copies of tokens go, bytes, loads, drops, groups and published runs.

Every function returns a figure and its alt text. Notebook 16_experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_lib.core.links import Link
from course_lib.core.parallelism import Parallelism
from course_lib.core.records import Event
from course_lib.core.specs import ModelSpec
from course_lib.core.units import GIB, KIB
from course_lib.cost.published import rows
from course_lib.display.colours import QUIET, WHITE, rank_colour
from course_lib.display.compare import Voices, compare
from course_lib.display.on_ranks import measured_over
from course_lib.display.page import SMALL_PT, TEXT_PT, Margins, page
from course_lib.display.timeline import timelines
from course_lib.expert_parallel.cost import (
    PassBytes,
    RoutedSizes,
    dropped_share,
    exchange_bytes,
    expert_tensor_bytes,
    load_imbalance,
    nodes_reached,
    state_bytes,
)
from course_lib.expert_parallel.simulation import draw_choices, mean_nodes


def dispatch_picture(choices: Sequence[Sequence[int]], ep: int, experts: int) -> tuple[Figure, str]:
    """Draw the copies of all tokens at home and at their experts, in the color of their rank.

    choices   experts of each token; the ranks have equally many tokens, rank 0 the first ones
    """
    tokens, held = len(choices) // ep, experts // ep
    copies = [(expert, t, t // tokens) for t, chosen in enumerate(choices) for expert in chosen]
    before = [sorted(one for one in copies if one[2] == rank) for rank in range(ep)]
    after = [sorted(one for one in copies if one[0] // held == rank) for rank in range(ep)]
    loads = [len(row) for row in after]
    title = f"Every rank has {len(before[0])} copies; after dispatch they have "
    title += ", ".join(map(str, loads))
    wide = len(before[0]), max(loads)
    note = "t5 e2: a copy of token 5 for expert 2. Color: the rank at which the token is at home."
    margins = Margins(left=0.9, right=0.2, top=0.35, bottom=0.1)
    figure, (axes,) = page(title, [0.42 * ep], note=note, margins=margins)
    axes.set(xlim=(0, sum(wide) + 1.5), ylim=(ep, 0))
    axes.set_axis_off()
    for left, name, side in ((0.0, "at home", before), (wide[0] + 1.5, "at the experts", after)):
        axes.text(left, -0.12, name, ha="left", va="bottom", fontsize=TEXT_PT)
        for row, own in enumerate(side):
            for column, (expert, token, home) in enumerate(own):
                words = f"t{token} e{expert}"
                _cell(axes, (left + column, row), rank_colour(home, ep), words)
    for row in range(ep):
        words = f"rank {row}: e{row * held}" + (f"–{row * held + held - 1}" if held > 1 else "")
        axes.text(-0.1, row + 0.5, words, ha="right", va="center", fontsize=SMALL_PT)
    arrow = {"arrowstyle": "->", "color": QUIET, "linewidth": 1.5}
    axes.annotate("", (wide[0] + 1.3, ep / 2), (wide[0] + 0.2, ep / 2), arrowprops=arrow)
    return figure, title


def _cell(axes: Axes, corner: tuple[float, float], colour: str, words: str) -> None:
    look: dict[str, Any] = {"facecolor": colour, "edgecolor": WHITE, "linewidth": 2}
    axes.add_patch(Rectangle(corner, 1, 1, **look))
    where: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL_PT}
    axes.text(corner[0] + 0.5, corner[1] + 0.5, words, **where)


def groups_picture(dp: int, ep: int, experts: int) -> tuple[Figure, str]:
    """Draw which experts each of dp ranks holds: those of one color average their gradients."""
    held = experts // ep
    title = f"{dp} ranks have a copy of all other parameters, but each expert is on {dp // ep}"
    note = "One color: these ranks hold the same experts, and sum their gradients."
    figure, (axes,) = page(title, [0.9], note=note, margins=Margins(left=0.3, bottom=0.1, top=0.1))
    axes.set(xlim=(0, dp), ylim=(2, 0))
    axes.set_axis_off()
    for rank in range(dp):
        first = rank % ep * held
        _cell(axes, (rank, 1), rank_colour(rank % ep, ep), f"e{first}–{first + held - 1}")
        axes.text(rank + 0.5, 0.6, f"rank {rank}", ha="center", va="center", fontsize=SMALL_PT)
    return figure, title


def bytes_picture(
    sizes: RoutedSizes, measured: Mapping[int, Mapping[int, Sequence[PassBytes]]]
) -> tuple[Figure, str]:
    """Draw the bytes that a rank sends for a layer, beside splitting each expert.

    measured   by k and number of ranks, those of each rank
    """
    ps = [*next(iter(measured.values()))]
    kib = {
        f"k = {k}:": [sum(exchange_bytes(_with(sizes, k), p)) / KIB for p in ps] for k in measured
    }
    curves = {
        name.rstrip(":"): Voices(
            formula=values,
            measurement=[[sum(rank) / KIB for rank in found[p]] for p in ps],
        )
        for (name, values), found in zip(kib.items(), measured.values(), strict=True)
    }
    split = [sum(expert_tensor_bytes(sizes, p)) / KIB for p in ps]
    curves["each expert split"] = Voices(formula=split)
    told = ", ".join(f"{name} {values[-1]:.0f} KiB" for name, values in kib.items())
    title = f"Sent per rank and layer on {ps[-1]} ranks, forward and backward: {told}, "
    title += f"with each expert split {split[-1]:.0f} KiB"
    figure = compare(
        ps,
        curves,
        title,
        x_label="ranks p that share the experts",
        y_label="KiB sent by a rank",
        names={"measurement": "real ranks"},
        note=f"{sizes.tokens} tokens of {sizes.hidden} numbers on each rank, "
        f"{sizes.experts} experts, {sizes.number_bytes} bytes a number",
    )
    return figure, title


def _with(sizes: RoutedSizes, active: int) -> RoutedSizes:
    return RoutedSizes(**{**vars(sizes), "active": active})


def layer_on_the_clock(
    runs: Mapping[str, list[Event]], link: Link | None = None
) -> tuple[Figure, str]:
    """Draw dispatch, experts and combine of a layer on all ranks, for each routing."""
    ends_ms = {name: 1e3 * max(event.end_s for event in own) for name, own in runs.items()}
    title = "A layer of experts, forward and backward: "
    title += ", ".join(f"{name} {end:.0f} ms" for name, end in ends_ms.items())
    return timelines(runs, title, link=measured_over(link)), title


def loads_picture(
    loads: Mapping[str, Sequence[Sequence[int]]], ep: int, window: int = 30
) -> tuple[Figure, str]:
    """Draw how full the fullest rank is during training, for each rule.

    loads   by rule: tokens of each expert, step by step; those of `window` steps are added up
    """
    num_steps = len(next(iter(loads.values())))
    ends = range(window, num_steps + 1, window)
    found = {
        name: [_imbalance_of(steps[end - window : end], ep) for end in ends]
        for name, steps in loads.items()
    }
    curves = {name: Voices(formula=values) for name, values in found.items()}
    title = f"The fullest of {ep} ranks, divided by the mean, at the end: "
    title += ", ".join(f"{name} {values[-1]:.2f}" for name, values in found.items())
    figure = compare(
        ends,
        curves,
        title,
        x_label="step",
        y_label="copies of the fullest rank / mean",
        names={"formula": f"training, {window} steps together"},
    )
    return figure, title


def _imbalance_of(steps: Sequence[Sequence[int]], ep: int) -> float:
    return load_imbalance([sum(tokens) for tokens in zip(*steps, strict=True)], ep)


def dropped_picture(
    loads: Mapping[str, Sequence[int]],
    measured: Mapping[str, Sequence[float]],
    factors: Sequence[float],
) -> tuple[Figure, str]:
    """Draw the share of copies that is dropped over the capacity factor, for several loads.

    loads      by name: tokens of each expert
    measured   by the same names: the shares that a layer dropped, one per factor
    """
    curves = {
        name: Voices(
            formula=[100 * dropped_share(tokens, factor) for factor in factors],
            measurement=[100 * share for share in measured[name]],
        )
        for name, tokens in loads.items()
    }
    at = 1.25
    told = {name: 100 * dropped_share(tokens, at) for name, tokens in loads.items()}
    title = f"Dropped with a capacity factor of {at}: "
    title += ", ".join(f"{name} {value:.0f} %" for name, value in told.items())
    figure = compare(
        factors,
        curves,
        title,
        x_label="capacity factor",
        y_label="dropped copies (%)",
        names={"measurement": "a layer of the library"},
    )
    return figure, title


def nodes_picture(
    experts: int = 256,
    active: int = 8,
    most: int = 4,
    nodes: Sequence[int] = (2, 4, 8, 16, 32),
    tokens: int = 2000,
) -> tuple[Figure, str]:
    """Draw on how many nodes a token's experts are, with and without a limit."""
    curves = {
        name: Voices(
            formula=[nodes_reached(n, active, limit) for n in nodes],
            simulation=[
                mean_nodes(
                    draw_choices(tokens, experts, active, nodes=n, most_nodes=limit), experts, n
                )
                for n in nodes
            ],
        )
        for name, limit in (("any nodes", None), (f"at most {most}", most))
    }
    told = [nodes_reached(8, active, limit) for limit in (None, most)]
    title = f"{active} of {experts} experts on 8 nodes: {told[0]:.1f} nodes per token, "
    title += f"{told[1]:.1f} with a limit of {most}"
    figure = compare(
        nodes,
        curves,
        title,
        x_label="nodes over which the experts are divided",
        y_label="nodes that a token is sent to",
        log_x=True,
        names={"simulation": f"{tokens:,} tokens drawn"},
    )
    return figure, title


def memory_picture(
    spec: ModelSpec, dp: int, tp: int, eps: Sequence[int], room_bytes: float
) -> tuple[Figure, str]:
    """Draw the model states of a rank in three kinds, over ep, with ZeRO-1."""
    axes = [Parallelism(dp=dp, tp=tp, ep=ep, expert_tp=1, zero=1) for ep in eps]
    kinds = [state_bytes(spec, one) for one in axes]
    names = {"experts": "experts", "split": "divided by tp", "whole": "replicated"}
    curves = {
        word: Voices(formula=[found[kind] / GIB for found in kinds]) for kind, word in names.items()
    }
    curves["all"] = Voices(formula=[sum(found.values()) / GIB for found in kinds])
    fits = [ep for ep, found in zip(eps, kinds, strict=True) if sum(found.values()) <= room_bytes]
    title = f"{spec.name}, states per rank with tp {tp}: experts "
    title += f"{kinds[0]['experts'] / GIB:,.0f} GiB with ep {eps[0]}, "
    title += f"{kinds[-1]['experts'] / GIB:,.0f} GiB with ep {eps[-1]}; "
    fitting = f"fits from ep {fits[0]} on" if fits else "does not fit"
    title += f"{fitting} into {room_bytes / GIB:.0f} GiB"
    figure = compare(
        eps,
        curves,
        title,
        x_label="ep",
        y_label="GiB per rank",
        log=True,
        note=f"layers only, 16 bytes a parameter, ZeRO-1; dp {dp}, no pipeline",
    )
    return figure, title


def published_balance_picture() -> tuple[Figure, str]:
    """Draw TFLOP/s of published runs whose router has learned, or is forced to be balanced.

    Source:  Megatron-Core's MoE model zoo: Qwen3-235B-A22B on 256 H100, bf16
    """
    found: dict[str, dict[int, float]] = {"forced": {}, "learned": {}}
    for row in rows("moe"):
        if "Long Context" in row["source"]:
            rate = float(row["model_TFLOPs_per_GPU"])
            found[row["balance"]][int(row["seq"])] = rate
    curves = {
        name: Voices(published=(sorted(by_seq), [by_seq[seq] for seq in sorted(by_seq)]))
        for name, by_seq in found.items()
    }
    lost = {seq: 1 - rate / found["forced"][seq] for seq, rate in found["learned"].items()}
    title = "Qwen3-235B on 256 H100: with the router that it has learned, "
    title += f"{100 * min(lost.values()):.0f} to {100 * max(lost.values()):.0f} % slower than with "
    title += "one that is forced to be balanced"
    figure = compare(
        sorted(lost),
        curves,
        title,
        x_label="tokens of a sequence",
        y_label="model TFLOP/s per GPU",
        log_x=True,
        source="Megatron-Core MoE model zoo (yanring/Megatron-MoE-ModelZoo), Qwen3, long context",
    )
    return figure, title
