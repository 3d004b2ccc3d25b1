"""Pictures of a mesh: which ranks form a group along each axis, and what every axis sends.

Most return a figure and its alt text. In a grid a row is a node. On up to eight ranks each group
has a color and a letter; on more, only the group of rank 0 along each axis is colored. Notebook
11_mesh.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from string import ascii_lowercase
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from course_lib.core.errors import MeshError
from course_lib.core.links import TwoLevelLink
from course_lib.core.records import Event
from course_lib.core.units import KIB
from course_lib.cost.published import rows
from course_lib.display.colours import QUIET, RANK, SERIES, WHITE
from course_lib.display.compare import Voices, compare
from course_lib.display.page import SMALL_PT, TEXT_PT, WIDTH_IN, Margins, page, plain, powers_of_ten
from course_lib.display.timeline import timelines
from course_lib.mesh.mesh import Mesh
from course_lib.ranks.timing import from_zero

GPUS_PER_NODE = 8  # of the published runs
PLAYBOOK = "Ultra-Scale Playbook (Tazi et al. 2025), 8B model, H100, 8 GPUs per node, 4096 tokens"
_SIDE_IN, _GAP_IN, _HEAD_IN, _CELL_IN, _WIDEST_IN = 0.6, 0.3, 0.55, 0.5, 2.2


def mesh_grid(mesh: Mesh, ranks_per_node: int, title: str) -> Figure:
    """Draw the groups along each axis of more than one rank, side by side; a row is a node.

    Raises: MeshError for a mesh of one rank, or fewer than one rank per node
    """
    axes_in = grid_height_in(mesh, ranks_per_node)
    margins = Margins(top=0, bottom=0.05)
    figure, (axes,) = page(title, [axes_in], note=grid_note(mesh), margins=margins)
    draw_grid(axes, mesh, ranks_per_node)
    return figure


def groups_across_nodes(mesh: Mesh, ranks_per_node: int) -> tuple[Figure, str]:
    """Draw the groups along each axis, and say which axes have groups on several nodes."""
    num_nodes = -(-mesh.world_size // ranks_per_node)
    crossing = [axis for axis in _shown(mesh) if mesh.crosses_nodes(axis, ranks_per_node)]
    title = f"With {_shown(mesh)[0]} outermost, "
    if crossing:
        title += f"only {' and '.join(crossing)} groups cross the {num_nodes} nodes"
    else:
        title += "no group crosses nodes"
    groups = [", ".join(map(str, mesh.group(0, axis))) for axis in _shown(mesh)]
    held = "; ".join(f"{axis} {ranks}" for axis, ranks in zip(_shown(mesh), groups, strict=True))
    return mesh_grid(mesh, ranks_per_node, title), f"{title}. Groups of rank 0: {held}"


def grid_note(mesh: Mesh) -> str:
    """Return what numbers, letters and colors of a grid mean."""
    if mesh.world_size <= len(RANK):
        return "number: rank; letter and color: its group along the axis"
    return "number: rank; colored: the group of rank 0 along the axis"


def grid_height_in(mesh: Mesh, ranks_per_node: int) -> float:
    """Return the inches that `draw_grid` needs."""
    num_nodes = -(-mesh.world_size // ranks_per_node) if ranks_per_node > 0 else 0
    return _HEAD_IN + num_nodes * _cell_in(mesh, ranks_per_node) + 0.05


def draw_grid(axes: Axes, mesh: Mesh, ranks_per_node: int) -> None:
    """Draw the grids of `mesh_grid` on an axes, which becomes as wide as the page."""
    _, bottom, _, tall = axes.get_position().bounds
    axes.set_position((0, bottom, 1, tall))
    cell, height = _cell_in(mesh, ranks_per_node), grid_height_in(mesh, ranks_per_node)
    axes.set_xlim(0, WIDTH_IN)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    wide = min(ranks_per_node, mesh.world_size) * cell
    for node in range(-(-mesh.world_size // ranks_per_node)):
        y = _HEAD_IN + (node + 0.5) * cell
        axes.text(0.14, y, f"node {node}", va="center", fontsize=SMALL_PT, color=QUIET)
    for number, axis in enumerate(_shown(mesh)):
        x = _SIDE_IN + number * (wide + _GAP_IN)
        _panel(axes, mesh, axis, (x, cell, ranks_per_node))
        axes.text(x, _HEAD_IN - 0.28, _headline(mesh, axis), fontsize=TEXT_PT, weight="bold")
        crosses = mesh.crosses_nodes(axis, ranks_per_node)
        where = "crosses nodes" if crosses else "inside nodes"
        axes.text(x, _HEAD_IN - 0.1, where, fontsize=SMALL_PT, color=QUIET)


def _shown(mesh: Mesh) -> list[str]:
    return [axis for axis, size in mesh.sizes.items() if size > 1]


def _cell_in(mesh: Mesh, ranks_per_node: int) -> float:
    """Return the side of a rank's cell, so that the grids of all axes fit the page."""
    if mesh.world_size < 2 or ranks_per_node < 1:
        raise MeshError(
            f"mesh_grid: need two ranks or more, and a rank per node or more; got {mesh} and "
            f"{ranks_per_node}."
        )
    num_grids, columns = len(_shown(mesh)), min(ranks_per_node, mesh.world_size)
    free_in = WIDTH_IN - _SIDE_IN - 0.14 - _GAP_IN * (num_grids - 1)
    return min(_CELL_IN, min(_WIDEST_IN, free_in / num_grids) / columns)


