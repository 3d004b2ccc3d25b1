"""Pictures of split matrices: each rank has an equal shard, and bad input is named."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from course_lib.core import MODELS, CourseError, Link
from course_lib.core.records import Event
from course_lib.display.colours import RANK, WHITE
from course_lib.tensor_parallel.cost import h100_scaling, kept_layer_bytes
from course_lib.tensor_parallel.explorer import degree_explorer
from course_lib.tensor_parallel.lab import OverlapRuns
from course_lib.tensor_parallel.live import computing_percent
from course_lib.tensor_parallel.pictures import (
    Matrix,
    f_and_g,
    h100_picture,
    layer_memory,
    matrices,
    overlapped_backward,
    sequence_region,
    split_mlp,
    width_picture,
)


def boxes(figure):
    """(colour, width, height) of every piece, in the order in which they are drawn."""
    (axes,) = figure.axes
    patches = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return [(to_hex(p.get_facecolor()).upper(), p.get_width(), p.get_height()) for p in patches]


def title_of(figure):
    return " ".join(figure.texts[0].get_text().split())


def drawn(split, ranks=4):
    return boxes(matrices([Matrix(name="A", height=2, width=4, split=split)], "t", ranks=ranks))


def test_a_whole_matrix_is_white():
    assert [colour for colour, _, _ in drawn("")] == [WHITE]


@pytest.mark.parametrize(("split", "shape"), [("columns", 4 / 4 / 2), ("rows", 4 / (2 / 4))])
def test_every_rank_has_an_equal_piece_in_its_colour(split, shape):
    pieces = drawn(split)
    assert [colour for colour, _, _ in pieces] == list(RANK[:4])
    assert [width / height for _, width, height in pieces] == pytest.approx([shape] * 4)


def test_parts_of_a_sum_are_sheets_of_full_size_and_rank_0_lies_on_top():
    (whole,) = boxes(matrices([Matrix(name="A", height=2, width=4)], "t", ranks=3))
    sheets = drawn("sum", 3)
    assert [colour for colour, _, _ in sheets] == list(RANK[2::-1])
    assert {(width, height) for _, width, height in sheets} == {whole[1:]}


def test_all_matrices_of_a_row_share_one_scale_and_fit_the_page():
    row = [Matrix(name="X", height=3, width=2), "×", Matrix(name="A", height=2, width=30)]
    figure = matrices(row, "t", ranks=2)
    (_, x_wide, x_tall), (_, a_wide, a_tall) = boxes(figure)
    assert x_wide / a_wide == pytest.approx(2 / 30)
    assert x_tall / a_tall == pytest.approx(3 / 2)
    assert x_wide + a_wide < figure.get_figwidth()
    assert {"×", "X", "A", "whole on every rank"} <= {t.get_text() for t in figure.axes[0].texts}


def test_the_cuts_of_an_mlp_fit_each_other():
    pieces = boxes(split_mlp(3)[0])
    assert [colour for colour, _, _ in pieces] == [WHITE, *3 * RANK[:3], *RANK[2::-1]]
    columns_of_a, rows_of_b = pieces[1], pieces[7]
    assert columns_of_a[1] == pytest.approx(rows_of_b[2])


def test_between_regions_each_rank_has_its_own_tokens():
    colours = [colour for colour, _, _ in boxes(sequence_region(3)[0])]
    tokens = list(RANK[:3])
    assert colours == [*tokens, WHITE, *tokens, *RANK[2::-1], *tokens]


def test_a_roofline_for_each_link_and_stars_for_published_runs():
    figure, alt = width_picture()
    assert "h = 3,420 (NVLink) or 24,050 (PCIe 5)" in alt
    (axes,) = figure.axes
    *roofs, models = sorted(axes.lines, key=lambda line: line.get_linestyle() == "None")
    at_8 = [line.get_ydata()[list(line.get_xdata()).index(8)] for line in roofs]
    assert at_8 == pytest.approx([3420, 24050, 30784], abs=1)
    assert list(models.get_ydata()) == [6144, 8192, 12288, 18432, *[3072] * 5]
    assert [star.get_text() for star in axes.texts] == ["16B", "70B", "177B", "462B", *["3B"] * 5]


def test_one_rank_sums_in_g_forward_and_in_f_backward():
    figure, alt = f_and_g()
    assert alt.startswith(title_of(figure))
    words = [text.get_text() for text in figure.axes[0].texts]
    sums = words.index("g: all-reduce"), words.index("f: all-reduce")
    assert sums[0] < words.index("backward pass on rank r") < sums[1]


def test_overlap_is_told_as_measured_and_as_predicted():
    def backward(end_s):
        spans = ("backward", 0.0, end_s), ("all_reduce", 0.1, 0.2)
        return [Event(rank=0, kind=kind, start_s=start, end_s=end) for kind, start, end in spans]

    runs = OverlapRuns({"plain": backward(0.5), "overlapped": backward(0.4)}, 0.12)
    figure, alt = overlapped_backward(runs, Link(latency_s=1e-3, bytes_per_s=1e8))
    assert title_of(figure) == "Overlap saves 100 ms in two MLPs; predicted 120 ms"
    assert alt.startswith(title_of(figure))


def test_the_memory_of_a_layer_is_the_measured_one_beside_the_formula():
    spec, whole = MODELS["tiny"], {"plain": 10, "again": 0}
    sizes = {name: {p: 2**10 * 60 // p for p in (1, 2, 4)} for name in whole}
    figure, alt = layer_memory(spec, 2, 64, whole, sizes)
    assert alt == "On 4 ranks a layer keeps 15 KiB (plain), or 15 KiB (again)"
    at = {p: kept_layer_bytes(spec, 2, 64, p, 10) for p in (1, 2)}
    assert at[1] == kept_layer_bytes(spec, 2, 64, 1, 0) == 2 * kept_layer_bytes(spec, 2, 64, 2, 0)
    assert at[2] - at[1] / 2 == 5 * 2 * 64 * spec.hidden
    curves = [line.get_ydata()[0] * 2**10 for line in figure.axes[0].lines]
    assert any(first == pytest.approx(at[1]) for first in curves)


def test_bad_input_is_one_sentence():
    with pytest.raises(CourseError, match=r"split as one of .*'columns'.*got .*'column'"):
        Matrix(name="A", height=1, width=1, split="column")
    with pytest.raises(CourseError, match="need sizes above 0"):
        Matrix(name="A", height=0, width=1)
    with pytest.raises(CourseError, match="need a matrix and a rank; got 0 and 4"):
        matrices(["×"], "t", ranks=4)


def test_the_formula_fits_published_runs_inside_a_node_and_says_too_much_beyond_it():
    found = h100_scaling()
    assert found.ranks == [2, 4, 8, 16, 32]
    assert found.formula[0] == pytest.approx(found.published[0])  # fitted there
    for p in (4, 8):
        at = found.ranks.index(p)
        assert found.formula[at] == pytest.approx(found.published[at], rel=0.04)
    published, formula = found.kept(8, 16)
    assert published == pytest.approx(0.573, abs=0.001)
    assert published < formula < 0.8
    assert len(found.sequence_parallel) == 5
    figure, alt = h100_picture(found)
    assert "keeps 57 % of its speed" in title_of(figure)
    assert alt.endswith("within 3 %")
    assert any("Ultra-Scale Playbook" in text.get_text() for text in figure.texts)


def test_more_ranks_compute_less_of_the_time_and_more_sequences_more_of_it():
    at = {"model": "llama-8b", "seq": 2048, "adapters": 8}
    one = [computing_percent(**at, p=p, batch=1) for p in (1, 2, 4, 8, 16, 32)]
    assert one[0] == 100
    assert one == sorted(one, reverse=True)
    assert computing_percent(**at, p=8, batch=8) > one[3]
    assert computing_percent(**{**at, "adapters": 1}, p=16, batch=1) < one[4]
    assert degree_explorer() is not None
