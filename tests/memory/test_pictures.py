"""Pictures of lesson 01: title and alt text say the numbers that were given."""

import re

import pytest

from course_lib.core import MODELS, CourseError
from course_lib.core.units import MIB
from course_lib.display.show import png_bytes
from course_lib.memory import pictures, step_ledger


def title_of(figure):
    return figure.texts[0].get_text().replace("\n", " ")


def drawn(pair):
    """The title and the alt text of a figure that can be drawn."""
    figure, alt = pair
    assert len(png_bytes(figure)) > 5000
    return title_of(figure), alt


@pytest.mark.parametrize(
    ("num_params", "who"),
    [(8_030_261_248, "only pure-bf16 fits"), (10**9, "5 of 5 fit"), (10**12, "0 of 5 fit")],
)
def test_states_say_which_recipes_fit(num_params, who):
    title, alt = drawn(pictures.states_by_recipe(num_params))
    assert f"Of these recipes, {who} the states of {num_params / 1e9:.0f}B" in title
    assert title.endswith("parameters into 80 GiB")
    assert alt.startswith(title)


def test_states_of_8b_take_120_gib():
    assert drawn(pictures.states_by_recipe(8_030_261_248))[1].endswith("takes 120 GiB")


@pytest.mark.parametrize(
    ("measured", "words"),
    [([MIB, 2 * MIB], "agree to the byte"), ([MIB, 2 * MIB + 1234], "differ by up to 1,234 bytes")],
)
def test_saved_bytes_say_how_far_formula_and_autograd_differ(measured, words):
    formula = [MIB, 2 * MIB]
    saved = {
        "written out": {"formula": [MIB, 3 * MIB], "measurement": [MIB, 3 * MIB]},
        "flash": {"formula": formula, "simulation": formula, "measurement": measured},
    }
    title, alt = drawn(pictures.saved_by_sequence([32, 64], saved))
    assert title.startswith(f"Formula and autograd {words};")
    assert alt.endswith("at 64 tokens: written out 3 MiB, flash 2 MiB")


def test_a_layer_is_drawn_with_the_34_and_the_5():
    figure, alt = pictures.layer_tensors(MODELS["gpt2"], batch=8, seq=1024)
    words = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert sum(map(int, re.findall(r": (\d+) sbh", words))) == 34
    assert sum(map(int, re.findall(r": (\d+) as²b", words))) == 5
    assert "70% of the 684 MiB" in drawn((figure, alt))[0]
    with pytest.raises(CourseError, match="need a layer with GELU; got 15 tensors"):
        pictures.layer_tensors(MODELS["llama-8b"], batch=1, seq=8)


def test_steps_and_graphs_say_their_peak():
    ledger = step_ledger(MODELS["small"], 2, 128, recipe="fp32")
    peak = f"{ledger.peak_bytes() / MIB:.1f} MiB"
    assert drawn(pictures.first_steps(ledger))[1].endswith(
        f"step 2 is first to reach the peak, {peak}"
    )
    title, alt = drawn(pictures.graphs_kept(ledger, 4))
    assert title == "4 losses in a list keep 4 graphs alive"
    assert peak in alt


def test_the_ways_to_fit_are_those_of_the_title():
    title, alt = drawn(pictures.ways_to_fit())
    peaks = [pictures.read_setup(line).peak_bytes for line in pictures.WAYS_TO_FIT.values()]
    assert [peak <= 80 * 2**30 for peak in peaks] == [False, False, True, True, True]
    assert "80 GiB" in title
    assert alt.endswith("takes 35.6 GiB")
