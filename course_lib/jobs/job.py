"""A job as a learner describes it: a program, its nodes, GPUs and time limit."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.jobs.profile import Profile, find_cluster_folder
from course_lib.jobs.slurm_time import read_time_s, write_time

CPU_RANKS = 2  # on each node, where there are no GPUs to count
NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
MODULE = r"[A-Za-z_]\w*(\.(?!py$)[A-Za-z_]\w*)+"
RANGE = r"(?P<first>\d{1,9})(-(?P<last>\d{1,9})(:(?P<step>[1-9]\d{0,8}))?)?"
LAST_ARRAY_TASK = 1000  # the highest number that Slurm takes unless a site raised MaxArraySize


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, or an array of them. `fitted` fills in what is None.

    program        the path of a file, or the name of a module with a dot in it (course_lib.train)
    script         a batch script: the name of one in `cluster` or a path; one_node if None, and
                   many_nodes on more than one
    gpus_per_node  as many as the profile has if None
    ranks_per_node one a GPU if None; where there are no GPUs, 2
    time_limit     as hours:minutes:seconds
    array          empty, or the array tasks of a job array as Slurm writes them: 1-8, 1-8%2, 1,3,5
    run_folder     where the log goes; programs see it as RUN_FOLDER

    Raises: CourseError for what no scheduler could take
    """

    name: str
    program: str
    arguments: tuple[str, ...] = ()
    script: str | None = None
    nodes: int = 1
    gpus_per_node: int | None = None
    ranks_per_node: int | None = None
    time_limit: str = "0:30:00"
    array: str = ""
    run_folder: str

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME, self.name):
            raise CourseError(
                f"job name: need letters, digits, dot, dash and underscore; got {self.name!r}."
            )
        if (
            not self.run_folder
            or not self.run_folder.isprintable()
            or set(self.run_folder) & set("\"'\\%")
        ):
            raise CourseError(
                f"run folder: need a path without quotes, backslash and %, in which Slurm sees "
                f"something else; got {self.run_folder!r}. Try runs/{self.name}."
            )
        if not self.program or any("\0" in word for word in self.words):
            raise CourseError(f"program: need words without a zero byte; got {self.words!r}.")
        for what, least in (("nodes", 1), ("gpus_per_node", 0), ("ranks_per_node", 1)):
            value = getattr(self, what)
            if value is not None and value < least:
                raise CourseError(f"job {self.name}, {what}: need at least {least}; got {value}.")
        if self.time_limit.count(":") != 2 or not read_time_s(self.time_limit):
            raise CourseError(
                f"job {self.name}, time limit: need hours:minutes:seconds; got "
                f"{self.time_limit!r}. Try 0:30:00 for half an hour."
            )
        _ = self.array_tasks

    @property
    def words(self) -> tuple[str, ...]:
        """The program and its arguments, as `python` and `torchrun` take them."""
        module = ("-m",) if re.fullmatch(MODULE, self.program) else ()
        return (*module, self.program, *self.arguments)

    @property
    def array_tasks(self) -> tuple[int, ...]:
        """The ids of the array tasks in order; one task, 0, where there is no array."""
        return read_array(self.array) if self.array else (0,)

    @property
    def gpu_hours(self) -> float:
        """The most that a fitted job can use: GPUs x hours x array tasks."""
        hours = read_time_s(self.time_limit) / 3600
        return self.nodes * (self.gpus_per_node or 0) * hours * len(self.array_tasks)


def read_array(text: str) -> tuple[int, ...]:
    """Return the array task ids that Slurm means by 1-8, 0-6:2, 1,3,5 or 1-8%2 (two at a time)."""
    array_tasks: set[int] = set()
    listed, _, at_once = text.partition("%")
    for part in listed.split(","):
        found = re.fullmatch(RANGE, part, re.ASCII)
        first, last, step = found.group("first", "last", "step") if found else ("1", "0", None)
        if int(last or first) < int(first) or int(last or first) > LAST_ARRAY_TASK:
            raise _bad_array(text)
        array_tasks.update(range(int(first), int(last or first) + 1, int(step or 1)))
    if "%" in text and not re.fullmatch(r"[1-9]\d{0,8}", at_once, re.ASCII):
        raise _bad_array(text)
    return tuple(sorted(array_tasks))


