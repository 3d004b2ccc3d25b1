"""The commands of `course` that submit jobs and collect their records."""

import errno
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from course_lib.core.errors import CourseError
from course_lib.jobs.job import Job, find_program, name_of
from course_lib.jobs.profile import Profile
from course_lib.jobs.scheduler import DONE, JobState, SchedulerError, in_words
from course_lib.jobs.site_commands import add_site_commands, pick_profile, plain_table
from course_lib.jobs.slurm_time import write_time
from course_lib.jobs.submissions import (
    FOLDER,
    Submission,
    at_home,
    find_home,
    find_submission,
    read_submissions,
    refresh,
    scheduler_of,
)

MOST_FAILED = 5  # of which `course status` says why

Id = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="A submission, such as 06_ddp-1, or its array task 3, 06_ddp-1_3."
    ),
]


Program = Annotated[
    str,
    typer.Argument(metavar="PROGRAM", help="An exercise (06 or 06_ddp), a path, or -m MODULE."),
]
Gpus = Annotated[int | None, typer.Option(help="GPUs per node. Default: those of the profile.")]
RanksPerNode = Annotated[
    int | None,
    typer.Option(
        "--ranks-per-node", help="Ranks per node. Default: one per GPU, or 2 without GPUs."
    ),
]
ArrayTasks = Annotated[
    str, typer.Option(help="Array tasks: 0-7, or 0-7%2 for two at the same time.")
]
SubmitProfile = Annotated[
    str | None,
    typer.Option("--profile", help="Where to run: one of `course cluster profiles`."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check the job and show its script; do not submit it.")
]


def submit(
    context: typer.Context,
    program: Program,
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 1,
    gpus: Gpus = None,
    ranks: RanksPerNode = None,
    time_limit: Annotated[str, typer.Option("--time", help="The job's time limit.")] = "0:30:00",
    array: ArrayTasks = "",
    script: Annotated[
        str | None, typer.Option(help="A batch script: one_node, many_nodes, requeue, or a path.")
    ] = None,
    profile_name: SubmitProfile = None,
    dry_run: DryRun = False,
) -> None:
    """Check a job and submit it. Arguments after -- are passed to its program.

    \b
    course submit 06 --nodes 2 --dry-run
    course submit cluster/exercises/06_ddp.py --turns 3 --gpus 2 --time 0:10:00
    course submit -m course_lib.train -- --strategy fsdp --out runs/fsdp
    """
    words = (find_program(program, *context.args[:1]), *context.args)
    job = Job(
        name=name_of(words),
        program=words[0],
        arguments=words[1:],
        script=script,
        nodes=nodes,
        gpus_per_node=gpus,
        ranks_per_node=ranks,
        time_limit=time_limit,
        array=array,
        run_folder="runs",
    )
    profile = pick_profile(profile_name)
    (_show if dry_run else _submit)(job, profile)


def _show(job: Job, profile: Profile) -> None:
    """Print the script, the limits and the results of the checks."""
    from course_lib.jobs.submit import drafted

    with drafted(job, profile, find_home() / FOLDER) as draft:
        print(draft.script.read_text(encoding="utf-8"))
        print(f"# {draft.limits}")
        for sentence in draft.problems or ["nothing speaks against it"]:
            print(f"# {sentence}")
        raise typer.Exit(1 if draft.problems else 0)


def _submit(job: Job, profile: Profile) -> None:
    """Hand it in, and say what to type next."""
    from course_lib.jobs.submit import submit_job

    taken = submit_job(job, profile, find_home() / FOLDER, say=print)
    where = "to Slurm" if profile.scheduler == "slurm" else "on this machine"
    print(f"{taken.id} is handed in {where}, as job {taken.job_id}.")
    for command, what in (
        (f"course logs -f {taken.id}", "reads along"),
        (f"course status {taken.id}", "says how it is"),
        (f"course collect {taken.id}", f"brings its run records to runs/{taken.id}"),
    ):
        print(f"{command:{len(taken.id) + 17}}{what}")


@at_home()
def status(
    id_text: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="Show each array task of this submission."),
    ] = None,
) -> None:
    """Show all submissions and their states; of the latest that failed, also why."""
    from course_lib.jobs.failures import told

    chosen = [find_submission(id_text)[0]] if id_text else read_submissions()
    table = plain_table("id", "job", "profile", "ran", "restarts", "state")
    silent: dict[str, str] = {}
    failed: list[str] = []
    for one in chosen:
        if one.scheduler not in silent:
            try:
                one = refresh(one)
            except SchedulerError as problem:  # then what was seen last has to do
                silent[one.scheduler] = str(problem)
        for row in _rows(one, each=bool(id_text)):
            table.add_row(*row)
        if (words := told(one.seen)) != in_words(one.seen):
            failed.append(f"{one.id}: {words}")
    if chosen:
        Console().print(table)
    else:
        print(f"Nothing was handed in from {Path.cwd()}. Try course submit --help.")
    for sentence in failed[-MOST_FAILED:]:
        print(sentence)
    for sentence in silent.values():
        print(f"As it was seen last. {sentence}")


