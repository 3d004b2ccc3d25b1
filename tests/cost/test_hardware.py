"""The table of real machines: dense peaks, links in one direction, and presets that are a row."""

from dataclasses import replace

import pytest

from course_lib.core import INFINIBAND, NVLINK, CourseError, Link, TwoLevelLink
from course_lib.cost.hardware import A100_80, DEVICES, H100, nodes_of


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


@pytest.mark.parametrize(
    ("ranks", "adapters", "gb_per_s"),
    [
        (range(8), 8, 450),  # one node: NVLink
        (range(64), 8, 400),  # whole nodes: a ring through each adapter
        (range(64), 2, 100),
        (range(0, 64, 8), 8, 50),  # one GPU per node has one adapter
        (range(0, 64, 4), 8, 100),
        (range(0, 64, 8), 1, 6.25),  # the eight groups of a node share its adapter
        (range(12), 8, 200),  # the node with the fewest ranks has the fewest rings
    ],
)
def test_a_ring_between_nodes_uses_as_many_adapters_as_it_has_ranks_on_a_node(
    ranks, adapters, gb_per_s
):
    ring = nodes_of(H100, adapters=adapters).ring(ranks)
    assert ring.bytes_per_s == gb_per_s * 1e9


def test_an_emulated_ring_is_one_ring_and_never_faster_than_its_nodes():
    fast, slow = (Link(latency_s=1e-3, bytes_per_s=rate) for rate in (9e6, 4e6))
    two = TwoLevelLink(inside=fast, outside=slow, ranks_per_node=4)
    assert two.ring(range(8)).bytes_per_s == 4e6
    assert replace(two, adapters=4).ring(range(8)).bytes_per_s == 9e6
    with pytest.raises(CourseError, match="need adapters >= 0; got -1"):
        replace(two, adapters=-1)
