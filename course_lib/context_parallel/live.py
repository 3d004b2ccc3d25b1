"""Who works longest on a shared sequence, what is sent, and when. Notebook 15_context_parallel."""

from course_lib.context_parallel.cost import (
    FORMS,
    FORWARD_FLOP,
    AttentionSizes,
    block_pairs,
    causal_pairs,
    imbalance,
)
from course_lib.context_parallel.layouts import LAYOUTS
from course_lib.core.live import Bars, Drawing, Live, lanes_of
from course_lib.core.presets import MODELS
from course_lib.core.records import Event
from course_lib.core.units import format_seconds
from course_lib.cost.hardware import H100

HEADS, HEAD_DIM = 32, 128
FLOP_PER_S = 0.5 * H100.peak()
COUNTED = 16  # tokens per rank in which pairs are counted: their shares hardly change with more
CALLS = {"ring": "send", "all-gather": "all_gather", "Ulysses": "all_to_all"}


def layout_drawing(layout: str, p: int, seq: int, kv_heads: int) -> Drawing:
    """Return the pairs of each rank, and the bytes that a rank sends in each form of exchange."""
    sizes = AttentionSizes(seq=seq, num_heads=HEADS, kv_heads=kv_heads, head_dim=HEAD_DIM)
    pairs = causal_pairs(p, seq, layout)
    sent = {name: form(sizes, p, 0, layout) for name, form in FORMS.items()}
    rows = {
        name: {"forward": one.forward / 1e6, "backward": one.backward / 1e6}
        for name, one in sent.items()
    }
    least = min(sent, key=lambda name: sum(sent[name]))
    worked = {f"rank {rank}": {"compute": pairs[rank] / 1e6} for rank in range(p)}
    return Drawing(
        finding=f"{layout} on {p} ranks: the slowest has {imbalance(p, seq, layout):.2f} times the "
        f"mean work; {least} sends least, {sum(sent[least]) / 1e6:.3g} MB a layer",
        panels=[
            Bars(rows=worked, x_label="pairs of a query and a key that it sees (millions)"),
            Bars(rows=rows, x_label="sent by rank 0 in one layer (MB)"),
        ],
        note=f"{HEADS} heads of {HEAD_DIM} numbers in bf16, causal, one sequence",
    )


LAYOUT = Live(
    name="context_explorer",
    lesson="15_context_parallel",
    question="Why does the last rank work longest, and which exchange suits which model?",
    choices={
        "layout": [*LAYOUTS],
        "p": ([1, 2, 4, 8, 16], 4),
        "seq": ([1024, 4096, 16384, 65536], 4096),
        "kv_heads": ([1, 2, 4, 8, 32], 8),
    },
    compute=layout_drawing,
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


def forward_drawing(p: int, seq: int, form: str, layout: str, link: str) -> Drawing:
    """Return the lanes, and as the finding how long the pass takes, and how much of it computes."""
    events = forward_events(p, seq, form, layout, link)
    end_s = max(event.end_s for event in events)
    busy_s = [0.0] * p
    for event in events:
        busy_s[event.rank] += event.duration_s * (event.kind == "forward")
    least, most = (f"{100 * one / end_s:.0f}" for one in (min(busy_s), max(busy_s)))
    shares = least if least == most else f"{least} to {most}"
    return Drawing(
        finding=f"{form}, {layout}, {seq // p:,} tokens on each of {p} ranks: "
        f"{format_seconds(end_s)}, in which a rank computes {shares} % of the time",
        panels=[lanes_of(events, "time (s)")],
        note="a layer of Llama-8B, forward, on H100 at 50 % of their peak; latency is left out",
    )


FORWARD = Live(
    name="attention_explorer",
    lesson="15_context_parallel",
    question="When does a rank of the ring wait, and for what?",
    choices={
        "p": ([2, 4, 8], 4),
        "seq": ([2**power for power in range(12, 19)], 2**14),
        "form": [*FORMS],
        "layout": [*LAYOUTS],
        "link": ([*H100.links], "InfiniBand NDR"),
    },
    compute=forward_drawing,
)
