"""Exercise 5 of 07_tensor_parallel: the cost of a split layer."""

from typing import Any

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.properties import COUNTS
from course_lib.core import Link

NVLINK = Link(name="NVLink", latency_s=3e-6, bytes_per_s=300e9)
SLOW = Link(name="a slow wire", latency_s=2e-3, bytes_per_s=1e6)
LAYERS = (
    # compute_s, batch, seq, hidden, p, link
    (0.4, 2, 50, 20, 3, SLOW),
    (0.4, 1, 64, 32, 1, SLOW),
    (0.4, 1, 64, 32, 2, SLOW),
    (0.012, 2, 4096, 4096, 8, NVLINK),
    (0.012, 1, 2048, 8192, 16, NVLINK),
    (0.0, 5, 7, 21, 7, NVLINK),
    (0.05, 1, 32768, 5120, 64, NVLINK),
)


def _cases() -> list[Case]:
    return [
        (
            f"compute_s {layer[0]:g}, batch {layer[1]}, seq {layer[2]}, hidden {layer[3]} on "
            f"{layer[4]} rank{'s' if layer[4] > 1 else ''} over {layer[5]}",
            layer,
        )
        for layer in LAYERS
    ]


def _number(seconds: Any, *_arguments: Any) -> Any:
    """Return the number in a tensor of one number, or in one of numpy's."""
    return seconds.item() if getattr(seconds, "ndim", None) == 0 else seconds


HALF = Cause(
    "Half of the communication is missing. Forward has two all-reduces (g), and backward has two "
    "(f); each is a reduce-scatter and an all-gather, 2 (p - 1) steps."
)
FOUR = Cause("Attention and MLP, forward and backward: of f and g, only one sends in each pass.")
NUMBER_BYTES = Cause("A number takes 2 bytes in bf16.")
ACTIVATION = Cause(
    "What travels is the summed output, batch * seq * hidden numbers: no weights, no values that "
    "stay inside a rank (ffn_hidden; q, k and v)."
)
STEPS = Cause(
    "A ring has 2 (p - 1) steps: each pays the latency, and sends a shard, 1 / p of the bytes. On "
    "one rank, it has none."
)
RING = "2 * (p - 1) * (link.latency_s + n / p / link.bytes_per_s)"
SUM = "compute_s / p + 4 * all_reduce_s"

PRICE = Exercise(
    key="tensor_parallel-5",
    title="the price of a split layer",
    check=Cases(
        cases=_cases,
        show=_number,
        unit=" s",
        look=(
            "Each rank computes its part; then look at the bytes, and at the number of "
            "all-reduces. Try p = 1: one rank has nobody to communicate with, and takes compute_s."
        ),
        success="Right for 1 to 64 ranks, on slow and fast links.",
    ),
    wrong=(
        Edit("+ 4 *", "+ 2 *", HALF),
        Edit("2 * (p - 1)", "(p - 1)", HALF),
        Edit("+ 4 *", "+", FOUR),
        Edit("+ 4 *", "+ 8 *", FOUR),
        Edit("n = 2 *", "n = 4 *", NUMBER_BYTES),
        Edit("n = 2 *", "n =", NUMBER_BYTES),
        Edit("seq * hidden", "seq * 4 * hidden", ACTIVATION),
        Edit("batch * seq * hidden", "hidden * hidden", ACTIVATION),
        Edit(RING, "2 * link.latency_s + 2 * (p - 1) * n / p / link.bytes_per_s", STEPS),
        Edit(RING, "link.latency_s + n / link.bytes_per_s", STEPS),
        Edit("n / p", "n", STEPS),
        Edit("(p - 1)", "p", STEPS),
        Edit(
            "compute_s / p",
            "compute_s",
            Cause("Each rank computes only its part of the layer: compute_s / p."),
        ),
        Edit(
            SUM,
            "(compute_s + 4 * all_reduce_s) / p",
            Cause("More ranks shorten the computation, not the communication."),
        ),
        Edit(
            SUM,
            "max(compute_s / p, 4 * all_reduce_s)",
            Cause("Nothing hides the communication: the next matrix needs the sum. Add the two."),
        ),
        *COUNTS,
    ),
)
