"""Who works longest on a shared sequence, and what is sent. Notebook 15_context_parallel."""

from course_lib.context_parallel.cost import FORMS, AttentionSizes, causal_pairs, imbalance
from course_lib.context_parallel.layouts import LAYOUTS
from course_lib.core.live import Bars, Drawing, Live

HEADS, HEAD_DIM = 32, 128


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
