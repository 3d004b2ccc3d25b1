"""The wait-for graph of a hang: ranks around a circle, an arrow from each to those it waits for.

A hang is a deadlock (a cycle of ranks that wait for each other) or a wait for a rank that never
makes the call. The picture shows which.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch

from course_lib.core.cycles import shortest_cycle
from course_lib.display.colours import BLACK, QUIET, RANK_GREY, WHITE, rank_colour
from course_lib.display.page import SMALL_PT, TEXT_PT, Margins, page

_NODE = 0.17


class Waiting(Protocol):
    """Wait of one rank, as in `RankError.waits`: call, ranks waited for, the learner's line."""

    rank: int
    kind: str
    waits_for: tuple[int, ...]
    where: str
    line: int


def waiting(waits: Iterable[Waiting], world_size: int, title: str = "") -> Figure:
    """Draw which rank waits for which: a cycle thick, ranks that do not wait in gray.

    Without a title, the finding is derived from the waits.
    """
    by_rank = {wait.rank: wait for wait in waits}
    edges = {rank: wait.waits_for for rank, wait in by_rank.items()}
    cycle = shortest_cycle(edges)
    note = "gray: finished, or still computing" if len(by_rank) < world_size else ""
    figure, (axes,) = page(
        title or _finding(edges, cycle),
        [3.5],
        note=note,
        margins=Margins(left=0.2, right=0.2, bottom=0.15),
    )
    axes.set_axis_off()
    axes.set_aspect("equal")
    half = 1.65 * (8.0 - 0.4) / 3.5
    axes.set_xlim(-half, half)
    axes.set_ylim(-1.65, 1.65)
    spots = _spots(world_size)
    inside = set(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    for rank, others in edges.items():
        for other in others:
            if rank != other and 0 <= other < world_size:
                _arrow(axes, spots[rank], spots[other], thick=(rank, other) in inside)
    for rank in range(world_size):
        _node(axes, spots[rank], rank, world_size, by_rank.get(rank))
    return figure


def _finding(edges: Mapping[int, Sequence[int]], cycle: Sequence[int]) -> str:
    if cycle:
        way = " \u2192 ".join(map(str, [*cycle, cycle[0]]))
        return f"A circle of waiting, {way}: none of these ranks can go on"
    missing = sorted({other for others in edges.values() for other in others} - set(edges))
    if not missing:
        return "No rank waits for another"
    waiters = [rank for rank in sorted(edges) if set(edges[rank]) & set(missing)]
    verb, not_waiting = "wait" if len(waiters) > 1 else "waits", "which does not wait for anyone"
    if len(missing) > 1:
        not_waiting = "which do not wait for anyone"
    who = names_of(waiters)
    return f"{who[0].upper()}{who[1:]} {verb} for {names_of(missing)}, {not_waiting}"


def names_of(ranks: Sequence[int]) -> str:
    """Return the ranks in words: `[1, 2, 3] -> 'ranks 1, 2 and 3'`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _spots(world_size: int) -> list[tuple[float, float]]:
    """Return positions on a circle, rank 0 on top, then clockwise."""
    if world_size == 1:
        return [(0.0, 0.0)]
    turns = [2 * math.pi * rank / world_size for rank in range(world_size)]
    return [(math.sin(turn), math.cos(turn)) for turn in turns]


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], *, thick: bool
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=16 if thick else 11,
            linewidth=2.6 if thick else 1.0,
            color=BLACK if thick else "#8A8A8A",
            linestyle="-" if thick else "--",
            connectionstyle="arc3,rad=0.14",
            shrinkA=21,
            shrinkB=21,
            zorder=2 if thick else 1,
        )
    )


def _node(
    axes: Axes, spot: tuple[float, float], rank: int, world_size: int, wait: Waiting | None
) -> None:
    """Draw the rank's number in its color, and next to it the call it waits in."""
    x, y = spot
    fill = rank_colour(rank, world_size) if wait else RANK_GREY
    edge = BLACK if wait else QUIET
    axes.add_patch(Circle(spot, _NODE, facecolor=fill, edgecolor=edge, linewidth=1.2, zorder=3))
    axes.text(x, y, str(rank), ha="center", va="center", fontsize=TEXT_PT + 2, zorder=4)
    if wait is None:
        return
    side = "center" if abs(x) < 0.05 else "left" if x > 0 else "right"
    up = "bottom" if y > 0.9 else "top" if y < -0.9 else "center"
    beside = {"center": 0.0, "left": 0.28, "right": -0.28}[side]
    axes.text(
        x + beside,
        y * 1.24 if side == "center" else y,
        _where(wait),
        ha=side,
        va=up,
        fontsize=SMALL_PT,
        linespacing=1.35,
        bbox={"facecolor": WHITE, "edgecolor": "none", "pad": 1.0},
        zorder=4,
    )


def _where(wait: Waiting) -> str:
    """Return the call, the number of its line, and the start of that line."""
    where = f"in {wait.kind}"
    if wait.line and f"line {wait.line}" not in wait.where:
        where += f", line {wait.line}"
    return "\n".join([where, *textwrap.wrap(wait.where, 34, max_lines=2, placeholder=" ...")])
