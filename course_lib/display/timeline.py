"""Timelines: one row per rank, time from left to right, for events of any origin.

The same function draws a simulated run, a measured one and one of a cluster, and several of them on
one scale of time, so that a prediction can be compared with a measurement.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from course_lib.core.links import Link, TwoLevelLink
from course_lib.core.records import COMMUNICATION_KINDS, KINDS, Event
from course_lib.display.colours import KIND, Ink
from course_lib.display.labels import Label, stamp
from course_lib.display.lanes import Slot, assign_slots, visible
from course_lib.display.page import TEXT_PT, Margins, empty, page, plain, swatches, time_unit
from course_lib.display.trace_button import offer_trace

_MAIN, _MAIN_ABOVE, _BENEATH = (-0.38, 0.38), (-0.42, 0.12), (0.17, 0.42)
_NARROWEST, _EDGED = 0.0012, 0.005  # parts of the width: about 1 and 4 pixels


@dataclass(frozen=True)
class _Box:
    start: float
    end: float
    top: float
    bottom: float
    event: Event


def timeline(
    events: Iterable[Event],
    title: str,
    *,
    link: Link | TwoLevelLink | str | None = None,
    unit: str = "",
) -> Figure:
    """Draw what every rank did: rank 0 on top, time from the left, starting at 0.

    link   printed on the picture: the emulated link on which it was measured
    unit   by default the fitting one of s, ms and us; any other word ("steps") is printed and the
           numbers stay as they are
    """
    return timelines({"": events}, title, link=link, unit=unit)


def timelines(
    runs: Mapping[str, Iterable[Event]],
    title: str,
    *,
    link: Link | TwoLevelLink | str | None = None,
    unit: str = "",
) -> Figure:
    """Draw several runs under one another on one scale of time.

    `runs` are events by name: {"predicted": ..., "measured": ...}; the rest is as in `timeline`.
    """
    listed = {name: list(events) for name, events in runs.items()}
    by_run = {name: visible(events) for name, events in listed.items()}
    everything = [event for events in by_run.values() for event in events]
    ranks = sorted({event.rank for event in everything}) or [0]
    span_s = max((event.end_s for event in everything), default=0.0) or 1.0
    scale, word = time_unit(span_s, unit)
    row_in = 0.44 if len(ranks) <= 4 else 0.36
    margins = Margins(top=0.32 if any(by_run) else 0.1, between=0.38)
    figure, panels = page(
        title,
        [row_in * len(ranks)] * len(by_run),
        note=link_note(link),
        legend=event_legend(everything),
        margins=margins,
    )
    for axes, (name, events) in zip(panels, by_run.items(), strict=True):
        draw_events(axes, name, events, ranks, (span_s * scale, scale))
    for axes in panels[:-1]:
        axes.tick_params(axis="x", labelbottom=False)
    panels[-1].set_xlabel(f"time ({word})", fontsize=TEXT_PT)
    offer_trace(figure, listed, title, unit)
    return figure


def draw_events(
    axes: Axes,
    name: str,
    events: Sequence[Event],
    ranks: Sequence[int],
    time: tuple[float, float],
) -> None:
    """Draw one run: boxes, their labels, the names of the ranks.

    `time` is the width of the axis in its unit, and the factor from seconds to that unit.
    """
    span, scale = time
    plain(axes)
    axes.set_xlim(0, span * 1.005)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0)
    if name:
        axes.set_title(name, loc="left", fontsize=TEXT_PT, fontweight="bold", pad=5)
    boxes = _boxes(events, ranks, scale, span * _NARROWEST)
    for ink in dict.fromkeys(KIND[kind] for kind in ("wait", *KINDS)):
        _draw(axes, ink, [box for box in boxes if KIND[box.event.kind] is ink], span * _EDGED)
    stamp(axes, [_label(box) for box in boxes])
    if not events:
        empty(axes, "nothing was recorded")


def _boxes(
    events: Sequence[Event], ranks: Sequence[int], scale: float, narrowest: float
) -> list[_Box]:
    found = []
    by_rank: dict[int, list[Event]] = {rank: [] for rank in ranks}
    for event in events:
        by_rank[event.rank].append(event)
    for row, rank in enumerate(ranks):
        slots = assign_slots(by_rank[rank])
        split = any(slot.beneath for slot in slots)
        for slot in slots:
            top, bottom = _heights(slot, split)
            start, end = slot.event.start_s * scale, slot.event.end_s * scale
            box = _Box(start, max(end, start + narrowest), row + top, row + bottom, slot.event)
            found.append(box)
    return found


def _heights(slot: Slot, split: bool) -> tuple[float, float]:
    """Return top and bottom of a slot within its row, in parts of a row."""
    top, bottom = _BENEATH if slot.beneath else _MAIN_ABOVE if split else _MAIN
    part = (bottom - top) / slot.count
    return top + part * slot.index, top + part * (slot.index + 1)


def _draw(axes: Axes, ink: Ink, boxes: Sequence[_Box], edged: float) -> None:
    """Draw all boxes of one ink as one shape; narrow ones without edges, which would hide them."""
    for narrow, line_pt in ((False, 0.7), (True, 0.0)):
        sides = [
            (box.start, box.end, box.top, box.bottom)
            for box in boxes
            if (box.end - box.start <= edged) is narrow
        ]
        if not sides:
            continue
        corners = np.array(sides)[:, [[0, 2], [1, 2], [1, 3], [0, 3]]]  # [box, corner, x or y]
        axes.add_artist(
            PathPatch(
                Path.make_compound_path_from_polys(corners),
                facecolor=ink.fill,
                edgecolor=ink.line,
                linewidth=line_pt,
                hatch=ink.hatch or None,
            )
        )


def _label(box: _Box) -> Label:
    """Return the label of a box."""
    return Label(
        texts=_texts(box.event),
        x=(box.start + box.end) / 2,
        y=(box.top + box.bottom) / 2,
        width=box.end - box.start,
        height=box.bottom - box.top,
        colour=KIND[box.event.kind].text,
    )


def _texts(event: Event) -> tuple[str, ...]:
    """Return the label and shorter ones: the call and its peer, the number in F3, the letter.

    A wait has none: the call that is waited for is drawn next to it or on it.
    """
    if event.kind == "wait":
        return ()
    words = [event.label]
    if event.kind in COMMUNICATION_KINDS:
        if event.kind in ("send", "recv") and event.peer is not None:
            way = f"{'to' if event.kind == 'send' else 'from'} {event.peer}"
            words += [f"{event.kind} {way}", way]
        words.append(event.kind)
    elif not event.label:
        words.append(KIND[event.kind].letter)
    elif re.fullmatch(r"[A-Z][0-9.]+", event.label):  # the color stands for the letter
        words += [event.label[1:], event.label[1:].partition(".")[0]]
    return tuple(word for word in words if word)


def event_legend(events: Sequence[Event]) -> list[Artist]:
    """Return the legend of the kinds that occur; communication names its calls."""
    present = [kind for kind in KINDS if any(event.kind == kind for event in events)]
    calls = [kind for kind in present if kind in COMMUNICATION_KINDS]
    names = {KIND[kind]: KIND[kind].name for kind in present}
    if calls:
        shown = ", ".join(calls[:4]) + (", ..." if len(calls) > 4 else "")
        names[KIND[calls[0]]] = f"communication ({shown})"
    return swatches(list(names), list(names.values()))


def link_note(link: Link | TwoLevelLink | str | None) -> str:
    """Return the note on the link on which a picture was measured."""
    return "" if link is None else link if isinstance(link, str) else f"emulated {link}"
