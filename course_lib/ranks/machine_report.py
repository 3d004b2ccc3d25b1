"""One text to attach to a question: `course doctor --report FILE`. Notebook 00_ranks.

It holds versions, limits, settings and what failed, and tries the links of this machine: ranks that
sum over gloo, and over NCCL where there are GPUs. `anonymous` replaces what names the user.
"""

import importlib.metadata
import os
import platform
import pwd
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from course_lib.core.course_files import PACKAGE, is_installed
from course_lib.core.units import format_bytes
from course_lib.ranks.machine import doctor_report, findings, installed_version, run_command

PACKAGES = (
    *("distributed-training-course", "torch", "numpy", "cloudpickle", "psutil", "safetensors"),
    *("fsspec", "jupyterlab", "ipykernel", "ipywidgets", "anywidget", "matplotlib", "nbclient"),
    *("nbval", "pytest", "deepspeed", "accelerate", "transformers", "megatron-core"),
    "lightning-fabric",
)
SETTINGS = re.compile(r"(NCCL|GLOO|TORCH|CUDA|OMP|MKL|COURSE|PYTORCH|TP)_|(RANK|WORLD_SIZE)$")
LINK_TEST = "from course_lib.ranks.machine_report import try_link; try_link({!r}, {})"
TEST_S = 90.0
LIMITS = {
    "processes and threads": resource.RLIMIT_NPROC,
    "open files": resource.RLIMIT_NOFILE,
    "address space": resource.RLIMIT_AS,
    "locked memory": resource.RLIMIT_MEMLOCK,
}
ADDRESS = re.compile(r"(?<![\w.:])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])|(?<!\w)fe80::[\da-f:]+", re.I)
EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+")
FOLDERS = re.compile(r"(?<![\w.~/])/(?:[^\s/:,;'\"()<>|]+/)+(?=[^\s/])")  # of an absolute path
_Test = Callable[[str, int], tuple[bool, str]]


def machine_report(machine: dict[str, Any], test: "_Test | None" = None) -> tuple[str, int]:
    """Return the report of a machine that `describe_machine` described, and how many tests failed.

    `test` tries a link, (device, ranks) -> (worked, what it said); tests of this file replace it.
    """
    tests = list(_link_tests(machine, test or run_link_test))
    failed = [f"{name}: {said}" for name, worked, said in tests if not worked]
    failed += [one.text for one in findings(machine) if one.state == "problem"]
    parts = {
        "What failed": failed or ["nothing"],
        "Links": [
            f"{name}: {said if worked else 'FAILED, see above'}" for name, worked, said in tests
        ],
        "Doctor": doctor_report(_without_site(machine)).splitlines(),
        "Versions": list(_versions()),
        "Memory, disk, limits": list(_resources()),
        "Settings": list(_settings(os.environ)) or ["none that the course or PyTorch reads"],
    }
    lines = ["Report of `course doctor`, without names and folders of its user."]
    for title, body in parts.items():
        lines += ["", f"== {title} ==", *body]
    return anonymous("\n".join(lines)) + "\n", len(failed)


# -- links --------------------------------------------------------------------------------------


def _link_tests(machine: dict[str, Any], test: _Test) -> Iterator[tuple[str, bool, str]]:
    if machine["gloo"]:
        yield "gloo, 2 ranks on the CPU", *test("cpu", 2)
    if machine["nccl"] and machine["usable_gpus"]:
        num_ranks = min(4, machine["usable_gpus"])
        yield f"NCCL, {num_ranks} ranks with a GPU each", *test("cuda", num_ranks)


def run_link_test(device: str, world_size: int) -> tuple[bool, str]:
    """Try a link in a process of its own, so that nothing there can end the report."""
    command = [sys.executable, "-c", LINK_TEST.format(device, world_size)]
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TEST_S,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {TEST_S:g} s"
    if done.returncode == 0:
        return True, done.stdout.strip()
    return False, f"exit code {done.returncode}\n{(done.stdout + done.stderr).strip()}"


def try_link(device: str, world_size: int) -> None:
    """Sum over ranks, small and 16 MB, and print the times.

    Raises: ValueError for a wrong sum or another backend, RankError for what a rank raised
    """
    from course_lib.ranks.pool import Ranks

    with Ranks(world_size, cluster="laptop") as ranks:
        found = ranks.run(_summed, device)
    total = sum(10.0**rank for rank in range(world_size))
    backend, small_s, large_s, _ = found[0]
    if any(row[3] != total for row in found):
        raise ValueError(f"wrong sums: need {total:g} on each rank; got {[r[3] for r in found]}")
    if device == "cuda" and backend != "nccl":
        raise ValueError(f"the tensors of the GPUs went over {backend}, not over NCCL")
    print(f"{backend} works: 4 bytes in {small_s * 1e3:.2f} ms, 16 MB in {large_s * 1e3:.1f} ms")


def _summed(rank: int, device: str) -> tuple[str, float, float, float]:
    """Return the backend, the seconds of both sums, and what 10**rank sums to."""
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    seconds, value = [], torch.tensor(0.0)
    for numel in (1, 1, 4_000_000, 4_000_000):  # the first of each size warms up
        value = torch.full((numel,), 10.0**rank, device=where)
        start_s = time.perf_counter()
        dist.all_reduce(value)
        last = value[-1].item()  # waits for the GPU
        seconds.append(time.perf_counter() - start_s)
    world = dist.group.WORLD
    backend = str(world._get_backend(where).name()) if world else "none"
    return backend, seconds[1], seconds[3], last


