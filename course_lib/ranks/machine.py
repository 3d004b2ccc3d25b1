"""Description of this machine: cores, memory, GPUs, links, backends, tools. Notebook 00_ranks.

`describe_machine` collects it as plain values, so that a run record can hold it; `doctor_report`
puts it in words for `course doctor`, with what to do about what is missing.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from course_lib.core.units import GIB, MIB, format_bytes

_Run = Callable[[Sequence[str]], str | None]
TORCH = "2.13"
LINK_WORDS = {
    "NV": "NVLink, with its number of lanes",
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe across one CPU's bridges",
    "SYS": "across CPU sockets, the slowest",
}


@dataclass(frozen=True)
class Finding:
    """Line of the doctor's report: `state` is `ok`, `missing` (optional) or `problem`."""

    state: str
    text: str


def run_command(command: Sequence[str]) -> str | None:
    """Return what a command prints; None if it is missing, fails, or takes more than 10 seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def describe_machine(run: _Run = run_command, root: Path = Path("/")) -> dict[str, Any]:
    """Describe the cores, memory, GPUs, links, backends and tools of this machine.

    `run` runs a command and `root` is where the system's files start; tests replace both.
    """
    distributed = torch.distributed
    available = distributed.is_available()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count() or 1,
        "usable_cores": usable_cores(root),
        "memory_bytes": usable_memory_bytes(root),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gloo": available and distributed.is_gloo_available(),
        "nccl": available and distributed.is_nccl_available(),
        "usable_gpus": torch.cuda.device_count(),
        "gpus": describe_gpus(run),
        "gpu_links": parse_links(run(["nvidia-smi", "topo", "-m"]) or ""),
        "slurm": describe_slurm(run),
        "jupyterlab": installed_version("jupyterlab"),
        "node": (run(["node", "--version"]) or "").strip() or None,
        "chromium": shutil.which("chromium") or shutil.which("chromium-browser"),
    }


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def usable_cores(root: Path) -> float:
    """Return the cores this process may use: its affinity, or the container's limit if smaller."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    words = read_words(root / "sys/fs/cgroup/cpu.max")  # "max 100000" or "150000 100000"
    if len(words) == 2 and words[0] != "max":
        return min(cores, int(words[0]) / int(words[1]))
    return cores


def usable_memory_bytes(root: Path) -> int:
    """Return the bytes of the machine's memory, or the container's limit if smaller."""
    total = int(psutil.virtual_memory().total)
    words = read_words(root / "sys/fs/cgroup/memory.max")  # "max" or a number of bytes
    return min(total, int(words[0])) if words and words[0] != "max" else total


def read_words(path: Path) -> list[str]:
    """Return the words of a small system file; none if it cannot be read."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def describe_gpus(run: _Run) -> list[dict[str, Any]]:
    """Return name and memory in bytes of each NVIDIA GPU; empty without a driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    gpus = []
    for line in (run(query) or "").splitlines():
        name, _, mebibytes = line.rpartition(",")
        size = mebibytes.strip()
        gpus.append(
            {"name": name.strip(), "memory_bytes": int(size) * MIB if size.isdigit() else 0}
        )
    return gpus


def parse_links(text: str) -> list[list[str]]:
    """Read the link matrix of `nvidia-smi topo -m`: row i, column j is how GPU i reaches GPU j."""
    rows = [
        [cell.strip() for cell in line.split("\t")]
        for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    ]
    header = next((row for row in rows if not row[0] and "GPU0" in row), [])
    columns = [index for index, cell in enumerate(header) if re.fullmatch(r"GPU\d+", cell)]
    links = [
        [row[index] for index in columns]
        for row in rows
        if re.fullmatch(r"GPU\d+", row[0]) and len(row) > max(columns, default=0)
    ]
    return links if len(links) == len(columns) else []


def describe_slurm(run: _Run) -> dict[str, Any] | None:
    """Return Slurm's version and partitions, or None; no partitions if its controller is silent."""
    version = run(["sinfo", "--version"])
    if version is None:
        return None
    lines = run(["sinfo", "--noheader", "--format=%P|%a|%D|%c|%G"])
    names = ("name", "state", "num_nodes", "cores_per_node", "devices")
    partitions = lines and [
        dict(zip(names, line.split("|"), strict=False)) for line in lines.splitlines() if line
    ]
    return {"version": version.split()[-1], "partitions": partitions}


