"""Picture of a computational graph with the values of forward and the gradients of backward.

A node is a box: its name (white on dark for parameters), its value on the color of forward, its
gradient on the color of backward. Nodes that have just changed have a heavy outline.
Notebook 02_accumulation.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from course_lib.accumulation.worked_graph import GRAPH, Moment
from course_lib.accumulation.worked_graph import PARAMS as PARAM_NAMES
from course_lib.core.errors import CourseError
from course_lib.display.colours import BACKWARD, BLACK, FORWARD, PARAMS, QUIET, WHITE, Ink
from course_lib.display.page import SMALL_PT, Margins, page, swatches

# (column, row) of each node in the drawing; both may be fractions
POSITIONS = {
    "x1": (0, 0.0),
    "w1": (0, 1.0),
    "x2": (0, 2.0),
    "w2": (0, 3.0),
    "x1 * w1": (1, 0.5),
    "x2 * w2": (1, 2.5),
    "b": (1, 3.6),
    "y_pred": (2, 1.5),
    "target": (2, 3.0),
    "error": (3, 1.5),
    "loss": (4, 1.5),
}
_WIDTH, _HEIGHT, _STRIP = 1.14, 0.63, 0.21  # inches
_COLUMN, _ROW = 1.56, 0.78
_LABEL = Ink(name="name", fill=WHITE, line=QUIET)


def graph(moment: Moment, title: str) -> Figure:
    """Draw the worked graph in one of its states.

    Raises: CourseError for a node that the graph does not have
    """
    unknown = [name for name in {**moment.values, **moment.grads} if name not in POSITIONS]
    if unknown:
        raise CourseError(f"graph: need nodes out of {', '.join(POSITIONS)}; got {unknown}.")
    inks = [PARAMS, FORWARD, BACKWARD]
    legend = swatches(inks, ["parameter", "value", "gradient"])
    margins = Margins(left=0.15, right=0.15, top=0.12, bottom=0.15)
    rows = max(row for _, row in POSITIONS.values())
    figure, (axes,) = page(title, [rows * _ROW + _HEIGHT], legend=legend, margins=margins)
    axes.set_xlim(-0.06, 8.0 - 0.36)
    axes.set_ylim(rows * _ROW + _HEIGHT + 0.03, -0.03)
    axes.set_axis_off()
    for name, sources in GRAPH.items():
        for source in sources:
            _arrow(axes, source, name)
    for name in POSITIONS:
        _node(axes, name, moment)
    return figure


def graph_words(moment: Moment) -> str:
    """Describe the state in words: its event, and the numbers of the parameters."""
    parts = []
    for name in PARAM_NAMES:
        grad = f" with gradient {_number(moment.grads[name])}" if name in moment.grads else ""
        parts.append(f"{name} {_number(moment.values[name])}{grad}")
    loss = f"; loss {_number(moment.values['loss'])}" if "loss" in moment.values else ""
    return f"{moment.words}: {', '.join(parts)}{loss}"


def _node(axes: Axes, name: str, moment: Moment) -> None:
    x, y = _corner(name)
    _strip(axes, (x, y), name, PARAMS if name in PARAM_NAMES else _LABEL)
    if name in moment.values:
        _strip(axes, (x, y + _STRIP), f"value {_number(moment.values[name])}", FORWARD)
    if name in moment.grads:
        _strip(axes, (x, y + 2 * _STRIP), f"grad {_number(moment.grads[name])}", BACKWARD)
    heavy = name in moment.fresh
    edge, wide = (BLACK, 2.2) if heavy else (QUIET, 0.8)
    box = Rectangle((x, y), _WIDTH, _HEIGHT, facecolor="none", edgecolor=edge, linewidth=wide)
    axes.add_patch(box)


def _strip(axes: Axes, corner: tuple[float, float], words: str, ink: Ink) -> None:
    axes.add_patch(Rectangle(corner, _WIDTH, _STRIP, facecolor=ink.fill, linewidth=0))
    x, y = corner[0] + _WIDTH / 2, corner[1] + _STRIP / 2 + 0.005
    axes.text(x, y, words, ha="center", va="center", fontsize=SMALL_PT, color=ink.text)


def _arrow(axes: Axes, source: str, target: str) -> None:
    """Draw an arrow from the right side of one box to the left side of another."""
    (x1, y1), (x2, y2) = _corner(source), _corner(target)
    ends = (x1 + _WIDTH, y1 + _HEIGHT / 2), (x2, y2 + _HEIGHT / 2)
    arrow = FancyArrowPatch(
        *ends,
        arrowstyle="-|>",
        mutation_scale=9,
        color=QUIET,
        linewidth=1.1,
        shrinkA=0,
        shrinkB=0,
    )
    axes.add_patch(arrow)


def _corner(name: str) -> tuple[float, float]:
    column, row = POSITIONS[name]
    return column * _COLUMN, row * _ROW


def _number(value: float) -> str:
    """Format with four decimals, without trailing zeros: `93.1804`, `-115.836`, `6`."""
    text = f"{value:.4f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"