def _headline(mesh: Mesh, axis: str) -> str:
    size = mesh.size(axis)
    return f"{axis}: {mesh.world_size // size} groups of {size}"


def _panel(axes: Axes, mesh: Mesh, axis: str, at: tuple[float, float, int]) -> None:
    x, cell, ranks_per_node = at
    small = mesh.world_size <= len(RANK)
    for number, group in enumerate(mesh.groups(axis)):
        marked = small or number == 0
        look = {"size": TEXT_PT if small else 6.5, "weight": "bold" if marked else "normal"}
        for rank in group:
            node, place = divmod(rank, ranks_per_node)
            corner = x + place * cell, _HEAD_IN + node * cell
            fill = RANK[number] if marked else WHITE
            axes.add_patch(Rectangle(corner, cell, cell, facecolor=fill, edgecolor=QUIET, lw=0.7))
            middle = corner[0] + cell / 2, corner[1] + cell / 2
            words = f"{rank} {ascii_lowercase[number]}" if small else f"{rank}"
            axes.text(*middle, words, ha="center", va="center", **look)  # type: ignore[arg-type]


def mesh_cube(mesh: Mesh) -> tuple[Figure, str]:
    """Draw 2 x 2 x 2 ranks as a cube: every edge is a process group, one line style per axis.

    The outermost axis goes to the back, the innermost to the right.

    Raises: MeshError for a mesh of other sizes
    """
    if [*mesh.sizes.values()] != [2, 2, 2]:
        raise MeshError(f"mesh_cube: need three axes of 2 ranks; got {mesh}. Try mesh_grid.")
    names = [*mesh.sizes]
    title = "Each edge of the cube is a process group: "
    title += ", ".join(f"ranks along {axis} differ by {mesh.stride(axis)}" for axis in names[::-1])
    lines: tuple[Any, ...] = (":", "--", "-")
    styles = dict(zip(names, zip(SERIES[:3], lines, strict=True), strict=True))
    keys = [
        Line2D([], [], color=color, linestyle=line, lw=2.4, label=f"{axis}: 4 groups of 2")
        for axis, (color, line) in styles.items()
    ]
    note = f"on a corner: the rank, and its coordinates {', '.join(names)}"
    figure, (axes,) = page(title, [3.0], note=note, legend=keys, margins=Margins(bottom=0.1))
    at = {rank: _corner(*mesh.coordinates(rank).values()) for rank in range(8)}
    for axis, (color, line) in styles.items():
        for one, other in mesh.groups(axis):
            ends = zip(at[one], at[other], strict=True)
            axes.plot(*ends, color=color, linestyle=line, lw=2.4)
    box = {"boxstyle": "round", "facecolor": WHITE, "edgecolor": QUIET}
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": TEXT_PT, "bbox": box}
    for rank, (x, y) in at.items():
        words = ", ".join(map(str, mesh.coordinates(rank).values()))
        axes.text(x, y, f"rank {rank}\n{words}", **look)
    axes.set_xlim(-0.9, 3.9)
    axes.set_ylim(-1.9, 0.8)
    axes.set_axis_off()
    return figure, f"{title}; twelve edges, twelve groups"


