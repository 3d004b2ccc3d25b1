"""Every picture draws, for usual and odd input, in the colours of the course."""

from dataclasses import dataclass

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch

from course_lib.core import CourseError, Event, Ledger, Link
from course_lib.core.records import COMMUNICATION_KINDS, KINDS
from course_lib.core.units import GIB, MIB
from course_lib.display import Voices, compare, memory, timeline, timelines, waiting
from course_lib.display.colours import KIND
from course_lib.display.lanes import assign_slots
from course_lib.display.show import png_bytes


def event(rank: int, kind: str, start_s: float, end_s: float, label: str = "") -> Event:
    return Event(rank=rank, kind=kind, start_s=start_s, end_s=end_s, label=label)


def busy(num_ranks: int, num_turns: int = 3) -> list[Event]:
    """A forward, a backward and an all_reduce beneath it, turn after turn."""
    return [
        event(rank, kind, 4 * turn + start, 4 * turn + end)
        for rank in range(num_ranks)
        for turn in range(num_turns)
        for kind, start, end in (
            ("forward", 0, 1),
            ("backward", 1, 3),
            ("all_reduce", 2, 3.5),
            ("wait", 3, 3.5),
        )
    ]


def held(rank: int = 0, **num_bytes: int) -> Ledger:
    ledger = Ledger(rank=rank)
    ledger.add(0.0, **num_bytes)
    return ledger


def fills(figure: Figure) -> set[str]:
    """Colours of the boxes of a timeline."""
    boxes = (artist for axes in figure.axes for artist in axes.get_children())
    patches = [box for box in boxes if isinstance(box, PathPatch)]
    return {to_hex(patch.get_facecolor()).upper() for patch in patches}


def words(figure: Figure) -> str:
    """All text on a figure."""
    inside = [text.get_text() for axes in figure.axes for text in axes.texts]
    labels = [axes.get_xlabel() + axes.get_ylabel() for axes in figure.axes]
    legends = [text.get_text() for legend in legends_of(figure) for text in legend.get_texts()]
    return "\n".join([*(text.get_text() for text in figure.texts), *inside, *labels, *legends])


def legends_of(figure: Figure) -> list:
    return [artist for artist in figure.get_children() if hasattr(artist, "legend_handles")]


EVENTS = {
    "none": [],
    "one rank": busy(1),
    "8 ranks": busy(8, 20),
    "rank 5 alone": [event(5, "forward", 0, 1)],
    "no length": [event(0, "forward", 1, 1), event(1, "send", 0, 0)],
    "all at 0": [event(0, "barrier", 0, 0)],
    "wide spread": [event(0, "forward", 0, 1e-7), event(0, "backward", 1, 1e4)],
    "every kind": [event(i % 3, kind, i, i + 1) for i, kind in enumerate(KINDS)],
    "long label": [event(0, "forward", 0, 1, "a label that fits no box " * 9)],
}


@pytest.mark.parametrize("events", EVENTS.values(), ids=EVENTS)
def test_timeline_draws(events: list[Event]) -> None:
    figure = timeline(events, "Ranks take turns")
    assert png_bytes(figure).startswith(b"\x89PNG")
    assert fills(figure) == {KIND[event.kind].fill for event in events}
    assert figure.axes[0].get_xlim()[0] == 0


def test_timeline_has_rank_0_on_top_and_a_unit_of_time() -> None:
    axes = timeline(busy(3), "Ranks take turns").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert axes.yaxis_inverted()
    assert axes.get_xlabel() == "time (s)"
    short = [event(0, "forward", 0, 2e-3)]
    assert timeline(short, "Short").axes[0].get_xlabel() == "time (ms)"
    assert timeline(short, "Short").axes[0].get_xlim()[1] == pytest.approx(2.0, rel=0.01)
    assert timeline(busy(1), "Steps", unit="steps").axes[0].get_xlabel() == "time (steps)"


