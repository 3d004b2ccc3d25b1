"""Machines for the cost model: speed, memory and links of a rank.

Speeds are those of data sheets times the share of them that training reaches, which a run of one
rank corrects as soon as there is one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.links import PCIE, Link
from course_lib.core.plain_values import build
from course_lib.core.units import GIB
from course_lib.cost.hardware import DEVICES, LAPTOP, Device, find_device, nodes_of
from course_lib.cost.network import AnyLink
from course_lib.jobs.profile import Profile

REACHED = 0.4  # of the peak, by large models; small ones reach less
LAPTOP_CORES = 4  # that LAPTOP's peak and bandwidth are of
LOOPBACK = Link(name="gloo on one machine", latency_s=300e-6, bytes_per_s=1e9)
DTYPES = {"float32": "fp32", "float64": "fp32", "bfloat16": "bf16"}
DESCRIBED: dict[str, Any] = {
    "cores": int,
    "usable_cores": float,
    "memory_bytes": int,
    "torch": str,
    "usable_gpus": int,
    "gpus": list[dict[str, Any]],
    "gpu_links": list[list[str]],
}
HOST_BYTES_PER_S = 50e9


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The kind of device that each rank has, and the links between ranks.

    cores     that the ranks share where there are no GPUs; None: a GPU each
    reached   the share of the device's peak that computing reaches
    """

    device: Device
    link: AnyLink
    cores: float | None = None
    reached: float = REACHED

    @property
    def has_gpus(self) -> bool:
        """Whether a rank has a GPU."""
        return self.cores is None

    @property
    def words(self) -> str:
        """A short description, for people."""
        return self.device.name if self.cores is None else f"{self.cores:g} CPU cores"

    def is_full(self, ranks: int) -> bool:
        """Return whether that many ranks leave no CPU core for communication."""
        return self.cores is not None and 1 < ranks >= self.cores

    def flop_per_s(self, dtype: str, ranks: int) -> float:
        """Return the FLOP per second of a rank when that many of them run."""
        peak = self.device.peak(DTYPES[dtype]) / (1 if self.cores is None else LAPTOP_CORES)
        return self.reached * peak * self._share(ranks)

    def bytes_per_s(self, ranks: int) -> float:
        """Return the memory bandwidth of a rank when that many of them run."""
        return self.device.bytes_per_s / (1 if self.cores is None else max(ranks, 1))

    def rank_bytes(self, ranks: int) -> int:
        """Return the memory of a rank: its GPU's, or its share of the machine's."""
        return self.device.memory_bytes // (1 if self.cores is None else ranks)

    def start_s(self, ranks: int) -> float:
        """Return the seconds until ranks have started; on a cluster each loads PyTorch first."""
        return 30.0 if self.cores is None else 2.0 * max(1.0, ranks / self.cores)

    def link_between_copies(self, copies: int, one_copy: int) -> Link:
        """Return the link of rings over copies of the model, each of that many ranks."""
        return self.link.ring(range(0, copies * one_copy, one_copy))

    @property
    def host_bytes_per_s(self) -> float:
        """Return the bandwidth of the host's memory for the optimizer."""
        return HOST_BYTES_PER_S

    @property
    def host_link_bytes_per_s(self) -> float:
        """Bandwidth between a GPU and its host's memory; of a copy where they are the same."""
        return PCIE.bytes_per_s if self.has_gpus else self.device.bytes_per_s / 2

    def _share(self, ranks: int) -> float:
        return 1.0 if self.cores is None else min(1.0, self.cores / ranks)


def machine_of_profile(profile: Profile, here: Mapping[str, Any]) -> Machine:
    """Return the machine of a profile's jobs; of a local profile, `here`."""
    if profile.scheduler == "local":
        return machine_of_record(here, 1)
    if not profile.gpus_per_node:
        return _cpu(here["usable_cores"], here["memory_bytes"])
    name = next((name for name in DEVICES if name == profile.gpu_type.lower()), "")
    device = find_device(name or profile.gpu_type.lower() or "a100-80")
    return Machine(device=device, link=nodes_of(device, profile.gpus_per_node))


def check_machine(machine: Mapping[str, Any]) -> None:
    """Check a record's description of its machine. Raises: CourseError for a value of no machine"""
    build(dict[str, Any], machine, "machine")
    for name, kind in DESCRIBED.items():
        if name in machine:
            build(kind, machine[name], f"machine.{name}")
    for name in ("cores", "usable_cores", "memory_bytes"):
        if not machine.get(name, 1) > 0:
            raise CourseError(f"machine.{name}: need more than 0; got {machine[name]}.")
    for gpu in machine.get("gpus", ()):
        build(str, gpu.get("name"), "machine.gpus, name")


def machine_of_record(machine: Mapping[str, Any], ranks: int) -> Machine:
    """Return the machine on which a record was made, from its own description."""
    gpus = machine.get("gpus") or []
    if not machine.get("usable_gpus") or len(gpus) == 0:
        return _cpu(machine.get("usable_cores", 1), machine.get("memory_bytes", 16 * GIB))
    words = gpus[0]["name"].lower().replace(" ", "").replace("-", "")
    names = sorted(DEVICES, key=len, reverse=True)
    name = next((name for name in names if name.replace("-", "") in words), "")
    name = name or next((name for name in names if name.split("-")[0] in words), "a100-80")
    device = find_device(name)
    links = {kind for row in machine.get("gpu_links", []) for kind in row}
    if not any(kind.startswith("NV") for kind in links):
        device = replace(
            device, links={name: device.links[name] for name in device.links if name != "NVLink"}
        )
    return Machine(device=device, link=nodes_of(device, len(gpus)))


def with_link(machine: Machine, links: Mapping[int, Link], ranks: int) -> Machine:
    """Return the machine with the link measured between that many ranks, where there is one."""
    return replace(machine, link=links[ranks]) if ranks in links else machine


def _cpu(cores: float, memory_bytes: int) -> Machine:
    device = Device(
        name="cpu",
        memory_bytes=memory_bytes,
        bytes_per_s=LAPTOP.bytes_per_s,
        peak_flop_per_s=LAPTOP.peak_flop_per_s,
    )
    return Machine(device=device, link=LOOPBACK, cores=cores)
