"""Cost of expert parallelism: bytes sent, the fullest rank, dropped tokens, nodes, memory.

A *copy* is the hidden vector of a token on its way to one of its experts: a token with k experts
has k copies. Bytes are those that one rank sends for one layer. The planner reads the same
functions. Nothing here needs PyTorch. Notebook 16_experts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from course_lib.context_parallel.cost import PassBytes
from course_lib.core.errors import CourseError, ShapeError
from course_lib.core.parallelism import Parallelism
from course_lib.core.recipes import BF16, Recipe
from course_lib.core.specs import ModelSpec, capacity_of
from course_lib.cost.params import layers_params
from course_lib.memory.formulas import model_states


@dataclass(frozen=True, kw_only=True)
class RoutedSizes:
    """Sizes of one layer of experts; `tokens` are those of one rank, all ranks have as many.

    active   experts that a token uses, k

    Raises: ShapeError for a size below 1, or active above experts
    """

    tokens: int
    hidden: int
    experts: int
    active: int
    number_bytes: int = 2

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1 or self.active > self.experts:
            raise ShapeError(
                f"RoutedSizes: need sizes above 0, and active of at most experts; got {vars(self)}."
            )

    @property
    def copy_bytes(self) -> int:
        """Bytes of one copy of a token."""
        return self.hidden * self.number_bytes


# --- what a rank sends


def exchange_bytes(sizes: RoutedSizes, ep: int) -> PassBytes:
    """Return the bytes of dispatch and combine: 2 T k h (ep-1)/ep numbers, again in backward.

    Copies go to all ranks alike (on average, whatever each token chooses, if all experts are
    chosen equally often). Combine brings the results back, and backward turns both around.

    Source: Lepikhin et al. 2020 (GShard), section 3.2, for the two all-to-alls
    """
    one_way = sizes.tokens * sizes.active * sizes.copy_bytes * (ep - 1) // ep
    return PassBytes(2 * one_way, 2 * one_way)


def sent_bytes(counts: Sequence[Sequence[int]], rank: int, copy_bytes: int) -> PassBytes:
    """Return the bytes that a rank sends for dispatch and combine, to the byte.

    counts   counts[source][to]: copies that rank `source` dispatches to rank `to`

    Dispatch sends its row, combine its column, both without its own; backward the same again.
    """
    row, column = sum(counts[rank]), sum(sent[rank] for sent in counts)
    others = row + column - 2 * counts[rank][rank]
    return PassBytes(others * copy_bytes, others * copy_bytes)


def expert_tensor_bytes(sizes: RoutedSizes, p: int) -> PassBytes:
    """Return the bytes if p ranks split *each* expert: 2 (p-1) T h numbers, again in backward.

    All-gather the tokens of all p ranks, compute a part of every expert, reduce-scatter the
    outputs. It does not depend on k: expert parallelism sends k/p of it.
    """
    forward = 2 * (p - 1) * sizes.tokens * sizes.copy_bytes
    return PassBytes(forward, forward)


class LevelBytes(NamedTuple):
    """Bytes that a rank sends inside its node, and to other nodes."""

    inside: float
    outside: float


def level_bytes(
    num_bytes: float,
    ranks: int,
    on_node: int,
    active: int = 1,
    *,
    sends_once: bool = False,
    most_nodes: int | None = None,
) -> LevelBytes:
    """Return where the bytes of a dispatch go, if a rank's copies have `num_bytes` in all.

    ranks, on_node   ranks that share the experts, and how many of them are on one node
    sends_once       a token goes to each node once, and there on to its experts (DeepEP)
    most_nodes       the router chooses experts on at most so many nodes; None: on any

    Source: DeepSeek-AI 2024 (DeepSeek-V3), section 3.2.2, for sending once
    """
    nodes = ranks / on_node
    if not (sends_once and nodes > 1):
        return LevelBytes(num_bytes * (on_node - 1) / ranks, num_bytes * (ranks - on_node) / ranks)
    outside = num_bytes * nodes_reached(nodes, active, most_nodes) / active
    return LevelBytes(num_bytes * (on_node - 1) / on_node, outside * (ranks - on_node) / ranks)


def nodes_reached(nodes: float, active: int, most: int | None = None) -> float:
    """Return on how many nodes the experts of a token are, on average: n (1 - (1 - 1/n)^k).

    Each of k choices misses a node with probability 1 - 1/n. (The experts of a token are distinct,
    so it reaches a little more: 1 % with 8 of 256 experts on 8 nodes.)

    most   a token is sent to at most so many nodes. A router that chooses its best nodes first then
           uses nearly all of them; None: no limit

    Raises: CourseError for numbers below 1
    Source: DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2 (node-limited routing), for `most`
    """
    if min(nodes, active, nodes if most is None else most) < 1:
        raise CourseError(
            f"nodes_reached: need nodes, active and most of at least 1; got {nodes:g}, {active} "
            f"and {most}."
        )
    reached = nodes * (1 - (1 - 1 / nodes) ** active)
    return reached if most is None else min(reached, most)


# --- who computes how much


def rank_loads(tokens_per_expert: Sequence[float], ep: int) -> list[float]:
    """Return the copies on each rank: rank 0 has the first experts.

    Raises: ShapeError unless ep divides the experts
    """
    held, rest = divmod(len(tokens_per_expert), ep)
    if rest or not held:
        raise ShapeError(
            f"rank_loads: need experts divisible by ep; got {len(tokens_per_expert)} and {ep}."
        )
    return [sum(tokens_per_expert[held * rank :][:held]) for rank in range(ep)]


def load_imbalance(tokens_per_expert: Sequence[float], ep: int | None = None) -> float:
    """Return the copies of the fullest rank divided by the mean of all ranks.

    The others wait for it, so it is the factor on the time of the experts. 1: balanced.

    ep   None: a rank for each expert
    """
    loads = rank_loads(tokens_per_expert, ep or len(tokens_per_expert))
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def dropped_share(tokens_per_expert: Sequence[int], factor: float) -> float:
    """Return the share of all copies that experts with a capacity do not take."""
    total = sum(tokens_per_expert)
    most = capacity_of(total, len(tokens_per_expert), factor)
    return sum(max(0, tokens - most) for tokens in tokens_per_expert) / total if total else 0.0


# --- memory, and a choice

Division = tuple[int, int, float | None]


def seconds_by_plan(
    plans: Iterable[Division],
    layer: tuple[int, int, int, int, int],
    fullest: Mapping[int, float],
    room_bytes: float,
    flop_per_s: float,
    bytes_per_s: float,
) -> dict[Division, float]:
    """Return the forward seconds of a layer's experts for the plans that fit.

    plans     (ep, tp, capacity): ranks that share the experts, ranks that split each of them, and
              the capacity factor or None
    layer     tokens of a rank, hidden, ffn_hidden, experts, active experts of a token
    fullest   by ep: copies of the fullest rank divided by the mean

    Nothing overlaps, and latency is left out. With tp > 1 ranks gather each other's copies after
    dispatch, as Megatron-Core does, but with ep = 1 each token once.
    """
    tokens, hidden, ffn, num_experts, k = layer
    found = {}
    for ep, tp, capacity in plans:
        if 16 * 3 * hidden * ffn * num_experts / (ep * tp) > room_bytes:
            continue
        load = fullest[ep] if capacity is None else min(fullest[ep], capacity)
        copies = load * tokens * k
        exchanged = 2 * copies * (ep - 1) / ep
        gathered = 2 * (tp - 1) * (tokens if ep == 1 else copies)
        sent_s = 2 * hidden * (exchanged + gathered) / bytes_per_s
        found[ep, tp, capacity] = sent_s + 6 * hidden * ffn * copies / flop_per_s
    return found


def state_bytes(
    spec: ModelSpec, parallelism: Parallelism, recipe: Recipe | str = BF16
) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state of a rank's layers, by kind.

    "split" is divided by tp, "whole" by nothing, "experts" by ep and the ranks that split each
    expert. ZeRO shards experts over the ranks that hold the same ones. Embedding and head are not
    counted: experts do not change them.
    """
    found = {}
    for kind, params in layers_params(spec, parallelism).items():
        experts = params if kind == "experts" else 0
        states = model_states(params, recipe, parallelism=parallelism, expert_params=experts)
        found[kind] = sum(states.values())
    return found