# -- what there is ------------------------------------------------------------------------------


def _without_site(machine: dict[str, Any]) -> dict[str, Any]:
    """Return the machine with the partitions of its Slurm counted instead of named."""
    slurm = machine["slurm"]
    if not slurm or not slurm["partitions"]:
        return machine
    numbered = [
        part | {"name": f"partition {n}"} for n, part in enumerate(slurm["partitions"], start=1)
    ]
    return machine | {"slurm": slurm | {"partitions": numbered}}


def _versions() -> Iterator[str]:
    yield f"{platform.system()} {platform.release()} {platform.machine()}"
    yield f"libc {' '.join(platform.libc_ver())}" if platform.libc_ver()[0] else "no glibc"
    yield f"Python {platform.python_version()} ({platform.python_implementation()})"
    yield f"course: {'an installed wheel' if is_installed() else 'a clone'}{_commit()}"
    yield f"torch: CUDA {torch.version.cuda}, threads {torch.get_num_threads()}"
    if torch.cuda.is_available():
        yield f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    driver = run_command(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    yield f"NVIDIA driver {driver.split()[0]}" if driver and driver.split() else "no NVIDIA driver"
    for package in PACKAGES:
        yield f"{package} {installed_version(package) or '-'}"
    both = {"numpy", "torch"} & _twice()
    if both:
        yield f"installed twice: {', '.join(sorted(both))}"


def _commit() -> str:
    if is_installed() or not (PACKAGE.parent / ".git").exists():
        return ""
    said = run_command(["git", "-C", str(PACKAGE.parent), "log", "-1", "--format=%h"])
    changed = run_command(["git", "-C", str(PACKAGE.parent), "status", "--porcelain", "course_lib"])
    return f" at {said.strip()}{', changed' if changed else ''}" if said else ""


def _twice() -> set[str]:
    """Return the packages that this Python finds in two places."""
    names = [(one.metadata["Name"] or "").lower() for one in importlib.metadata.distributions()]
    return {name for name in names if names.count(name) > 1}


def _resources() -> Iterator[str]:
    memory = psutil.virtual_memory()
    yield f"memory: {format_bytes(memory.available)} of {format_bytes(memory.total)} available"
    yield f"swap: {format_bytes(psutil.swap_memory().total)}"
    places = {"temporary files": tempfile.gettempdir(), "current folder": "."}
    for name, place in {**places, "shared memory": "/dev/shm"}.items():
        if os.path.isdir(place):
            free = shutil.disk_usage(place)
            yield f"{name}: {format_bytes(free.free)} of {format_bytes(free.total)} free"
    for name, limit in LIMITS.items():
        soft, hard = (
            "no limit" if n == resource.RLIM_INFINITY else str(n) for n in resource.getrlimit(limit)
        )
        yield f"{name}: {soft}" + (f" (at most {hard})" if soft != hard else "")
    yield f"load: {' '.join(f'{load:.1f}' for load in os.getloadavg())}"
    yield f"in a container: {'yes' if Path('/.dockerenv').exists() else 'not seen'}"


def _settings(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in sorted(environment.items()):
        if SETTINGS.match(name) and not re.search("TOKEN|KEY|SECRET|PASS", name):
            yield f"{name}={value}"
        elif re.fullmatch("https?_proxy|all_proxy|PIP_.*|PYTHONPATH", name, re.IGNORECASE):
            yield f"{name} is set"


# -- who ----------------------------------------------------------------------------------------


def anonymous(text: str) -> str:
    """Return a text without this user's names, folders, hosts, and addresses.

    What lies in the course, in the environment or in the home folder keeps its name from there on;
    of any other path only the last part stays.
    """
    for folder, word in _folders():
        text = re.sub(rf"{re.escape(folder)}(?![\w.-])", word, text)
    text = EMAIL.sub("EMAIL", text)
    for name, word in _names():
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", word, text, flags=re.I)
    text = ADDRESS.sub(lambda found: found[0] if found[0][:4] == "127." else "ADDRESS", text)
    return FOLDERS.sub(".../", text)


def _folders() -> Sequence[tuple[str, str]]:
    """Return the folders that stay as a word, the deepest first."""
    words = {
        "COURSE": str(PACKAGE.parent),
        "ENVIRONMENT": sys.prefix,
        "PYTHON": sys.base_prefix,
        "TEMPORARY": tempfile.gettempdir(),
        "HERE": os.getcwd(),
        "HOME": os.path.expanduser("~"),
    }
    both = [(form, word) for word, it in words.items() for form in (it, os.path.realpath(it))]
    return sorted((pair for pair in both if len(pair[0]) > 1), key=lambda pair: -len(pair[0]))


def _names() -> Sequence[tuple[str, str]]:
    """Return the names of the user and of the machine, the longest first."""
    hosts = {socket.gethostname(), platform.node(), os.environ.get("HOSTNAME", "")}
    hosts |= {host.partition(".")[0] for host in hosts}
    users = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
    users.add(os.path.basename(os.path.expanduser("~")))
    try:
        entry = pwd.getpwuid(os.getuid())
        full = entry.pw_gecos.split(",")[0]
        users |= {entry.pw_name, full, *full.split()}
    except KeyError:  # a user that only the container's starter knows
        pass
    pairs = {(name, "HOST") for name in hosts if name not in ("", "localhost")}
    pairs |= {(name, "USER") for name in users}
    return sorted((pair for pair in pairs if len(pair[0]) > 1), key=lambda pair: -len(pair[0]))
