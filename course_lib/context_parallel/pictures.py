"""Pictures of context parallelism: who computes what, bytes, busy ranks, overlap, memory.

Every function returns a figure and its alt text. Notebook 15_context_parallel.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_lib.context_parallel.cost import (
    FORMS,
    AttentionSizes,
    PassBytes,
    causal_pairs,
    hides_from,
    imbalance,
    kept_bytes,
)
from course_lib.context_parallel.lab import RingRuns, fitted_pair_s
from course_lib.context_parallel.layouts import LAYOUTS, positions
from course_lib.core.links import Link
from course_lib.core.units import GIB, KIB
from course_lib.cost.hardware import H100
from course_lib.display.colours import QUIET, WHITE, rank_colour
from course_lib.display.compare import Voices, compare
from course_lib.display.page import SMALL_PT, TEXT_PT, WIDTH_IN, Margins, page
from course_lib.display.timeline import timelines

SEQS = [2**power for power in range(13, 21)]


def causal_work(p: int, seq: int = 24) -> tuple[Figure, str]:
    """Draw the causal mask of each layout: a row for each query, in the color of its rank."""
    most = {layout: imbalance(p, seq, layout) for layout in LAYOUTS}
    told = ", ".join(f"{layout} {factor:.2f}" for layout, factor in most.items())
    title = f"The busiest of {p} ranks has this many times the mean work: {told}"
    figure, (axes,) = page(
        title,
        [2.6],
        note="A row is a query, as wide as the keys it sees; its color and number are its rank's.",
        margins=Margins(left=0.2, right=0.2, top=0.35, bottom=0.1),
    )
    axes.set(xlim=(0, WIDTH_IN), ylim=(2.6, 0))
    axes.set_axis_off()
    cell = min(2.5, (WIDTH_IN - 0.4) / len(LAYOUTS) - 0.3) / seq
    for column, layout in enumerate(LAYOUTS):
        left = 0.35 + column * (WIDTH_IN - 0.4) / len(LAYOUTS)
        axes.text(left, -0.08, layout, fontsize=TEXT_PT, fontweight="bold")
        for rank in range(p):
            for at in positions(rank, p, seq, layout):
                look: dict[str, Any] = {"facecolor": rank_colour(rank, p), "edgecolor": WHITE}
                box = Rectangle((left, at * cell), (at + 1) * cell, cell, linewidth=0.5, **look)
                axes.add_patch(box)
                look = {"ha": "right", "va": "center", "fontsize": SMALL_PT - 2, "color": QUIET}
                axes.text(left - 0.03, (at + 0.5) * cell, str(rank), **look)
    return figure, title


def bytes_picture(
    sizes: AttentionSizes, measured: Mapping[int, Mapping[str, Sequence[PassBytes]]]
) -> tuple[Figure, str]:
    """Draw the bytes that a rank sends for one layer, by formula and as measured.

    measured   by p and form, those of each rank: `measure_bytes`
    """
    ps = [*measured]

    def kib(form: str, p: int) -> float:
        return sum(FORMS[form](sizes, p, 0, "contiguous")) / KIB

    curves = {
        form: Voices(
            simulation=[kib(form, p) for p in ps],
            measurement=[[sum(rank) / KIB for rank in measured[p][form]] for p in ps],
        )
        for form in FORMS
    }
    last = ps[-1]
    told = ", ".join(f"{form} {kib(form, last):,.0f} KiB" for form in FORMS)
    title = f"Sent per rank and layer, forward and backward, on {last} ranks: {told}"
    figure = compare(
        ps,
        curves,
        title,
        x_label="ranks p",
        y_label="KiB sent by a rank",
        names={"simulation": "formula"},
        note=_sizes_in_words(sizes),
    )
    return figure, title


def busy_picture(sizes: AttentionSizes, p: int, runs: Mapping[str, RingRuns]) -> tuple[Figure, str]:
    """Draw the processor seconds of each rank beside those that its part of the mask says.

    The formula's seconds of a pair are those of all measured work, divided by all its pairs.
    """
    pair_ms = 1e3 * fitted_pair_s(sizes, runs)
    curves = {
        layout: Voices(
            simulation=[pair_ms * pairs for pairs in causal_pairs(p, sizes.seq, layout)],
            measurement=[[1e3 * s for s in turns] for turns in run.busy_s],
        )
        for layout, run in runs.items()
    }
    told = [
        f"{layout} {run.imbalance:.2f} (formula {imbalance(p, sizes.seq, layout):.2f})"
        for layout, run in runs.items()
    ]
    title = f"The busiest rank's time divided by the mean: {', '.join(told)}"
    figure = compare(
        range(p),
        curves,
        title,
        x_label="rank",
        y_label="processor time (ms)",
        names={"simulation": "pairs of the mask"},
        note=f"ring attention, causal, forward and backward; {_sizes_in_words(sizes)}",
    )
    return figure, title


def ring_on_the_clock(runs: Mapping[str, RingRuns], link: Link | None = None) -> tuple[Figure, str]:
    """Draw the forward and the backward pass of a ring on all ranks, for each layout."""
    events = {layout: run.fastest for layout, run in runs.items()}
    ends_ms = {name: 1e3 * max(event.end_s for event in own) for name, own in events.items()}
    title = "A causal ring, forward and backward: "
    title += ", ".join(f"{name} {end:.0f} ms" for name, end in ends_ms.items())
    return timelines(events, title, link=link), f"{title}; a block travels while one is computed"


def hiding_picture(
    tokens: Sequence[int] = (256, 512, 1024, 2048, 4096, 8192, 16384),
    *,
    hidden: int = 4096,
    kv_share: float = 0.25,
) -> tuple[Figure, str]:
    """Draw how long a step of a ring computes and sends on H100, over the tokens of a rank.

    kv_share   KV heads divided by heads, as in Llama-3 8B
    """
    peak = H100.peak()
    links = {"NVLink": 1.0, "NVLink, GQA": kv_share, "InfiniBand NDR, GQA": kv_share}

    def rate(name: str) -> float:
        return H100.links[name.partition(",")[0]]

    def send_ms(name: str, n: float) -> float:
        return 1e3 * 4 * n * hidden * links[name] / rate(name)

    curves = {"computing": Voices(formula=lambda n: 1e3 * 4 * n**2 * hidden / peak)}
    curves |= {name: Voices(formula=partial(send_ms, name)) for name in links}
    least = {name: hides_from(peak, rate(name), kv_share=share) for name, share in links.items()}
    told = ", ".join(f"{name}: {count:,.0f}" for name, count in least.items())
    title = f"Tokens per rank from which computing hides sending. {told}"
    figure = compare(
        tokens,
        curves,
        title,
        x_label="tokens per rank",
        y_label="ms per step of the ring",
        log=True,
        note=f"one H100 at its peak, bf16, h = {hidden}, GQA: h_kv / h = {kv_share:g}; no mask: "
        "a balanced causal one halves computing, and doubles the tokens",
    )
    return figure, title


def memory_picture(sizes: AttentionSizes, p: int, seqs: Sequence[int] = SEQS) -> tuple[Figure, str]:
    """Draw what one layer's attention keeps for backward on a rank, over the sequence length."""

    def gib(form: str, ranks: int, seq: float) -> float:
        whole = AttentionSizes(**{**vars(sizes), "seq": int(seq) // ranks * ranks})
        return kept_bytes(whole, ranks, form) / GIB

    curves = {"one rank": Voices(formula=partial(gib, "ring", 1))}
    curves |= {form: Voices(formula=partial(gib, form, p)) for form in FORMS}
    last = seqs[-1]
    told = ", ".join(f"{form} {gib(form, p, last):.2g} GiB" for form in FORMS)
    title = (
        f"One layer at {last:,} tokens on {p} ranks: {told}; one rank {gib('ring', 1, last):.2g}"
    )
    figure = compare(
        seqs,
        curves,
        title,
        x_label="tokens of the sequence",
        y_label="GiB kept by attention",
        log=True,
        note=_sizes_in_words(sizes, with_seq=False),
    )
    return figure, title


def _sizes_in_words(sizes: AttentionSizes, *, with_seq: bool = True) -> str:
    heads = f"{sizes.num_heads} heads, {sizes.kv_heads} KV heads of {sizes.head_dim}"
    seq = f", {sizes.seq:,} tokens" if with_seq else ""
    return f"batch {sizes.batch}{seq}, {heads}, {sizes.number_bytes} bytes a number"
