"""Profiles of sites: partition, account, GPUs, modules, and the limits of one learner.

A profile is a small TOML file in `cluster/profiles`. The batch scripts hold nothing of a site, so
that everybody reads the same ones; `render` puts the profile's lines into them.
"""

import difflib
import json
import os
import re
import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from course_lib.core.course_files import course_folder
from course_lib.core.errors import CourseError
from course_lib.core.files import read_text, write_whole
from course_lib.jobs.slurm_time import read_time_s

SCHEDULERS = ("slurm", "local")
OWN = "site"  # the profile that `course cluster init` writes
WORD = r"[A-Za-z0-9_][A-Za-z0-9._:@,+/=-]*"  # what a name at a site may look like
COMMENTS = {
    "scheduler": "slurm, or local: this machine, without a queue",
    "partition": "of the queue; sinfo lists them",
    "account": "that the hours are charged to",
    "qos": "quality of service, where the site asks for one",
    "gpus_per_node": "that a job can have; 0: ranks run on the CPU",
    "gpu_type": "h100, a100, ... where a partition has several",
    "cpus_per_gpu": "CPU cores that each rank gets",
    "node_memory_gib": "GiB of memory that jobs can have on a node",
    "time_limit": "the longest that a job may take: hours:minutes:seconds",
    "max_nodes": "that one job may have",
    "modules": "that are loaded, in this order",
    "environment": "lines of shell after the modules",
    "scratch": "a large, fast folder: /scratch/$USER",
    "network_interface": "that ranks on different nodes talk over: ib0",
    "kernel_address": "address or interface of a notebook that nodes can reach",
    "idle_minutes": "after which a notebook's nodes are given back; 0: never",
}
LIMIT_COMMENTS = {
    "max_jobs": "that wait or run at a time",
    "gpu_hours": "in all; ended jobs count what they used",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one learner, so that a class cannot flood the queue.

    max_jobs   that wait or run at a time
    gpu_hours  in all: what ended jobs used, and what the others can use at most
    """

    max_jobs: int = 8
    gpu_hours: float = 8.0

    def __post_init__(self) -> None:
        if not _is_count(self.max_jobs, 1) or not self.gpu_hours >= 0:
            raise CourseError(
                f"profile, limits: need max_jobs from 1 and gpu_hours from 0; got {self.max_jobs} "
                f"and {self.gpu_hours}. Try 8 and 8.0."
            )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A site where jobs run; an empty value or 0 is left to the site.

    scheduler          "slurm", or "local": this machine, without a queue
    gpus_per_node      that a job can have; 0: there are none, ranks run on the CPU
    cpus_per_gpu       CPU cores that each rank gets, also where there are no GPUs
    node_memory_gib    memory that jobs can have on a node, in GiB
    time_limit         the longest that a job may take, as hours:minutes:seconds
    modules            that `module load` loads, in this order
    environment        lines of shell, after the modules: activate an environment, set variables
    scratch            a large, fast folder; ~ and $USER are filled in, scripts see it as SCRATCH
    network_interface  for communication between nodes, such as ib0
    kernel_address     where nodes connect to a notebook: an address, or an interface such as eth0
    idle_minutes       after which a notebook's nodes are given back when no cell runs

    Raises: CourseError for a value that no site has
    """

    name: str
    scheduler: str = "slurm"
    partition: str = ""
    account: str = ""
    qos: str = ""
    gpus_per_node: int = 0
    gpu_type: str = ""
    cpus_per_gpu: int = 0
    node_memory_gib: int = 0
    time_limit: str = "1:00:00"
    max_nodes: int = 1
    modules: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    scratch: str = ""
    network_interface: str = ""
    kernel_address: str = ""
    idle_minutes: int = 10
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self._need("name", re.fullmatch(WORD, self.name), "one word", "Rename the file.")
        is_known = self.scheduler in SCHEDULERS
        self._need("scheduler", is_known, " or ".join(SCHEDULERS), "Try slurm.")
        words = ("partition", "account", "qos", "gpu_type", "network_interface", "kernel_address")
        for name in words:
            is_word = re.fullmatch(f"({WORD})?", getattr(self, name))
            self._need(name, is_word, "one word", "Ask your site how it is written.")
        for name, least in (
            ("gpus_per_node", 0),
            ("cpus_per_gpu", 0),
            ("node_memory_gib", 0),
            ("idle_minutes", 0),
            ("max_nodes", 1),
        ):
            is_right = _is_count(getattr(self, name), least)
            self._need(name, is_right, f"a whole number from {least}", "Try 1.")
        is_long = self.time_limit.count(":") == 2 and read_time_s(self.time_limit)
        self._need("time_limit", is_long, "hours:minutes:seconds", "Try 1:00:00 for one hour.")
        for name in ("modules", "environment"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            are_lines = all(isinstance(x, str) and x.isprintable() for x in getattr(self, name))
            self._need(name, are_lines, "texts of one line each", "Write one text a line.")
        self._need("scratch", self.scratch.isprintable(), "a folder", "Try /scratch/$USER.")

    def _need(self, name: str, is_right: object, need: str, hint: str) -> None:
        if not is_right:
            raise CourseError(
                f"profile {self.name}, {name}: need {need}; got {getattr(self, name)!r}. {hint}"
            )

    @property
    def scratch_folder(self) -> str:
        """The scratch folder of the current user: ~ and $USER expanded."""
        return os.path.expanduser(os.path.expandvars(self.scratch))


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def find_cluster_folder() -> Path:
    """Return the course's folder `cluster`: here, above, or else beside course_lib."""
    here = Path.cwd()
    for parent in (here, *here.parents):
        if (parent / "cluster" / "profiles").is_dir():
            return parent / "cluster"
    return course_folder() / "cluster"


def profile_names() -> list[str]:
    """Return the names of all profiles, the learner's own first."""
    names = sorted(path.stem for path in (find_cluster_folder() / "profiles").glob("*.toml"))
    return sorted(names, key=lambda name: name != OWN)


def own_path() -> Path:
    """Return the path of the profile `site`."""
    return find_cluster_folder() / "profiles" / f"{OWN}.toml"


def read_profile(name: str | os.PathLike[str]) -> Profile:
    """Read the profile of this name in `cluster/profiles`, or of this path.

    Raises: CourseError that names the profiles there are, or the line that is wrong
    """
    path = Path(name)
    if path.suffix != ".toml":
        path = find_cluster_folder() / "profiles" / f"{name}.toml"
    if not os.path.lexists(path):
        raise CourseError(
            f"profile: need one of {', '.join(profile_names())}, or the path of a .toml; got "
            f"{os.fspath(name)!r}. Try course cluster init, which writes the profile {OWN}."
        )
    text = read_text(path, "a profile")
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        raise CourseError(
            f'profile {path}: need TOML, lines like partition = "gpu"; {problem}.'
        ) from problem
    limits = _known(path, Limits, values.pop("limits", {}))
    return Profile(name=path.stem, limits=Limits(**limits), **_known(path, Profile, values))


def _known(path: Path, kind: type[Profile] | type[Limits], values: Any) -> dict[str, Any]:
    """Return the values, if each has a name and a type that the dataclass knows."""
    if not isinstance(values, dict):
        raise CourseError(f"profile {path}, limits: need a table, [limits]; got {values!r}.")
    known = {one.name: one for one in fields(kind) if one.name not in ("name", "limits")}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or [", ".join(known)]
            raise CourseError(f"profile {path}: {name!r} means nothing. Try {near[0]}.")
        default = known[name].default
        allowed = list if isinstance(default, tuple) else type(default)
        if not isinstance(value, (int, float) if allowed is float else allowed):
            raise CourseError(
                f"profile {path}, {name}: need a value like {toml_value(default)}; got {value!r}."
            )
    return dict(values)


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> Path:
    """Write a profile as commented TOML, whole or not at all; return its path."""
    path = Path(path)
    try:
        return write_whole(path, profile_text(profile))
    except OSError as problem:
        raise CourseError(
            f"profile {path}: need to write it; {problem.strerror}. Try it in a copy of the course "
            "that is yours."
        ) from problem


def profile_text(profile: Profile) -> str:
    """Return the TOML of a profile, with a comment on each value."""
    values = asdict(profile)
    lines = [f"# The profile {profile.name!r}. What is empty or 0 is left to the site."]
    for name, comment in COMMENTS.items():
        lines.append(f"{name} = {toml_value(values[name])}".ljust(34) + f"  # {comment}")
    lines += ["", "[limits]  # how much one learner may have"]
    for name, value in values["limits"].items():
        lines.append(f"{name} = {toml_value(value)}".ljust(34) + f"  # {LIMIT_COMMENTS[name]}")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Return a text, number or list of texts as TOML; long lists take a line a text."""
    if not isinstance(value, (list, tuple)):
        return json.dumps(value, ensure_ascii=False)
    texts = [json.dumps(text, ensure_ascii=False) for text in value]
    if sum(map(len, texts)) < 60:
        return f"[{', '.join(texts)}]"
    return "[\n" + "".join(f"  {text},\n" for text in texts) + "]"
