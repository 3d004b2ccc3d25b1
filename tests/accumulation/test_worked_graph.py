"""The worked graph has the numbers of the material it comes from, and the picture shows them."""

import pytest

from course_lib.accumulation.explorer import graph_explorer
from course_lib.accumulation.live import chain_rule_states
from course_lib.accumulation.pictures import graph
from course_lib.accumulation.worked_graph import (
    GRAPH,
    PARAMS,
    GraphState,
    graph_states,
    graph_words,
)
from course_lib.core import CourseError


def of_params(numbers):
    return [numbers[name] for name in PARAMS]


def test_stepping_at_once_gives_the_numbers_of_the_lecture():
    start, forward, backward, step, forward2, backward2, step2 = graph_states()
    assert of_params(start.values) == [0.773, 0.321, 0.067]
    chain = [forward.values[name] for name in ("x1 * w1", "x2 * w2", "y_pred", "loss")]
    assert chain == pytest.approx([4.638, 0.642, 5.347, 93.180], abs=5e-4)
    assert of_params(backward.grads) == pytest.approx([-115.836, -38.612, -19.306], abs=5e-4)
    assert of_params(step.values) == pytest.approx([0.8888, 0.3596, 0.0863], abs=5e-5)
    assert step.grads == {}
    assert forward2.values["y_pred"] == pytest.approx(5.249, abs=1e-3)  # cut there, not rounded
    assert forward2.values["loss"] == pytest.approx(45.5664, abs=5e-5)
    assert of_params(backward2.grads) == pytest.approx([-67.5029, -27.0012, -13.5006], abs=5e-5)
    assert of_params(step2.values) == pytest.approx([0.9563, 0.3866, 0.0998], abs=5e-5)


def test_accumulating_gives_the_numbers_of_the_lecture():
    _, _, backward, forward2, backward2, step = graph_states(items_per_step=2)
    assert forward2.values["y_pred"] == pytest.approx(4.574, abs=5e-4)
    assert forward2.values["loss"] == pytest.approx(55.1455, abs=5e-5)
    assert of_params(forward2.grads) == of_params(backward.grads)
    added = [new - old for new, old in zip(*map(of_params, (backward2.grads, backward.grads)))]  # noqa: B905
    assert added == pytest.approx([-74.26, -29.704, -14.852], abs=5e-5)
    assert of_params(backward2.grads) == pytest.approx([-190.096, -68.316, -34.158], abs=5e-4)
    assert of_params(step.values) == pytest.approx([0.9631, 0.3893, 0.1012], abs=5e-5)


@pytest.mark.parametrize("items_per_step", [1, 2])
def test_the_picture_holds_every_number_and_the_words_tell_them(items_per_step):
    for state in graph_states(items_per_step=items_per_step):
        figure = graph(state, "Every number is autograd's")
        texts = {text.get_text() for text in figure.axes[0].texts}
        assert set(GRAPH) <= texts
        assert sum(text.startswith("grad ") for text in texts) <= len(state.grads)
        shown = {text for text in texts if text.startswith("value ")}
        assert len(shown) <= len(state.values)
        assert f"value {state.values['w1']:.4f}".rstrip("0") in shown
        assert graph_words(state).startswith(state.words)
        assert ("with gradient" in graph_words(state)) == bool(state.grads)


@pytest.mark.parametrize("items_per_step", [1, 2])
def test_the_chain_rule_of_the_page_is_autograds(items_per_step):
    states = graph_states(items_per_step=items_per_step)
    for ours, theirs in zip(chain_rule_states(items_per_step), states, strict=True):
        assert ours.values == pytest.approx(theirs.values, rel=1e-14)
        assert ours.grads == pytest.approx(theirs.grads, rel=1e-14)
        assert (ours.words, {*ours.fresh}) == (theirs.words, {*theirs.fresh})


def test_the_explorer_stays_in_the_last_state_of_the_shorter_way():
    ways = {"add up": graph_states(items_per_step=2), "step after each": graph_states()}
    explorer = graph_explorer(ways)
    assert explorer.alt.startswith(
        "item 2: backward adds its gradients: w1 0.773 with gradient -190"
    )
    assert explorer.alt.endswith("(add up)")
    assert explorer.sliders["event"].max == 6
    explorer.sliders["event"].value = 6
    assert explorer.alt.startswith("the optimizer steps after item 2: w1 0.9631")


def test_a_node_that_is_not_there_is_told():
    with pytest.raises(CourseError, match=r"need nodes out of .*; got \['w9'\]"):
        graph(GraphState(words="no", values={"w9": 1.0}), "title")
