"""Devices by their data sheets: memory, bandwidth, peak FLOP/s, and links.

Every peak is dense. Data sheets of GPUs that support structured sparsity print twice that number,
"with sparsity", which training does not reach: `sparse_flop_per_s`. Notebook 01b_speed.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from course_lib.core.errors import CourseError
from course_lib.core.links import ETHERNET, INFINIBAND, NVLINK, PCIE, Link, TwoLevelLink
from course_lib.core.units import GIB

DTYPES = ("fp32", "tf32", "fp16", "bf16")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, by its data sheet.

    memory_bytes      of its own memory
    bytes_per_s       bandwidth of that memory
    peak_flop_per_s   dense peaks by dtype; a dtype that is missing has no fast path on this device
    skips_zeros       the data sheet's tensor-core peaks are twice as high, with sparsity
    links             bytes/s in one direction by name: half of the "bidirectional" of data sheets
    """

    name: str
    memory_bytes: int
    bytes_per_s: float
    peak_flop_per_s: Mapping[str, float]
    skips_zeros: bool = False
    links: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def peak(self, dtype: str = "bf16") -> float:
        """Return the dense peak in FLOP/s at a dtype, or at the fastest substitute.

        A device without bf16 computes in fp16, and one without either in fp32.

        Raises: CourseError for another dtype than fp32, tf32, fp16 and bf16
        """
        if dtype not in DTYPES:
            raise CourseError(f"peak: need one of {', '.join(DTYPES)}; got {dtype!r}.")
        order = {
            "bf16": ("bf16", "fp16", "fp32"),
            "fp16": ("fp16", "fp32"),
            "tf32": ("tf32", "fp32"),
        }
        found = next(one for one in order.get(dtype, ("fp32",)) if one in self.peak_flop_per_s)
        return self.peak_flop_per_s[found]

    def sparse_flop_per_s(self, dtype: str = "bf16") -> float:
        """Return the data sheet's peak in FLOP/s, reached only when half of the weights are zero.

        Tensor cores do not compute in fp32, so its peak stays the same.
        """
        return self.peak(dtype) * (2 if self.skips_zeros and dtype != "fp32" else 1)


