"""Bus bandwidth by nccl-tests' convention: from its output, and measured on ranks."""

import pytest
from typer.testing import CliRunner

from course_lib.cli.commands import app
from course_lib.core import CourseError
from course_lib.debugging import link_report
from course_lib.debugging.link_report import measure_all_reduce, read_nccl_tests

HEAD = "# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor)\n# Using devices\n"
RANKS = "".join(
    f"#  Rank {rank:2} Group  0 Pid 17{rank} on  node1 device  {rank} [0x1b] NVIDIA H100\n"
    for rank in range(8)
)


def row(size, us, factor, redop="sum", root=-1, wrong=0):
    rate = size / us / 1e3
    cells = f"{size} {size // 4} float {redop} {root} {us} {rate:.2f} {rate * factor:.2f} {wrong}"
    return "    ".join(f"{cells} {us} {rate:.2f} {rate * factor:.2f} 0".split()) + "\n"


def output(factor=1.75, ranks=RANKS, **more):
    """Times of a link: 2 (p - 1) messages of n / 8 bytes, 5 us and 400 GB/s each."""
    sizes = [2**n for n in range(10, 31, 2)]
    rows = (row(n, round(14 * (5 + n / 8 / 4e5), 2), factor, **more) for n in sizes)
    return HEAD + ranks + "".join(rows) + "# Avg bus bandwidth    : 123.4\n"


def test_output_of_nccl_tests_is_read(tmp_path):
    (tmp_path / "links.txt").write_text(output())
    done = CliRunner().invoke(app, ["links", str(tmp_path / "links.txt"), "--link", "900"])
    assert done.exit_code == 0, done.output
    assert "all_reduce of 8 ranks (nccl-tests, out of place)" in done.output
    assert "Largest bus bandwidth: 394 GB/s at 1 GiB" in done.output
    assert "Fitted to a ring's messages: 5 us and 400 GB/s" in done.output
    assert "That is 44 % of a link of 900 GB/s" in done.output
    assert "Less than half of the link" in done.output


@pytest.mark.parametrize(
    ("factor", "more", "kind"),
    [
        (1.75, {}, "all_reduce"),
        (0.875, {}, "reduce_scatter"),
        (0.875, {"redop": "none"}, "all_gather"),
        (1.0, {"redop": "none", "root": 0}, "broadcast"),
        (1.0, {"root": 0}, "reduce"),
    ],
)
def test_the_columns_tell_the_collective_and_its_bus_bandwidth(factor, more, kind, tmp_path):
    (tmp_path / "links.txt").write_text(output(factor, **more))
    found = read_nccl_tests(tmp_path / "links.txt")
    assert found.kind == kind
    size = 2**30
    assert found.bus_bandwidths()[size] == pytest.approx(size / found.times_s[size] * factor)


def test_wrong_values_are_told(tmp_path):
    (tmp_path / "links.txt").write_text(output(wrong=3))
    assert "33 values are wrong" in "\n".join(read_nccl_tests(tmp_path / "links.txt").lines())


@pytest.mark.parametrize("text", ["", "hello\n", HEAD + RANKS, output(ranks="")])
def test_another_text_is_one_sentence(text, tmp_path):
    (tmp_path / "links.txt").write_text(text)
    with pytest.raises(CourseError, match="need what a program of nccl-tests prints"):
        read_nccl_tests(tmp_path / "links.txt")


def test_ranks_of_this_machine_are_measured(monkeypatch):
    monkeypatch.setattr(link_report, "SIZES", (2**10, 2**12))
    monkeypatch.setattr(link_report, "TURNS", 1)
    with pytest.raises(CourseError, match="need two or more"):
        measure_all_reduce(1)
    assert "all_reduce of 2 ranks (measured here)" in "\n".join(measure_all_reduce(2).lines())
