"""Exercise 5 of 15_context_parallel: the seconds of each form, from bytes and FLOP."""

from typing import Any

from course_lib.checks.cases import Case, Cases, real
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed

CLUSTERS = (
    # seq, p, heads, kv_heads, head_dim, flop_per_s, bytes_per_s
    (4096, 4, 8, 4, 64, 1e12, float("inf")),  # messages take no time
    (65536, 8, 32, 8, 128, 500e12, 50e9),  # the ring hides them
    (4096, 8, 32, 8, 128, 500e12, 50e9),  # it does not
    (131072, 16, 32, 8, 128, 500e12, 50e9),  # too few KV heads
    (8192, 3, 8, 4, 32, 1e12, 1e9),  # heads that p does not divide
    (12288, 6, 24, 8, 64, 300e12, 25e9),  # KV heads that p does not divide
    (1024, 1, 4, 2, 16, 1e9, 1e6),  # one rank
    (2048, 2, 4, 4, 16, 1e9, 1e6),
)


def _cases() -> list[Case]:
    return [
        (
            f"seq {one[0]}, p {one[1]}, {one[2]} heads, {one[3]} KV heads of {one[4]}, "
            f"{one[5]:g} FLOP/s, {one[6]:g} bytes/s",
            one,
        )
        for one in CLUSTERS
    ]


A_DICT = Cause('Return a dict with the keys "ring", "all-gather" and, if possible, "Ulysses".')
HALF = Cause("A causal mask leaves half of the 4 s² h FLOP: 2 s² h, divided over p ranks.")
SHARED = Cause("Each rank computes 1/p of the scores: divide by p once.")
BF16 = Cause("A number takes 2 bytes in bf16.")
KEYS_AND_VALUES = Cause("A block has keys and values: twice the numbers of the KV heads.")
KV_HEADS = Cause("A ring and an all-gather send KV heads only; queries stay where they are.")
OWN = Cause("A rank's own block is already there: p - 1 blocks are sent.")
OVERLAP = Cause(
    "A ring computes while it sends: each of its first p - 1 steps takes the longer of the two."
)
LAST = Cause("A ring's last step has nothing to send, and its length is that of the computation.")
EXPOSED = Cause("All-gather and Ulysses cannot overlap: they first send, then compute.")
STEP = Cause("A step of the ring computes 1/p of this rank's work: p steps in all.")
ALL_FOUR = Cause("Ulysses exchanges q, k, v and the output: 2 heads + 2 kv_heads per token.")
KEEPS = Cause("In an all-to-all a rank keeps 1/p of each tensor, and sends (p - 1) / p of it.")
IMPOSSIBLE = Cause("Ulysses needs p to divide both numbers of heads; leave it out if not.")


def _by_form(found: Any, *_arguments: Any) -> dict[str, Any]:
    """Return the seconds by form. Raises: CheckFailed for what is no dict"""
    if not isinstance(found, dict):
        raise failed(f"need a dict of seconds by form; got {found!r}", A_DICT)
    return {form: real(found[form]) for form in sorted(found)}


COMPUTE, HEAD = "2 * seq**2 * heads * head_dim / p / flop_per_s", "2 * seq / p * head_dim"
BLOCK, RING = "2 * kv_heads * head_s", "(p - 1) * max(compute_s / p, block_s) + compute_s / p"
GATHER, EXCHANGE = "(p - 1) * block_s + compute_s", "2 * (heads + kv_heads) * head_s * (p - 1) / p"

FORMS = Exercise(
    key="context_parallel-5",
    title="seconds of each form",
    library=("course_lib.context_parallel.lab:forward_s",),
    check=Cases(
        cases=_cases,
        show=_by_form,
        unit=" s",
        look="With infinite bandwidth, every form takes as long as it computes. If this is right, "
        "count the bytes of this form.",
        success="Right for fast links and slow ones, and for heads that p does not divide.",
    ),
    wrong=(
        Edit(COMPUTE, "4 * seq**2 * heads * head_dim / p / flop_per_s", HALF),
        Edit(COMPUTE, "2 * seq**2 * heads * head_dim / flop_per_s", SHARED),
        Edit(COMPUTE, "2 * (seq / p) ** 2 * heads * head_dim / flop_per_s", SHARED),
        Edit(HEAD, "seq / p * head_dim", BF16),
        Edit(HEAD, "4 * seq / p * head_dim", BF16),
        Edit(BLOCK, "kv_heads * head_s", KEYS_AND_VALUES),
        Edit(BLOCK, "2 * heads * head_s", KV_HEADS),
        Edit(GATHER, "p * block_s + compute_s", OWN),
        Edit(GATHER, "max((p - 1) * block_s, compute_s)", EXPOSED),
        Edit(RING, "(p - 1) * block_s + compute_s", OVERLAP),
        Edit(RING, "max((p - 1) * block_s, compute_s)", LAST),
        Edit(RING, "p * max(compute_s / p, block_s)", LAST),
        Edit(RING, "(p - 1) * max(compute_s, block_s) + compute_s", STEP),
        Edit(EXCHANGE, "2 * kv_heads * head_s * (p - 1) / p", ALL_FOUR),
        Edit(EXCHANGE, "(heads + kv_heads) * head_s * (p - 1) / p", ALL_FOUR),
        Edit(EXCHANGE, "4 * heads * head_s * (p - 1) / p", ALL_FOUR),
        Edit(f"{EXCHANGE} + compute_s", f"max({EXCHANGE}, compute_s)", EXPOSED),
        Edit(EXCHANGE, "(heads + 2 * kv_heads) * head_s * (p - 1) / p", ALL_FOUR),
        Edit(EXCHANGE, "2 * (heads + kv_heads) * head_s", KEEPS),
        Edit(EXCHANGE, "2 * (heads + kv_heads) * head_s * (p - 1)", KEEPS),
        Edit("heads % p == 0 and kv_heads % p == 0", "heads % p == 0", IMPOSSIBLE),
        Edit("heads % p == 0 and kv_heads % p == 0", "True", IMPOSSIBLE),
        Edit("heads % p == 0 and kv_heads % p == 0", "p <= kv_heads", IMPOSSIBLE),
        Edit("return found", "return {'Ulysses': torch.inf} | found", IMPOSSIBLE),
        Edit("return found", "return {'Ulysses': None} | found", IMPOSSIBLE),
        Edit('found["Ulysses"]', 'found["ulysses"]', A_DICT),
        Edit("return found", "return min(found, key=found.get)", A_DICT),
    ),
)