def _corner(depth: int, down: int, right: int) -> tuple[float, float]:
    """Return where a corner of the cube is drawn: the back face is smaller, up and to the right."""
    size = 0.85 if depth else 1.0
    return 1.0 * depth + 2.0 * size * right, 0.55 * depth - 1.6 * size * down


def axis_dots(
    predicted: Mapping[str, float],
    counted: Mapping[str, float] | None = None,
    *,
    who: str = "A rank",
) -> tuple[Figure, str]:
    """Draw the bytes that a rank sends per step along each axis: by formula, and as counted.

    The axis is logarithmic, because one axis can send a hundred times as much as another. An axis
    of the mesh that sends nothing is left out.
    """
    scale, unit = (1e9, "GB") if max(predicted.values()) > 1e8 else (KIB, "KiB")
    names = [axis for axis, size in predicted.items() if size]
    most, *others = sorted(names, key=predicted.__getitem__, reverse=True)
    size = (counted or predicted)[most] / scale
    title = f"{who} sends {size:,.0f} {unit} per step along {most}, "
    rest = " and ".join(f"{predicted[axis] / scale:.3g} along {axis}" for axis in others)
    title += rest if counted is None else f"{predicted[most] / scale:,.0f} by formula"
    voices = {"by formula": (predicted, WHITE, 11.0)}
    if counted is not None:
        voices["counted"] = (counted, SERIES[0], 5.0)
    look: dict[str, Any] = {"color": SERIES[0], "linestyle": ""}
    keys = [
        Line2D([], [], marker="o", markersize=wide, markerfacecolor=fill, label=name, **look)
        for name, (_, fill, wide) in voices.items()
    ]
    height, margins = 0.4 * len(names) + 0.2, Margins(left=0.7, right=0.8)
    figure, (axes,) = page(title, [height], legend=keys, margins=margins)
    plain(axes, x_label=f"{unit} that a rank sends per step, logarithmic axis")
    powers_of_ten(axes, ("x",))
    for sizes, fill, wide in voices.values():
        x = [sizes[axis] / scale for axis in names]
        axes.plot(x, range(len(names)), "o", markersize=wide, markerfacecolor=fill, **look)
    for row, axis in enumerate(names):
        at = (predicted[axis] / scale, row)
        words = f"{at[0]:.3g}" if at[0] < 1000 else f"{at[0]:,.0f}"
        axes.annotate(words, at, xytext=(9, 0), textcoords="offset points", va="center",
                      fontsize=SMALL_PT)  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(min(x) / 2, max(x) * 2)
    return figure, title if counted is None else f"{title}; {rest}"


def order_bars(
    predicted: Mapping[Mesh, float],
    measured: Mapping[Mesh, float],
    inside: Mesh,
    outside: Mesh,
) -> tuple[Figure, str]:
    """Draw each order's milliseconds: communication by formula, beside it the measured step.

    These are different times, so each has an axis of its own.

    inside, outside   the orders that the title compares: the same axis innermost, and outermost
    """
    axis = [*inside.sizes][-1]
    title = f"With {axis} innermost, a step takes {1e3 * measured[inside]:.0f} ms; "
    title += f"with {axis} outermost, {1e3 * measured[outside]:.0f} ms"
    names = [" ".join(mesh.sizes) for mesh in predicted]
    note = "names: outermost axis first"
    figure, (left,) = page(title, [0.3 * len(names) + 0.1], note=note, margins=Margins(left=0.9))
    x, y, wide, tall = left.get_position().bounds
    left.set_position((x, y, 0.43 * wide, tall))
    right = figure.add_axes((x + 0.52 * wide, y, 0.43 * wide, tall))
    panels = {
        "communication, by formula (ms)": (left, predicted, WHITE),
        "whole step, measured (ms)": (right, measured, SERIES[0]),
    }
    for label, (axes, seconds, fill) in panels.items():
        plain(axes, x_label=label)
        sizes = [1e3 * seconds[mesh] for mesh in predicted]
        bars = axes.barh(range(len(names)), sizes, 0.6, color=fill, edgecolor=SERIES[0])
        axes.bar_label(bars, fmt="{:.0f}", padding=3, fontsize=SMALL_PT)
        axes.set_xlim(0, 1.15 * max(sizes))
        axes.set_yticks(range(len(names)), names if axes is left else [""] * len(names))
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
    return figure, f"{title}; real ranks, emulated links"


