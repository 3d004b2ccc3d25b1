"""Pictures of the clinic. Each function returns a figure and its alt text."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from course_lib.display.colours import QUIET, SERIES
from course_lib.display.page import page, plain


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the mean distance of two loss curves with the same steps."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


def curves_picture(
    name: str, right: Sequence[float], case: Sequence[float], others: Sequence[Sequence[float]]
) -> tuple[Figure, str]:
    """Draw a case's loss, the right run's, and those of right runs with other seeds."""
    least = min(distance(right, other) for other in others)
    title = (
        f"{name}: {distance(right, case):.2g} from the right run on average; "
        f"right runs with other seeds: at least {least:.2g}"
    )
    looks: dict[str, dict[str, Any]] = {
        "right runs, other seeds": {"color": QUIET, "linewidth": 1.0},
        "one process": {"color": SERIES[0], "linewidth": 1.6},
        "the case": {"color": SERIES[1], "linewidth": 1.6, "linestyle": "--"},
    }
    legend = [Line2D([], [], label=label, **look) for label, look in looks.items()]
    figure, (above, below) = page(title, [1.7, 1.2], legend=legend)
    plain(above, y_label="loss", grid="both")
    plain(below, x_label="step", y_label="difference\nfrom one process", grid="both")
    for look, curves in zip(looks.values(), (others, [right], [case]), strict=True):
        for curve in curves:
            steps = range(len(curve))
            above.plot(steps, curve, **look)
            below.plot(steps, [a - b for a, b in zip(curve, right, strict=True)], **look)
    return figure, title
