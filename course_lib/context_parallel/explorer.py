"""Interactive picture: one layer's causal attention on a clock, by form, layout, ranks and length.

Everything is a formula, so a slider responds at once. Notebook 15_context_parallel.
"""

from matplotlib.figure import Figure

from course_lib.context_parallel.cost import (
    FORMS,
    FORWARD_FLOP,
    AttentionSizes,
    block_pairs,
)
from course_lib.context_parallel.layouts import LAYOUTS
from course_lib.core.presets import MODELS
from course_lib.core.records import Event
from course_lib.core.units import format_seconds
from course_lib.cost.hardware import H100
from course_lib.display.explore import Explore, explore
from course_lib.display.timeline import timeline

FLOP_PER_S = 0.5 * H100.peak()
COUNTED = 16  # tokens per rank in which pairs are counted: their shares hardly change with more
CALLS = {"ring": "send", "all-gather": "all_gather", "Ulysses": "all_to_all"}


def attention_explorer() -> Explore:
    """Return a picture with sliders for ranks, length, form, layout and link."""
    return explore(
        draw_forward,
        forward_alt,
        p=([2, 4, 8], 4),
        seq=([2**power for power in range(12, 19)], 2**14),
        form=([*FORMS], "ring"),
        layout=([*LAYOUTS], "contiguous"),
        link=([*H100.links], "InfiniBand NDR"),
    )


def forward_events(p: int, seq: int, form: str, layout: str, link: str) -> list[Event]:
    """Return when each rank computes and sends in the forward pass of a layer of Llama-8B.

    A rank of a ring begins with a block when it has computed with the one before and this one is
    there, and passes it on then. The two others compute when all has come. Latency is left out.
    """
    model = MODELS["llama-8b"]
    sizes = AttentionSizes(
        seq=seq, num_heads=model.num_heads, kv_heads=model.kv_heads, head_dim=model.head_size
    )
    pair_s = FORWARD_FLOP * model.num_heads * model.head_size / FLOP_PER_S
    pair_s *= (seq / (COUNTED * p)) ** 2
    compute_s = [[pair_s * n for n in row] for row in block_pairs(p, COUNTED * p, layout)]
    sent_s = [FORMS[form](sizes, p, rank, layout).forward / H100.links[link] for rank in range(p)]
    if form == "ring":
        return _ring_events(compute_s, max(sent_s) / (p - 1))
    totals = [sum(row) for row in compute_s]
    if form == "Ulysses":  # some heads of all tokens, whatever the layout
        totals = [sum(totals) / p] * p
    found = []
    for rank, total in enumerate(totals):
        found.append(_event(rank, CALLS[form], 0.0, sent_s[rank]))
        found.append(_event(rank, "forward", sent_s[rank], total))
    return found


def _ring_events(compute_s: list[list[float]], hop_s: float) -> list[Event]:
    p, found = len(compute_s), list[Event]()
    starts = [0.0] * p  # of this step, on each rank
    for step in range(p):
        for rank, start_s in enumerate(starts):
            source = (rank - step) % p
            seconds = compute_s[rank][source]
            if seconds:
                found.append(_event(rank, "forward", start_s, seconds, str(source)))
            if step < p - 1:
                found.append(_event(rank, "send", start_s, hop_s, str(source)))
        here = [starts[rank] + compute_s[rank][(rank - step) % p] for rank in range(p)]
        starts = [max(here[rank], starts[rank - 1] + hop_s) for rank in range(p)]
    return found


def _event(rank: int, kind: str, start_s: float, seconds: float, label: str = "") -> Event:
    return Event(rank=rank, kind=kind, start_s=start_s, end_s=start_s + seconds, label=label)


def draw_forward(p: int, seq: int, form: str, layout: str, link: str) -> Figure:
    """Draw the forward pass on all ranks."""
    events = forward_events(p, seq, form, layout, link)
    return timeline(events, forward_alt(p, seq, form, layout, link), link=link)


def forward_alt(p: int, seq: int, form: str, layout: str, link: str) -> str:
    """Return the finding as a sentence: how long the pass takes, and how much of it computes."""
    events = forward_events(p, seq, form, layout, link)
    end_s = max(event.end_s for event in events)
    busy_s = [0.0] * p
    for event in events:
        busy_s[event.rank] += event.duration_s * (event.kind == "forward")
    least, most = (f"{100 * one / end_s:.0f}" for one in (min(busy_s), max(busy_s)))
    shares = least if least == most else f"{least} to {most}"
    return (
        f"{form}, {layout}, {seq // p:,} tokens on each of {p} ranks: {format_seconds(end_s)}, in "
        f"which a rank computes {shares} % of the time"
    )
