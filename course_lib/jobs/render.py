"""Render the batch script to submit: one of `cluster/*.sbatch` with profile and job filled in.

Directives that the job names are replaced where they stand; the profile's take the place of the
line `# site`, its modules and variables that of `# environment`. The program and its arguments are
quoted, so a name with blanks or a semicolon in it stays a name.
"""

import re
import shlex
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.jobs.job import Job, fitted
from course_lib.jobs.lint.directives import PREFIX, head_lines, read_directives
from course_lib.jobs.profile import Profile, find_cluster_folder

SITE, ENVIRONMENT = "# site", "# environment"
LINE = re.compile(r"#SBATCH\s+--(?P<option>[a-z-]+)(=\S+)?(\s+(?P<comment>#.*))?")
COLUMN = 35  # where comments begin after a directive


def render(job: Job, profile: Profile) -> str:
    """Return the whole batch script of this job at this site; `sbatch FILE` needs nothing else.

    Raises: CourseError for a job that does not fit the profile, and a script that is not there or
        has no line `# site` or `# environment`
    """
    job = fitted(job, profile)
    text = read_script(str(job.script))
    own = {one.option: one.value for one in read_directives(text)}
    starts_ranks = own.get("ntasks-per-node", "1") != "1"
    wanted = {**_job_directives(job, profile, starts_ranks), **_site_directives(profile)}
    head = [line for _, line in head_lines(text)]
    in_place = {found["option"] for found in map(LINE.fullmatch, head) if found}
    lines: list[str] = []
    for number, line in enumerate(text.split("\n")):
        if line == SITE:
            rest = [name for name in wanted if name not in in_place]
            lines += [one for name in rest for one in _directive(name, wanted[name])]
        elif line == ENVIRONMENT:
            lines += [line, *_environment(job, profile, starts_ranks)]
        else:
            lines += _replaced(line, wanted) if number < len(head) else [line]
    return "\n".join(lines)


def read_script(script: str) -> str:
    """Return the text of a batch script: a name in `cluster`, or a path."""
    own = find_cluster_folder() / f"{script}.sbatch"
    path = own if own.is_file() else Path(script)
    if not path.is_file():
        names = ", ".join(sorted(one.stem for one in find_cluster_folder().glob("*.sbatch")))
        raise CourseError(f"script: need one of {names}, or the path of one; got {script!r}.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise CourseError(f"script {path}: need a text in UTF-8; {problem}.") from problem
    for marker in (SITE, ENVIRONMENT):
        if marker not in text.split("\n"):
            raise CourseError(
                f"script {path}: need a line that is {marker!r} and nothing else; got none. "
                "Put it in as cluster/many_nodes.sbatch has it, or hand it in with sbatch."
            )
    return text


def _job_directives(job: Job, profile: Profile, starts_ranks: bool) -> dict[str, str]:
    """Return what the job requests, by option; empty values are not requested.

    With `starts_ranks`, Slurm starts each rank; else one launcher on each node.
    """
    ranks, gpus = job.ranks_per_node or 1, job.gpus_per_node
    tasks = ranks if starts_ranks else 1
    gpu_type = f"{profile.gpu_type}:" if profile.gpu_type else ""
    log = "log-%A_%a.out" if job.array else "log-%j.out"
    return {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(tasks),
        "gpus-per-node": f"{gpu_type}{gpus}" if gpus else "",
        "cpus-per-task": str(profile.cpus_per_gpu * ranks // tasks or ""),
        "time": job.time_limit,
        "array": job.array,
        "output": f"{job.run_folder}/{log}",
    }


def _site_directives(profile: Profile) -> dict[str, str]:
    return {"partition": profile.partition, "account": profile.account, "qos": profile.qos}


def _directive(option: str, value: str, comment: str = "") -> list[str]:
    """Return the line that requests it; none for an empty value."""
    text = shlex.quote(value) if re.search(r"\s|#", value) else value
    line = f"{PREFIX} --{option}={text}"
    return [f"{line:{COLUMN}} {comment}".rstrip()] if value else []


def _replaced(line: str, wanted: dict[str, str]) -> list[str]:
    """Return a line of the head, with the job's value where it is a directive that the job sets."""
    found = LINE.fullmatch(line)
    if not found or found["option"] not in wanted:
        return [line]
    return _directive(found["option"], wanted[found["option"]], found["comment"] or "")


def _environment(job: Job, profile: Profile, starts_ranks: bool) -> list[str]:
    """Return modules, the site's own lines, variables, and the program as arguments."""
    variables = {
        "SCRATCH": profile.scratch_folder,
        "NCCL_SOCKET_IFNAME": profile.network_interface,
        "GLOO_SOCKET_IFNAME": profile.network_interface,
        "RUN_FOLDER": job.run_folder,
        "RANKS_PER_NODE": "" if starts_ranks else str(job.ranks_per_node),
    }
    return [
        *(f"module load {shlex.quote(module)}" for module in profile.modules),
        *profile.environment,
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items() if value),
        f"set -- {shlex.join(job.words)}",
    ]
