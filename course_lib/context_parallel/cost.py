"""Cost of context-parallel attention: bytes sent, the work of each rank, memory, and overlap.

Bytes are those that one rank sends for one layer, to the byte, for any length and layout. Work is
counted in pairs of a query and a key that it sees: FLOP are proportional to them. Nothing here
needs PyTorch. Notebook 15_context_parallel.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from course_lib.context_parallel.layouts import lengths_of, positions
from course_lib.core.errors import CourseError, ShapeError

FORWARD_FLOP, BACKWARD_FLOP = 4, 10  # per pair and number of a head: 2 and 5 matrix products
SUM_BYTES = 4  # gradients that are summed over ranks are in fp32 or wider


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes of the attention of one layer, all ranks together; a number has `number_bytes`.

    Raises: ShapeError for a size below 1, or heads that kv_heads do not divide
    """

    batch: int = 1
    seq: int
    num_heads: int
    kv_heads: int
    head_dim: int
    number_bytes: int = 2

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1 or self.num_heads % self.kv_heads:
            raise ShapeError(
                "AttentionSizes: need sizes above 0, and num_heads divisible by kv_heads; got "
                f"{vars(self)}."
            )

    def numbers(self, heads: float, tokens: float) -> float:
        """Return how many numbers so many heads of so many tokens of each sequence have."""
        return self.batch * heads * tokens * self.head_dim

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a number of a gradient that is summed over ranks."""
        return max(SUM_BYTES, self.number_bytes)


class PassBytes(NamedTuple):
    """Bytes of a layer's forward and backward pass."""

    forward: int
    backward: int


# --- what a rank sends


def ring_bytes(
    sizes: AttentionSizes, p: int, rank: int = 0, layout: str = "contiguous"
) -> PassBytes:
    """Return the bytes that a rank of a ring sends: 2 (p-1)/p b s h_kv numbers in forward.

    In backward the same again, and as many numbers of their gradient. Of keys and values it passes
    on all but its right neighbor's, of gradients all but its own.

    Source: derived here from `ring.py`; Liu, Zaharia and Abbeel 2023, section 3, for the forward
    """
    lengths = lengths_of(sizes.seq, p, layout)
    others = sizes.seq - lengths[(rank + 1) % p] if p > 1 else 0
    blocks = 2 * sizes.numbers(sizes.kv_heads, others) * sizes.number_bytes
    not_own = 2 * sizes.numbers(sizes.kv_heads, sizes.seq - lengths[rank]) * sizes.gradient_bytes
    return PassBytes(int(blocks), int(blocks + not_own))


def all_gather_bytes(
    sizes: AttentionSizes, p: int, rank: int = 0, layout: str = "contiguous"
) -> PassBytes:
    """Return the bytes that a rank sends for an all-gather of K and V, and for its adjoint.

    As many as in the forward of a ring, but for shards that are padded to the longest; backward
    sends no keys and values again.
    """
    longest = max(lengths_of(sizes.seq, p, layout))
    numbers = 2 * sizes.numbers(sizes.kv_heads, (p - 1) * longest)
    return PassBytes(int(numbers * sizes.number_bytes), int(numbers * sizes.gradient_bytes))


