"""Pictures of context parallelism: who computes what, bytes, busy ranks, overlap, memory.

Every function returns a figure and its alt text. Notebook 15_context_parallel.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

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
from course_lib.core.presets import MODELS
from course_lib.core.units import GIB, KIB
from course_lib.cost.flops import train_step_flop
from course_lib.cost.hardware import H100
from course_lib.cost.published import rows
from course_lib.display.colours import BLACK, QUIET, WHITE, rank_colour
from course_lib.display.compare import Voices, compare
from course_lib.display.on_ranks import compare_on_ranks, measured_over
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
    figure = compare_on_ranks(
        "busy_picture",
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
    over = measured_over(link)
    return timelines(events, title, link=over), f"{title}; a block travels while one is computed"


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


# --- drawings of the lesson


def ring_blocks(p: int = 4) -> tuple[Figure, str]:
    """Draw whose keys each rank has in each step of a ring, and which ones a causal mask removes.

    Layout contiguous: a block of later tokens than the queries is empty, one's own is half full.
    """
    empty = p * (p - 1) // 2
    title = f"In step i rank r has the keys of rank r - i; a causal mask empties {empty} of {p * p}"
    margins = Margins(left=0.9, right=2.6, top=0.3, bottom=0.1)
    note = "pale: all keys are later than the queries; triangle: half of the block"
    figure, (axes,) = page(title, [0.5 * p], note=note, margins=margins)
    _grid(axes, p, p)
    for step in range(p):
        axes.text(step + 0.5, -0.12, f"step {step}", ha="center", va="bottom", fontsize=TEXT_PT)
        for rank in range(p):
            source = (rank - step) % p
            pale = 0.25 if source > rank else 1.0
            _cell(axes, (step, rank), rank_colour(source, p), f"keys of {source}", alpha=pale)
            if source == rank:
                corners = [(step, rank), (step + 1, rank), (step + 1, rank + 1)]
                axes.add_patch(Polygon(corners, facecolor=WHITE, alpha=0.75))
    return figure, title


def tokens_to_heads(p: int = 4) -> tuple[Figure, str]:
    """Draw what a rank has before and after Ulysses' all-to-all: tokens of all heads, and back."""
    title = f"An all-to-all turns 1/{p} of the tokens into 1/{p} of the heads; a second one, back"
    margins = Margins(left=0.9, right=0.3, top=0.35, bottom=0.1)
    figure, (axes,) = page(title, [0.45 * p], note="colour: the rank that has it", margins=margins)
    _grid(axes, 2 * p + 2, p)
    for left, name in ((0, "before"), (p + 2, "during attention")):
        axes.text(left + p / 2, -0.12, name, ha="center", va="bottom", fontsize=TEXT_PT)
        for row in range(p):
            for column in range(p):
                owner = row if left == 0 else column
                words = f"t{row} h{column}"
                _cell(axes, (left + column, row), rank_colour(owner, p), words)
    arrow = {"arrowstyle": "<->", "color": QUIET, "linewidth": 1.5}
    axes.annotate("", (p + 1.7, p / 2), (p + 0.3, p / 2), arrowprops=arrow)
    axes.text(p + 1, p / 2 - 0.2, "all-to-all", ha="center", va="bottom", fontsize=SMALL_PT)
    for row in range(p):
        axes.text(-0.1, row + 0.5, f"tokens {row}", ha="right", va="center", fontsize=TEXT_PT)
    return figure, title


def _grid(axes: Axes, columns: int, rows: int) -> None:
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    axes.set_axis_off()
    if columns == rows:
        for row in range(rows):
            axes.text(-0.1, row + 0.5, f"rank {row}", ha="right", va="center", fontsize=TEXT_PT)


def _cell(
    axes: Axes, corner: tuple[float, float], colour: str, words: str, alpha: float = 1.0
) -> None:
    look: dict[str, Any] = {"facecolor": colour, "edgecolor": WHITE, "linewidth": 2}
    axes.add_patch(Rectangle(corner, 1, 1, alpha=alpha, **look))
    x, y = corner
    where: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL_PT}
    axes.text(x + 0.5, y + 0.5, words, color=BLACK if alpha == 1 else QUIET, **where)


def forms_picture(
    seconds: Callable[[int], Mapping[str, float]], seqs: Sequence[int], words: str
) -> tuple[Figure, str]:
    """Draw the time of attention in forward, divided by that of the fastest form, over the length.

    seconds   those of each form that is possible, for a length: `forward_s` with all else given
    words     of the model and the cluster, for the note
    """
    found = {seq: seconds(seq) for seq in seqs}
    forms = [*found[seqs[-1]]]
    least = [min(found[seq].values()) for seq in seqs]
    curves = {
        form: Voices(formula=[found[seq][form] / s for seq, s in zip(seqs, least, strict=True)])
        for form in forms
    }
    first, last = (min(found[seq], key=found[seq].__getitem__) for seq in (seqs[0], seqs[-1]))
    title = f"Fastest at {seqs[0]:,} tokens: {first}; at {seqs[-1]:,} tokens: {last}"
    figure = compare(
        seqs,
        curves,
        title,
        x_label="tokens of the sequence",
        y_label="time / that of the fastest form",
        log_x=True,
        note=words,
    )
    return figure, title


def long_runs_picture() -> tuple[Figure, str]:
    """Draw tokens/s per GPU of torchtitan's runs, whose length grows with the ranks that share it.

    The formula has the FLOP of a token, at the speed of the run without context parallelism.

    Source:  torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, Table 2
    """
    runs = [row for row in rows("torchtitan") if row["table"] == "2"]
    seqs = [int(row["seq_len"]) for row in runs]
    tokens_per_s = [float(row["TPS_per_GPU"]) for row in runs]

    def flop(seq: float) -> float:
        step = train_step_flop(MODELS["llama-8b"], 1, int(seq), recompute="full", causal=True)
        return step / int(seq)

    formula = [tokens_per_s[0] * flop(seqs[0]) / flop(seq) for seq in seqs]
    gib = [float(row["memory_GiB"]) for row in runs]
    title = f"Llama-8B on 8 H100: cp {', '.join(row['cp'] for row in runs)}, each with "
    title += f"{min(gib):.1f} to {max(gib):.1f} GiB; {tokens_per_s[-1]:.0f} tokens/s per GPU "
    title += f"are left, by the FLOP of a token {formula[-1]:,.0f}"
    figure = compare(
        seqs,
        Voices(formula=formula, published=(seqs, tokens_per_s)),
        title,
        x_label="tokens of the sequence",
        y_label="tokens/s per GPU",
        log=True,
        source="torchtitan (Liang et al. 2024), Llama 3.1 8B, benchmarks of December 2024, Table 2",
    )
    return figure, title
