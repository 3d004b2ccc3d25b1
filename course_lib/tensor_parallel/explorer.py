"""Interactive picture: which part of a step computes, over the tensor-parallel degree.

Everything is a formula (`live.py`), so a slider responds at once. Notebook 07_tensor_parallel.
"""

from matplotlib.figure import Figure

from course_lib.display.compare import Voices, compare
from course_lib.display.explore import Explore, explore
from course_lib.tensor_parallel.live import DEGREE, computing_curves


def degree_explorer() -> Explore:
    """Return a picture with sliders for model, tokens per sequence, and adapters per node."""
    return explore(by_degree, DEGREE.finding, **DEGREE.choices)


def by_degree(model: str, seq: int, adapters: int) -> Figure:
    """Draw the part of a step that computes, for one sequence and for one per rank."""
    curves = computing_curves(model, seq, adapters)
    drawing = DEGREE.compute(model=model, seq=seq, adapters=adapters)
    return compare(
        curves.x,
        {name: Voices(simulation=ys) for name, ys in curves.ys.items()},
        drawing.finding,
        x_label=curves.x_label,
        y_label=curves.y_label,
        log_x=True,
        names={"simulation": "formula"},
        note=drawing.note,
    )
