"""The cost of a study: finished runs, remaining runs, their price, and what does not fit."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.table import Table

from course_lib.core.errors import CourseError
from course_lib.core.units import format_bytes, format_seconds
from course_lib.jobs.profile import Profile
from course_lib.jobs.slurm_time import write_time
from course_lib.ranks.machine import describe_machine
from course_lib.scaling_study.aggregate import Experiment, find_baseline, read_experiment
from course_lib.scaling_study.machines import Machine, machine_of_profile, with_link
from course_lib.scaling_study.measure_link import read_links
from course_lib.scaling_study.plan import Study
from course_lib.scaling_study.prediction import PredictedRun, fit_machine, hours, predict
from course_lib.scaling_study.report import name_of, new_table
from course_lib.scaling_study.results import set_of
from course_lib.scaling_study.study_run import StudyRun

HEADERS = ("strategy", "ranks", "step", "run", "peak per rank", "")


@dataclass(frozen=True)
class Costing:
    """A study, the machine it runs on, and the records in its folder."""

    study: Study
    profile: Profile
    folder: Path
    machine: Machine
    done: dict[StudyRun, Experiment]

    @cached_property
    def predictions(self) -> list[PredictedRun]:
        """The prediction of every run; a finished run of one rank supplies the speed."""
        return [predict(run, self._machine(run)) for run in self.study.runs]

    @property
    def left(self) -> list[PredictedRun]:
        """The predictions of runs that remain and fit."""
        return [p for p in self.predictions if p.run not in self.done and not p.missing_bytes]

    @property
    def too_large(self) -> list[PredictedRun]:
        """The runs that do not fit, so that they are not started."""
        return [p for p in self.predictions if p.run not in self.done and p.missing_bytes]

    def tables(self) -> list[Table]:
        """A table for each model and batch, with a line for each run."""
        found: dict[str, Table] = {}
        for one in self.predictions:
            name = set_of(one.run)
            table = found.setdefault(name, new_table(name, HEADERS))
            table.add_row(
                name_of(one.run),
                str(one.run.ranks),
                format_seconds(one.step_s),
                write_time(one.run_s),
                format_bytes(one.peak_bytes),
                self._state(one),
            )
        return list(found.values())

    def sentences(self) -> list[str]:
        """Sentences on finished and remaining runs, their cost, and what does not fit."""
        wall, of_ranks = hours(self.left)
        unit = "GPU" if self.machine.has_gpus else "rank"
        said = [
            f"{len(self.done)} of {len(self.study.runs)} runs are done, {len(self.left)} to run: "
            f"{write_time(wall * 3600)} one after the other, {_hours(of_ranks)} {unit}-hours, "
            f"on {self.profile.name} ({self.machine.words}). Records: {self.folder}"
        ]
        if self.machine.has_gpus and not self.profile.gpu_type:
            said.append(f"The profile names no gpu_type: counted as {self.machine.words}.")
        if self.too_large:
            said.append(f"{len(self.too_large)} runs do not fit and are left out:")
        return said + [f"  {one.run.name}: {_missing(one)}" for one in self.too_large]

    def _machine(self, run: StudyRun) -> Machine:
        baseline = find_baseline(run, self.done.values())
        machine = with_link(self.machine, read_links(self.folder), run.ranks)
        return fit_machine(machine, baseline) if baseline else machine

    def _state(self, one: PredictedRun) -> str:
        if one.run in self.done:
            return "done"
        return "does not fit" if one.missing_bytes else "to run"


def cost_study(study: Study, profile: Profile, folder: Path, *, resume: bool = True) -> Costing:
    """Find the finished runs and price the rest; without `resume`, no run counts as finished."""
    machine = machine_of_profile(profile, describe_machine())
    done = find_done(study.runs, folder) if resume else {}
    return Costing(study, profile, folder, machine, done)


def find_done(runs: Iterable[StudyRun], folder: Path) -> dict[StudyRun, Experiment]:
    """Return the experiments of these runs that have complete records in the study's folder.

    Whole is what has all ranks with all their steps; all else is started again from its first.
    """
    done = {}
    for run in runs:
        try:
            experiment = read_experiment(folder / run.name)
        except CourseError:
            continue
        if experiment.run == run:
            done[run] = experiment
    return done


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


def _missing(one: PredictedRun) -> str:
    there = one.machine.rank_bytes(one.run.ranks)
    return (
        f"need {format_bytes(one.peak_bytes)} per rank; there are {format_bytes(there)}, "
        f"{format_bytes(one.missing_bytes)} too few"
    )
