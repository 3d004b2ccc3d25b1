"""The pictures of lesson 03 say in title and alt text what they are given."""

from course_lib.core.records import Ledger
from course_lib.recompute import pictures
from course_lib.recompute.lab import FORMATS, losses_behind

MIB = 2**20


def ledger(activations):
    one = Ledger()
    one.add(0.0, activations=activations)
    return one


def heading(figure):
    return " ".join(text.get_text().replace("\n", " ") for text in figure.texts)


def test_the_best_segment_and_its_tensors_are_told():
    formula = {1: 10.0, 3: 6.0, 9: 10.0}
    figure, alt = pictures.segment_peaks(9, formula, {1: 10.0, 3: 6.0, 9: 10.0})
    assert "Segments of 3 layers need 6 tensors instead of 9" in heading(figure)
    assert alt.endswith("lowest at k = 3")
    assert list(figure.axes[0].lines[0].get_ydata()) == [10, 6, 10]


def test_strategies_tell_whether_the_formula_is_right():
    held = {"none": ledger(10 * MIB), "selective": ledger(5 * MIB), "full": ledger(2 * MIB)}
    predicted = {how: one.peak_bytes() for how, one in held.items()}
    figure, alt = pictures.strategies(predicted, held)
    assert alt == "Full recompute needs 20 % of the activation bytes, as the formula says"
    assert alt in heading(figure)
    _, alt = pictures.strategies(predicted | {"selective": 5 * MIB + 1024}, held)
    assert alt.endswith("off by up to 1,024 bytes")


def test_the_published_shares_are_those_of_the_title():
    figure, alt = pictures.published_memory()
    title = "Large models keep 8 to 10 % with full recompute, 49 to 62 % with selective"
    assert title in heading(figure)
    assert alt.startswith(title)


def test_the_price_has_both_multiples():
    flop, time = {"none": 1, "selective": 1.05, "full": 1.33}, {"none": 1, "selective": 1.2}
    figure, alt = pictures.price(flop, time | {"full": 1.4})
    assert "Full recompute: 1.33 times the FLOPs, 1.40 times the time" in heading(figure)
    assert alt.endswith("selective: 1.05 and 1.20")


def test_autocast_is_compared_with_bf16():
    kinds = {"fp32": ledger(24 * MIB), "autocast": ledger(18 * MIB), "bf16": ledger(12 * MIB)}
    _, alt = pictures.number_formats(kinds)
    assert alt == "bf16 keeps 50 % of the bytes of fp32; autocast keeps 1.50 times those of bf16"


def test_the_outliers_that_ruin_a_product_are_told():
    figure, alt = pictures.product_errors()
    title = "an outlier of 100 ruins E2M1, one of 10\u2076 ruins E4M3; blocks confine the damage"
    assert title in heading(figure)
    assert alt.endswith("MXFP8 has at most 4.1 %, MXFP4 has at most 16.1 %")


def test_losses_are_compared_over_the_last_steps():
    losses = {name: [4.0] * 10 + [3.0] * 10 for name in FORMATS}
    losses["MXFP8"] = [4.0] * 10 + [3.005] * 10
    losses["MXFP4 in forward"] = [4.0] * 10 + [3.0] * 5 + [3.12] * 5
    behind = losses_behind(losses)
    assert (behind["fp32"], round(behind["MXFP4 in forward"], 9)) == (0, 0.06)
    figure, alt = pictures.format_losses(losses)
    title = "The loss with MXFP4 ends 0.060 above that with fp32, with MXFP8 0.005"
    assert title in heading(figure)
    assert alt.startswith(title)