def median_call_s(mesh: Mesh, axis: str, events: Iterable[Event]) -> float:
    """Return the median seconds of one rank's collectives and messages along an axis."""
    return median(one.duration_s for one in events if mesh.axis_of(one.group) == axis)


def axis_traces(
    traces: Mapping[Mesh, Sequence[Event]], axis: str, link: TwoLevelLink
) -> tuple[Figure, str]:
    """Draw a rank's step on two meshes, calls with the name of their axis; the title tells one's.

    traces   by mesh: first that whose groups of `axis` are inside a node, then that where they
             are not
    """
    inside_ms, outside_ms = (1e3 * median_call_s(mesh, axis, traces[mesh]) for mesh in traces)
    title = f"The median all-reduce along {axis} takes {inside_ms:.0f} ms inside a node, "
    title += f"{outside_ms:.0f} ms between nodes"
    rows = {
        " ".join(mesh.sizes): from_zero(named_by_axis(mesh, events))
        for mesh, events in traces.items()
    }
    return timelines(rows, title, link=link), f"{title}; one rank, by axis"


def named_by_axis(mesh: Mesh, events: Sequence[Event]) -> Iterator[Event]:
    """Yield forward, backward and calls; receives, which mostly wait for computation, are not."""
    for event in events:
        if event.kind in ("forward", "backward"):
            yield event
        elif event.kind != "recv" and (axis := mesh.axis_of(event.group)):
            yield replace(event, label=axis)


def losses_by_data_axis(losses: Mapping[str, Sequence[float]]) -> tuple[Figure, str]:
    """Draw the loss if sequences are selected by the dp coordinate, and if by another one's."""
    (right, rights), (wrong, wrongs) = losses.items()
    title = f"With sequences by {wrong}, the loss falls to {wrongs[-1]:.1f}; "
    title += f"by {right}, to {rights[-1]:.1f}"
    curves = {f"sequences by {axis}": Voices(measurement=one) for axis, one in losses.items()}
    figure = compare(range(1, len(rights) + 1), curves, title, x_label="step", y_label="loss")
    return figure, f"{title}, after {len(rights)} steps on one batch"


def best_by_tensor_degree(nodes: tuple[int, ...] = (2, 8, 32)) -> tuple[Figure, str]:
    """Draw the published best tokens/s per GPU over the tensor-parallel degree, and say the drop.

    The best of all runs of 256 sequences per step with that degree, whatever the other axes are.

    Source: Ultra-Scale Playbook (Tazi et al. 2025), benchmark of 8B models
    """
    best = {count: best_tokens(count) for count in nodes}
    inside, outside = GPUS_PER_NODE, 2 * GPUS_PER_NODE
    kept = [best[count][outside] / best[count][inside] for count in nodes]
    title = f"The fastest run with tp = 16 reaches {min(kept):.0%} to {max(kept):.0%} of the "
    title += "fastest with tp = 8"
    curves = {
        f"{count} nodes": Voices(published=([*found], [*found.values()]))
        for count, found in best.items()
    }
    figure = compare(
        [],
        curves,
        title,
        x_label="tensor-parallel degree",
        y_label="tokens/s per GPU",
        log_x=True,
        note="a star: the fastest run of that degree; dp, pp, ZeRO stage and sequences per "
        "micro-batch also differ between stars",
        source=PLAYBOOK,
    )
    return figure, f"{title}; dp, pp, ZeRO stage and micro-batch differ, too"


def best_tokens(num_nodes: int) -> dict[int, float]:
    """Return the best published tokens/s per GPU by tensor-parallel degree."""
    return {tp: float(row["tok_s_gpu"]) for tp, row in best_runs(num_nodes).items()}


def best_runs(num_nodes: int) -> dict[int, dict[str, str]]:
    """Return the fastest run of 256 sequences by tensor-parallel degree: rows of `ultrascale`."""
    best: dict[int, dict[str, str]] = {}
    for row in sorted(rows("ultrascale"), key=lambda row: float(row["tok_s_gpu"] or 0)):
        batch = int(row["dp"]) * int(row["mbs"]) * int(row["grad_acc"])
        if (row["model"], int(row["nodes"]), batch) == ("8B", num_nodes, 256) and row["tok_s_gpu"]:
            best[int(row["tp"])] = row  # the last one is the fastest
    return dict(sorted(best.items()))