def test_timeline_names_only_the_kinds_that_are_there() -> None:
    said = words(timeline(busy(2), "Ranks take turns"))
    assert "communication (all_reduce)" in said
    assert "waiting" in said
    assert "optimizer" not in said


def test_timeline_says_that_a_link_was_emulated() -> None:
    link = Link(name="Ethernet", latency_s=50e-6, bytes_per_s=1.25e9)
    assert "emulated Ethernet (50 us, 1.25 GB/s)" in words(timeline(busy(2), "Slow", link=link))
    assert "emulated" not in words(timeline(busy(2), "Fast"))


def test_predicted_and_measured_share_one_scale_of_time() -> None:
    late = [event(0, "forward", 5, 9)]
    figure = timelines({"predicted": busy(2, 1), "measured": late}, "It takes twice as long")
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim()
    assert first.get_xlim()[1] >= 9
    assert first.get_ylim() == second.get_ylim()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["predicted", "measured"]


def test_a_message_under_way_during_work_goes_beneath_the_rank() -> None:
    found = {slot.event.kind: slot for slot in assign_slots(busy(1, 1))}
    assert found["all_reduce"].beneath
    assert not found["forward"].beneath


def test_a_message_with_nothing_beside_it_fills_the_lane() -> None:
    work, send = event(0, "forward", 0, 1), event(0, "send", 1, 2)
    assert not any(slot.beneath for slot in assign_slots([work, send]))


def test_a_message_that_is_only_waited_for_fills_the_lane_over_the_wait() -> None:
    wait, reduce = event(0, "wait", 0, 3), event(0, "all_reduce", 0, 2)
    assert [(slot.event, slot.beneath) for slot in assign_slots([reduce, wait])] == [
        (wait, False),
        (reduce, False),
    ]


def test_messages_at_the_same_time_share_the_height() -> None:
    send, recv, later = (event(0, kind, *at) for kind, at in
        (("send", (0, 2)), ("recv", (1, 3)), ("send", (3, 4))))  # fmt: skip
    slots = assign_slots([later, recv, send])
    found = {slot.event: (slot.index, slot.count) for slot in slots}
    assert found == {send: (0, 2), recv: (1, 2), later: (0, 1)}


def test_every_event_gets_exactly_one_place() -> None:
    events = busy(1, 5) + [event(0, kind, 0.5, 7) for kind in COMMUNICATION_KINDS]
    assert sorted(map(str, events)) == sorted(str(slot.event) for slot in assign_slots(events))


def test_a_picture_needs_a_title() -> None:
    with pytest.raises(CourseError, match="need a title"):
        timeline(busy(1), " ")


def test_memory_over_time_is_stacked_and_names_its_unit() -> None:
    ledger = Ledger()
    for moment in range(4):
        ledger.add(moment * 1e-3, params=2 * GIB, activations=moment * GIB)
    figure = memory(ledger, "Activations climb", limit_bytes=4 * GIB)
    png_bytes(figure)
    said = words(figure)
    assert "memory (GiB)" in said
    assert "time (ms)" in said
    assert "peak 5 GiB" in said
    assert "limit 4 GiB" in said
    assert "grads" not in said


def test_a_peak_that_hardly_lasts_is_drawn_up_to_its_label() -> None:
    ledger = Ledger()
    for at_s, grads in ((0, 1), (1, 3), (1 + 1e-9, 6), (1 + 2e-9, 2), (2, 1)):
        ledger.add(at_s, params=MIB, grads=grads * MIB)
    (axes,) = memory(ledger, "A peak").axes
    low, high = axes.get_xlim()
    boxes = [patch.get_bbox() for patch in axes.patches]
    assert max(box.y1 for box in boxes) == 7
    assert all(box.width > 2e-3 * (high - low) for box in boxes)


