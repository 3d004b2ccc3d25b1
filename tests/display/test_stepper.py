"""Frames follow from messages alone, and can be seen, read and stepped through."""

from xml.etree import ElementTree

import pytest

from course_lib.collectives.messages import Message
from course_lib.core import CourseError
from course_lib.display import (
    frames_from_messages,
    own_everything,
    own_one,
    rank_colour,
    root_everything,
    stepper,
)
from course_lib.display.frames import Cell, Holdings
from course_lib.display.shards import frame_svg
from course_lib.display.stepper import Player

SVG = "{http://www.w3.org/2000/svg}"


def ring_reduce_scatter(p: int) -> list[Message]:
    return [
        Message(
            step=step + 1, sender=rank, receiver=(rank + 1) % p, shard=(rank - step) % p, adds=True
        )
        for step in range(p - 1)
        for rank in range(p)
    ]


def ring_all_gather(p: int) -> list[Message]:
    return [
        Message(step=step + 1, sender=rank, receiver=(rank + 1) % p, shard=(rank - step) % p)
        for step in range(p - 1)
        for rank in range(p)
    ]


def tree_broadcast(p: int) -> list[Message]:
    steps = range((p - 1).bit_length())
    return [
        Message(step=step + 1, sender=rank, receiver=rank + 2**step, shard=0)
        for step in steps
        for rank in range(min(2**step, p - 2**step))
    ]


def all_to_all(p: int) -> list[Message]:
    pairs = [(a, b) for a in range(p) for b in range(p)]
    return [Message(step=1, sender=a, receiver=b, shard=b, to_shard=a) for a, b in pairs]


ALGORITHMS = {
    "reduce_scatter": (ring_reduce_scatter, own_everything),
    "all_gather": (ring_all_gather, own_one),
    "broadcast": (tree_broadcast, root_everything),
    "all_to_all": (all_to_all, own_everything),
}


def held(frames: list) -> list[list[tuple[int, ...]]]:
    """What every rank holds in the last frame."""
    return [[cell.ranks for cell in row] for row in frames[-1].cells]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_a_ring_leaves_each_rank_one_full_sum(p: int) -> None:
    frames = frames_from_messages(ring_reduce_scatter(p), own_everything(p))
    assert len(frames) == p
    full = tuple(range(p))
    owned = [[shard for shard in range(p) if row[shard] == full] for row in held(frames)]
    assert owned == [[(rank + 1) % p] for rank in range(p)]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_gathering_and_trees_bring_everything_everywhere(p: int) -> None:
    gathered = held(frames_from_messages(ring_all_gather(p), own_one(p)))
    assert gathered == [[(shard,) for shard in range(p)]] * p
    told = held(frames_from_messages(tree_broadcast(p), root_everything(p)))
    assert told == [[(0,)]] * p


def test_all_to_all_lands_where_the_message_says() -> None:
    swapped = held(frames_from_messages(all_to_all(4), own_everything(4)))
    assert swapped == [[(0,), (1,), (2,), (3,)]] * 4


def test_messages_of_one_step_leave_before_any_arrives() -> None:
    swap = [
        Message(step=1, sender=0, receiver=1, shard=0, adds=True),
        Message(step=1, sender=1, receiver=0, shard=0, adds=True),
    ]
    assert held(frames_from_messages(swap, own_everything(2, 1))) == [[(0, 1)], [(0, 1)]]


def test_a_rank_counted_twice_is_seen() -> None:
    twice = [Message(step=step, sender=0, receiver=1, shard=0, adds=True) for step in (1, 2)]
    frames = frames_from_messages(twice, own_everything(2, 1))
    assert frames[-1].cells[1][0].label == "2\u00d70+1"


@pytest.mark.parametrize(
    ("ranks", "label"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1), "0+1"),
        ((0, 1, 2), "0\u20262"),
        ((0, 2, 3, 4, 7), "0+2\u20264+7"),
        ((0, 1, 1, 2), "0+2\u00d71+2"),
    ],
)
def test_labels_are_short_and_true(ranks: tuple[int, ...], label: str) -> None:
    assert Cell(ranks).label == label


def test_every_step_is_said_in_words() -> None:
    texts = [f.text for f in frames_from_messages(ring_reduce_scatter(3), own_everything(3))]
    assert texts[0] == (
        "step 1 of 2: rank 0 sends shard 0 to rank 1, which adds it; rank 1 sends shard 1 to "
        "rank 2, which adds it; rank 2 sends shard 2 to rank 0, which adds it"
    )
    assert texts[2].startswith("after 2 steps: rank 0 holds 0 | 0+1+2 | 0+2; rank 1 holds 0+1 |")
    assert (
        "every rank holds 0" in frames_from_messages(tree_broadcast(2), root_everything(2))[1].text
    )


def test_cells_that_just_changed_are_highlighted() -> None:
    frames = frames_from_messages(tree_broadcast(4), root_everything(4))
    lit = [
        [rank for rank, (cell,) in enumerate(frame.cells) if cell.highlighted] for frame in frames
    ]
    assert lit == [[], [1], [2, 3]]


def test_messages_that_are_nowhere_are_refused() -> None:
    with pytest.raises(CourseError, match="need ranks below 2 and shards below 1"):
        frames_from_messages([Message(step=1, sender=0, receiver=2, shard=0)], own_everything(2, 1))


@pytest.mark.parametrize("p", [2, 4, 8, 9])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_picture_is_well_formed_and_complete(name: str, p: int) -> None:
    messages, start = ALGORITHMS[name]
    holdings: Holdings = start(p)  # type: ignore[operator]
    made = stepper(frames_from_messages(messages(p), holdings), f"{name} <on> {p} & more")
    root = ElementTree.fromstring(made.svg)
    assert root.get("aria-label") == f"{name} <on> {p} & more"
    said = " ".join(root.itertext())
    assert all(frame.text.split(":")[0] in said for frame in made.frames)
    used = {path.get("fill") for path in root.iter(f"{SVG}path")}
    assert {rank_colour(rank, p) for row in holdings for cell in row for rank in cell} <= used


def test_each_arrow_has_one_shard_that_travels_on_it() -> None:
    for frame in frames_from_messages(all_to_all(3), own_everything(3)):
        root = ElementTree.fromstring(frame_svg(frame, "all to all"))
        moving = [m for m in frame.messages if m.sender != m.receiver]
        classes = [element.get("class") for element in root.iter()]
        assert classes.count("way") == classes.count("traveller") == len(moving)


def test_without_widgets_there_is_the_picture_and_all_steps() -> None:
    made = stepper(frames_from_messages(tree_broadcast(4), root_everything(4)), "A tree: 2 steps")
    data = made._repr_mimebundle_()
    assert data["text/plain"] == made.text
    assert data["image/svg+xml"] == made.svg
    assert 'alt="A tree: 2 steps"' in data["text/html"]
    assert all(f"<li>{frame.text}</li>" in data["text/html"] for frame in made.frames)
    assert "application/vnd.jupyter.widget-view+json" not in data


def test_the_player_reads_out_every_step_and_can_be_used_by_keyboard() -> None:
    script = Player._esm
    assert 'setAttribute("aria-live", "polite")' in script
    assert script.count('createElement("button")') == 1
    assert 'type: "range"' in script


@pytest.mark.parametrize(("frames", "title"), [([], "x"), (None, "")])
def test_a_stepper_needs_frames_and_a_title(frames: list | None, title: str) -> None:
    given = frames_from_messages([], own_one(2)) if frames is None else frames
    with pytest.raises(CourseError, match="need frames and a title"):
        stepper(given, title)