def _rows(one: Submission, *, each: bool) -> list[tuple[str, ...]]:
    """Return a table row for the submission, or one for each array task."""
    parts = [(s,) for s in one.seen] if each and one.job.array else [one.seen]
    rows: list[tuple[str, ...]] = []
    for part in parts:
        array_task = f"_{part[0].array_task}" if each and one.job.array else ""
        ran = write_time(max((state.seconds for state in part), default=0))
        restarts = sum(state.restarts for state in part)
        ids = (one.id + array_task, (one.job_id or "?") + array_task)
        rows.append((*ids, one.profile, ran, str(restarts or ""), in_words(part)))
    return rows


@at_home()
def logs(
    id_text: Id,
    until_over: Annotated[
        bool, typer.Option("-f", "--follow", help="Follow the log until the job has ended.")
    ] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="Also show the lines of torchrun and its store.")
    ] = False,
) -> None:
    """Show the log of a submission, or of one array task; of a failed one, first what failed."""
    from course_lib.jobs.failures import told
    from course_lib.jobs.logs import follow

    def say(words: str) -> None:
        print(f"{id_text}: {words}", file=sys.stderr, flush=True)

    one, array_task = find_submission(id_text)
    try:
        for text in follow(one, array_task, until_over=until_over, whole=whole, say=say):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        print(f"\n{id_text} goes on; course cancel {id_text} would end it.", file=sys.stderr)
        raise typer.Exit(130) from None
    now = find_submission(one.id)[0]
    say(told(_of(now, array_task)))


@at_home()
def cancel(id_text: Id) -> None:
    """Cancel a submission, or one of its array tasks, whether it is waiting or running."""
    one, array_task = find_submission(id_text)
    one = refresh(one)
    if one.job_id is None or all(state.is_final for state in _of(one, array_task)):
        print(f"{id_text} has ended: {in_words(_of(one, array_task))}.")
        return
    job_id = one.job_id if array_task is None else f"{one.job_id}_{array_task}"
    scheduler_of(one.scheduler).cancel(job_id)
    print(f"{id_text} is cancelled. What it has said: course logs {id_text}")


@at_home()
def collect(
    id_text: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="A submission. Default: all submissions."),
    ] = None,
) -> None:
    """Collect run records in runs/ID. Of each array task, the attempt that counts is collected."""
    failed = False
    for one in [find_submission(id_text)[0]] if id_text else read_submissions():
        try:
            for sentence in _collected(refresh(one)):
                print(sentence)
        except CourseError as problem:
            print(f"{one.id}: {problem}", file=sys.stderr)
            failed = True
    raise typer.Exit(int(failed))


def _collected(one: Submission) -> Iterator[str]:
    """Collect the records of one submission; return a sentence for each folder."""
    from course_lib.jobs.collect import collect as collect_records

    found = collect_records(one)
    for attempt in found:
        count = f"{len(attempt.ranks)} of {attempt.world_size} ranks"
        again = f", after {attempt.restarts} restarts" if attempt.restarts else ""
        yield f"{one.id}: records of {count} in {attempt.folder}{again}"
    collected = {attempt.array_task for attempt in found}
    without: dict[str, list[JobState]] = {}
    for state in one.seen:
        if state.array_task not in collected:
            without.setdefault(_why_none(one, state), []).append(state)
    for why, states in without.items():
        yield f"{one.id}: {in_words(states)}: {why}"


def _why_none(one: Submission, state: JobState) -> str:
    """Return why there are no records of this array task."""
    from course_lib.jobs.failures import WITH_CAUSE, why_failed

    if not state.is_final:
        return "no records yet. Collect again when it has ended."
    if state.state == DONE:
        return "left no records. Its program needs launch(..., record_to=...)."
    why = why_failed(state) if state.state in WITH_CAUSE else ""
    return f"left no records; {why or f'course logs {one.id} may say why'}."


def _of(one: Submission, array_task: int | None) -> list[JobState]:
    return [state for state in one.seen if array_task in (None, state.array_task)]


def add_commands(app: typer.Typer) -> None:
    """Add all commands of this file to the command line."""
    takes_more = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(context_settings=takes_more)(needs_disk_space(submit))
    for command in (status, logs, cancel, collect):
        app.command()(needs_disk_space(command))
    add_site_commands(app)


def needs_disk_space(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command so that a full disk is reported in one sentence."""

    @wraps(command)
    def run(*args: object, **options: object) -> None:
        try:
            command(*args, **options)
        except OSError as problem:
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise CourseError(
                f"course {command.__name__}: need room for {problem.filename or 'a file'}; got "
                f"{problem.strerror}. Delete something and try again: nothing is lost."
            ) from problem

    return run
