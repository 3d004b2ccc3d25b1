"""Look up a site from its login node: partitions, GPUs, limits; a first profile of it.

Where there is no Slurm, the profile describes this machine.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from course_lib.core.errors import CourseError
from course_lib.jobs.job import CPU_RANKS
from course_lib.jobs.profile import OWN, Profile
from course_lib.jobs.slurm_time import read_time_s, write_time
from course_lib.ranks.machine import describe_gpus, run_command

_Run = Callable[[Sequence[str]], str | None]
DAY = "1-00:00:00"  # where a site has no limit, a course still needs one
SINFO = ("sinfo", "--noheader", "--format=%P|%c|%m|%G")
NAMES = ("sinfo", "--all", "--noheader", "--format=%R")
PARTITIONS = ("scontrol", "show", "partition", "--oneliner")


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition of the site, and its largest kind of node."""

    name: str
    is_default: bool = False
    cores: int = 0
    memory_gib: int = 0
    gpus: int = 0
    gpu_type: str = ""
    max_nodes: int = 1
    time_limit: str = DAY


def find_partitions(run: _Run = run_command) -> list[Partition]:
    """Return the partitions that Slurm names, those with GPUs first; none without Slurm."""
    if not (listed := run(SINFO)):
        return []
    limits = dict(_limits(run(PARTITIONS) or ""))
    found: dict[str, Partition] = {}
    for line in listed.splitlines():
        partition = _partition(line)
        if partition and partition.gpus >= found.get(partition.name, partition).gpus:
            max_nodes, time_limit = limits.get(partition.name, (1, DAY))
            found[partition.name] = replace(partition, max_nodes=max_nodes, time_limit=time_limit)
    return sorted(found.values(), key=lambda one: (not one.gpus, not one.is_default))


def partition_names(run: _Run = run_command) -> list[str]:
    """Return the names of all partitions, also of those that Slurm hides; none without Slurm."""
    return sorted({*(run(NAMES) or "").split()})


def _partition(line: str) -> Partition | None:
    """Parse `gpu*|64|515000|gpu:h100:4(S:0-1)`: default, 64 cores, 515000 MiB, 4 GPUs a node."""
    parts = line.strip().split("|")
    if len(parts) != 4:
        return None
    name, cores, memory, devices = parts
    gpu = re.search(r"gpu(?::(?P<type>[A-Za-z][\w.-]*))?:(?P<count>\d+)", devices)
    return Partition(
        name=name.rstrip("*"),
        is_default=name.endswith("*"),
        cores=int(re.sub(r"\D.*", "", cores) or 0),
        memory_gib=int(re.sub(r"\D.*", "", memory) or 0) // 1024,
        gpus=int(gpu["count"]) if gpu else 0,
        gpu_type=(gpu["type"] or "") if gpu else "",
    )


def _limits(text: str) -> Iterator[tuple[str, tuple[int, str]]]:
    """Return name, most nodes and longest time of each line of `scontrol show partition`."""
    for line in text.splitlines():
        values = dict(re.findall(r"(\w+)=(\S+)", line))
        counts = [values.get(key, "") for key in ("MaxNodes", "TotalNodes")]
        nodes = [int(count) for count in counts if count.isdigit()]
        if "PartitionName" in values:
            longest = _time_limit(values.get("MaxTime", ""))
            yield values["PartitionName"], (max(min(nodes, default=1), 1), longest)


def _time_limit(text: str) -> str:
    try:
        return write_time(read_time_s(text))
    except CourseError:  # UNLIMITED
        return DAY


def profile_of(partition: Partition) -> Profile:
    """Return a profile for a partition, as far as it is known."""
    ranks = partition.gpus or CPU_RANKS
    return Profile(
        name=OWN,
        partition=partition.name,
        gpus_per_node=partition.gpus,
        gpu_type=partition.gpu_type,
        cpus_per_gpu=partition.cores // ranks,
        node_memory_gib=partition.memory_gib,
        time_limit=partition.time_limit,
        max_nodes=partition.max_nodes,
        scratch="$SCRATCH" if os.environ.get("SCRATCH") else "",
    )


def profile_of_machine(run: _Run = run_command) -> Profile:
    """Return a profile for this machine; without GPUs, it emulates two nodes."""
    gpus = len(describe_gpus(run))
    return Profile(
        name=OWN,
        scheduler="local",
        gpus_per_node=gpus,
        cpus_per_gpu=max((os.cpu_count() or 1) // (gpus or CPU_RANKS), 1),
        max_nodes=1 if gpus else 2,
        environment=() if gpus else ("export OMP_NUM_THREADS=1",),
    )
