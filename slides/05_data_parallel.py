"""The pictures of the deck 05_data_parallel, drawn by the functions that the notebook calls."""

from dataclasses import dataclass
from pathlib import Path

from course_lib.core import Event
from course_lib.data_parallel import RankSampler
from course_lib.data_parallel import pictures as of_the_notebook
from course_lib.data_parallel.cost import mean_staleness, simulated_staleness
from course_lib.display import RANK, Voices, compare, timelines

SLOWDOWNS = [1, 2, 4, 8]
AXIS = "step time of rank 3, as a multiple of the others'"


@dataclass(frozen=True)
class Svg:
    """A drawn SVG that is saved like a figure."""

    text: str

    def savefig(self, path, **_options):
        """Write it beside where a figure would write its PNG."""
        Path(path).with_suffix(".svg").write_text(self.text, encoding="utf-8")


def dealt():
    """The order of an epoch, and which rank reads which item."""
    readers = [list(RankSampler(12, rank, 4)) for rank in range(4)]
    order = [readers[place % 4][place // 4] for place in range(12)]
    boxes = [_box(place, 0, "#FFFFFF", str(item)) for place, item in enumerate(order)]
    for rank, items in enumerate(readers):
        boxes += [
            _box(rank + 4 * turn, rank + 1.5, RANK[rank], str(item))
            for turn, item in enumerate(items)
        ]
        boxes.append(_text(70, rank + 1.5, f"rank {rank}"))
    boxes.append(_text(70, 0, "order"))
    return Svg(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 340" width="1000" height="340" '
        'font-family="sans-serif" font-size="22" text-anchor="middle">' + "".join(boxes) + "</svg>"
    )


def _box(column, row, colour, words):
    x, y = 160 + 68 * column, 10 + 58 * row
    return (
        f'<rect x="{x}" y="{y:g}" width="60" height="46" fill="{colour}" stroke="#333333"/>'
        f'<text x="{x + 30}" y="{y + 31:g}">{words}</text>'
    )


def _text(x, row, words):
    return f'<text x="{x}" y="{10 + 58 * row + 31:g}">{words}</text>'


def uneven():
    """Three ranks with 8 items, one with b: the weight of an item of the short batch."""
    items = [1, 2, 4, 8]
    curves = {
        "mean of means": Voices(formula=lambda b: 8 / b),
        "weighted by items": Voices(formula=lambda b: 1.0),
    }
    title = "Mean of means: a single item beside batches of 8 counts 8 times as much"
    y_label = "weight, relative to the others' items"
    return compare(items, curves, title, x_label="items in the last batch", y_label=y_label)


def rounds():
    """Two rounds, and the same stretch of time without waiting."""
    steps_s = [0.02, 0.02, 0.08]
    bsp, free = [], []
    for turn in range(2):
        start = turn * max(steps_s)
        for rank, step_s in enumerate(steps_s, start=1):
            bsp.append(_event(rank, "compute", start, start + step_s, f"{turn}"))
            bsp.append(_event(rank, "wait", start + step_s, start + max(steps_s), ""))
    for rank, step_s in enumerate(steps_s, start=1):
        steps = range(round(2 * max(steps_s) / step_s))
        free += [_event(rank, "compute", n * step_s, (n + 1) * step_s, f"{n}") for n in steps]
    return timelines(
        {"BSP": bsp, "asynchronous": free},
        f"Two rounds compute 6 gradients; without waiting there are {len(free)}",
    )


def _event(rank, kind, start_s, end_s, label):
    return Event(rank=rank, kind=kind, start_s=start_s, end_s=end_s, label=label)


def staleness():
    """Formula and simulation of the straggler and of the others."""
    curves = {
        name: Voices(
            formula=lambda k, worker=worker: mean_staleness([1, 1, k], worker),
            simulation=[simulated_staleness([1, 1, k], worker, 600) for k in SLOWDOWNS],
        )
        for name, worker in (("rank 3", 3), ("rank 1", 1))
    }
    old = mean_staleness([1, 1, 8], 3)
    title = f"If rank 3 is 8 times as slow, its gradients are {old:.0f} updates old"
    return compare(SLOWDOWNS, curves, title, x_label=AXIS, y_label="mean staleness (updates)")


def pace():
    """Time of three gradients in rounds and without."""
    figure, _ = of_the_notebook.pace(SLOWDOWNS, step_s=0.02)
    return figure


def links():
    """Bytes sent by the busiest rank in a step."""
    figure, _ = of_the_notebook.busiest_link([2, 4, 6, 8])
    return figure


def gpus():
    """Published: tokens/s per GPU and all-reduce bandwidth on up to 256 GPUs."""
    figure, _ = of_the_notebook.scaling_on_gpus()
    return figure


def pictures():
    """All pictures by the names the deck calls them."""
    drawn = (dealt, uneven, rounds, staleness, pace, links, gpus)
    return {draw.__name__: draw() for draw in drawn}
