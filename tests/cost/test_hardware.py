"""The table of real machines: dense peaks, links in one direction, and presets that are a row."""

import pytest

from course_lib.core import INFINIBAND, NVLINK
from course_lib.cost.hardware import A100_80, DEVICES


@pytest.mark.parametrize("name", ["a6000", "a100-80", "h100", "h200", "b200"])
def test_a_real_machine_has_its_memory_peak_links_and_source(name):
    device = DEVICES[name]
    assert {kind.split()[0] for kind in device.links} >= {"NVLink", "PCIe"}
    assert device.sparse_flop_per_s("bf16") == 2 * device.peak("bf16")
    assert min(device.memory_bytes, device.bytes_per_s, *device.links.values()) > 0
    assert "NVIDIA" in device.source


def test_links_are_counted_in_one_direction():
    """Data sheets print the sum of both: 600, 900, 900 and 1,800 GB/s of NVLink."""
    names = ("a100-80", "h100", "h200", "b200", "gb200")
    assert [DEVICES[name].links["NVLink"] for name in names] == [300e9, 450e9, 450e9, 900e9, 900e9]
    adapters = [max(v for k, v in DEVICES[n].links.items() if "Infini" in k) for n in names]
    assert adapters == [25e9, 50e9, 50e9, 50e9, 50e9]


def test_the_presets_are_the_links_of_one_machine():
    assert NVLINK.bytes_per_s == A100_80.links["NVLink"]
    assert INFINIBAND.bytes_per_s == A100_80.links["InfiniBand HDR"]
