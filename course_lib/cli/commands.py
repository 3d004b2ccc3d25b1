"""The `course` command: check a notebook, see how far you are, start an exercise again."""

import importlib.util
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from course_lib.cli.checkpoint_commands import add_checkpoint_commands
from course_lib.cli.debug_commands import add_debug_commands
from course_lib.cli.machine_commands import add_machine_commands
from course_lib.cli.plan_command import add_plan_command, list_models
from course_lib.cli.trace_command import add_trace_command
from course_lib.core import CourseError
from course_lib.core.files import check_result_path
from course_lib.core.plain_text import one_line, printable
from course_lib.jobs.commands import add_commands, plain_table
from course_lib.scaling_study.commands import add_study_commands
from course_lib.workbooks.progress_bar import cell_bar

if TYPE_CHECKING:  # imported where they are used: `course --help` should not wait for Jupyter
    from course_lib.workbooks.check_notebook import GradeReport

STYLES = {"right": "green", "wrong": "red", "missing": "red", "twice": "red", "not judged": "red"}

GROUPS = {
    "The course": ("start", "check", "progress", "reset", "pack", "update", "doctor"),
    "Predictions and recorded runs": ("memory", "plan", "trace", "checkpoint"),
    "A run that is wrong, slow or stuck": ("diff", "hang", "why", "links"),
    "A cluster": (
        *("cluster", "lint-job", "submit", "status", "logs", "cancel", "collect"),
        *("study", "report"),
    ),
    "For instructors": ("assignment", "grade", "term", "new-exercise"),
}


class _Grouped(TyperGroup):
    """The commands under the headings of `GROUPS`, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the headings and the commands."""
        for title, names in GROUPS.items():
            if there := [name for name in names if name in self.commands]:
                with formatter.section(title):
                    rows = [(name, self.commands[name].get_short_help_str(200)) for name in there]
                    formatter.write_dl(rows)


app = typer.Typer(cls=_Grouped, add_completion=False, rich_markup_mode=None)