def findings(machine: dict[str, Any]) -> Iterator[Finding]:
    """Yield what works here, what does not, and what to do about it."""
    yield _cores(machine)
    yield _memory(machine)
    yield _torch(machine)
    yield _gloo(machine)
    yield _gpus(machine)
    yield _slurm(machine)
    yield _tool(machine, "jupyterlab", "JupyterLab", "problem", "make lab installs it")
    yield _tool(machine, "node", "Node.js", "missing", "only make slides needs it")
    yield _tool(machine, "chromium", "chromium", "missing", "only make slides and browser tests do")


def _cores(machine: dict[str, Any]) -> Finding:
    usable = machine["usable_cores"]
    text = f"{usable:g} of {machine['cores']} cores: "
    if usable >= 4:
        return Finding("ok", text + "4 ranks run at the same time")
    return Finding("ok", text + "ranks take turns; times of 4 ranks say little about speed-up")


def _memory(machine: dict[str, Any]) -> Finding:
    num_bytes = machine["memory_bytes"]
    if num_bytes >= 3.5 * GIB:
        return Finding("ok", f"{format_bytes(num_bytes)} of memory")
    return Finding("problem", f"{format_bytes(num_bytes)} of memory: the lessons need 4 GiB")


def _torch(machine: dict[str, Any]) -> Finding:
    text = f"Python {machine['python']}, torch {machine['torch']}"
    if machine["torch"].startswith(TORCH + "."):
        return Finding("ok", text)
    return Finding("problem", f"{text}: the lessons are proven with {TORCH}. Run make lab")


def _gloo(machine: dict[str, Any]) -> Finding:
    if machine["gloo"]:
        return Finding("ok", "gloo: ranks communicate on the CPU")
    return Finding("problem", "this torch has no gloo, so no rank can communicate. Run make lab")


def _gpus(machine: dict[str, Any]) -> Finding:
    gpus = machine["gpus"]
    if not gpus:
        return Finding("missing", "GPU (optional): ranks run on the CPU, as all lessons expect")
    kinds = Counter((gpu["name"], format_bytes(gpu["memory_bytes"])) for gpu in gpus)
    text = ", ".join(f"{number} x {name} of {size}" for (name, size), number in kinds.items())
    if not machine["usable_gpus"]:
        return Finding(
            "missing", f"{text} (optional): this torch is a CPU build, ranks use the CPU"
        )
    return Finding("ok", f"{text}; NCCL {'works' if machine['nccl'] else 'is missing'}")


def _slurm(machine: dict[str, Any]) -> Finding:
    slurm = machine["slurm"]
    if slurm is None:
        return Finding("missing", "Slurm (optional): cluster scripts run under torchrun instead")
    if not slurm["partitions"]:
        return Finding(
            "problem",
            f"Slurm {slurm['version']}: its controller does not answer. "
            "Ask whoever runs the cluster, or use torchrun",
        )
    parts = [
        f"{part['name']} ({part['num_nodes']} nodes, {part['state']})"
        for part in slurm["partitions"]
    ]
    return Finding("ok", f"Slurm {slurm['version']}, partitions {', '.join(parts)}")


def _tool(machine: dict[str, Any], key: str, name: str, otherwise: str, why: str) -> Finding:
    value = machine[key]
    if value:
        return Finding("ok", f"{name} {value}")
    return Finding(otherwise, f"{name}{' (optional)' if otherwise == 'missing' else ''}: {why}")


def doctor_report(machine: dict[str, Any]) -> str:
    """Return the findings as lines to read, with the GPUs' link matrix where there is one."""
    lines = [f"{finding.state:8} {finding.text}" for finding in findings(machine)]
    return "\n".join([*lines, *_link_lines(machine["gpu_links"])])


def _link_lines(links: list[list[str]]) -> list[str]:
    if len(links) < 2:
        return []
    names = [f"GPU{i}" for i in range(len(links))]
    table = [["", *names], *([name, *row] for name, row in zip(names, links, strict=True))]
    kinds = {re.sub(r"\d+", "", kind) for row in links for kind in row}
    legend = [f"{kind}: {words}" for kind, words in LINK_WORDS.items() if kind in kinds]
    rows = ["".join(f"{cell:>6}" for cell in row) for row in table]
    return ["", "How the GPUs reach each other:", *rows, "  " + "; ".join(legend)]
