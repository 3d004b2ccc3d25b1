"""Pictures of lesson 14: title and alt text say the numbers that were given."""

import pytest

from course_lib.checkpoint import pictures
from course_lib.core import Event
from course_lib.core.shards import Box
from course_lib.display.show import png_bytes


def drawn(pair):
    """The title and the alt text of a figure that can be drawn."""
    figure, alt = pair
    assert len(png_bytes(figure)) > 5000
    return figure.texts[0].get_text().replace("\n", " "), alt


def event(kind, start_s, end_s, rank=0):
    return Event(rank=rank, kind=kind, label="save", start_s=start_s, end_s=end_s)


def rows(*sizes):
    """Boxes of a matrix with 6 columns, with that many rows each."""
    return [Box((sum(sizes[:n]), 0), (size, 6)) for n, size in enumerate(sizes)]


def test_saves_say_when_the_last_rank_of_each_is_done():
    runs = {
        "through rank 0": [event("gather", 0, 0.1), event("write", 0.1, 0.3)],
        "every rank": [event("write", 0, 0.05), event("write", 0, 0.06, rank=1)],
    }
    title, alt = drawn(pictures.saves(runs, 8 * 2**20, "a slow link"))
    assert title == alt == "A save of 8 MiB: 300 ms through rank 0, 60 ms by every rank"


@pytest.mark.parametrize(
    ("saved", "wanted", "words", "reads"),
    [
        ((3, 3, 3, 1), (5, 5), "2 ranks read 5 intersections with 4 saved boxes", "0, 1; rank 1"),
        ((5, 5), (3, 3, 3, 1), "4 ranks read 5 intersections with 2 saved boxes", "0; rank 1"),
    ],
)
def test_boxes_count_the_intersections(saved, wanted, words, reads):
    shape = (sum(saved), 6)
    title, alt = drawn(pictures.boxes(shape, rows(*saved), rows(*wanted)))
    assert title == words
    assert alt.startswith(f"{title}: rank 0 reads from boxes {reads} reads from")


def test_overlap_adds_up_the_waiting_of_each_run():
    step = [event("forward", 0, 0.01), event("backward", 0.01, 0.03)]
    plain = [*step, event("wait", 0.03, 0.15)]
    hidden = [*step, event("wait", 0.03, 0.06), event("write", 0.06, 0.2)]
    title, alt = drawn(pictures.overlap({"save": plain, "save_async": hidden}))
    assert title == alt == "A plain save stops training for 120 ms, an asynchronous one for 30 ms"


def test_extra_time_says_how_far_the_formula_is_off_at_most():
    measured_s = {50: 0.2, 100: 0.1, 200: 0.04}
    title, alt = drawn(pictures.extra_time(1000, measured_s, save_s=0.01))
    assert title == alt
    assert title == "With 10 ms per save, the formula is within 25 % of each measurement"


def test_best_intervals_say_how_far_young_is_from_daly():
    title, alt = drawn(pictures.best_intervals())
    assert "Young's interval is 1.34 times Daly's if M is 15 min" in title
    assert alt.startswith(title)


def test_an_overhead_curve_says_the_best_interval_and_its_overhead():
    title, alt = drawn(pictures.overhead_curve(30, 11_135, 600, "16,384 GPUs"))
    assert title == "16,384 GPUs, a failure every 3.09 h: save every 13.3 min, overhead 13.7 %"
    assert alt.startswith(title)


@pytest.mark.parametrize(("save_s", "mtbf_s", "restart_s"), [(30, 120, 600), (600, 960, 1800)])
def test_an_overhead_curve_simulates_no_interval_that_hardly_ever_ends(
    monkeypatch, save_s, mtbf_s, restart_s
):
    played = []
    monkeypatch.setattr(
        pictures, "simulated_overhead", lambda interval_s, *_, **__: played.append(interval_s) or 1
    )
    figure, alt = pictures.overhead_curve(save_s, mtbf_s, restart_s)
    assert "overhead" in alt
    assert figure.axes
    assert all(one + save_s + restart_s <= 6 * mtbf_s for one in played)
