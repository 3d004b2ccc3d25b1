"""Exercise 1 of 02_accumulation: the batch arithmetic."""

from collections.abc import Callable
from functools import partial
from typing import Any

from course_lib.checks.accumulation.effects import EffectCase, Effects
from course_lib.checks.cases import whole
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.checks.expect import on_ranks

EVEN = (
    (64, 8, 2, 1),
    (64, 8, 2, 4),
    (30, 5, 1, 3),
    (2**22, 2**12, 2, 128),
    (2**22, 2**12, 2, 512),
)
UNEVEN = ((96, 8, 8, 1), (96, 8, 4, 2), (100, 8, 2, 3), (48, 6, 4, 4), (100, 4, 2, 1))
NOT_EVEN = "sizes that do not divide evenly"
ROUNDED = Cause("Rounding would silently change the batch: raise a ValueError.")
RETURNED = Cause("The error came back as a result: raise it.")
TOKENS = Cause("That counts tokens; a micro-batch consists of sequences.")
ALL_RANKS = Cause("The ranks share the work: each does 1/dp of it.")
SEQUENCES = Cause("That counts sequences; return the number of micro-batches.")
TIMES_DP = Cause("More ranks run fewer micro-batches each: divide by dp.")
NOT_BY_DP = Cause("Every rank needs as many micro-batches: the sizes must divide by dp, too.")
NO_SEQUENCE = Cause("100 tokens are no whole number of sequences of 8: that is an error, too.")
ROUNDED_BEFORE = Cause("`//` rounds before `%` sees it: take the remainder of all of it.")
ASSERTED = Cause("A ValueError is needed: raise it; `assert` raises an AssertionError, or nothing.")


def _cases() -> list[EffectCase]:
    return [
        (
            f"{num_tokens} tokens in sequences of {seq}, {micro_batch} at a time {on_ranks(dp)}",
            partial(_count, sizes=(num_tokens, seq, micro_batch, dp)),
        )
        for num_tokens, seq, micro_batch, dp in (*EVEN, *UNEVEN)
    ]


def _count(answer: Callable[..., Any], sizes: tuple[int, ...]) -> dict[str, Any]:
    label = "micro-batches" if sizes in EVEN else NOT_EVEN
    try:
        result = answer(*sizes)
    except (ValueError, AssertionError) as error:
        return {label: "a ValueError" if isinstance(error, ValueError) else "an AssertionError"}
    if isinstance(result, BaseException):
        raise failed(f"got {result!r}", RETURNED)
    missing = result is None and sizes in EVEN
    return {label: None if missing else whole(result)}


RAISE = 'raise ValueError(f"{num_tokens} is no multiple of {seq} * {micro_batch} * {dp}")'
IF = "if num_tokens % (seq * micro_batch * dp):"
COUNT = "return num_tokens // (seq * micro_batch * dp)"

COUNT_PARTS = Exercise(
    key="accumulation-1",
    title="how many micro-batches",
    library=("course_lib.accumulation.accumulation:count_micro_batches",),
    check=Effects(
        cases=_cases,
        looks={NOT_EVEN: ROUNDED},
        look=Cause(
            "Compute it by hand: how many sequences, how many on a rank, how many at a time?"
        ),
        success="512 ranks run 1 micro-batch each; sizes that do not divide evenly are an error.",
    ),
    wrong=(
        Edit(COUNT, "return num_tokens // (micro_batch * dp)", TOKENS),
        Edit(COUNT, "return num_tokens // (seq * micro_batch)", ALL_RANKS),
        Edit(COUNT, "return num_tokens // (seq * dp)", SEQUENCES),
        Edit(COUNT, "return num_tokens // (seq * micro_batch) * dp", TIMES_DP),
        Edit(IF, "if False:", ROUNDED),
        Edit(IF, "if num_tokens % (seq * micro_batch):", NOT_BY_DP),
        Edit(IF, "if num_tokens // seq % (micro_batch * dp):", NO_SEQUENCE),
        Edit(IF, "if num_tokens // seq // micro_batch % dp:", ROUNDED_BEFORE),
        Edit(RAISE, f"assert False, {RAISE[17:-1]}", ASSERTED),
        Edit(RAISE, f"return {RAISE[6:]}", RETURNED),
    ),
)
