"""The pictures of lesson 04: what they say is what the formulas and the published values give."""

import pytest
import torch

from course_lib.collectives import lab, ring_all_reduce
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
    (_, first), (size, second) = wires.winners(p, LINK)
    assert (first, second) == ("doubling", "halving-doubling")
    exact = network.crossover_bytes(p, LINK, network.halving_doubling_all_reduce_s)
    assert size == pytest.approx(exact, rel=0.03)


def test_where_p_is_no_power_of_two_the_ring_is_fastest_for_large_tensors():
    assert [name for _, name in wires.winners(2, LINK)] == ["doubling"]
    assert [name for _, name in wires.winners(6, LINK)] == ["doubling", "ring"]


def test_the_explorer_starts_from_nvlink_inside_a_node():
    explorer = wires.explore_all_reduces()
    assert explorer.values()["gb_per_s"] == 450
    assert explorer.alt.startswith("8 ranks: doubling is fastest for small tensors, halving-doub")
    explorer.sliders["p"].value = 3
    assert "ring from" in explorer.alt


def test_all_reduces_draws_every_rival_over_its_link():
    link = TwoLevelLink(inside=LINK, outside=LINK, ranks_per_node=2)
    times_s = {"ring": [[1e-3, 2e-3]] * 2, "hierarchical": [[1e-3]] * 2}
    figure = wires.all_reduces(times_s, [1000, 10**6], 4, link, "The finding")
    words = {text.get_text() for text in figure.findobj(match=lambda one: hasattr(one, "get_text"))}
    assert {"ring", "hierarchical", "The finding"} <= words


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
    assert "Ultra-Scale Playbook" in " ".join(text.get_text() for text in figure.texts)


def test_a_race_times_every_rival_and_size(pools):
    def twice(x: torch.Tensor) -> None:
        for _ in range(2):
            ring_all_reduce(x)

    found = lab.race(pools(2), {"once": ring_all_reduce, "twice": twice}, [8, 4096], times=3)
    assert list(found) == ["once", "twice"]
    for by_size in found.values():
        assert [len(times_s) for times_s in by_size] == [3, 3]
        assert min(min(times_s) for times_s in by_size) > 0
