"""Results of a study, read from a folder of run records or from one small file.

The file holds the experiments only, without the records they were made of: results that somebody
else measured, to look at before one has a cluster. It says where and when they were made.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.files import not_one, read_json
from course_lib.core.links import Link
from course_lib.core.plain_values import build
from course_lib.scaling_study.aggregate import (
    Comparison,
    Experiment,
    against,
    find_baseline,
    read_experiments,
)
from course_lib.scaling_study.machines import machine_of_record, with_link
from course_lib.scaling_study.measure_link import links_of, plain_links, read_links
from course_lib.scaling_study.prediction import PredictedRun, fit_machine, predict
from course_lib.scaling_study.study_run import StudyRun

SAMPLES = Path(__file__).parent / "data"  # NAME_study.json
MACHINE = ("system", "cores", "usable_cores", "memory_bytes", "torch", "usable_gpus", "gpus")
RESULTS = "run records in a folder, or results in a file"
NAMES = ("cluster", "laptop")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One experiment, the run of one rank to compare it with, and the cost model's prediction.

    The cost model takes its speed of computing from that run of one rank, where there is one.
    """

    experiment: Experiment
    baseline: Experiment | None
    comparison: Comparison | None
    prediction: PredictedRun


@dataclass(frozen=True, kw_only=True)
class Results:
    """All experiments of a study.

    made       where and when, in a sentence; empty for records of one's own
    links      how fast ranks reached each other there, by their number, where that was measured
    left_out   why a run is not among them, by its folder
    """

    experiments: tuple[Experiment, ...]
    made: str = ""
    links: Mapping[int, Link] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    def judged(self) -> list[Result]:
        """Each experiment with its baseline and its prediction."""
        return [self._judge(one) for one in self.experiments]

    def sets(self) -> dict[str, list[Result]]:
        """The results of one model and one batch together, by a name for them."""
        found: dict[str, list[Result]] = {}
        for result in self.judged():
            found.setdefault(set_of(result.experiment.run), []).append(result)
        return found

    def _judge(self, experiment: Experiment) -> Result:
        baseline = find_baseline(experiment.run, self.experiments)
        machine = machine_of_record(experiment.machine, experiment.run.ranks)
        machine = with_link(machine, self.links, experiment.run.ranks)
        if baseline:
            machine = fit_machine(machine, baseline)
        return Result(
            experiment=experiment,
            baseline=baseline,
            comparison=against(experiment, baseline) if baseline else None,
            prediction=predict(experiment.run, machine),
        )


def set_of(run: StudyRun) -> str:
    """Return the model and the batch: what runs have to share to be compared."""
    accumulated = run.num_micro_batches > 1 and run.pp == 1
    words = f" in {run.num_micro_batches} micro-batches" if accumulated else ""
    words += f", {run.warmup} steps of warm-up" if run.warmup else ""
    return f"{run.spec.name} ({run.global_batch} x {run.seq} tokens{words})"


def read_results(path: str | Path) -> Results:
    """Read the results in a folder of run records, or in a file that `save_results` wrote.

    Raises: CourseError where there are none
    """
    path = Path(path)
    if path.is_file():
        return _read_file(path)
    found, left_out = read_experiments(path)
    if not found:
        reasons = [f"{folder}: {why}" for folder, why in left_out.items()]
        raise CourseError(
            f"report: need the records of a whole run below {path}; got none. "
            + (
                reasons[0]
                if reasons
                else "Has one ended? Try course status, or course study run laptop."
            )
        )
    return Results(experiments=tuple(found), links=read_links(path), left_out=left_out)


def sample_results(study: str = "laptop") -> Results:
    """Return a recorded study: `laptop` or `convergence`."""
    return read_results(SAMPLES / f"{study}_study.json")


def save_results(results: Results, path: str | Path, made: str) -> Path:
    """Write the experiments into one file, with a sentence on where and when they were made."""
    path = Path(path)
    lines = [json.dumps(_plain(one)) for one in results.experiments]
    text = ",\n  ".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    links = json.dumps(plain_links(results.links))
    head = f'"made": {json.dumps(made)},\n "links": {links}'
    path.write_text(f'{{{head},\n "experiments": [\n  {text}\n]}}\n')
    return path


def _plain(experiment: Experiment) -> dict[str, Any]:
    fields = asdict(experiment)
    fields["run"] = experiment.run.plain()
    fields["machine"] = {
        name: experiment.machine[name] for name in MACHINE if name in experiment.machine
    } | {"gpu_links": experiment.machine.get("gpu_links", [])}
    fields["losses"] = [round(loss, 6) for loss in experiment.losses]
    return _rounded(fields)


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    """Round to six digits, which is more than the precision of a measurement."""
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in fields.items()
    }


def _read_file(path: Path) -> Results:
    told = read_json(path, RESULTS)
    if not isinstance(told, dict) or not isinstance(told.get("experiments"), list):
        raise not_one(path, RESULTS, "there are no experiments in it")
    experiments = [
        build(Experiment, one, f"{path}: experiments[{n}]")
        for n, one in enumerate(told["experiments"])
    ]
    return Results(
        experiments=tuple(experiments),
        made=build(str, told.get("made"), f"{path}: made"),
        links=links_of(told.get("links"), f"{path}: links"),
    )


def in_order(results: Sequence[Result]) -> list[Result]:
    """Sort: the run of one rank first, then strategy by strategy, with growing numbers of ranks."""
    labels = list(dict.fromkeys(result.experiment.run.label for result in results))
    labels.sort(key=lambda label: label != "single")

    def place(result: Result) -> tuple[int, int, int, float]:
        run = result.experiment.run
        return labels.index(run.label), run.ranks, run.num_micro_batches, run.bucket_mib

    return sorted(results, key=place)


def own_or_sample(start: Path | None = None) -> tuple[Results, str]:
    """Return results in `runs`, those of the cluster first, else the sample; and a sentence.

    A study that has just begun has no whole run yet: then the next one is looked at.
    """
    here = (start or Path.cwd()).resolve()
    for parent in (here, *here.parents):
        for name in NAMES:
            folder = parent / "runs" / f"study-{name}"
            try:
                found = read_results(folder)
            except CourseError:
                continue
            return found, f"your own: {len(found.experiments)} runs in {folder}"
    return sample_results(), "the recorded study: no run of your own in runs/ yet"