def test_memory_of_several_ledgers_says_what_is_too_much() -> None:
    ledgers = {"whole": held(params=3 * MIB), "sharded": held(params=MIB)}
    figure = memory(ledgers, "Sharding fits", limit_bytes=2 * MIB)
    png_bytes(figure)
    said = words(figure)
    assert "memory (MiB)" in said
    assert "3 MiB\n1 MiB too much" in said
    assert said.count("too much") == 1
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["whole", "sharded"]


def test_a_number_that_the_limit_would_cross_stays_legible() -> None:
    (axes,) = memory({"fits": held(params=99 * MIB)}, "It fits", limit_bytes=100 * MIB).axes
    number = next(text for text in axes.texts if text.get_text() == "99 MiB")
    assert number.get_bbox_patch().get_facecolor() == (1, 1, 1, 1)
    assert number.get_zorder() > max(line.get_zorder() for line in axes.lines)


LEDGERS = {
    "none": [],
    "empty": Ledger(),
    "one moment": held(params=5),
    "all zero": held(),
    "8 ranks": [held(rank, params=GIB, grads=GIB // (rank + 1)) for rank in range(8)],
}


@pytest.mark.parametrize("ledgers", LEDGERS.values(), ids=LEDGERS)
@pytest.mark.parametrize("limit_bytes", [None, 0, GIB])
def test_memory_draws(ledgers: Ledger | list[Ledger], limit_bytes: int | None) -> None:
    png_bytes(memory(ledgers, "Bytes", limit_bytes=limit_bytes))


def test_memory_pictures_of_one_scale_are_equally_high() -> None:
    small, large = Ledger(), Ledger()
    for moment in range(2):
        small.add(moment, params=MIB)
        large.add(moment, params=5 * MIB)
    figures = [memory(one, "Bytes", scale_bytes=5 * MIB).axes[0] for one in (small, large)]
    assert figures[0].get_ylim() == figures[1].get_ylim()


def test_memory_refuses_two_ledgers_of_one_rank_without_names() -> None:
    with pytest.raises(CourseError, match="a rank twice"):
        memory([held(), held()], "Bytes")


def test_compare_draws_three_voices_on_one_axes() -> None:
    voices = Voices(formula=lambda x: 2 * x, simulation=[2, 4], measurement=[[2, 3], [4, 5, 9]])
    figure = compare([1, 2], voices, "Doubled", x_label="size (bytes)", y_label="time (s)")
    png_bytes(figure)
    said = words(figure)
    for word in ("formula", "simulation", "measurement (median, range)", "size (bytes)"):
        assert word in said
    measured = figure.axes[0].lines[-1].get_ydata()
    assert list(measured) == [2.5, 5]


def test_compare_cuts_no_mark_at_the_top() -> None:
    voices = Voices(measurement=[512, 462])
    figure = compare([0, 1], voices, "Nearly equal", x_label="rank", y_label="KiB")
    bottom, top = figure.axes[0].get_ylim()
    assert bottom == 0
    assert top > 512 * 1.02


@pytest.mark.parametrize(("x", "whole"), [([1, 2, 4], True), ([0.5, 1.5], False)])
def test_compare_has_no_half_ranks(x: list[float], whole: bool) -> None:
    figure = compare(x, Voices(measurement=x), "Ranks", x_label="ranks", y_label="s")
    ticks = figure.axes[0].get_xticks()
    assert all(tick.is_integer() for tick in ticks) == whole


def test_compare_draws_several_curves_on_logarithmic_axes() -> None:
    curves = {
        "ring": Voices(formula=[1.0, 2.0, 9.0], measurement=[1.1, 2.2, 9.9]),
        "tree": Voices(formula=lambda x: x / 7, simulation=[1, 2, 3]),
    }
    figure = compare([1, 10, 1000], curves, "Ring wins", x_label="B", y_label="s", log=True)
    png_bytes(figure)
    assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log"
    assert {"ring", "tree"} <= set(words(figure).split("\n"))
    assert len({line.get_color() for line in figure.axes[0].lines}) == 2


@pytest.mark.parametrize("low_s", [0.03, 0.3, 0.6])
def test_compare_labels_logarithmic_axes_that_are_short(low_s: float) -> None:
    seconds = Voices(formula=[low_s, 2 * low_s])
    figure = compare([10, 20], seconds, "Twice", x_label="B", y_label="s", log=True)
    png_bytes(figure)
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        low, high = axis.get_view_interval()
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        shown = [t.label1.get_text() for t in ticks if low <= t.get_loc() <= high]
        assert len(set(filter(None, shown))) >= 2


@pytest.mark.parametrize("log", [False, True])
def test_compare_draws_a_single_point(log: bool) -> None:
    for voices in (Voices(formula=lambda x: x, measurement=[[0.5, 1.0]]), Voices(simulation=[3])):
        png_bytes(compare([10], voices, "One", x_label="B", y_label="s", log=log))
    flat = Voices(formula=lambda x: 5e-5)
    png_bytes(compare([1, 10], flat, "Latency only", x_label="B", y_label="s", log=log))


@pytest.mark.parametrize(("x", "y"), [([0, 10], [1, 2]), ([1, 10], [0, 2])])
def test_compare_has_no_place_for_zero_on_logarithmic_axes(x: list, y: list) -> None:
    for voices in (Voices(formula=y), Voices(simulation=y), Voices(measurement=y)):
        with pytest.raises(CourseError, match="need numbers above 0 on logarithmic axes; got 0"):
            compare(x, voices, "From nothing", x_label="B", y_label="s", log=True)


@pytest.mark.parametrize("given", [[1.0], [[1.0], []]])
def test_compare_says_which_voice_has_too_few_numbers(given: list) -> None:
    with pytest.raises(CourseError, match=r"ring: need one number, .* in measurement for each"):
        compare([1, 2], {"ring": Voices(measurement=given)}, "x", x_label="B", y_label="s")


def test_compare_refuses_curves_without_a_voice() -> None:
    with pytest.raises(CourseError, match="got none of them"):
        Voices()
    with pytest.raises(CourseError, match="need 1 to 4 curves; got 0"):
        compare([1], {}, "x", x_label="B", y_label="s")
    with pytest.raises(CourseError, match="at least one value of x"):
        compare([], Voices(formula=[]), "x", x_label="B", y_label="s")


NAN = float("nan")
AXES = {"x_label": "GPUs", "y_label": "s"}


def marks(figure: Figure, marker: str) -> list:
    return [line for line in figure.axes[0].lines if line.get_marker() == marker]


def ticks_of(figure: Figure) -> list[str]:
    low, high = figure.axes[0].get_xlim()
    ticks = zip(figure.axes[0].get_xticks(), figure.axes[0].get_xticklabels(), strict=True)
    return [label.get_text() for at, label in ticks if low <= at <= high]


@pytest.mark.parametrize("log", [False, True])
def test_published_values_have_a_mark_and_name_their_source(log: bool) -> None:
    voices = Voices(formula=[1, 2], published=([4, 8, 16], [3, 5, 9]))
    figure = compare([1, 2], voices, "Twice", **AXES, log=log, source="Somebody 2022, table 5")
    png_bytes(figure)
    (stars,) = marks(figure, "*")
    assert list(stars.get_xdata()) == [4, 8, 16]
    assert "published" in words(figure)
    assert "Published values: Somebody 2022, table 5" in words(figure)


def test_published_values_need_no_others() -> None:
    voices = Voices(published=([8, 512], [40, 20]))
    png_bytes(compare([], voices, "Half", **AXES, log_x=True, source="Somebody 2022"))


@pytest.mark.parametrize(
    ("published", "more", "says"),
    [
        (([1, 2], [3, 4]), {}, "need the source of the published values; got none"),
        (([1, 2], [3]), {"source": "x"}, "one y for each x; got 2 and 1 numbers"),
        (([], []), {"source": "x"}, "one y for each x; got 0 and 0 numbers"),
        (([1, 2], [3, 0]), {"source": "x", "log": True}, "need numbers above 0"),
        (([0, 2], [3, 1]), {"source": "x", "log_x": True}, "need numbers above 0"),
        (([1], [1]), {"source": "x", "names": {"paper": "y"}}, "need names of formula, .*'paper'"),
    ],
)
def test_published_values_that_cannot_be_drawn_are_told(
    published: tuple, more: dict, says: str
) -> None:
    with pytest.raises(CourseError, match=says):
        compare([1], Voices(formula=[1], published=published), "x", **AXES, **more)


def test_only_one_axis_is_logarithmic_with_log_x() -> None:
    axes = compare([1, 8], Voices(measurement=[0, 5]), "x", **AXES, log_x=True).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")


@pytest.mark.parametrize("log", [False, True])
def test_no_value_is_a_mark_of_its_own(log: bool) -> None:
    figure = compare([1, 2, 4], Voices(measurement=[1, NAN, 3]), "One fails", **AXES, log=log)
    png_bytes(figure)
    (cross,) = marks(figure, "x")
    assert list(cross.get_xdata()) == [2]
    assert "no value" in words(figure)
    png_bytes(compare([1, 2], Voices(simulation=[NAN, NAN]), "All fail", **AXES, log=log))
    whole = compare([1, 2], Voices(measurement=[1, 2]), "None fails", **AXES, log=log)
    assert "no value" not in words(whole)


def test_the_legend_says_what_a_line_is() -> None:
    voices = Voices(formula=[1, 2], measurement=[[1, 2], [2, 3]])
    names = {"formula": "one process", "measurement": "four ranks"}
    said = words(compare([1, 2], voices, "Same", **AXES, names=names))
    assert "one process" in said
    assert "four ranks (median, range)" in said
    assert "formula" not in said


def test_logarithmic_ticks_are_the_measured_points() -> None:
    def ticks(x: list[float], published: list[float] | None = None) -> list[str]:
        more = None if published is None else (published, published)
        voices = Voices(measurement=x, published=more)
        return ticks_of(compare(x, voices, "x", **AXES, log=True, source="somebody"))

    assert ticks([1, 2, 4, 8]) == ["1", "2", "4", "8"]
    assert ticks([1, 4], [16, 64]) == ["1", "4", "16", "64"]
    assert ticks([1024, 65536, 3e5]) == ["1,024", "2\u00b9\u2076", "3\u00b710\u2075"]
    assert ticks([1, 64], [65]) == ["1", "64"]  # 64 and 65 would touch: those of x alone
    assert "17" not in ticks([*range(1, 18)])  # too many: powers of ten


@dataclass
class Wait:
    rank: int
    waits_for: tuple[int, ...]
    kind: str = "recv"
    where: str = "dist.recv(x, src=rank - 1)"
    line: int = 4


def test_waiting_titles_say_the_finding() -> None:
    ring = [Wait(rank, ((rank + 1) % 3,)) for rank in range(3)]
    assert "A circle of waiting, 0 \u2192 1 \u2192 2 \u2192 0" in words(waiting(ring, 3))
    left = [Wait(rank, (0,)) for rank in (1, 2, 3)]
    said = words(waiting(left, 4))
    assert "Ranks 1, 2 and 3 wait for rank 0, which does not wait for anyone" in said
    assert "gray: finished, or still computing" in said
    assert "in recv, line 4\ndist.recv(x, src=rank - 1)" in said
    assert "My own title" in words(waiting(ring, 3, "My own title"))


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_waiting_draws(world_size: int) -> None:
    ranks = range(world_size)
    png_bytes(waiting([], world_size))
    png_bytes(waiting([Wait(rank, tuple(ranks), where="x" * 99) for rank in ranks], world_size))
    png_bytes(waiting([Wait(0, (99,), where="", line=0)], world_size))
