"""What a learner asks for: a program, on how many nodes and GPUs, for how long."""

import re
from dataclasses import dataclass
from pathlib import Path

from course_lib.cluster.profile import Profile
from course_lib.core.errors import CourseError

CPU_RANKS = 2  # on each node, where there are no GPUs to count
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, or an array of them. None: as the profile has it; `render` and `fitted` know.

    script         a batch script: the name of one in `cluster` (many_nodes), or a path
    program        a Python file, or the name of a module (course_lib.train)
    ranks_per_node one a GPU if None; where there are no GPUs, 2
    time_limit     as hours:minutes:seconds
    array          empty, or the elements of a job array as Slurm writes them: 1-8, 1-8%2, 1,3,5
    run_folder     where the log goes, and what programs see as RUN_FOLDER

    Raises: CourseError for what no scheduler could take
    """

    program: str
    arguments: tuple[str, ...] = ()
    script: str = "one_node"
    name: str
    nodes: int = 1
    gpus_per_node: int | None = None
    ranks_per_node: int | None = None
    time_limit: str = "0:30:00"
    array: str = ""
    run_folder: str

    @property
    def words(self) -> tuple[str, ...]:
        """The program and its arguments, as `python` and `torchrun` take them."""
        raise NotImplementedError

    @property
    def elements(self) -> tuple[int, ...]:
        """The elements of the array; one element, 0, where there is no array."""
        raise NotImplementedError

    @property
    def gpu_hours(self) -> float:
        """The most it can use: GPUs x hours x elements. Of a fitted job, where no None is left."""
        raise NotImplementedError


def fitted(job: Job, profile: Profile) -> Job:
    """The job with the profile's values where it named none.

    Raises: CourseError where it asks for more than the profile has
    """
    raise NotImplementedError
