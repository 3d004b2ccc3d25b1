"""Pictures of lesson 00: title and alt text say what the events, times and waits say."""

from dataclasses import dataclass

import pytest

from course_lib.core import Event, Link
from course_lib.core.records import RunRecord
from course_lib.display import pictures
from course_lib.display.show import png_bytes


@dataclass(frozen=True)
class Wait:
    """A wait as in `RankError.waits`."""

    rank: int
    waits_for: tuple[int, ...]
    kind: str = "send"
    where: str = "dist.send(x, right)"
    line: int = 4


def drawn(pair):
    """The title and the alt text of a figure that can be drawn."""
    figure, alt = pair
    assert len(png_bytes(figure)) > 5000
    return figure.texts[0].get_text().replace("\n", " "), alt


def test_the_order_is_that_of_the_events():
    events = [
        Event(rank=rank, kind="compute", start_s=at, end_s=at + 1, label=f"rank {rank}")
        for at, rank in enumerate([2, 0, 1])
    ]
    title, alt = drawn(pictures.order_of_ranks(events))
    assert title == "Rank 2 prints first, rank 1 last"
    assert alt.startswith(title)


def test_the_largest_message_is_told_by_its_median():
    link = Link(name="slow wire", latency_s=0.02, bytes_per_s=50e6)
    times_s = [[0.02, 0.02, 0.03], [0.9, 0.101, 0.1]]
    title, alt = drawn(pictures.message_times(link, [0, 4], [0.02, 0.1], times_s))
    assert title == alt == "4 MB take 0.101 s; the formula says 0.100 s"


def test_rank_0_waits_as_long_as_its_call_takes():
    events = [
        Event(rank=rank, kind="all_reduce", start_s=0.1 * rank, end_s=0.31) for rank in range(3)
    ]
    title, alt = drawn(pictures.late_all_reduce(events))
    assert "Rank 0 is in all_reduce for 0.31 s" in title
    assert alt.endswith("all 3 calls return at about the same time")


@pytest.mark.parametrize(
    ("waits", "words"),
    [
        (
            [Wait(0, (1,)), Wait(1, (0,))],
            "2 of 4 ranks wait: rank 0 in send for rank 1, rank 1 in send for rank 0",
        ),
        (
            [Wait(0, (1, 2, 3), "all_reduce")],
            "1 of 4 ranks waits: rank 0 in all_reduce for ranks 1, 2 and 3",
        ),
    ],
)
def test_a_hang_lists_its_arrows(waits, words):
    assert drawn(pictures.who_waits(waits, 4))[1] == words


def test_a_recorded_run_counts_its_ranks():
    records = [
        RunRecord(rank, 2, events=[Event(rank=rank, kind="compute", start_s=rank, end_s=rank + 1)])
        for rank in range(2)
    ]
    assert drawn(pictures.recorded_run(records))[0].startswith("2 ranks started by torchrun")
