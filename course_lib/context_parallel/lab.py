"""Measure context-parallel attention on real ranks: bytes sent, and how busy each rank is.

`measure_bytes` counts the messages of each form; `measure_busy` times the work of each rank under
each layout in seconds of its processor, so that neither waiting for other ranks nor a shared core
counts. Notebook 15_context_parallel.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.context_parallel.all_gather import all_gather_attention
from course_lib.context_parallel.cost import FORWARD_FLOP, AttentionSizes, PassBytes
from course_lib.context_parallel.layouts import LAYOUTS, positions
from course_lib.context_parallel.ring import ring_attention
from course_lib.context_parallel.ulysses import ulysses_attention
from course_lib.core.records import Event
from course_lib.ranks import Ranks, record
from course_lib.ranks.progress import in_turns
from course_lib.ranks.timing import from_zero

Form = Callable[..., Tensor]
ATTENTION: dict[str, Form] = {  # by the names of `cost.FORMS`
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


def measure_busy(
    ranks: Ranks, sizes: AttentionSizes, layouts: Sequence[str] = LAYOUTS, turns: int = 5
) -> dict[str, list[list[float]]]:
    """Return for each layout, rank and turn the processor seconds of causal ring attention.

    Forward and backward together; a first turn, which warms up, is not counted.
    """
    by_rank = ranks.run(_busy_by_layout, sizes, list(layouts), turns)
    return {layout: [found[layout] for found in by_rank] for layout in layouts}


def _busy_by_layout(
    rank: int, sizes: AttentionSizes, layouts: Sequence[str], turns: int
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {layout: [] for layout in layouts}
    for layout in in_turns(layouts, turns + 1):
        q, k, v, grad = own_qkv(rank, dist.get_world_size(), sizes, layout)
        dist.barrier()
        start_s = time.thread_time()
        ring_attention(q, k, v, layout=layout, seq=sizes.seq).backward(grad)
        found[layout].append(time.thread_time() - start_s)
    return {layout: seconds[1:] for layout, seconds in found.items()}


def record_ring(
    ranks: Ranks, sizes: AttentionSizes, layouts: Sequence[str] = LAYOUTS, turns: int = 5
) -> dict[str, list[Event]]:
    """Return for each layout all ranks' events of the fastest forward pass of a causal ring."""
    by_rank = ranks.run(_ring_events, sizes, list(layouts), turns)
    return {layout: _fastest([found[layout] for found in by_rank]) for layout in layouts}


def _ring_events(
    rank: int, sizes: AttentionSizes, layouts: Sequence[str], turns: int
) -> dict[str, list[list[Event]]]:
    found: dict[str, list[list[Event]]] = {layout: [] for layout in layouts}
    for layout in in_turns(layouts, turns + 1):
        q, k, v, _ = own_qkv(rank, dist.get_world_size(), sizes, layout)
        dist.barrier()
        with record() as log:
            ring_attention(q, k, v, layout=layout, seq=sizes.seq)
        found[layout].append(log.events)
    return {layout: turns[1:] for layout, turns in found.items()}


def _fastest(by_rank: Sequence[Sequence[list[Event]]]) -> list[Event]:
    """Return all ranks' events of the turn that took the shortest, on a clock that starts at 0."""
    together = zip(*by_rank, strict=True)
    turns = [from_zero(event for own in ranks for event in own) for ranks in together]
    return min(turns, key=lambda events: max(event.end_s for event in events))


def fitted_busy_s(
    pairs: Mapping[str, Sequence[int]], busy_s: Mapping[str, Sequence[Sequence[float]]]
) -> float:
    """Return the processor seconds of a pair of query and key: of all work by all pairs."""
    total_s = sum(min(turns) for by_rank in busy_s.values() for turns in by_rank)
    return total_s / sum(sum(by_rank) for by_rank in pairs.values())


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
        "ring": (p - 1) * max(compute_s / p, send_s) + compute_s / p,
        "all-gather": (p - 1) * send_s + compute_s,
    }
    if sizes.num_heads % p == 0 and sizes.kv_heads % p == 0:
        heads = 2 * (sizes.num_heads + sizes.kv_heads)
        sent = sizes.numbers(heads, sizes.seq / p) * sizes.number_bytes * (p - 1) / p
        found["Ulysses"] = sent / bytes_per_s + compute_s
    return found
