"""Pictures of lesson 04: collectives step by step, all-reduces by size, published bandwidths.

They stand here because `course_lib.collectives` may not draw. Published values are those of
`course_lib.cost.published`, each with its source.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import numpy as np
from matplotlib.figure import Figure

from course_lib.collectives import messages
from course_lib.collectives.live import (
    BY_SIZE,
    COSTS,
    MESSAGES,
    RING,
    SIZES,
    Cost,
    wire_of,
)
from course_lib.core.default_place import default_place
from course_lib.core.links import Link, TwoLevelLink
from course_lib.core.units import format_bytes, format_rate, format_seconds
from course_lib.cost import bandwidth, network
from course_lib.cost.network import AnyLink
from course_lib.cost.published import rows
from course_lib.display.compare import Repeated, Voices, compare
from course_lib.display.explore import Explore, explore
from course_lib.display.frames import frames_from_messages, own_everything
from course_lib.display.on_ranks import compare_on_ranks
from course_lib.display.stepper import Stepper, stepper

HIERARCHICAL, OUR_RING = "hierarchical", "our ring"
ListsMessages = Callable[[int, float], list[messages.Message]]
_by_size = partial(compare, x_label="tensor (bytes)", y_label="time (s)", log=True)
_on_ranks = partial(compare_on_ranks, x_label="tensor (bytes)", y_label="time (s)", log=True)
A100 = "8x A100 NVLink3, nccl-tests"
H200 = "8x H200 NVLink4, NCCL 2.27.7 (ring up to 1 MiB, then NVLS)"
H100_NODES = "HF H100 cluster, 8 GPUs per node (Ultra-Scale Playbook)"


def costs_table(p: int) -> str:
    """Return what each all-reduce of n bytes costs on p ranks, in lines of text.

    The last column adds the busiest wire of each step, if ranks stand in a circle of wires.
    """
    lines = [f"{p} ranks{'':12}messages in a row  bytes of a rank  busiest wire of each step"]
    for name, build in MESSAGES.items():
        moves = build(p, 1.0)
        sent = sum(m.num_bytes for m in moves if m.sender == 0)
        steps = max((m.step for m in moves), default=0)
        busiest = messages.busiest_wire_bytes(moves, p)
        lines.append(f"{name:<19}{steps:>17}{sent:>15.3g} n{busiest:>25.3g} n")
    return "\n".join(lines)


def reduce_scatter_steps(p: int) -> Stepper:
    """Return a ring reduce-scatter on p ranks, step by step."""
    frames = frames_from_messages(messages.ring_reduce_scatter_messages(p), own_everything(p))
    return stepper(frames, "Every rank sends one shard in every step, and the sums grow on the way")


def halving_doubling_steps(p: int) -> Stepper:
    """Return a halving-doubling all-reduce on p = 2, 4, 8 ... ranks, step by step."""
    moves = [one for m in messages.halving_doubling_messages(p) for one in m.one_by_one()]
    rounds = network.num_doublings(p)
    title = f"Halving-doubling: {rounds} rounds halve and add, {rounds} rounds send the sums back"
    return stepper(frames_from_messages(moves, own_everything(p)), title)


def all_reduces(
    sizes: Sequence[int], p: int, link: Link, measured: Mapping[str, Repeated] | None = None
) -> tuple[Figure, str]:
    """Draw the three all-reduces over a link by size: formula, simulation, and `measured` times.

    measured   seconds by name and size, a list for each
    """
    from_bytes = network.crossover_bytes(p, link, network.halving_doubling_all_reduce_s)
    title = (
        f"Doubling is fastest for small tensors, halving-doubling from {from_bytes / 1e6:.2g} MB on"
    )
    return _all_reduces(tuple(COSTS), sizes, p, link, title, measured), f"{title}, on {p} ranks"


def two_levels(
    sizes: Sequence[int], p: int, link: TwoLevelLink, measured: Mapping[str, Repeated] | None = None
) -> tuple[Figure, str]:
    """Draw a flat ring and a hierarchical all-reduce over two levels of links by size.

    measured   seconds by name and size, a list for each
    """
    names, largest = (RING, HIERARCHICAL), format_bytes(sizes[-1])
    if measured is None:
        cost_s, _ = _two_levels(link)
        ratio = COSTS[RING](sizes[-1], p, link) / cost_s(sizes[-1], p, link)
        title = f"By the formula, two levels are {ratio:.1f} times as fast as a ring at {largest}"
    else:
        flat_s, levels_s = (float(np.min(measured[name][-1])) for name in names)
        title = f"At {largest}, two levels are {flat_s / levels_s:.1f} times as fast as a flat ring"
    m = link.ranks_per_node
    alt = f"{title}, on {p // m} nodes of {m} ranks"
    return _all_reduces(names, sizes, p, link, title, measured), alt


def _all_reduces(
    names: Sequence[str],
    sizes: Sequence[int],
    p: int,
    link: AnyLink,
    title: str,
    measured: Mapping[str, Repeated] | None,
) -> Figure:
    curves = {}
    for name in names:
        cost_s, build = _two_levels(link) if name == HIERARCHICAL else (COSTS[name], MESSAGES[name])
        played = [messages.end_of(messages.simulate(build(p, n), link)) for n in sizes]
        times_s = measured[name] if measured else None
        curves[name] = Voices(formula=_at(cost_s, p, link), simulation=played, measurement=times_s)
    note = f"emulated: {link}" if measured and not default_place().is_cluster else f"{link}"
    picture = f"all_reduces of {', '.join(names)}"
    return _on_ranks(picture, sizes, curves, title, note=note)


def _two_levels(link: AnyLink) -> tuple[Cost, ListsMessages]:
    """Return formula and messages of the hierarchical all-reduce with the nodes of this link."""
    m = link.ranks_per_node if isinstance(link, TwoLevelLink) else 1

    def cost_s(n: float, p: int, over: AnyLink) -> float:
        return network.hierarchical_all_reduce_s(n, p, over, ranks_per_node=m)

    def build(p: int, n: float) -> list[messages.Message]:
        return messages.hierarchical_all_reduce_messages(p, n, ranks_per_node=m)

    return cost_s, build


def ring_on_this_machine(
    sizes: Sequence[int],
    measured: Mapping[str, Sequence[Sequence[float]]],
    predicted_s: Sequence[float],
) -> tuple[Figure, str]:
    """Draw "our ring" and its rival on this machine by size, beside the ring's predicted times.

    measured   seconds by name and size, a list for each
    """
    rows = list(zip(measured[OUR_RING], predicted_s, strict=True))
    fastest, middle = ([pick(row) / s for row, s in rows] for pick in (min, median))
    title = (
        f"Our ring's median times are {min(middle):.1f} to {max(middle):.1f} times the prediction, "
        f"its fastest calls {min(fastest):.1f} to {max(fastest):.1f} times"
    )
    curves = {
        name: Voices(formula=predicted_s if name == OUR_RING else None, measurement=times_s)
        for name, times_s in measured.items()
    }
    names = {"formula": "prediction, from the fastest exchanges"}
    return _on_ranks("ring_on_this_machine", sizes, curves, title, names=names), title


def explore_all_reduces() -> Explore:
    """Return the three all-reduces by size with sliders; it starts from NVLink inside a node."""

    def draw(p: int, latency_us: float, gb_per_s: float) -> Figure:
        over = wire_of(latency_us, gb_per_s)
        curves = {name: Voices(formula=_at(cost_s, p, over)) for name, cost_s in COSTS.items()}
        title = BY_SIZE.compute(p, latency_us, gb_per_s).finding
        return _by_size(SIZES, curves, title, note=f"{over}")

    return explore(draw, BY_SIZE.finding, **BY_SIZE.choices)


def _at(cost_s: Cost, p: int, link: AnyLink) -> Callable[[float], float]:
    return lambda n: cost_s(n, p, link)


# --- published measurements of NCCL


def published_by_size() -> tuple[Figure, str]:
    """Draw the bus bandwidth of NCCL's all-reduce on 8 GPUs by size, and the ring fitted to it.

    One alpha and one beta are fitted for each of the two machines, to all of its sizes;
    every second one is drawn.
    """
    curves, worst, source, p = dict[str, Voices](), 1.0, "", 8
    for name, hardware in (("8 A100", A100), ("8 H200, NVLS from 2 MiB on", H200)):
        found = [row for row in rows("bandwidth") if row["hardware"] == hardware]
        sizes = [float(row["size_bytes"]) for row in found]
        bus = [float(row["value"]) for row in found]  # GB/s
        steps = [_step_s(n, b * 1e9, p) for n, b in zip(sizes, bus, strict=True)]
        link = bandwidth.fit_link([n / p for n in sizes], steps)
        line = [_bus(n, p, link) / 1e9 for n in sizes]
        worst = max(worst, *(max(a / b, b / a) for a, b in zip(line, bus, strict=True)))
        label = f"{name}: {format_seconds(link.latency_s)}, {format_rate(link.bytes_per_s)}"
        label += f"; NCCL up to {max(bus):.0f} GB/s"
        curves[label] = Voices(formula=line[1::2], published=(sizes[1::2], bus[1::2]))
        source = f"S. Bekman, Machine Learning Engineering: {found[0]['source']}; "
        source += "A100 with nccl-tests; H200 with all_reduce_bench.py, which times "
        source += "PyTorch's calls, and NCCL 2.27.7"
    title = f"Fitted to each machine, a ring is within a factor of {worst:.2g} of NCCL at all sizes"
    names = {"formula": "ring, alpha and beta fitted to all sizes", "published": "NCCL"}
    figure = _by_size(
        sizes[1::2], curves, title, y_label="bus bandwidth (GB/s)", source=source, names=names
    )
    return figure, f"{title}; at {format_bytes(sizes[-1])}, {bus[-1]:.0f} GB/s on 8 H200"


def _step_s(num_bytes: float, bus_bytes_per_s: float, p: int) -> float:
    """Return the seconds of one of the 2 (p-1) steps of a ring with this bus bandwidth."""
    time_s = num_bytes * bandwidth.bus_factor("all_reduce", p) / bus_bytes_per_s
    return time_s / (2 * (p - 1))


def _bus(num_bytes: float, p: int, link: Link) -> float:
    time_s = network.ring_all_reduce_s(num_bytes, p, link)
    return bandwidth.bus_bandwidth("all_reduce", num_bytes, time_s, p)


def published_by_nodes() -> tuple[Figure, str]:
    """Draw the bandwidth of an all-reduce by nodes of 8 H100, and one ring over all.

    The source says "256MB"; we take this as 2**28 bytes. In a ring, n / bandwidth =
    p alpha + n / beta: a line in p, fitted to all points.
    """
    found = [
        row
        for row in rows("bandwidth")
        if row["hardware"] == H100_NODES and row["what"].startswith("all_reduce")
    ]
    nodes = [int(row["nodes"]) for row in found]
    ranks = [int(row["ranks"]) for row in found]
    gb_per_s = [float(row["value"]) for row in found]
    sent = gb_per_s[0] * bandwidth.bus_factor("all_reduce", ranks[0])  # if it were n / t
    num_bytes = float(found[0]["size_bytes"])
    times_s = [num_bytes / (one * 1e9) for one in gb_per_s]
    line = bandwidth.fit_link(ranks, times_s)
    link = Link(latency_s=1 / line.bytes_per_s, bytes_per_s=num_bytes / line.latency_s)
    formula = [_bus(num_bytes, p, link) / 1e9 for p in ranks]
    ratio = gb_per_s[0] / gb_per_s[-1]
    worst = max(max(a / b, b / a) for a, b in zip(formula, gb_per_s, strict=True))
    title = f"Bandwidth on {nodes[-1]} nodes is 1/{ratio:.0f} of that on one; "
    title += f"one fitted ring is within a factor of {worst:.2g}"
    names = {
        "formula": f"one ring, fitted: {format_seconds(link.latency_s)} a step, "
        f"{format_rate(link.bytes_per_s)}"
    }
    source = (
        f"N. Tazi et al., The Ultra-Scale Playbook, 2025: {found[0]['source']}. We take "
        "256MB as 2^28 bytes. The figure does not say which bandwidth; if it were n / t, each GPU "
        f"of a ring of {ranks[0]} would send {sent:.0f} GB/s, more than NVLink can"
    )
    figure = compare(
        nodes,
        Voices(formula=formula, published=(nodes, gb_per_s)),
        title,
        x_label="nodes of 8 H100",
        y_label='bus bandwidth, all-reduce of "256MB" (GB/s)',
        log=True,
        source=source,
        names=names,
    )
    return figure, f"{title}; bandwidth falls from {gb_per_s[0]:.0f} to {gb_per_s[-1]:.0f} GB/s"