Timeout = Annotated[
    float, typer.Option("--timeout", min=1, help="Time limit of a cell, in seconds.")
]
JUnit = Annotated[
    Path | None, typer.Option("--junitxml", metavar="PATH", help="Also write a JUnit file.")
]
NotebookName = Annotated[
    str,
    typer.Argument(
        metavar="NB", help="A lesson (04 or 04_collectives), or the path of a notebook."
    ),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of the course are one sentence and exit code 1."""
    try:
        app(args=arguments)
    except CourseError as error:
        print(printable(str(error)), file=sys.stderr)
        sys.exit(1)
    except OSError as problem:
        place = one_line(str(problem.filename or "a file"))
        print(
            f"course: need to read or write {place}; got: {problem.strerror or problem}. Try in a "
            "folder of yours, and with room on the disk.",
            file=sys.stderr,
        )
        sys.exit(1)


@app.callback(invoke_without_command=True)
def course(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Distributed training of language models: check exercises, see progress, look at a machine."""
    if show_version:
        from importlib.metadata import version

        print(version("distributed-training-course"))
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def check(
    notebook: NotebookName,
    timeout_s: Timeout = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
    junitxml: JUnit = None,
) -> None:
    """Check the exercises of a saved notebook. The exit code is 0 if all are right."""
    from course_lib.workbooks.check_notebook import grade, lesson_of
    from course_lib.workbooks.learner_progress import remember
    from course_lib.workbooks.lessons import find_lesson, read_notebook
    from course_lib.workbooks.verdict_files import verdicts_json, write_junit

    check_result_path(junitxml)
    folder = _own_folder()
    is_path = notebook.endswith(".ipynb") or "/" in notebook
    path = Path(notebook) if is_path else find_lesson(notebook, folder).student
    with cell_bar(path.stem) as ended:
        report = grade(path, folder, timeout_s, ended)
    learner = read_notebook(path)
    lesson = lesson_of(learner, path, folder)
    if as_json:
        print(verdicts_json(report, learner, lesson))
    else:
        _show(report, path)
    if os.path.realpath(path) == os.path.realpath(lesson.student):
        try:
            remember(report, lesson)
        except CourseError as error:  # the verdicts count all the same
            print(printable(str(error)), file=sys.stderr)
    if junitxml:
        write_junit([report], junitxml)
    raise typer.Exit(0 if report.all_right else 1)


@app.command()
def progress() -> None:
    """Show how many exercises of each lesson are right, from the last checks. Runs no code."""
    from course_lib.workbooks.learner_progress import progress as progress_of
    from course_lib.workbooks.lessons import all_lessons

    table, total, unread = plain_table("lesson", "", "right", "open"), Counter[str](), 0
    following = ""
    for lesson in all_lessons(_own_folder()):
        try:
            statuses = progress_of(lesson)
        except CourseError as error:
            table.add_row(lesson.name, "", "", Text(f"not judged: {one_line(str(error))}", "red"))
            unread += 1
            continue
        total.update(statuses.values())
        still = [key for key, status in statuses.items() if status != "right"]
        right = len(statuses) - len(still)
        bar = "#" * right + "." * len(still)
        table.add_row(lesson.name, bar, f"{right} of {len(statuses)}", _open(statuses))
        if still and not following:
            following = f" Next: {one_line(still[0])} in {lesson.name}."
    Console().print(table)
    print(f"{total['right']} of {total.total()} exercises are right.{following}")
    raise typer.Exit(1 if unread else 0)


@app.command()
def reset(
    notebook: Annotated[str, typer.Argument(metavar="NB", help="A lesson: 04 or 04_collectives.")],
    exercise: Annotated[
        str, typer.Argument(metavar="EXERCISE", help="The exercise's key, such as collectives-1.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Put the empty cell of an exercise back. A backup of the notebook is kept."""
    from course_lib.workbooks import learner_progress, lessons

    lesson = lessons.find_lesson(notebook, _own_folder())
    learner_progress.stub_of(lesson, exercise)  # an unknown key is told before anything is asked
    if not yes:
        typer.confirm(f"Take what you wrote for {exercise} out of {lesson.student}?", abort=True)
    backup = learner_progress.reset(lesson, exercise)
    print(f"{exercise} is empty again. Your notebook as it was: {backup}")
    print("Is it open in JupyterLab? Then: File, Reload Notebook from Disk.")


@app.command()
def pack(
    notebook: Annotated[
        Path | None,
        typer.Argument(
            metavar="[NOTEBOOK]", help="Default: the assignment's notebook in this folder."
        ),
    ] = None,
    student: Annotated[
        str, typer.Option(help="The student's name. Default: your login name.")
    ] = "",
) -> None:
    """Write the file to hand in, from the saved notebook, and say what is missing."""
    from course_lib.core.plain_text import printable
    from course_lib.workbooks.pack import notebook_here, pack

    path, told = pack(notebook or notebook_here(), student)
    print(f"{path} is what you hand in.")
    for sentence in told:
        print(printable(f"- {sentence}"))


@app.command()
def update() -> None:
    """Get the newest version of the course. What you wrote in notebooks is kept and backed up."""
    from course_lib.workbooks.lessons import find_folder
    from course_lib.workbooks.update import update as update_course

    for sentence in update_course(find_folder()):
        print(sentence)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def memory(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Show how much GPU memory a training run needs, and whether it fits.

    \b
    --model llama-8b      a preset (--model list prints them), or the path of a
                          Hugging Face config.json (docs/models.md says which)
    --gpu h100            laptop rtx2080ti v100 a6000 a100-40 a100-80 h100 h200
                          b200 gb200
    --recipe bf16         fp32 bf16 bf16+fp32-accumulator bf16+fp32-grads
                          pure-bf16
    --batch 1             sequences in a micro-batch
    --micro-batches 1     micro-batches in a step of a rank
    --seq 4096            tokens in a sequence
    --recompute none      none selective full
    --dp 1 --zero 0       ranks of data parallelism, and the ZeRO stage that
                          shards over them; 3 is FSDP
    --tp 1 --pp 1 --cp 1  ranks of tensor, pipeline and context parallelism
    --sequence-parallel   with tp: also split norms and dropout
    --ep 1                ranks that divide the experts, out of dp * cp * tp
    --expert-tp           ranks that split each expert; default: tp
    --unfused             save the scores of attention; --dropout: use dropout
    --step-time-s         measured seconds of a step, for the MFU

    The model runs on dp * tp * pp * cp ranks, one GPU each.

    \b
    course memory --model llama-8b --gpu h100 --dp 8 --zero 3
    course memory --model qwen3-30b-a3b --gpu h100 --dp 16 --zero 3 --ep 8
    """
    from course_lib.memory.calculator import read_setup
    from course_lib.memory.explorer import accounting_table

    if context.args in (["--model", "list"], ["--model=list"]):
        raise typer.Exit(list_models())
    setup = read_setup(context.args)
    if as_json:
        print(json.dumps(setup.accounting(), indent=1))
    else:
        Console().print(accounting_table(setup))
        print(f"course memory {setup.text()}")  # not wrapped: to copy


def _own_folder() -> Path:
    """Return the folder of notebooks, with an update that was cut off finished, and told."""
    from course_lib.workbooks.lessons import find_folder
    from course_lib.workbooks.update import finish_cut_off

    folder = find_folder()
    for sentence in finish_cut_off(folder):
        print(sentence, file=sys.stderr)
    return folder


def _ago(seconds: float) -> str:
    """Format a time that has passed: `just now`, `5 min ago`, `3 days ago`."""
    minutes, days = round(seconds / 60), round(seconds / 86_400)
    if days > 3650:
        return "by whoever handed it out"  # a zip's own time
    return f"{days} days ago" if days > 1 else f"{minutes} min ago" if minutes else "just now"


def _show(report: "GradeReport", path: Path) -> None:
    """Print the verdicts as a table, then further messages."""
    print(f"{one_line(str(path))}, saved {_ago(time.time() - path.stat().st_mtime)}\n")
    table = plain_table("exercise", "verdict", "")
    for verdict in report.verdicts:
        status = Text(verdict.status, style=STYLES.get(verdict.status, ""))
        told = printable(f"{verdict.detail}\n{verdict.note}".strip())
        table.add_row(Text(one_line(verdict.key)), status, Text(told))
    Console().print(table)
    right = sum(verdict.status == "right" for verdict in report.verdicts)
    print(f"\n{right} of {len(report.verdicts)} exercises are right.")
    for note in report.notes:
        print(one_line(note))


def _open(statuses: dict[str, str]) -> Text:
    """Return `toy-2 wrong; toy-3, toy-4 not done`; nothing for a lesson that was not begun."""
    keys: dict[str, list[str]] = {}
    for key, status in statuses.items():
        keys.setdefault(status, []).append(one_line(key))
    if [*keys] == ["not done"]:
        return Text("")
    return Text("; ").join(
        Text(f"{', '.join(of)} {status}", STYLES.get(status, ""))
        for status, of in keys.items()
        if status != "right"
    )


for add in (
    *(add_commands, add_study_commands, add_checkpoint_commands),
    *(add_plan_command, add_trace_command, add_debug_commands, add_machine_commands),
):
    add(app)
if importlib.util.find_spec("course_tools"):  # students' copies of the course are without it
    importlib.import_module("course_tools.commands").add_commands(app)

if __name__ == "__main__":
    main()
