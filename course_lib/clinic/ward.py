"""Run a case of the clinic: as it was brought in, with a function in the fault's place, or right.

The right run is that of one process with the same model, data and settings. Both record what they
compute, so that `compare_runs` finds where they differ first. Notebook 17_clinic.
"""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from course_lib.clinic.cases import CASES, USUAL, FaultyRun, replaced
from course_lib.core.errors import CourseError
from course_lib.core.presets import MODELS
from course_lib.debugging import RunComparison, compare_runs
from course_lib.ranks import Ranks
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import train

SPLITTING = ("strategy", "tp", "pp", "cp", "ep", "sequence_parallel", "micro_batch", "save_every")
Losses = list[float]


def find_case(name: str) -> FaultyRun:
    """Return a case by its name. Raises: CourseError that names all"""
    if name not in CASES:
        raise CourseError(f"find_case: need one of {', '.join(CASES)}; got {name!r}.")
    return CASES[name]


def run_case(
    case: FaultyRun,
    folder: Path | None = None,
    *,
    function: Callable[..., Any] | None = None,
    seed: int = 0,
    steps: int | None = None,
) -> Losses:
    """Train a case on its ranks; return the loss of each step, counted from 0.

    folder    for the recorded values; None: nothing is recorded
    function  what stands in the fault's place; None: the fault
    steps     None: those of the case; a run that resumes does so in the middle
    """
    there = {**case.circumstances, case.place: function or case.faulty}
    settings, losses = _settings(case, seed, steps), Losses()
    here = Ranks(case.ranks, cluster="laptop")
    with tempfile.TemporaryDirectory() as out, here as ranks:
        if every := settings.get("save_every"):  # the job is preempted in the middle
            settings["out"] = out
            losses += ranks.run(_trained, TrainConfig(**settings | {"steps": every}), there)[0]
            settings["resume"] = True
        config = TrainConfig(**settings, record_values=str(folder) if folder else None)
        return losses + ranks.run(_trained, config, there)[0]


def run_right(
    case: FaultyRun, folder: Path | None = None, *, seed: int = 0, steps: int | None = None
) -> Losses:
    """Train in one process what a case should have trained; return the loss of each step."""
    settings = {k: v for k, v in _settings(case, seed, steps).items() if k not in SPLITTING}
    config = TrainConfig(**settings, record_values=str(folder) if folder else None)
    with Ranks(1, cluster="laptop") as one:
        return one.run(_trained, config, case.circumstances)[0]


def examine(
    case: FaultyRun, function: Callable[..., Any] | None = None, *, steps: int | None = None
) -> RunComparison:
    """Compare a case, or what a function makes of it, with the right run: the first difference."""
    with tempfile.TemporaryDirectory() as folder:
        right, brought_in = Path(folder) / "one process", Path(folder) / "the case"
        run_right(case, right, steps=steps)
        run_case(case, brought_in, function=function, steps=steps)
        return replace(compare_runs(right, brought_in), names=(right.name, brought_in.name))


def _settings(case: FaultyRun, seed: int, steps: int | None) -> dict[str, Any]:
    model = replace(MODELS["tiny"], **case.model)
    settings = {"model": model, "seed": seed, **USUAL, **case.settings}
    if steps is None:
        return settings
    half = {"save_every": steps // 2} if "save_every" in settings else {}
    return settings | {"steps": steps} | half


def _trained(rank: int, config: TrainConfig, functions: Mapping[str, Callable[..., Any]]) -> Losses:
    with ExitStack() as stack:
        for place, function in functions.items():
            stack.enter_context(replaced(place, function))
        return [step["loss"] for step in train(rank, config).steps]
