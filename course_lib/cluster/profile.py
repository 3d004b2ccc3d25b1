"""What a site wants to be told: its partition, account, GPUs, modules, and how much a learner may.

A profile is a small TOML file in `cluster/profiles`. The batch scripts hold nothing of a site, so
that everybody reads the same ones; `render` puts the profile's lines into them.
"""

import os
import re
import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from course_lib.cluster.slurm_time import read_time_s
from course_lib.core.errors import CourseError

SCHEDULERS = ("slurm", "local")
OWN = "site"  # the profile that `course cluster init` writes
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@,+-]*")  # what a name at a site may look like


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one learner may have in the queue at a time, so that a class cannot flood it."""

    max_jobs: int = 8
    gpu_hours: float = 8.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A place where jobs run. What is empty or 0 is left to the site.

    scheduler          "slurm", or "local": this machine, without a queue
    gpus_per_node      that a job can have; 0: there are none, ranks run on the CPU
    cpus_per_gpu       CPU cores that each rank gets, also where there are no GPUs
    time_limit         the longest that a job may take, as hours:minutes:seconds
    modules            that `module load` loads, in this order
    environment        lines of shell, after the modules: activate an environment, set variables
    scratch            a large, fast folder; ~ and $USER are filled in, scripts see it as SCRATCH
    network_interface  that ranks on different nodes talk over, such as ib0

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
    time_limit: str = "1:00:00"
    max_nodes: int = 1
    modules: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    scratch: str = ""
    network_interface: str = ""
    limits: Limits = field(default_factory=Limits)


def find_cluster_folder() -> Path:
    """The course's folder `cluster`: in the current folder or above it, else beside course_lib."""
    raise NotImplementedError


def profile_names() -> list[str]:
    """The names of all profiles there are, the learner's own first."""
    raise NotImplementedError


def default_profile() -> str:
    """`site` where `course cluster init` wrote one, else `laptop`."""
    raise NotImplementedError


def read_profile(name: str | os.PathLike[str]) -> Profile:
    """The profile of this name in `cluster/profiles`, or of this path."""
    raise NotImplementedError


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> Path:
    """Write a profile as commented TOML, whole or not at all; return its path."""
    raise NotImplementedError
