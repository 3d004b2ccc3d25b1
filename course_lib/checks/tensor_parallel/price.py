"""Exercise 5 of 07_tensor_parallel: the cost of a split layer."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
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


def _rounded(got: Sequence[Any], need: Sequence[Any]) -> bool:
    """Return whether all seconds are off by little."""
    return all(
        isinstance(found, Real) and math.isclose(found, wanted, rel_tol=0.02, abs_tol=1e-4)
        for found, wanted in zip(got, need, strict=True)
    )


ROUNDED = Cause("Nearly right: was something rounded, by round() or `//`? Return all digits.")
HALF = Cause(
    "Half of the communication is missing. Forward has two all-reduces (g), and backward has two "
    "(f); each is a reduce-scatter and an all-gather, 2 (p - 1) steps."
)
NUMBER_BYTES = Cause("A number takes 2 bytes in bf16.")
ONE_LATENCY = Cause("Each step of the ring pays the latency, and an all-reduce has 2 (p - 1).")
OTHER_LINK = Cause("The latency and the bytes a second are those of `link`, which is an argument.")
RING = "2 * (p - 1) * (link.latency_s + n / p / link.bytes_per_s)"
SUM = "compute_s / p + 4 * all_reduce_s"

PRICE = Exercise(
    key="tensor_parallel-5",
    title="the price of a split layer",
    check=Cases(
        cases=_cases,
        show=_number,
        symptoms=((_rounded, ROUNDED),),
        unit=" s",
        look=(
            "Each rank computes its part; then look at the bytes, and at the number of "
            "all-reduces. Try p = 1: one rank has nobody to communicate with, and takes compute_s."
        ),
        success="Right for 1 to 64 ranks, on slow and fast links.",
    ),
    wrong=(
        Edit("+ 4 *", "+ 2 *", HALF),
        Edit(
            "+ 4 *",
            "+",
            Cause("Attention and MLP, forward and backward: how many all-reduces are that?"),
        ),
        Edit(
            "+ 4 *",
            "+ 8 *",
            Cause("Twice too many: only one of f and g communicates in each direction."),
        ),
        Edit("n = 2 *", "n = 4 *", NUMBER_BYTES),
        Edit("n = 2 *", "n =", NUMBER_BYTES),
        Edit(
            "seq * hidden",
            "seq * 4 * hidden",
            Cause("The sums have hidden numbers a token; ffn_hidden stays inside a rank."),
        ),
        Edit("2 * (p - 1)", "(p - 1)", HALF),
        Edit(
            "compute_s / p",
            "compute_s",
            Cause("Each rank computes only its part of the layer: compute_s / p."),
        ),
        Edit(
            "n / p",
            "n",
            Cause("In each step of the ring a rank sends a shard: 1 / p of the bytes."),
        ),
        Edit(
            "n / p",
            "n / p / p",
            Cause("The sum is whole on every rank: it has batch * seq * hidden numbers."),
        ),
        Edit("link.latency_s", "0", Cause("Each step of the ring pays the latency, too.")),
        Edit(
            "batch * seq * hidden",
            "hidden * hidden",
            Cause("Activations travel, not weights: batch * seq * hidden numbers."),
        ),
        Edit(RING, "link.latency_s + 2 * (p - 1) * n / p / link.bytes_per_s", ONE_LATENCY),
        Edit(RING, "2 * link.latency_s + 2 * (p - 1) * n / p / link.bytes_per_s", ONE_LATENCY),
        Edit(
            "(p - 1)",
            "p",
            Cause("A ring of p ranks has p - 1 steps each way: nobody needs its own shard."),
        ),
        Edit(
            SUM,
            "max(compute_s / p, 4 * all_reduce_s)",
            Cause(
                "Nothing hides the communication: the next matrix multiplication needs the sum. "
                "Add the two."
            ),
        ),
        Edit(
            SUM,
            "(compute_s + 4 * all_reduce_s) / p",
            Cause(
                "More ranks shorten the computation, not the communication: divide compute_s only."
            ),
        ),
        Edit(
            RING,
            "link.latency_s + n / link.bytes_per_s",
            Cause(
                "That is one message of the whole sum. A ring has 2 (p - 1) steps of a shard, and "
                "on one rank, with nobody to communicate with, none."
            ),
        ),
        Edit("n / p / link.bytes_per_s", "n / p / 300e9", OTHER_LINK),
        Edit(RING, RING.replace("link.latency_s", "3e-6"), OTHER_LINK),
        Edit(SUM, f"1e3 * ({SUM})", Cause("1000 times too large: seconds, not milliseconds.")),
        Edit("n / p", "n // p", ROUNDED),
        Edit(SUM, f"round({SUM}, 4)", ROUNDED),
        Edit("(p - 1)", "7", Cause("That is the ring of 8 ranks: it has p - 1 steps each way.")),
        Edit(
            "seq * hidden",
            "seq * 3 * hidden",
            Cause("The output is summed, hidden numbers a token: q, k and v stay on their rank."),
        ),
        Edit("batch * seq", "seq", Cause("Every sequence of the batch is summed: times batch.")),
    ),
)
