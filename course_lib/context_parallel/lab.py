"""Measure context-parallel attention on real ranks: bytes sent, and how busy each rank is.

`measure_bytes` counts the messages of each form. `measure_ring` times the work of each rank under
each layout, in seconds of its processor: neither waiting for other ranks nor a shared core counts.
Notebook 15_context_parallel.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.context_parallel.all_gather import all_gather_attention
from course_lib.context_parallel.cost import FORWARD_FLOP, AttentionSizes, PassBytes, ring_exposed_s
from course_lib.context_parallel.layouts import LAYOUTS, positions
from course_lib.context_parallel.ring import ring_attention
from course_lib.context_parallel.ulysses import ulysses_attention
from course_lib.core.records import Event
from course_lib.ranks import Ranks, record
from course_lib.ranks.progress import in_turns
from course_lib.ranks.timing import from_zero

ATTENTION: dict[str, Callable[..., Tensor]] = {  # by the names of `cost.FORMS`
    "ring": ring_attention,
    "all-gather": all_gather_attention,
    "Ulysses": ulysses_attention,
}
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by bytes of a number


def own_qkv(rank: int, p: int, sizes: AttentionSizes, layout: str) -> tuple[Tensor, ...]:
    """Return random q, k, v and gradient of a rank's tokens; q, k and v require gradients.

    Shapes:  [batch, heads or kv_heads, seq/p, head_dim]
    """
    torch.manual_seed(rank)
    tokens = len(positions(rank, p, sizes.seq, layout))
    heads = sizes.num_heads, sizes.kv_heads, sizes.kv_heads, sizes.num_heads
    shapes = [(sizes.batch, one, tokens, sizes.head_dim) for one in heads]
    q, k, v, grad = (torch.randn(shape).to(DTYPES[sizes.number_bytes]) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad


def sent_by(events: Iterable[Event]) -> int:
    """Return the bytes that a rank sends: messages, and collectives around a ring.

    Of an all_gather, a reduce_scatter or an all_to_all a rank keeps 1/p, and sends the rest.
    """
    sent = 0
    for event in events:
        if event.kind == "send":
            sent += event.num_bytes
        elif event.kind in ("all_gather", "reduce_scatter", "all_to_all"):
            sent += event.num_bytes - event.num_bytes // len(event.group)
    return sent


def measure_bytes(
    ranks: Ranks, sizes: AttentionSizes, layout: str = "contiguous"
) -> dict[str, list[PassBytes]]:
    """Return for each form the bytes that each rank sends for one layer; p divides the sequence."""
    by_rank = ranks.run(_sent_by_form, sizes, layout)
    return {form: [found[form] for found in by_rank] for form in ATTENTION}


def _sent_by_form(rank: int, sizes: AttentionSizes, layout: str) -> dict[str, PassBytes]:
    q, k, v, grad = own_qkv(rank, dist.get_world_size(), sizes, layout)
    found = {}
    for name, attention in ATTENTION.items():
        with record() as forward:
            o = attention(q, k, v, layout=layout, seq=sizes.seq)
        with record() as backward:
            o.backward(grad)
        found[name] = PassBytes(sent_by(forward.events), sent_by(backward.events))
    return found


@dataclass(frozen=True)
class RingRuns:
    """Causal ring attention in one layout: forward and backward, several turns.

    busy_s    processor seconds by rank and turn
    fastest   all ranks' events of the turn that took the shortest, on a clock that starts at 0
    """

    busy_s: list[list[float]]
    fastest: list[Event]

    @property
    def imbalance(self) -> float:
        """The busiest rank's processor seconds, divided by the mean; of each the least turn."""
        least = [min(turns) for turns in self.busy_s]
        return max(least) * len(least) / sum(least)


def measure_ring(
    ranks: Ranks, sizes: AttentionSizes, layouts: Sequence[str] = LAYOUTS, turns: int = 5
) -> dict[str, RingRuns]:
    """Run causal ring attention in each layout, in turns, after one that warms up."""
    by_rank = ranks.run(_ring_turns, sizes, list(layouts), turns)
    runs = {}
    for layout in layouts:
        together = zip(*(found[layout] for found in by_rank), strict=True)  # turn by turn
        events = [from_zero(e for _, own in turn for e in own) for turn in together]
        busy_s = [[seconds for seconds, _ in found[layout]] for found in by_rank]
        runs[layout] = RingRuns(busy_s, min(events, key=lambda one: max(e.end_s for e in one)))
    return runs


def _ring_turns(
    rank: int, sizes: AttentionSizes, layouts: Sequence[str], turns: int
) -> dict[str, list[tuple[float, list[Event]]]]:
    found: dict[str, list[tuple[float, list[Event]]]] = {layout: [] for layout in layouts}
    for layout in in_turns(layouts, turns + 1):
        q, k, v, grad = own_qkv(rank, dist.get_world_size(), sizes, layout)
        dist.barrier()
        start_s = time.thread_time()
        with record() as log:
            ring_attention(q, k, v, layout=layout, seq=sizes.seq).backward(grad)
        found[layout].append((time.thread_time() - start_s, log.events))
    return {layout: seen[1:] for layout, seen in found.items()}


def fitted_pair_s(sizes: AttentionSizes, runs: Mapping[str, RingRuns]) -> float:
    """Return the processor seconds per pair of query and key: of all runs, by all their pairs."""
    total_s = sum(min(turns) for run in runs.values() for turns in run.busy_s)
    return total_s / (len(runs) * sizes.seq * (sizes.seq + 1) / 2)


def forward_s(
    sizes: AttentionSizes, p: int, flop_per_s: float, bytes_per_s: float
) -> dict[str, float]:
    """Return the seconds of one layer's attention in forward, by form, for those that are possible.

    Causal and balanced. The ring computes with one block while it sends it; the two others first
    send, then compute. Latency is left out, and that small blocks compute less efficiently.
    """
    pairs = sizes.batch * sizes.seq**2 / 2 / p
    compute_s = FORWARD_FLOP * pairs * sizes.num_heads * sizes.head_dim / flop_per_s
    block = 2 * sizes.numbers(sizes.kv_heads, sizes.seq / p) * sizes.number_bytes  # K and V
    send_s = block / bytes_per_s
    found = {
        "ring": compute_s + ring_exposed_s(send_s, compute_s, p),
        "all-gather": (p - 1) * send_s + compute_s,
    }
    if sizes.num_heads % p == 0 and sizes.kv_heads % p == 0:
        heads = 2 * (sizes.num_heads + sizes.kv_heads)
        sent = sizes.numbers(heads, sizes.seq / p) * sizes.number_bytes * (p - 1) / p
        found["Ulysses"] = sent / bytes_per_s + compute_s
    return found
