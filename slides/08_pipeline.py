"""The pictures of the deck 08_pipeline, drawn by the functions that the notebook calls."""

from dataclasses import dataclass

from course_lib.core import MODELS, Link
from course_lib.cost.flops import forward_flop
from course_lib.display import timeline, timelines, waiting
from course_lib.pipeline import (
    PipelineTimes,
    balance,
    cost,
    dual_pipe_v,
    schedule_bound,
    schedules,
    simulate,
    zero_bubble_v,
)
from course_lib.pipeline import pictures as lesson_pictures
from course_lib.pipeline import token_pipeline as tokens
from course_lib.pipeline.cost import BatchCost
from course_lib.pipeline.pictures import h100_picture, pipelines, throughput_picture

BATCH = BatchCost(forward_s=160e-3, backward_s=320e-3)
WIRE = Link(name="slow link", latency_s=30e-3, bytes_per_s=1e9)


@dataclass(frozen=True)
class Wait:
    """One rank that waits, for the picture of the hang."""

    rank: int
    waits_for: tuple[int, ...]
    kind: str = "send"
    where: str = "dist.send(x, target)"
    line: int = 7


def naive():
    """One rank computes at a time."""
    figure, _alt = lesson_pictures.one_batch(simulate(schedules.naive(4, 1)))
    return figure


def bubble():
    """The bubble over the number of micro-batches."""
    figure, _alt = lesson_pictures.gpipe_bubble(4, [1, 2, 4, 8, 16, 32], log=True)
    return figure


def gpipe():
    """All forwards, then all backwards, with what they hold."""
    played = simulate(schedules.gpipe(4, 6))
    return pipelines({"GPipe": played.events()}, "Every rank holds all 6 micro-batches", unit="F")


def one_f_one_b():
    """Forwards and backwards in turn, with what they hold."""
    played = simulate(schedules.one_f_one_b(4, 6))
    title = "Rank 0 holds 4 micro-batches, rank 3 one"
    return pipelines({"1F1B": played.events()}, title, unit="F")


def _five(p, m):
    """The five schedules in use, by name."""
    return {
        "1F1B": schedules.one_f_one_b(p, m),
        "interleaved": schedules.interleaved(p, m, 2),
        "ZB-H1": schedules.zero_bubble_h1(p, m),
        "ZB-V": zero_bubble_v(p, m),
        "DualPipeV": dual_pipe_v(p, m),
    }


def _idle(*names):
    """Some of the five schedules on one scale of time."""
    played = {name: simulate(_five(3, 6)[name]) for name in names}
    idle = ", ".join(f"{one.bubble_fraction:.0%}" for one in played.values())
    runs = {name: one.events() for name, one in played.items()}
    return timelines(runs, f"Idle: {idle} of the time", unit="F")


def chunks():
    """Several short chunks of the model on each rank."""
    return _idle("1F1B", "interleaved")


def deferred():
    """Weight gradients of their own, in the bubble."""
    return _idle("1F1B", "ZB-H1")


def both():
    """Chunks in a V."""
    return _idle("ZB-V", "DualPipeV")


def puzzle():
    """ZB-H1 and ZB-V with other times, and what no order of one chunk a rank can beat."""
    times = PipelineTimes(forward_s=2, backward_input_s=2, backward_weight_s=1)
    played = {name: simulate(_five(4, 8)[name], times) for name in ("ZB-H1", "ZB-V")}
    bound_s = schedule_bound(4, 8, 4, times)
    title = (
        f"ZB-H1 takes {played['ZB-H1'].step_s:g}; the bound for one chunk per rank is {bound_s:g}"
    )
    runs = {f"{name}: {one.step_s:g}": one.events() for name, one in played.items()}
    return timelines(runs, title, unit="F/2")


def throughput():
    """What deferred weight gradients gain on real GPUs."""
    real = cost.zero_bubble_throughput()
    gain = real.published["ZB-1p"][0] / real.published["1F1B"][0] - 1
    return throughput_picture(
        real, f"24 micro-batches: ZB-1p has {gain:.0%} more samples/s than 1F1B"
    )


def h100():
    """Tokens/s per GPU on 8 H100, by number of stages."""
    found = cost.h100_stages()
    kept = found.published[-1] / found.published[0]
    title = (
        f"8 stages keep {kept:.0%} of the speed: the output layer is {found.head_layers:.1f} blocks"
    )
    return h100_picture(found, title)


def hang():
    """Two neighbors send to each other."""
    return waiting([Wait(0, (1,)), Wait(1, (2,)), Wait(2, (3,)), Wait(3, (2,))], 4)


def slow_wire():
    """1F1B and GPipe over a link with latency."""
    figure, _alt = lesson_pictures.steps_on_link(4, [4, 8, 16], BATCH, WIRE)
    return figure


def uneven():
    """GPT-2, equally many layers a stage."""
    flop = forward_flop(MODELS["gpt2"], 1, 1024)
    head = flop.pop("logits")
    layers = [0.0, *[1.0] * 12, 12 * head / sum(flop.values())]
    cuts = [4, 3, 3, 4], balance.balance_stages(layers, 4)
    shown = {}
    for cut in cuts:
        each = balance.stage_times(layers, cut)
        times = PipelineTimes(forward_s=each, backward_input_s=each, backward_weight_s=each)
        shown[f"layers {cut}"] = simulate(schedules.one_f_one_b(4, 4), times).events()
    ends = [max(event.end_s for event in events) for events in shown.values()]
    title = f"GPT-2, m = 4: a step takes {ends[0]:.0f} block times, balanced {ends[1]:.0f}"
    return timelines(shown, title, unit="blocks")


def sequence():
    """Pieces of one sequence."""
    token_cost = tokens.TokenCost(piece_s=50e-6, token_s=1e-6, pair_s=4e-9)
    cut = tokens.balanced_cut(2048, 8, token_cost)
    played = simulate(tokens.token_schedule(4, 8), tokens.token_times(cut, token_cost))
    return timeline(played.events(), f"Pieces of {cut[0]} to {cut[-1]} tokens take equally long")


def pictures():
    """All pictures by the names the deck calls them."""
    draws = (
        naive,
        bubble,
        gpipe,
        one_f_one_b,
        hang,
        chunks,
        deferred,
        both,
        puzzle,
        throughput,
        slow_wire,
        uneven,
        h100,
    )
    return {draw.__name__: draw() for draw in (*draws, sequence)}