def _bad_array(text: str) -> CourseError:
    return CourseError(
        f"array: need tasks from 0 to {LAST_ARRAY_TASK}, as in 1-8, 1,3,5 or 1-8%2 for two at a "
        f"time; got {text!r}."
    )


def fitted(job: Job, profile: Profile) -> Job:
    """Return the job with every open value filled in from this profile.

    Raises: CourseError where it asks for more than the profile has
    """
    gpus = profile.gpus_per_node if job.gpus_per_node is None else job.gpus_per_node
    if job.nodes > profile.max_nodes:
        raise _too_much(job, profile, f"{profile.max_nodes} nodes", f"{job.nodes}")
    if gpus > profile.gpus_per_node:
        raise _too_much(job, profile, f"{profile.gpus_per_node} GPUs on a node", f"{gpus}")
    if read_time_s(job.time_limit) > read_time_s(profile.time_limit):
        raise _too_much(job, profile, f"{profile.time_limit} of time", job.time_limit)
    return replace(
        job,
        script=job.script or ("one_node" if job.nodes == 1 else "many_nodes"),
        gpus_per_node=gpus,
        ranks_per_node=job.ranks_per_node or gpus or CPU_RANKS,
        time_limit=write_time(read_time_s(job.time_limit)),
    )


def _too_much(job: Job, profile: Profile, most: str, got: str) -> CourseError:
    return CourseError(
        f"job {job.name}: need at most {most}; got {got}. That is what profile {profile.name} has: "
        "ask for less, or see course cluster profiles."
    )


def find_program(text: str, module: str = "") -> str:
    """Return the path of an exercise from its lesson's number or name; other words unchanged.

    `module` is the word behind `-m`, and is looked for without being run.

    Raises: CourseError where there is no such file, or no such module
    """
    if text == "-m" and not _is_module(module):
        raise CourseError(
            f"course submit: need a module that `python -m` finds from this folder; got {module!r}."
            " Try course_lib.train, or the path of a Python file."
        )
    if text == "-m" or os.path.isfile(text):
        return text
    exercises = sorted((find_cluster_folder() / "exercises").glob("[0-9]*.py"))
    lesson = text.zfill(2) if text.isdigit() else text
    found = [path for path in exercises if path.stem.startswith(lesson)]
    if len(found) == 1 and re.fullmatch(r"\d\d(_\w+)?", lesson):
        return str(found[0])
    lessons = ", ".join(path.stem[:2] for path in exercises)
    raise CourseError(
        f"course submit: need a program that is there; got {text!r}. Try a lesson that "
        f"has a script ({lessons}), the path of a Python file, or -m and the name of a module."
    )


def _is_module(name: str) -> bool:
    """Return whether `python -m name` finds something to run, from the current folder or installed.

    Nothing is imported: a package may want a GPU for that.
    """
    words = name.split(".")
    if not all(map(str.isidentifier, words)) or words[0] == "__main__":
        return False
    found = PathFinder.find_spec(words[0], [os.getcwd()]) or find_spec(words[0])
    for full_name in list(accumulate(words, "{}.{}".format))[1:]:
        found = _inside(found, full_name)
    is_package = found is not None and found.submodule_search_locations is not None
    return (_inside(found, f"{name}.__main__") if is_package else found) is not None


def _inside(package: ModuleSpec | None, full_name: str) -> ModuleSpec | None:
    places = package.submodule_search_locations if package else None
    return None if places is None else PathFinder.find_spec(full_name, places)


def name_of(words: Sequence[str]) -> str:
    """Return a job's name: that of the file or module, without characters that are not allowed."""
    of = Path(words[0]).stem if words[0] != "-m" else "".join(words[1:2]).rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9._-]", "-", of).strip(".-") or "job"
