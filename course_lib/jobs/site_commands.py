"""The commands of `course` about a site: `lint-job`, `cluster init` and `cluster profiles`.

`pick_profile` is what commands that start jobs ask for the place where they run.
"""

import sys
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
from course_lib.jobs.slurm import Slurm, tell

if TYPE_CHECKING:  # imported where they are used: `course --help` should stay fast
    from course_lib.jobs.profile import Profile
    from course_lib.jobs.site import Partition

HERE = "laptop"  # the profile of this machine
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
    from course_lib.jobs.lint.check import findings_text
    from course_lib.jobs.lint.check import lint_job as lint
    from course_lib.jobs.profile import read_profile
    from course_lib.jobs.site import partition_names

    text = read_text(path, "a batch script", hint="Try to save it as UTF-8.", most_bytes=LONGEST)
    profile = read_profile(profile_name) if profile_name else None
    found = lint(text, Path.cwd(), profile, partition_names())
    if not found:
        print(f"{path.name}: nothing found.")
        return
    print(printable(findings_text(str(path), found)))
    print(f"\n{len(found)} {'finding' if len(found) == 1 else 'findings'}.")
    raise typer.Exit(1)


@cluster_app.command()
def profiles() -> None:
    """List the profiles, and mark the default: where jobs run without --profile."""
    from course_lib.jobs.profile import OWN, profile_names, read_profile
    from course_lib.jobs.site import find_partitions

    names = profile_names()
    is_open = OWN not in names and bool(find_partitions())
    default = OWN if OWN in names else "" if is_open else HERE
    table = plain_table(
        "profile", "where", "nodes", "GPUs a node", "longest job", "jobs", "GPU hours"
    )
    for name in names:
        one = read_profile(name)
        where = " ".join(filter(None, (one.scheduler, one.partition)))
        numbers = (one.max_nodes, one.gpus_per_node, one.time_limit)
        limits = (one.limits.max_jobs, f"{one.limits.gpu_hours:g}")
        mark = " (default)" if name == default else ""
        table.add_row(name + mark, where, *map(str, (*numbers, *limits)))
    Console().print(table)
    if is_open:
        print(
            "No default is chosen yet, and Slurm is here: jobs run there. Try course cluster init."
        )


@cluster_app.command()
def init(
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take the values found.")] = False,
) -> None:
    """Write the profile `site` for this cluster or machine. Asks before it overwrites a file."""
    from course_lib.jobs.profile import own_path, save_profile
    from course_lib.jobs.site import find_partitions, profile_of, profile_of_machine

    path = own_path()
    _may_write(path, yes)
    partitions = find_partitions()
    if partitions:
        profile = profile_of(partitions[0]) if yes else _chosen(partitions)
    else:
        print("There is no Slurm here that answers: the profile is for this machine.")
        profile = profile_of_machine()
    save_profile(profile if yes else _asked(profile), path)
    print(f"{path} is written. Read it, and change what is not so: it has a comment on each line.")
    print("Next: course cluster profiles, and course submit 00 --dry-run")


def pick_profile(name: str | None) -> "Profile":
    """Return the profile of this name; without one, the site's own, else Slurm's, else `laptop`.

    Where Slurm is and no profile of the site, a person is asked once, and the answer becomes the
    profile `site`. A script is not asked, but told what is taken and how to choose otherwise.
    """
    from course_lib.jobs.profile import OWN, own_path, profile_names, read_profile, save_profile
    from course_lib.jobs.site import find_partitions, profile_of

    if name or OWN in profile_names():
        return read_profile(name or OWN)
    if not Slurm().is_here():
        return read_profile(HERE)
    partitions = find_partitions()
    if not partitions:
        raise CourseError(
            f"course: need a partition of this Slurm; it names none. Try --profile {HERE} for this "
            "machine, or the path of a profile."
        )
    if not is_terminal():
        tell(
            f"No profile is chosen, and Slurm is here: taking its partition {partitions[0].name}. "
            f"Otherwise: --profile {HERE} for this machine, or course cluster init, once for all."
        )
        return profile_of(partitions[0])
    print(f"Slurm is here. Where should jobs run? {HERE} is this machine, without Slurm.")
    profile = _chosen(partitions, replace(read_profile(HERE), name=OWN))
    try:
        tell(
            f"{save_profile(profile, own_path())} remembers it. To change it: course cluster init."
        )
    except CourseError as problem:  # the folder is somebody else's
        tell(str(problem))
    return profile


def is_terminal() -> bool:
    """Return whether a person can be asked."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _may_write(path: Path, yes: bool) -> None:
    """Stop where a profile would be lost."""
    if path.exists() and yes:
        raise CourseError(
            f"course cluster init --yes: {path} is there already, and stays. Try it without "
            "--yes, or move the file away."
        )
    if path.exists():
        typer.confirm(f"{path} is there already. Overwrite it?", abort=True)


def _chosen(partitions: "list[Partition]", here: "Profile | None" = None) -> "Profile":
    """Ask for a partition, or `here`, and return a profile for it."""
    from course_lib.jobs.site import profile_of

    for one in partitions:
        nodes = f"{one.max_nodes} nodes, each {one.cores} cores and {one.gpus} GPUs"
        print(f"  {one.name:12} {nodes} {one.gpu_type}, at most {one.time_limit}".rstrip())
    choices = {HERE: here} if here else {}
    choices |= {one.name: profile_of(one) for one in partitions}
    name = typer.prompt(f"Partition{f', or {HERE}' if here else ''}", default=partitions[0].name)
    if name not in choices:
        raise CourseError(f"partition: need one of {', '.join(choices)}; got {name!r}.")
    return choices[name]


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
