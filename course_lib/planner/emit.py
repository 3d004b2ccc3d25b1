"""Write what it takes to run a plan: a note, and for each program its arguments and batch script.

    plan.md             the plan, its prediction, and which program trains it
    PROGRAM.args        the program's arguments, one option a line
    PROGRAM.sbatch      a batch script with them, from `cluster/*.sbatch`

Programs: see `launches`. Notebook 12_planner.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.core.files import write_result
from course_lib.core.units import format_bytes, format_seconds
from course_lib.cost.hardware import LAPTOP
from course_lib.jobs.job import Job
from course_lib.jobs.profile import Profile
from course_lib.jobs.render import render
from course_lib.planner.launches import PROGRAMS, ProgramLaunch
from course_lib.planner.notes import plan_notes
from course_lib.planner.plan import Plan
from course_lib.planner.prediction import AT_PEAK, CAUSES, PredictedStep

TIME_LIMIT = "1:00:00"


def emit(step: PredictedStep, folder: Path) -> list[Path]:
    """Write the files of a plan into a folder; return their paths.

    Raises: CourseError for a plan that no program trains, and a folder that has such files
    """
    launches, refusals = find_launches(step)
    if not launches:
        reasons = " ".join(refusals.values())
        raise CourseError(f"emit: need a plan that a program trains; got {step.plan}. {reasons}")
    contents = {"plan.md": "\n".join(_note(step, folder, launches, refusals))}
    for launch in launches:
        contents[f"{launch.name}.args"] = "\n".join(_lines(launch)) + "\n"
        contents[f"{launch.name}.sbatch"] = batch_script(step, launch, folder)
    if old := sorted(name for name in contents if (folder / name).exists()):
        raise CourseError(
            f"{folder}: need a folder without the files of a plan; got one with {', '.join(old)}. "
            "Try another folder, or remove them."
        )
    for name, content in contents.items():
        write_result(folder / name, content)
    return [folder / name for name in contents]


def find_launches(step: PredictedStep) -> tuple[list[ProgramLaunch], dict[str, str]]:
    """Return how programs train a plan, and by name the sentences of those that cannot."""
    launches, refusals = [], {}
    for name, launch in PROGRAMS.items():
        try:
            launches.append(launch(step))
        except CourseError as error:
            refusals[name] = str(error)
    return launches, refusals


def batch_script(step: PredictedStep, launch: ProgramLaunch, folder: Path) -> str:
    """Return the batch script that trains a plan on its cluster; the site's lines are left out.

    Raises: CourseError for a plan whose ranks do not fill nodes
    """
    cluster, (nodes, ranks) = step.cluster, _nodes(step)
    gpus = 0 if cluster.device is LAPTOP else ranks
    job = Job(
        name=launch.name,
        program=launch.program,
        arguments=launch.arguments,
        nodes=nodes,
        gpus_per_node=gpus,
        ranks_per_node=ranks,
        time_limit=TIME_LIMIT,
        run_folder=str(folder.resolve()),
    )
    profile = Profile(
        name=re.sub(r"\W", "-", cluster.name),
        gpus_per_node=gpus,
        max_nodes=nodes,
        time_limit=TIME_LIMIT,
        environment=launch.environment,
    )
    return _with_head(render(job, profile), step, launch, folder)


def _with_head(script: str, step: PredictedStep, launch: ProgramLaunch, folder: Path) -> str:
    """Return the script with a head of its own: that of `cluster/*.sbatch` tells how to use it."""
    path = shlex.quote(str(folder.resolve() / f"{launch.name}.sbatch"))
    first, *lines = script.split("\n")
    start = next(
        number for number, line in enumerate(lines) if not line.startswith("# ") and line != "#"
    )
    head = [
        f"# {launch.title} trains {step.model.name}: {step.plan}.",
        *("#", f"#   sbatch {path}", "#"),
        f"# Submit it in {launch.where}.",
        *(f"# {sentence}" for sentence in launch.comments),
    ]
    return "\n".join([first, *head, *lines[start:]])


def _nodes(step: PredictedStep) -> tuple[int, int]:
    """Return the nodes, and the ranks on each. Raises: CourseError if the last one is not full"""
    num_ranks, most = step.plan.world_size, step.cluster.gpus_per_node
    if num_ranks <= most:
        return 1, num_ranks
    if num_ranks % most:
        raise CourseError(
            f"emit: need ranks that fill nodes of {most} GPUs; got {num_ranks}. "
            f"Try a plan of {num_ranks // most * most} ranks."
        )
    return num_ranks // most, most


def _lines(launch: ProgramLaunch) -> Iterator[str]:
    """Yield the arguments, an option with its values on each line."""
    starts = [n for n, word in enumerate(launch.arguments) if word.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(launch.arguments)], strict=True):
        yield shlex.join(launch.arguments[start:end])


def _note(
    step: PredictedStep,
    folder: Path,
    launches: Sequence[ProgramLaunch],
    refusals: Mapping[str, str],
) -> Iterator[str]:
    """Yield the lines of plan.md."""
    cluster, (nodes, ranks) = step.cluster, _nodes(step)
    yield f"# {step.model.name} on {step.plan.world_size} {cluster.device.name} ({cluster.name})\n"
    yield f"{step.plan}; {_way(step.plan)}; {step.plan.seq} tokens a sequence.\n"
    yield (
        f"Predicted: {format_seconds(step.step_s)} per step, "
        f"{step.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {100 * step.mfu:.0f} %, "
        f"{format_bytes(step.memory_bytes)} on the fullest rank. {step.bound}\n"
    )
    yield "| seconds | of a step |\n|---|---|"
    parts = step.shown_seconds
    yield from (f"| {seconds:.3f} | {CAUSES[name]} |" for name, seconds in parts.items())
    yield f"| {step.step_s:.3f} | a step |"
    yield f"| {step.peak_s:.3f} | {AT_PEAK} |"
    yield from (f"\n{sentence}" for sentence in plan_notes(step))
    yield "\nThe batch scripts lack what your site wants: partition, account, cores, modules."
    for launch in launches:
        yield f"\n## {launch.title}\n"
        script = folder.resolve() / f"{launch.name}.sbatch"
        yield f"In {launch.where}: `sbatch {shlex.quote(str(script))}`"
        if nodes == 1:
            yield f"\nWithout Slurm: `{shlex.join(_started(launch, ranks))}`"
        yield from (f"\n{sentence}" for sentence in (*launch.differs, *launch.comments))
        if launch.differs:
            yield "\nSo the predicted memory and time do not hold for it."
    if refusals:
        yield "\n## Programs that do not train this plan\n"
        yield from (f"- {sentence}" for sentence in refusals.values())
    yield ""


def _way(plan: Plan) -> str:
    return f"schedule {plan.schedule}" if plan.parallelism.pp > 1 else plan.pipeline_words


def _started(launch: ProgramLaunch, ranks: int) -> tuple[str, ...]:
    """Return the command that starts a program on this machine."""
    module = () if launch.program.endswith(".py") else ("-m",)
    torchrun = ("torchrun", "--standalone", "--nproc-per-node", str(ranks), *module)
    return (*torchrun, launch.program, *launch.arguments)