def ulysses_bytes(
    sizes: AttentionSizes, p: int, rank: int = 0, layout: str = "contiguous"
) -> PassBytes:
    """Return the bytes of Ulysses: 2 (h + h_kv) b s/p (p-1)/p numbers forward, again backward.

    q, k and v go from tokens to heads: a rank sends its tokens of the other ranks' heads. o goes
    back: it sends the other ranks' tokens of its heads. Backward turns both around. With fewer KV
    heads than ranks they are replicated, and count as p.

    Raises: ShapeError unless p divides the heads, and p or kv_heads the other
    Source: Jacobs et al. 2023 (DeepSpeed Ulysses)
    """
    q_heads, kv_heads = sizes.num_heads, max(sizes.kv_heads, p)
    if q_heads % p or kv_heads % p or kv_heads % sizes.kv_heads:
        raise ShapeError(
            "ulysses_bytes: need num_heads divisible by p, and kv_heads by p or p by kv_heads; "
            f"got {q_heads}, {sizes.kv_heads} and p = {p}."
        )
    own = lengths_of(sizes.seq, p, layout)[rank]
    to_heads, to_tokens = own * (p - 1), sizes.seq - own  # in units of 1/p of all heads
    forward = (q_heads + 2 * kv_heads) * to_heads + q_heads * to_tokens
    backward = (q_heads + 2 * kv_heads) * to_tokens + q_heads * to_heads
    one = sizes.batch * sizes.head_dim * sizes.number_bytes
    return PassBytes(forward * one // p, backward * one // p)


FormBytes = Callable[[AttentionSizes, int, int, str], PassBytes]
FORMS: dict[str, FormBytes] = {
    "ring": ring_bytes,
    "all-gather": all_gather_bytes,
    "Ulysses": ulysses_bytes,
}


# --- who computes how much


def causal_pairs(p: int, seq: int, layout: str = "contiguous") -> list[int]:
    """Return for each rank the pairs of its queries and the keys they see: position + 1 each."""
    return [sum(at + 1 for at in positions(rank, p, seq, layout)) for rank in range(p)]


def block_pairs(p: int, seq: int, layout: str = "contiguous") -> list[list[int]]:
    """Return the pairs of each rank's queries with the keys of each source: [rank][source]."""
    held = [positions(rank, p, seq, layout) for rank in range(p)]
    return [[sum(bisect_right(keys, at) for at in queries) for keys in held] for queries in held]


def imbalance(p: int, seq: int, layout: str = "contiguous") -> float:
    """Return the most pairs of a rank divided by the mean of all ranks, counted from the mask.

    1: balanced. A step lasts as long as its slowest rank, so this is the factor on its time.
    """
    pairs = causal_pairs(p, seq, layout)
    return max(pairs) * p / sum(pairs)


def contiguous_imbalance(p: int, *, whole_diagonal: bool = False) -> float:
    """Return the imbalance of a long contiguous sequence: (r + 1/2) of p blocks on rank r.

    The last rank's p - 1/2 divided by the mean, p/2, is 2 - 1/p. Where a rank computes its own
    block whole, and masks half of it afterwards, rank r has r + 1 blocks: 2p / (p+1).
    """
    return 2 * p / (p + 1) if whole_diagonal else 2 - 1 / p


# --- overlap and memory


def hides_from(
    flop_per_s: float,
    bytes_per_s: float,
    *,
    kv_share: float = 1.0,
    causal: bool = False,
    number_bytes: int = 2,
    backward: bool = False,
) -> float:
    """Return the tokens per rank from which a ring computes as long as it sends.

    A step of n tokens on a rank computes 4 b n² h FLOP and sends 2 b n h_kv numbers: computing
    grows with the square of n, sending with n. In bf16 they take equally long at
    n = (F / beta) (h_kv / h), with a causal mask that is balanced at twice as many. In backward
    10 b n² h FLOP hide K, V and, in fp32, their gradients.

    kv_share   h_kv / h: KV heads divided by heads

    Raises: CourseError for a rate or share that is not above 0
    Source: Liu, Zaharia and Abbeel 2023 (Ring Attention), section 3, for kv_share = 1
    """
    if min(flop_per_s, bytes_per_s, kv_share, number_bytes) <= 0:
        raise CourseError(
            "hides_from: need rates, kv_share and number_bytes above 0; got "
            f"{flop_per_s}, {bytes_per_s}, {kv_share} and {number_bytes}."
        )
    flop = (BACKWARD_FLOP if backward else FORWARD_FLOP) / (2 if causal else 1)
    sent_bytes = 2 * (number_bytes + (max(SUM_BYTES, number_bytes) if backward else 0))
    return flop_per_s / bytes_per_s * kv_share * sent_bytes / flop


def ring_exposed_s(hop_s: float, compute_s: float, p: int) -> float:
    """Return the seconds of a ring's p - 1 hops that computing with p equal blocks does not hide.

    While a block is on its way a rank computes with the one before; the last one hides nothing.
    """
    return (p - 1) * max(0.0, hop_s - compute_s / p)


def kept_bytes(sizes: AttentionSizes, p: int, form: str) -> int:
    """Return the bytes that a rank's attention keeps for backward: q, k, v, o, and lse.

    All-gather keeps the keys and values of all tokens, the two others 1/p of them (but replicated
    KV heads); lse is one number per query and head, in fp32 or wider. p divides the sequence.

    Raises: CourseError for another form; ShapeError for a length that p does not divide
    """
    if form not in FORMS:
        raise CourseError(f"kept_bytes: need form as one of {', '.join(FORMS)}; got {form!r}.")
    if sizes.seq % p:
        raise ShapeError(f"kept_bytes: need seq divisible by p; got {sizes.seq} and {p}.")
    own = sizes.seq // p
    queries = 2 * sizes.numbers(sizes.num_heads, own) * sizes.number_bytes
    lse = sizes.batch * sizes.num_heads * own * sizes.gradient_bytes
    heads = max(sizes.kv_heads, p) if form == "Ulysses" else sizes.kv_heads
    tokens = sizes.seq if form == "all-gather" else own
    return int(queries + lse + 2 * sizes.numbers(heads, tokens) * sizes.number_bytes)
