"""Measured roofs: rates are counted, and the pictures say what they show."""

from course_lib.cost.roofline import Roof
from course_lib.display.show import png_bytes
from course_lib.speed import lab, pictures


def test_rates_are_flop_by_seconds_and_the_peak_is_the_best_of_the_largest(monkeypatch):
    monkeypatch.setattr(lab, "WIDTH", 64)
    monkeypatch.setattr(lab, "TOKENS", [1, 4])
    monkeypatch.setattr(lab, "seconds", lambda run: [run() is None or 2.0, 4.0])
    roof, rates = lab.measure_roof()
    assert rates == {1: [64 * 64, 64 * 64 / 2], 4: [4 * 64 * 64, 2 * 64 * 64]}
    assert roof.flop_per_s == 4 * 64 * 64
    assert roof.bytes_per_s == 64 * 64 * 12 / 2


def test_a_product_of_many_tokens_is_faster_than_one_of_few_on_this_machine(monkeypatch):
    monkeypatch.setattr(lab, "TOKENS", [1, 64])
    _, rates = lab.measure_roof()
    assert max(rates[64]) > 2 * max(rates[1])


def drawn(pair):
    """The title and the alt text of a figure that can be drawn."""
    figure, alt = pair
    assert len(png_bytes(figure)) > 5000
    return figure.texts[0].get_text().replace("\n", " "), alt


def test_published_runs_and_roofs_say_their_range():
    assert "38 to 56 %" in drawn(pictures.mfu_of_real_runs())[0]
    assert "6 of these 8 operations cannot reach the h100's peak" in drawn(
        pictures.operations_on_roof())[0]  # fmt: skip
    assert pictures.roof_rows().count("100.0%") == 8  # two operations on four GPUs
    rates = {m: [m * 1e9] * 3 for m in lab.TOKENS}
    roof = Roof(name="made up", flop_per_s=256e9, bytes_per_s=10e9)
    title, alt = drawn(pictures.measured_roof(roof, rates))
    assert "stay under the roof" in title
    assert alt.endswith("1 GFLOP/s for 1 token, 256 for 256")
    low = Roof(name="made up", flop_per_s=256e9, bytes_per_s=1e9)
    assert "stay under the roof" not in drawn(pictures.measured_roof(low, rates))[0]
