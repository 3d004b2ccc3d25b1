"""The pictures and the explorer of lesson 12, and a plan in miniature on real ranks."""

from dataclasses import replace
from itertools import pairwise

import pytest
from matplotlib.figure import Figure

from course_lib.core.errors import CourseError
from course_lib.core.presets import MODELS
from course_lib.core.units import GIB
from course_lib.pipeline import one_f_one_b
from course_lib.planner import Plan, find_cluster, lab, pictures, predict, search
from course_lib.planner.explorer import plan_explorer
from course_lib.planner.published_runs import published_runs

MODEL, CLUSTER = MODELS["llama-8b"], find_cluster("selene-a100", 2)
PIPELINE = Plan(num_micro_batches=16).with_axes(dp=4, tp=2, pp=2, sequence_parallel=True)
STEP = predict(MODEL, CLUSTER, PIPELINE)
LARGE = predict(MODEL, CLUSTER, Plan(num_micro_batches=4).with_axes(dp=16))


def texts(figure):
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    return [*found, *(tick.get_text() for axes in figure.axes for tick in axes.get_yticklabels())]


def test_the_parts_of_a_bill_end_where_the_step_ends():
    figure, alt = pictures.bill_waterfall(STEP)
    (axes,) = figure.axes
    *parts, whole = axes.patches
    for part, following in pairwise(parts):
        assert part.get_x() + part.get_width() == pytest.approx(following.get_x())
    assert parts[-1].get_x() + parts[-1].get_width() == pytest.approx(STEP.step_s, rel=0.005)
    assert whole.get_width() == pytest.approx(STEP.step_s)
    assert {"compute", "TP messages", "bubble", "step"} <= {*texts(figure)}
    assert f"MFU {100 * STEP.mfu:.0f} %" in alt


def test_causes_of_no_time_have_no_row():
    figure, _ = pictures.bill_waterfall(LARGE)
    assert "bubble" not in texts(figure)
    assert "TP messages" not in texts(figure)


def test_bills_share_a_scale():
    figure, alt = pictures.bills({"split": STEP, "copied": LARGE}, "title")
    ends = [box.get_x() + box.get_width() for box in figure.axes[0].patches]
    assert max(ends) == pytest.approx(max(STEP.step_s, LARGE.step_s))
    assert "split" in alt
    assert "copied" in alt


def test_bills_of_the_lesson_compare_the_slowest_with_the_fastest():
    figure, alt = pictures.bills_that_fit({"split": STEP, "copied": LARGE})
    assert alt.startswith("Of the plans that fit, split takes 1.0 times as long as split")
    assert "copied" not in texts(figure)
    _, alt = pictures.bills_of_choices({"all": LARGE, "blind": STEP}, forgot="bubble")
    slow_s, fast_s = max(STEP.step_s, LARGE.step_s), min(STEP.step_s, LARGE.step_s)
    assert alt.startswith(
        f"Forgetting the bubble leads to {slow_s:.1f} s per step instead of {fast_s:.1f} s"
    )


def test_measured_pipelines_stand_beside_their_predictions():
    measured = {"1f1b": [5.0, 5.1, 9.0], "interleaved": [4.6], "zb-h1": [4.2]}
    predicted_s = {"1f1b": 4.8, "interleaved": 4.1, "zb-h1": 3.9}
    figure, alt = pictures.pipelines_in_miniature(measured, predicted_s, divided_by=10)
    lengths = [bar.get_width() for bar in figure.axes[0].patches]
    assert sorted(lengths) == [3.9, 4.1, 4.2, 4.6, 4.8, 5.1]
    assert alt.startswith("The measured pipeline takes 5.1 s with 1F1B, 4.2 s with ZB-H1; predict")
    assert {"1F1B", "interleaved", "ZB-H1"} <= {*texts(figure)}
    assert "multiplied by 10" in figure.axes[0].get_xlabel()


def test_memory_says_what_fits():
    _, alt = pictures.memory_by_kind({"split": STEP, "copied": LARGE})
    assert alt.startswith("1 of 2 plans fit into 72 GiB")
    assert "does not fit" in pictures.memory_by_kind({"copied": LARGE})[1]
    figure, alt = pictures.bill_and_memory(STEP)
    held = sum(box.get_width() for box in figure.axes[1].patches)
    assert held == pytest.approx(STEP.memory_bytes / GIB)
    assert "of 72 GiB" in alt


def test_the_front_is_below_every_plan():
    found = search(MODEL, CLUSTER, 32)
    figure, alt = pictures.time_against_memory(found, {"split": STEP})
    dots, front = figure.axes[0].lines[:2]
    corners = list(zip(*front.get_data(), strict=True))
    for memory, seconds in zip(*dots.get_data(), strict=True):
        assert any(held <= memory and step_s <= seconds for held, step_s in corners)
    assert f"{len(found.pareto_front)} of {len(found.steps)} plans" in alt
    assert any("split" in text for text in texts(figure))


def test_predictions_stand_beside_published_runs():
    runs = published_runs("korthikanti")
    figure, alt = pictures.predicted_against_published({"Korthikanti 2022": runs})
    at, said = figure.axes[0].lines[0].get_data()
    assert list(at) == [run.step_s for run in runs]
    assert list(said) == [run.predicted().step_s for run in runs]
    assert alt.startswith(f"{len(runs)} of {len(runs)} predicted steps")
    efficient = [replace(run, mfu=0.5) for run in runs[:4]]
    _, alt = pictures.errors_by_mfu([*efficient, *(replace(run, mfu=0.1) for run in runs[4:])])
    assert alt.endswith(f"4 and {len(runs) - 4} runs")


# --- the explorer


def test_the_explorer_begins_at_the_plan_and_follows_its_sliders():
    explorer = plan_explorer(MODEL, "selene-a100", PIPELINE, num_nodes=2)
    assert explorer.predicted.step_s == STEP.step_s
    assert explorer.predicted.plan == PIPELINE
    explorer.sliders["pp"].value = 4
    assert explorer.predicted.plan.parallelism.dp == 2
    assert explorer.predicted.plan.global_batch == PIPELINE.global_batch
    assert isinstance(explorer.figure, Figure)
    assert "MFU" in explorer.alt


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("pp", 32, "need tp \\* pp that divides 16 GPUs; got 2 \\* 32"),
        (
            "micro_batch",
            32,
            "need a global batch that dp \\* micro_batch divides; got 64, 4 \\* 32",
        ),
    ],
)
def test_sliders_that_do_not_go_together_say_so(name, value, says):
    explorer = plan_explorer(MODEL, "selene-a100", PIPELINE, num_nodes=2)
    explorer.sliders[name].value = value
    assert explorer.image.picture["failed"]
    with pytest.raises(CourseError, match=says):
        _ = explorer.predicted


# --- a plan in miniature


def test_a_measured_pipeline_takes_at_least_what_was_predicted():
    plan = Plan(num_micro_batches=4).with_axes(dp=8, pp=2)
    schedules = {"1f1b": one_f_one_b(2, 4)}
    found = lab.measure_pipelines(MODEL, CLUSTER, plan, schedules, divided_by=10, turns=2)
    assert list(found) == ["1f1b"]
    assert len(found["1f1b"]) == 2
    predicted = predict(MODEL, CLUSTER, plan)
    waits = predicted.compute_s + predicted.bubble_s + predicted.pp_s
    assert lab.pipeline_s(predicted) == pytest.approx(waits)
    assert min(found["1f1b"]) > 0.98 * waits
