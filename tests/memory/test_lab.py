"""Measured roofs: rates are counted, and the pictures say what they show."""

from statistics import median

from course_lib.cost.roofline import Roof
from course_lib.memory import lab, pictures


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
    assert median(rates[64]) > 2 * median(rates[1])


def test_the_pictures_name_their_finding():
    roof = Roof(name="x", flop_per_s=50e9, bytes_per_s=10e9)
    figure, alt = pictures.measured_roof(roof, {1: [4e9], 256: [48e9]})
    assert "4 GFLOP/s for 1 token, 48 for 256" in alt
    assert figure.axes
    _, alt = pictures.gpu_roofs()
    assert "153 to 295 FLOP per byte" in alt
    assert pictures.roof_rows().count("compute") == 4
