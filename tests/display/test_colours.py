"""One place for colours: every kind has one, can be told apart and written upon."""

from itertools import combinations

import numpy as np
import pytest

from course_lib.core.records import COMMUNICATION_KINDS, KINDS, MEMORY_KINDS
from course_lib.display.colours import KIND, RANK, RANK_GREY, SERIES, WHITE, Ink, rank_colour

# Simulated colour blindness, Machado, Oliveira and Fernandes 2009, severity 1.0.
SIGHT = {
    "normal": np.eye(3),
    "protan": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deutan": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritan": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)


def linear(colour: str) -> np.ndarray:
    """`#RRGGBB` as linear light."""
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Contrast as web pages are judged: 1 is none, 21 is black on white."""
    light = sorted(float(XYZ[1] @ linear(colour)) for colour in (one, other))
    return (light[1] + 0.05) / (light[0] + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = XYZ @ np.clip(rgb, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def ciede2000(one: np.ndarray, other: np.ndarray) -> float:
    """The distance of two colours as people see it."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    chroma = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    grow = 1.5 - 0.5 * np.sqrt(chroma**7 / (chroma**7 + 25**7))
    c1, c2 = np.hypot(a1 * grow, b1), np.hypot(a2 * grow, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a * grow)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180
    mean_h = (h1 + turn / 2) % 360
    mean_l, mean_c = (l1 + l2) / 2, (c1 + c2) / 2
    waves = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    t = 1 + sum(by * np.cos(np.radians(times * mean_h + off)) for by, times, off in waves)
    s_l = 1 + 0.015 * (mean_l - 50) ** 2 / np.sqrt(20 + (mean_l - 50) ** 2)
    s_c, s_h = 1 + 0.045 * mean_c, 1 + 0.015 * mean_c * t
    twist = np.radians(60 * np.exp(-(((mean_h - 275) / 25) ** 2)))
    r = -2 * np.sqrt(mean_c**7 / (mean_c**7 + 25**7)) * np.sin(twist)
    d_l, d_c = (l2 - l1) / s_l, (c2 - c1) / s_c
    d_h = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn) / 2) / s_h
    return float(np.sqrt(d_l**2 + d_c**2 + d_h**2 + r * d_c * d_h))


def closest(colours: list[str]) -> float:
    """The smallest distance of any two colours under any sight."""
    return min(
        ciede2000(lab(matrix @ linear(one)), lab(matrix @ linear(other)))
        for matrix in SIGHT.values()
        for one, other in combinations(colours, 2)
    )


def inks() -> list[Ink]:
    return list(dict.fromkeys(KIND.values()))


def test_the_distance_agrees_with_a_published_pair() -> None:
    # Sharma, Wu and Dalal 2005, table 1, pairs 1 and 17
    first = ciede2000(np.array([50, 2.6772, -79.7751]), np.array([50, 0, -82.7485]))
    assert first == pytest.approx(2.0425, abs=1e-4)
    second = ciede2000(np.array([50, 2.5, 0]), np.array([73, 25, -18]))
    assert second == pytest.approx(27.1492, abs=1e-4)


def test_every_kind_of_event_and_memory_has_an_ink() -> None:
    assert set(KIND) == {*KINDS, *MEMORY_KINDS}


def test_kinds_share_an_ink_only_where_they_share_a_meaning() -> None:
    together = {"forward": "activations", "backward": "grads", "optimizer": "optim_state"}
    for work, kept in together.items():
        assert KIND[work] is KIND[kept]
    assert len({KIND[kind] for kind in COMMUNICATION_KINDS}) == 1
    assert len({KIND[kind] for kind in KINDS if kind not in COMMUNICATION_KINDS}) == 9
    assert len({KIND[kind] for kind in MEMORY_KINDS}) == len(MEMORY_KINDS)


def test_kinds_are_told_apart_under_simulated_colour_blindness() -> None:
    assert closest([ink.fill for ink in inks()]) > 10.8


def test_curves_are_told_apart_from_one_another() -> None:
    assert closest(list(SERIES)) > 12
    assert all(contrast(colour, WHITE) > 4.5 for colour in SERIES)


@pytest.mark.parametrize("ink", inks(), ids=lambda ink: ink.name)
def test_text_can_be_read_upon_every_kind(ink: Ink) -> None:
    assert contrast(ink.fill, ink.text) > 4.5


def test_ranks_have_eight_pale_colours_and_grey_beyond() -> None:
    assert len({*RANK}) == 8
    assert all(contrast(colour, "#000000") > 7 for colour in RANK)
    assert [rank_colour(rank, 8) for rank in range(8)] == list(RANK)
    assert {rank_colour(rank, 9) for rank in range(9)} == {RANK_GREY}


def test_waiting_and_wires_carry_hatches() -> None:
    assert KIND["wait"].hatch == ".."
    assert KIND["send"].hatch == "//"
