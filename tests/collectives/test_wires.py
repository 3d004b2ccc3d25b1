"""The pictures of lesson 04: what they say is what the formulas and the published values give."""

import pytest
import torch

from course_lib.collectives import lab, ring_all_reduce
from course_lib.collectives.live import winners
from course_lib.core import Link, TwoLevelLink
from course_lib.cost import network
from course_lib.display import wires

LINK = Link(latency_s=3e-6, bytes_per_s=450e9)


def test_the_table_counts_messages_bytes_and_the_busiest_wire():
    head, ring, doubling, halving = wires.costs_table(8).splitlines()
    assert head.startswith("8 ranks")
    assert ring.split() == ["ring", "14", "1.75", "n", "1.75", "n"]
    assert doubling.split() == ["doubling", "3", "3", "n", "7", "n"]
    assert halving.split() == ["halving-doubling", "6", "1.75", "n", "3", "n"]


@pytest.mark.parametrize("p", [4, 8, 64])
def test_doubling_is_fastest_first_then_halving_doubling(p):
    (_, first), (size, second) = winners(p, LINK)
    assert (first, second) == ("doubling", "halving-doubling")
    exact = network.crossover_bytes(p, LINK, network.halving_doubling_all_reduce_s)
    assert size == pytest.approx(exact, rel=0.03)


def test_where_p_is_no_power_of_two_the_ring_is_fastest_for_large_tensors():
    assert [name for _, name in winners(2, LINK)] == ["doubling"]
    assert [name for _, name in winners(6, LINK)] == ["doubling", "ring"]


def test_the_explorer_starts_from_nvlink_inside_a_node():
    explorer = wires.explore_all_reduces()
    assert explorer.values()["gb_per_s"] == 450
    assert explorer.alt.startswith("8 ranks: doubling is fastest for small tensors, halving-doub")
    explorer.sliders["p"].value = 3
    assert "ring from" in explorer.alt


def words(figure):
    texts = figure.findobj(match=lambda one: hasattr(one, "get_text"))
    return " ".join(text.get_text() for text in texts).replace("\n", " ")


def test_steppers_show_every_step():
    assert len(wires.reduce_scatter_steps(4).frames) == 3 + 1
    steps = wires.halving_doubling_steps(8)
    assert len(steps.frames) == 6 + 1
    assert "3 rounds halve and add, 3 rounds send" in steps.title


def test_all_reduces_say_from_where_halving_doubling_is_fastest():
    times_s = {name: [[1e-3, 2e-3]] * 2 for name in wires.COSTS}
    wire = Link(name="slow wire", latency_s=10e-3, bytes_per_s=20e6)
    for measured in (times_s, None):
        figure, finding = wires.all_reduces([1000, 10**6], 4, wire, measured)
        assert finding.endswith("halving-doubling from 0.8 MB on, on 4 ranks")
        assert {"ring", "doubling", "halving-doubling"} <= set(words(figure).split())
        assert ("emulated" in words(figure)) == (measured is not None)


def test_two_levels_compare_the_fastest_calls_of_the_largest_size():
    link = TwoLevelLink(inside=LINK, outside=LINK, ranks_per_node=2)
    times_s = {"ring": [[1.0], [6.0, 8.0]], "hierarchical": [[1.0], [5.0, 2.0]]}
    figure, finding = wires.two_levels([1024, 2**20], 4, link, times_s)
    assert (
        finding
        == "At 1 MiB, two levels are 3.0 times as fast as a flat ring, on 2 nodes of 2 ranks"
    )
    assert "hierarchical" in words(figure)
    _, finding = wires.two_levels([1024, 2**20], 4, link)
    assert finding.startswith("By the formula, two levels are 1.")


def test_the_ring_on_this_machine_tells_medians_and_fastest_calls():
    times_s = {"our ring": [[1.0, 2.0, 9.0], [6.0, 9.0, 12.0]], "gloo": [[1.0], [2.0]]}
    figure, finding = wires.ring_on_this_machine([1024, 2048], times_s, [1.0, 3.0])
    assert "median times are 2.0 to 3.0 times" in finding
    assert "fastest calls 1.0 to 2.0 times" in finding
    assert "prediction, from the fastest exchanges" in words(figure)


def test_one_alpha_and_one_beta_are_near_every_published_size():
    figure, finding = wires.published_by_size()
    worst = float(finding.split("factor of ")[1].split()[0])
    assert 1 < worst < 2
    assert "482 GB/s on 8 H200" in finding
    assert "Bekman" in " ".join(text.get_text() for text in figure.texts)


def test_over_many_nodes_the_published_bandwidth_falls_like_a_ring():
    figure, finding = wires.published_by_nodes()
    assert finding.startswith("Bandwidth on 64 nodes is 1/13 of that on one")
    assert "from 436 to 33 GB/s" in finding
    assert "Ultra-Scale Playbook" in words(figure)
    assert "256MB as 2^28 bytes" in words(figure)


def test_a_race_times_every_rival_and_size(pools):
    def twice(x: torch.Tensor) -> None:
        for _ in range(2):
            ring_all_reduce(x)

    found = lab.race(pools(2), {"once": ring_all_reduce, "twice": twice}, [8, 4096], times=3)
    assert list(found) == ["once", "twice"]
    for by_size in found.values():
        assert [len(times_s) for times_s in by_size] == [3, 3]
        assert min(min(times_s) for times_s in by_size) > 0
