"""Pictures of pipelines: a timeline and the micro-batches in flight, drawn from any events."""

import pytest

from course_lib.core import Event, Link
from course_lib.display.show import png_bytes
from course_lib.pipeline import (
    PipelineTimes,
    dual_pipe_v,
    pictures,
    schedules,
    simulate,
    zero_bubble_v,
)
from course_lib.pipeline.cost import BatchCost, bubble_fraction
from course_lib.pipeline.explorer import schedule_explorer
from course_lib.pipeline.pictures import DrawnRun, pipelines

MADE = {
    "naive": schedules.naive(3, 4),
    "gpipe": schedules.gpipe(3, 4),
    "1f1b": schedules.one_f_one_b(4, 6),
    "zb-h1": schedules.zero_bubble_h1(4, 6),
    "interleaved": schedules.interleaved(3, 6, 3),
    "zb-v": zero_bubble_v(3, 6),
    "dualpipe-v": dual_pipe_v(3, 6),
    "one rank": schedules.interleaved(1, 2, 2),
}


def run_of(schedule):
    return DrawnRun(simulate(schedule).events())


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


@pytest.mark.parametrize("schedule", MADE.values(), ids=MADE)
def test_the_lanes_say_what_the_simulation_says(schedule):
    played = simulate(schedule, PipelineTimes(overlap=0.5))
    run = DrawnRun(played.events())
    chunks = run.num_model_chunks
    peaks = [chunks * run.peak_in_flight(rank) for rank in run.ranks]
    assert peaks == pytest.approx(played.peak_in_flight())
    assert run.bubble_fraction == pytest.approx(played.bubble_fraction)
    assert run.step_s == played.step_s


def test_what_is_held_begins_with_a_forward_and_ends_with_a_backward():
    events = [
        Event(rank=0, kind="forward", start_s=1, end_s=2, label="F0"),
        Event(rank=0, kind="backward_input", start_s=2, end_s=4, label="I0"),
        Event(rank=0, kind="backward_weight", start_s=4, end_s=5, label="W0"),
        Event(rank=0, kind="send", start_s=5, end_s=9, label="I0 to 1"),
    ]
    assert DrawnRun(events).in_flight(0) == ([0.0, 1, 5, 5], [0.0, 1, 0, 0])
    assert DrawnRun(events).bubble_fraction == pytest.approx(1 / 5)


def test_a_picture_has_two_lanes_a_run_and_says_bubble_and_peak():
    runs = {"GPipe": schedules.gpipe(4, 8), "1F1B": schedules.one_f_one_b(4, 8)}
    figure = pipelines({name: simulate(one).events() for name, one in runs.items()}, "Same bubble")
    idle = f"{bubble_fraction(4, 8):.0%} of the time idle"
    held = "micro-batches in flight (right: maximum)"
    assert titles(figure) == [f"GPipe: {idle}", held, f"1F1B: {idle}", held]
    said = [[text.get_text() for text in axes.texts] for axes in figure.axes[1::2]]
    assert said == [["8"] * 4, ["4", "3", "2", "1"]]


@pytest.mark.parametrize(
    "runs", [{}, {"nothing": []}, {"late": [Event(rank=2, kind="wait", start_s=0, end_s=1)]}]
)
def test_odd_input_draws(runs):
    assert png_bytes(pipelines(runs or {"": []}, "Nothing happened")).startswith(b"\x89PNG")


def test_the_explorer_plays_every_schedule_and_says_what_cannot_be_made():
    picture = schedule_explorer()
    assert picture.alt.startswith(
        "1F1B: a bubble of 50% of the computing time, 4 micro-batches in flight"
    )
    picture.sliders["m"].value = 8
    for name in ("naive", "GPipe", "ZB-H1", "ZB-V", "DualPipeV", "interleaved"):
        picture.sliders["schedule"].value = name
        assert picture.alt.startswith(name)
    assert "11 parts of 1/2" in picture.alt
    picture.sliders["p"].value = 3
    picture.sliders["m"].value = 7
    assert picture.image.picture["failed"]
    assert "equal rounds of 3 or more; got 7" in picture.image.picture["alt"]


def title_of(figure):
    return " ".join(figure.texts[0].get_text().split())


def test_an_undivided_batch_tells_how_long_its_ranks_are_idle():
    figure, alt = pictures.one_batch(simulate(schedules.naive(4, 1)))
    assert title_of(figure) == "One batch at a time: 4 ranks are idle for 75% of their time"
    assert alt.endswith("a backward takes 2 F")


def test_the_bubble_of_gpipe_is_told_with_and_without_a_measurement():
    figure, alt = pictures.gpipe_bubble(4, [2, 8], [[150, 160], [38, 40, 45]])
    assert title_of(figure) == "4 stages: twice as many micro-batches, about half the bubble"
    assert alt.endswith("with 8 micro-batches 37.5 % by formula, measured 40.0 %")
    assert pictures.gpipe_bubble(4, [2, 8], log=True)[1].endswith("37.5 % by formula")


def test_what_a_measured_step_holds_is_told():
    plans = {"GPipe": schedules.gpipe(3, 4), "1F1B": schedules.one_f_one_b(3, 4)}
    figure, alt = pictures.fewer_in_flight({n: simulate(one).events() for n, one in plans.items()})
    assert titles(figure)[0].startswith("GPipe, measured: ")
    assert alt.endswith("at most 4 with GPipe, 3 with 1F1B")


def test_steps_on_a_link_are_told_from_the_measurement_if_there_is_one():
    batch = BatchCost(forward_s=0.16, backward_s=0.32)
    link = Link(name="slow link", latency_s=30e-3, bytes_per_s=1e9)
    figure, _ = pictures.steps_on_link(4, [4, 8, 16], batch, link)
    assert title_of(figure) == "1F1B on a slow link: 1140 ms with m = 4, 1410 ms with m = 16"
    times_s = {(name, m): [m / 10, m / 5] for name in ("1F1B", "GPipe") for m in (4, 16)}
    figure, alt = pictures.steps_on_link(4, [4, 16], batch, link, times_s)
    assert title_of(figure) == "1F1B on a slow link: 600 ms with m = 4, 2400 ms with m = 16"
    assert alt.endswith("GPipe: 600 and 2400 ms")


def test_the_bubble_of_every_schedule_is_told():
    plans = {"1F1B": schedules.one_f_one_b(3, 6), "ZB-H1": schedules.zero_bubble_h1(3, 6)}
    figure, alt = pictures.smaller_bubbles({n: simulate(one) for n, one in plans.items()})
    assert title_of(figure).startswith("Chunks shorten the bubble")
    assert alt.endswith("idle: 1F1B 25%, ZB-H1 10% of the time")
