"""Pictures say where ranks have measured, and draw a laptop's points beside a cluster's."""

import json
from types import SimpleNamespace

import pytest
from matplotlib.text import Text

from course_lib.core import default_place as module
from course_lib.core.default_place import DefaultPlace, default_place, resolve
from course_lib.core.errors import CourseError
from course_lib.core.links import Link
from course_lib.display import on_ranks
from course_lib.display.claim import claim
from course_lib.display.compare import Voices
from course_lib.display.on_ranks import compare_on_ranks, measured_over

WIRE, AXES = Link(latency_s=1e-3, bytes_per_s=1e7), {"x_label": "x", "y_label": "time (s)"}
CURVES = {"ours": Voices(measurement=[[3.0, 2.0], [5.0, 9.0]])}


@pytest.fixture
def place(monkeypatch):
    """Begin a kernel with this COURSE_RANKS; its allocation has 2 nodes that use gloo."""

    def begin(text: str) -> SimpleNamespace:
        monkeypatch.setenv(module.PLACE, text)
        module._first.cache_clear()
        allocation = SimpleNamespace(nodes=2, backends={"gloo"})
        asked: list[tuple] = []
        shared = SimpleNamespace(
            allocate=lambda *words, **more: asked.append((*words, more)) or allocation
        )
        monkeypatch.setattr(module, "import_module", lambda _: shared)
        return SimpleNamespace(allocation=allocation, asked=asked)

    yield begin
    module._first.cache_clear()


def words_of(figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("slurm", ("slurm", {"nodes": None, "hosts": ()})),
        ("slurm:3", ("slurm", {"nodes": 3, "hosts": ()})),
        ("ssh:a,b", ("ssh", {"nodes": 2, "hosts": ("a", "b")})),
    ],
)
def test_all_pools_of_a_kernel_share_one_allocation(place, text, asked):
    kernel = place(text)
    assert [resolve(p, None, None) for p in (2, 4)] == [(None, kernel.allocation)] * 2
    assert kernel.asked == [asked]


def test_here_means_here_and_a_named_cluster_is_left_alone(place):
    kernel = place("slurm")
    assert resolve(2, WIRE, "laptop") == (WIRE, None)
    assert resolve(2, None, "ssh") == (None, "ssh")
    assert not kernel.asked


def test_no_link_is_emulated_on_an_allocation_and_one_line_says_so(place, capsys):
    kernel = place("slurm")
    assert resolve(2, WIRE, None) == (None, kernel.allocation)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "Ranks(2)" in said
    assert "cluster (2 nodes, gloo)" in said
    assert str(WIRE) in said


@pytest.mark.parametrize("text", ["Slurm", "slurm:0", "ssh", "ssh:-oProxyCommand=x", "slurm:2:3"])
def test_a_place_that_does_not_exist_is_refused(text):
    with pytest.raises(CourseError, match="COURSE_RANKS: need laptop"):
        DefaultPlace(text)


def test_a_kernel_keeps_its_place(place, monkeypatch):
    place("slurm")
    assert default_place().is_cluster
    monkeypatch.setenv(module.PLACE, "laptop")
    with pytest.raises(CourseError, match=r"got laptop after slurm.*restart the kernel"):
        default_place()


def test_a_cluster_is_drawn_beside_the_laptop(place, monkeypatch, tmp_path):
    place("laptop")
    path = tmp_path / "laptop.json"
    monkeypatch.setenv(on_ranks.KEEP, str(path))
    at_home = compare_on_ranks("one", [1, 2], CURVES, "t", **AXES)
    assert "cluster" not in words_of(at_home)
    slower = {"ours": Voices(measurement=[[2.5], [4.0]])}
    compare_on_ranks("one", [1, 2], slower, "t", **AXES)
    assert json.loads(path.read_text()) == {"one": {"ours": [[1.0, 2.0], [2.0, 4.0]]}}

    monkeypatch.setattr(on_ranks, "_laptops", lambda: json.loads(path.read_text()))
    place("slurm")
    there = compare_on_ranks("one", [1, 2], {"ours": Voices(measurement=[7.0, 8.0])}, "t", **AXES)
    drawn = {tuple(line.get_ydata()) for line in there.axes[0].lines}
    assert {(7.0, 8.0), (2.0, 4.0)} <= drawn
    assert {"cluster (2 nodes, gloo)", on_ranks.LAPTOPS} <= set(words_of(there).split("\n"))
    assert "over its real link" in words_of(there)
    assert json.loads(path.read_text())["one"]["ours"][1] == [2.0, 4.0]  # only a laptop's are kept


def test_timelines_and_claims_say_that_the_link_is_real(place, capsys, monkeypatch):
    place("laptop")
    assert measured_over(WIRE) is WIRE
    place("slurm")
    assert measured_over(WIRE) == (
        f"measured on cluster (2 nodes, gloo), over its real link; predictions are for {WIRE}"
    )
    monkeypatch.delenv("COURSE_CLAIMS", raising=False)
    claim("ours is faster", False)
    assert "On cluster (2 nodes, gloo)" in capsys.readouterr().out
