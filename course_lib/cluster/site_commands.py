"""The commands of `course` about a site: `lint-job`, `cluster init` and `cluster profiles`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from course_lib.core.errors import CourseError
from course_lib.core.files import read_text
from course_lib.core.plain_text import printable
from course_lib.core.units import KIB

if TYPE_CHECKING:  # imported where they are used: `course --help` should stay fast
    from course_lib.cluster.profile import Profile
    from course_lib.cluster.site import Partition

LONGEST = 256 * KIB  # bytes of a batch script
cluster_app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Write and list profiles: where jobs run."
)


def add_site_commands(app: typer.Typer) -> None:
    """Add `lint-job` and the group `cluster` to the command line."""
    app.command("lint-job")(lint_job)
    app.add_typer(cluster_app, name="cluster")


def lint_job(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A batch script.")
    ],
    profile_name: Annotated[
        str, typer.Option("--profile", help="Also check the script against this profile.")
    ] = "",
) -> None:
    """Find mistakes in a batch script before you submit it. The exit code is 1 if there are any."""
    from course_lib.cluster.lint.check import findings_text
    from course_lib.cluster.lint.check import lint_job as lint
    from course_lib.cluster.profile import read_profile

    text = read_text(path, "a batch script", hint="Try to save it as UTF-8.", most_bytes=LONGEST)
    found = lint(text, Path.cwd(), read_profile(profile_name) if profile_name else None)
    if not found:
        print(f"{path.name}: nothing found.")
        return
    print(printable(findings_text(str(path), found)))
    print(f"\n{len(found)} {'finding' if len(found) == 1 else 'findings'}.")
    raise typer.Exit(1)


@cluster_app.command()
def profiles() -> None:
    """List the profiles, and mark the one that is taken by default."""
    from course_lib.cluster.profile import default_profile, profile_names, read_profile

    table = plain_table(
        "profile", "where", "nodes", "GPUs a node", "longest job", "jobs", "GPU hours"
    )
    for name in profile_names():
        one = read_profile(name)
        where = " ".join(filter(None, (one.scheduler, one.partition)))
        numbers = (one.max_nodes, one.gpus_per_node, one.time_limit)
        limits = (one.limits.max_jobs, f"{one.limits.gpu_hours:g}")
        mark = " (taken)" if name == default_profile() else ""
        table.add_row(name + mark, where, *map(str, (*numbers, *limits)))
    Console().print(table)


@cluster_app.command()
def init(
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take the values found.")] = False,
) -> None:
    """Write the profile `site` for this cluster or machine. Asks before it overwrites a file."""
    from course_lib.cluster.profile import OWN, find_cluster_folder, save_profile
    from course_lib.cluster.site import find_partitions, profile_of, profile_of_machine

    path = find_cluster_folder() / "profiles" / f"{OWN}.toml"
    _may_write(path, yes)
    partitions = find_partitions()
    if partitions:
        profile = profile_of(partitions[0] if yes else _chosen(partitions))
    else:
        print("There is no Slurm here that answers: the profile is for this machine.")
        profile = profile_of_machine()
    save_profile(profile if yes else _asked(profile), path)
    print(f"{path} is written. Read it, and change what is not so: it has a comment on each line.")
    print("Next: course cluster profiles, and course submit 00 --dry-run")


def _may_write(path: Path, yes: bool) -> None:
    """Stop where a profile would be lost."""
    if path.exists() and yes:
        raise CourseError(
            f"course cluster init --yes: {path} is there already, and stays. Try it without "
            "--yes, or move the file away."
        )
    if path.exists():
        typer.confirm(f"{path} is there already. Overwrite it?", abort=True)


def _chosen(partitions: "list[Partition]") -> "Partition":
    """Ask for a partition and return it."""
    for one in partitions:
        nodes = f"{one.max_nodes} nodes, each {one.cores} cores and {one.gpus} GPUs"
        print(f"  {one.name:12} {nodes} {one.gpu_type}, at most {one.time_limit}".rstrip())
    names = {one.name: one for one in partitions}
    name = typer.prompt("Partition", default=partitions[0].name)
    if name not in names:
        raise CourseError(f"partition: need one of {', '.join(names)}; got {name!r}.")
    return names[name]


def _asked(profile: "Profile") -> "Profile":
    """Return the profile with the answers to questions on what cannot be looked up."""
    values: dict[str, object] = {}
    if profile.scheduler == "slurm":
        values["account"] = typer.prompt("Account (empty: none)", profile.account)
        values["modules"] = tuple(typer.prompt("Modules to load (empty: none)", "").split())
        values["scratch"] = typer.prompt("Scratch folder (empty: none)", profile.scratch)
        values["max_nodes"] = typer.prompt("Most nodes of a job", profile.max_nodes, type=int)
    values["gpus_per_node"] = typer.prompt("GPUs on a node", profile.gpus_per_node, type=int)
    values["time_limit"] = typer.prompt("Longest job", profile.time_limit)
    return replace(profile, **values)  # type: ignore[arg-type]


def plain_table(*columns: str) -> Table:
    """Return a table without lines, whose last column takes the remaining width."""
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in table.columns[:-1]:
        column.no_wrap = True
    return table
