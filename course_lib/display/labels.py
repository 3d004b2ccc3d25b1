"""Many short labels drawn as one shape per color.

matplotlib takes half a millisecond per text object, and a timeline has hundreds. Here letters
become outlines, and all labels of one color one shape.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath

POINTS = 72
_SIZES_PT = (8.0, 6.5)
_AIR_PT = 3.0  # left free in a box, both sides together


@dataclass(frozen=True, kw_only=True)
class Label:
    """Text for the middle of a box: the first of `texts` that fits is printed, or none."""

    texts: tuple[str, ...]
    x: float
    y: float
    width: float
    height: float
    colour: str


def stamp(axes: Axes, labels: Iterable[Label]) -> None:
    """Draw the labels that fit into their boxes; x, y, width and height in data coordinates."""
    figure = cast(Figure, axes.get_figure(root=True))
    box = axes.get_position()
    size = np.array(figure.get_size_inches()) * POINTS
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    per_unit = size * (box.width, box.height) / (right - left, top - bottom)
    corner = size * (box.x0, box.y0)
    strokes: dict[str, list[Path]] = {}
    for label in labels:
        width, height = np.abs(per_unit * (label.width, label.height))
        outline = _fitting(label.texts, width - _AIR_PT, height)
        if outline is not None:
            middle = corner + per_unit * (label.x - left, label.y - bottom)
            moved = Path((outline.vertices + middle) / POINTS, outline.codes)
            strokes.setdefault(label.colour, []).append(moved)
    for colour, paths in strokes.items():
        whole = Path.make_compound_path(*paths)
        figure.add_artist(
            PathPatch(whole, facecolor=colour, linewidth=0, transform=figure.dpi_scale_trans)
        )


def _fitting(texts: Iterable[str], width_pt: float, height_pt: float) -> Path | None:
    """Return the outline of the first text that fits, in the largest size that fits."""
    for text in texts:
        for size in _SIZES_PT:
            if size > height_pt or width_pt < 0.3 * size * len(text):
                continue
            outline, taken = _outline(text, size)
            if taken <= width_pt:
                return outline
    return None


@lru_cache(maxsize=1024)
def _outline(text: str, size_pt: float) -> tuple[Path, float]:
    """Return a text as an outline around the origin, and its width; both in points."""
    path = TextPath((0, 0), text, size=size_pt, usetex=False)
    if not len(path.vertices):
        return path, 0.0
    left, right = path.vertices[:, 0].min(), path.vertices[:, 0].max()
    middle = np.array([(left + right) / 2, 0.36 * size_pt])
    return Path(path.vertices - middle, path.codes), right - left
