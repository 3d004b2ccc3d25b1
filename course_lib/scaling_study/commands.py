"""`course study plan`, `course study run` and `course report`: the scaling study's command line."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from course_lib.core.files import check_result_path
from course_lib.core.plain_text import printable

if TYPE_CHECKING:  # imported where it is used: `course --help` should not wait for PyTorch
    from course_lib.scaling_study.costing import Costing

study_app = typer.Typer(rich_markup_mode=None, help="Plan and run the scaling study.")

Name = Annotated[str, typer.Argument(metavar="STUDY", help="laptop, cluster or convergence.")]
Models = Annotated[
    list[str] | None, typer.Option("--model", help="Run only this model; repeatable.")
]
Strategies = Annotated[
    list[str] | None, typer.Option("--strategy", help="Run only this strategy; repeatable.")
]
StudyRanks = Annotated[
    list[int] | None, typer.Option("--ranks", help="Run only this number of ranks; repeatable.")
]
ProfileName = Annotated[
    str | None,
    typer.Option("--profile", help="Where it runs: laptop, slurm, or the path of a profile."),
]
StudyOut = Annotated[
    Path | None, typer.Option("--out", help="The study's folder. Default: runs/study-STUDY.")
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="PATH", help="Write a page of tables and pictures.")
]


@study_app.command()
def plan(
    name: Name = "laptop",
    models: Models = None,
    strategies: Strategies = None,
    ranks: StudyRanks = None,
    profile: ProfileName = None,
    out: StudyOut = None,
) -> None:
    """Show what a study runs, what is done, and what the rest will cost. Starts nothing."""
    costing = _costing(name, models, strategies, ranks, profile, out)
    for table in costing.tables():
        Console().print(table, "")
    for line in costing.sentences():
        print(line)


@study_app.command()
def run(
    name: Name = "laptop",
    models: Models = None,
    strategies: Strategies = None,
    ranks: StudyRanks = None,
    profile: ProfileName = None,
    out: StudyOut = None,
    resume: Annotated[
        bool, typer.Option(help="Skip runs with a complete record; --no-resume: run all again.")
    ] = True,
) -> None:
    """Run the part of a study that is not done: one run after the other here, or as job arrays."""
    from course_lib.scaling_study.run_local import run_all
    from course_lib.scaling_study.submit import submit_all

    costing = _costing(name, models, strategies, ranks, profile, out, resume)
    for line in costing.sentences():
        print(line)
    start = run_all if costing.profile.scheduler == "local" else submit_all
    raise typer.Exit(start(costing))


def add_study_commands(app: typer.Typer) -> None:
    """Add the `study` and `report` commands to an app."""
    app.add_typer(study_app, name="study")
    app.command()(report)


def report(
    runs: Annotated[
        Path, typer.Argument(metavar="RUNS", help="A folder of run records, or a file of results.")
    ],
    page: Html = None,
) -> None:
    """Show the results of a study as tables; with --html, also as pictures."""
    from course_lib.scaling_study.report import notes, tables
    from course_lib.scaling_study.results import read_results

    check_result_path(page)
    results = read_results(runs)
    console = Console()
    for table in tables(results):
        console.print(table, "")
    for note in notes(results):
        console.print(Text(printable(note)))
    if page:
        from course_lib.scaling_study.html_report import write_page

        print(f"Tables and pictures: {write_page(results, page)}")


def _costing(
    name: str,
    models: list[str] | None,
    strategies: list[str] | None,
    ranks: list[int] | None,
    profile: str | None,
    out: Path | None,
    resume: bool = True,
) -> "Costing":
    from course_lib.jobs.site_commands import pick_profile
    from course_lib.scaling_study.costing import cost_study
    from course_lib.scaling_study.plan import find_study

    study = find_study(name).only(models or (), strategies or (), ranks or ())
    place = pick_profile(profile)
    return cost_study(study, place, out or Path("runs") / f"study-{name}", resume=resume)
