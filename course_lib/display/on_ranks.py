"""Pictures of what ranks have measured: they say where, and a cluster stands beside the laptop.

On an allocation (COURSE_RANKS) no link is emulated: the dots are the cluster's, over its real one,
and plus signs show what the same cell measured on a laptop of two cores, with emulated links.
Those numbers are in `laptop.json`: the fastest of all runs with COURSE_KEEP=path/of/laptop.json.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from course_lib.core.default_place import default_place
from course_lib.core.files import write_whole
from course_lib.core.links import Link, TwoLevelLink
from course_lib.display.compare import Series, Voices, compare

KEEP = "COURSE_KEEP"  # the file to which the laptop's points are written
LAPTOPS = "laptop (2 cores), fastest"
LinkOrName = Link | TwoLevelLink | str | None
CurvesKept = dict[str, dict[str, list[list[float]]]]  # by picture and curve: x, y


def compare_on_ranks(
    picture: str,
    x: Series,
    curves: Voices | Mapping[str, Voices],
    title: str,
    *,
    note: str = "",
    names: Mapping[str, str] | None = None,
    **how: Any,
) -> Figure:
    """Draw as `compare` does; on a cluster, say so and add the laptop's points.

    picture  a name of its own, by which the laptop's points are kept; the measurement is of ranks
    """
    by_name = {"": curves} if isinstance(curves, Voices) else dict(curves)
    place, drawn = default_place(), by_name
    if all(curve.measurement is None for curve in by_name.values()):
        return compare(x, curves, title, note=note, names=names, **how)
    if place.is_cluster:
        kept = _laptops().get(picture, {})
        drawn = {name: _beside(kept.get(name), curve) for name, curve in by_name.items()}
        names = {**(names or {}), "measurement": place.name, "elsewhere": LAPTOPS}
        note = "; ".join(filter(None, [note, _words(place.name)]))
    elif path := os.environ.get(KEEP):
        _keep(Path(path), picture, x, by_name)
    return compare(x, drawn, title, note=note, names=names, **how)


def measured_over(link: LinkOrName) -> LinkOrName:
    """Return what a timeline of measured events says of its link: on a cluster, that it is real."""
    place = default_place()
    if not place.is_cluster:
        return link
    predicted = f"; predictions are for {link}" if isinstance(link, Link | TwoLevelLink) else ""
    said = f"{link}; " if isinstance(link, str) else ""
    return f"{said}{_words(place.name)}{predicted}"


def _words(place: str) -> str:
    return f"measured on {place}, over its real link"


def _beside(points: list[list[float]] | None, curve: Voices) -> Voices:
    return replace(curve, elsewhere=(points[0], points[1])) if points else curve


@cache
def _laptops() -> CurvesKept:
    kept: CurvesKept = json.loads(
        Path(__file__).with_name("laptop.json").read_text(encoding="utf-8")
    )
    return kept


def _keep(path: Path, picture: str, x: Series, curves: Mapping[str, Voices]) -> None:
    """Write the fastest repetitions of a picture to the file, beside those of other pictures."""
    kept: CurvesKept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = kept.setdefault(picture, {})
    for name, curve in curves.items():
        if curve.measurement is None:
            continue
        at = [float(value) for value in x]
        fastest = [float(f"{np.min(y):.4g}") for y in curve.measurement]
        before = found.get(name, [[], []])
        if before[0] == at:  # other programs only ever slow a run down
            fastest = [min(pair) for pair in zip(fastest, before[1], strict=True)]
        found[name] = [at, fastest]
    lines = [f" {json.dumps(one)}: {json.dumps(kept[one])}" for one in sorted(kept)]
    write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")