# "80 GB" on a data sheet is 80 GiB less what the firmware keeps (an H100 shows 81559 MiB of 81920).
A6000 = Device(
    name="a6000",
    memory_bytes=48 * GIB,
    bytes_per_s=768e9,
    peak_flop_per_s={"fp32": 38.7e12, "tf32": 77.4e12, "fp16": 154.8e12, "bf16": 154.8e12},
    skips_zeros=True,
    links={"NVLink": 56.25e9, "PCIe 4": 32e9},
    source="NVIDIA RTX A6000 data sheet: 48 GB, 768 GB/s, 309.7 TFLOPS with sparsity",
)
RTX_2080_TI = Device(
    name="rtx2080ti",
    memory_bytes=11 * GIB,
    bytes_per_s=616e9,
    peak_flop_per_s={"fp32": 13.4e12, "fp16": 53.8e12},
    links={"NVLink": 50e9, "PCIe 3": 16e9},
    source="NVIDIA Turing architecture white paper, appendix: 616 GB/s, 53.8 TFLOPS fp16 with "
    "fp32 accumulation (107.6 with fp16 accumulation)",
)
V100 = Device(
    name="v100",
    memory_bytes=32 * GIB,
    bytes_per_s=900e9,
    peak_flop_per_s={"fp32": 15.7e12, "fp16": 125e12},
    links={"NVLink": 150e9, "PCIe 3": 16e9},
    source="NVIDIA V100 data sheet, SXM2: 32 GB, 900 GB/s, 15.7 TFLOPS fp32, 125 TFLOPS tensor, "
    "NVLink 300 GB/s",
)
_A100_SHEET = "NVIDIA A100 data sheet: 312 TFLOPS bf16, 624 with sparsity, NVLink 600 GB/s"
A100_40 = Device(
    name="a100-40",
    memory_bytes=40 * GIB,
    bytes_per_s=1555e9,
    peak_flop_per_s={"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
    skips_zeros=True,
    links={"NVLink": 300e9, "PCIe 4": 32e9, "InfiniBand HDR": 25e9},
    source=f"{_A100_SHEET}; SXM, 40 GB, 1555 GB/s",
)
A100_80 = replace(
    A100_40,
    name="a100-80",
    memory_bytes=80 * GIB,
    bytes_per_s=2039e9,
    source=f"{_A100_SHEET}; SXM, 80 GB, 2039 GB/s; DGX A100: one 200 Gb/s adapter per GPU",
)
_H100_SHEET = (
    "1,979 TFLOPS bf16 and 989 tf32 with sparsity, NVLink 900 GB/s; DGX: one 400 Gb/s adapter per "
    "GPU"
)
H100 = Device(
    name="h100",
    memory_bytes=80 * GIB,
    bytes_per_s=3.35e12,
    peak_flop_per_s={"fp32": 67e12, "tf32": 494.5e12, "fp16": 989.5e12, "bf16": 989.5e12},
    skips_zeros=True,
    links={"NVLink": 450e9, "PCIe 5": 64e9, "InfiniBand NDR": 50e9},
    source=f"NVIDIA H100 data sheet, SXM: 80 GB, 3.35 TB/s, {_H100_SHEET}",
)
H200 = replace(
    H100,
    name="h200",
    memory_bytes=141 * GIB,
    bytes_per_s=4.8e12,
    source=f"NVIDIA H200 data sheet, SXM: 141 GB, 4.8 TB/s, {_H100_SHEET}",
)
B200 = Device(
    name="b200",
    memory_bytes=180 * GIB,
    bytes_per_s=8e12,
    peak_flop_per_s={"fp32": 75e12, "tf32": 1.125e15, "fp16": 2.25e15, "bf16": 2.25e15},
    skips_zeros=True,
    links={"NVLink": 900e9, "PCIe 5": 64e9, "InfiniBand NDR": 50e9},
    source="NVIDIA DGX B200 data sheet, divided by its 8 GPUs: 1,440 GB, 64 TB/s, NVLink 14.4 TB/s,"
    " one 400 Gb/s adapter per GPU; HGX B200: 36 PFLOPS bf16 and 18 tf32 with sparsity, 600 TFLOPS"
    " fp32",
)
GB200 = Device(
    name="gb200",
    memory_bytes=186 * GIB,
    bytes_per_s=8e12,
    peak_flop_per_s={"fp32": 80e12, "tf32": 1.25e15, "fp16": 2.5e15, "bf16": 2.5e15},
    skips_zeros=True,
    links={"NVLink": 900e9, "NVLink-C2C": 450e9, "InfiniBand NDR": 50e9},
    source="NVIDIA GB200 NVL72 data sheet, divided by its 72 GPUs: 13.4 TB, 576 TB/s, NVLink "
    "130 TB/s, 360 PFLOPS bf16 and 180 tf32 with sparsity, 5,760 TFLOPS fp32; one 400 Gb/s adapter "
    "per GPU",
)
LAPTOP = Device(
    name="laptop",
    memory_bytes=16 * GIB,
    bytes_per_s=50e9,
    peak_flop_per_s={"fp32": 200e9},
    source="a round figure: 4 cores at 3 GHz, 8 fp32 multiply-adds a cycle, two memory channels",
)

DEVICES = {
    device.name: device
    for device in (LAPTOP, RTX_2080_TI, V100, A6000, A100_40, A100_80, H100, H200, B200, GB200)
}


def nodes_of(device: Device, gpus: int = 8, adapters: int = 0) -> TwoLevelLink:
    """Return the links of nodes of that many of these GPUs: NVLink where the data sheet has it.

    adapters    of a node, as fast as the data sheet's InfiniBand. Default: one per GPU, as in DGX
    """
    rates = {name.split()[0]: rate for name, rate in device.links.items()}
    return TwoLevelLink(
        inside=replace(NVLINK, bytes_per_s=rates["NVLink"]) if "NVLink" in rates else PCIE,
        outside=replace(INFINIBAND, bytes_per_s=rates.get("InfiniBand", INFINIBAND.bytes_per_s)),
        ranks_per_node=gpus,
        adapters=adapters or gpus,
    )


def links_of_rings(device: Device) -> dict[str, Link]:
    """Return by name the links that a ring over these GPUs can have, from fast to slow."""
    nodes = nodes_of(device)
    return {
        "NVLink": nodes.inside,
        "InfiniBand, 8 adapters": nodes.ring(range(2 * nodes.ranks_per_node)),
        "InfiniBand, 1 adapter": nodes.outside,
        "Ethernet": ETHERNET,
    }


def find_device(name: str) -> Device:
    """Return the device of that name.

    Raises: CourseError that names the most similar ones
    """
    if name not in DEVICES:
        near = difflib.get_close_matches(name.lower(), DEVICES, n=2, cutoff=0.4)
        raise CourseError(
            f"gpu: need one of {', '.join(DEVICES)}; got {name!r}."
            + (f" Try {' or '.join(near)}." if near else "")
        )
    return DEVICES[name]
