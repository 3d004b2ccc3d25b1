"""The newest run of a cluster exercise, for its lesson's notebook.

Exercises mark what they measure with `span("compute", name)`; `course collect` copies the records
to this machine. For any lesson, `last_run` finds them and `marked_times_s` returns the marked
times; `wire_run` draws those of lesson 04.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from course_lib.core.errors import CourseError
from course_lib.core.records import RunRecord, read_runs
from course_lib.core.units import format_bytes
from course_lib.cost.bandwidth import fit_link
from course_lib.cost.network import ring_all_reduce_s
from course_lib.display.compare import Voices, compare

OUR_RING, BUILT_IN, MESSAGE = "all_reduce, our ring", "all_reduce", "there and back"


def last_run(exercise: str) -> list[RunRecord]:
    """Return the records of the newest collected run of an exercise, such as 04_collectives.

    It is searched for in `runs`, here and in the folders above. If there is none, the list is empty
    and a line says what to type.
    """
    here = Path.cwd()
    homes = [home for top in (here, *here.parents) for home in top.glob(f"runs/{exercise}-*")]
    found = [path for home in homes for path in home.rglob("*.jsonl")]
    if not found:
        told = f"course submit {exercise[:2]}; when it has ended, course collect"
        print(f"No run of {exercise} was collected yet. In a terminal: {told}.")
        return []
    return read_runs(max(found, key=lambda path: path.stat().st_mtime).parent)


def marked_times_s(records: Sequence[RunRecord]) -> dict[str, dict[int, list[float]]]:
    """Return the marked times in seconds by name and size, each that of the slowest rank.

    The first of each, which warms up, is left out.
    """
    marked = [[one for one in record.events if one.kind == "compute"] for record in records]
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for at_once in zip(*marked, strict=False):  # a rank may have stopped early
        slowest_s = max(one.duration_s for one in at_once)
        found[at_once[0].label][at_once[0].num_bytes].append(slowest_s)
    return {name: {n: s[1:] for n, s in by_size.items()} for name, by_size in found.items()}


def wire_run(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw lesson 04's run: both all-reduces and the formula, with that run's alpha and beta.

    Raises: CourseError for a run of one rank, and where times do not grow with the size
    """
    times_s, p = marked_times_s(records), len(records)
    if p < 2 or not times_s.keys() >= {OUR_RING, BUILT_IN, MESSAGE}:
        raise CourseError(
            "wire_run: need the records of cluster/exercises/04_collectives.py on two ranks or "
            f"more; got {p}, with {', '.join(times_s) or 'nothing marked'}. Try course submit 04."
        )
    trips = [(n, both_s / 2) for n, some in times_s[MESSAGE].items() for both_s in some]
    wire = fit_link([n for n, _ in trips], [one_s for _, one_s in trips], name="the wire")
    ours, theirs = (list(times_s[name].values()) for name in (OUR_RING, BUILT_IN))
    sizes = list(times_s[OUR_RING])
    ratio = median(ours[-1]) / ring_all_reduce_s(sizes[-1], p, wire)
    title = f"{format_bytes(sizes[-1])} on {p} ranks: our ring took {ratio:.2g} times its formula"
    ring = Voices(formula=lambda n: ring_all_reduce_s(n, p, wire), measurement=ours)
    curves = {"our ring": ring, "built in": Voices(measurement=theirs)}
    axes: dict[str, Any] = {"x_label": "tensor (bytes)", "y_label": "time (s)"}
    note = f"the line knows only the messages there and back: {wire}"
    return compare(sizes, curves, title, log=True, note=note, **axes), f"{title}; {wire}"
