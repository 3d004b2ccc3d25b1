"""Exercise 5 of 16_experts: the seconds of each way to divide experts, for those that fit."""

from typing import Any

from course_lib.checks.cases import Case, Cases, real
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed

MIXTRAL, QWEN = (4096, 4096, 14336, 8, 2), (4096, 2048, 768, 128, 8)
FULLEST = {1: 1.0, 2: 1.2, 4: 1.3, 8: 1.6, 16: 2.0}
GIB, INF = 2**30, float("inf")
SETTINGS = (
    # plans, layer, room_bytes, flop_per_s, bytes_per_s
    ([(8, 1, None), (1, 8, None)], MIXTRAL, 4 * GIB, 400e12, INF),
    ([(8, 1, None), (4, 2, None), (2, 4, None), (1, 8, None)], MIXTRAL, 4 * GIB, 400e12, 450e9),
    ([(8, 1, None), (8, 1, 1.25), (8, 1, 3.0), (4, 1, 1.0)], QWEN, 2 * GIB, 400e12, 50e9),
    ([(8, 1, 1.0), (8, 1, None)], QWEN, 2 * GIB, 400e12, 50e9),
    ([(16, 1, 1.0), (4, 4, 1.25), (1, 16, 1.5)], QWEN, 2 * GIB, 400e12, 50e9),
    ([(1, 1, None), (2, 1, None)], (64, 8, 16, 2, 1), 16 * 3 * 8 * 16, 1e9, 1e6),
    ([(1, 1, None), (2, 1, None)], (64, 8, 16, 2, 1), 2 * 16 * 3 * 8 * 16 - 1, 1e9, 1e6),
    ([(1, 1, None), (1, 2, 0.51)], (64, 8, 16, 2, 1), GIB, 1e9, 1e6),
    ([(2, 1, None)], MIXTRAL, GIB, 400e12, 50e9),
)


def _cases() -> list[Case]:
    return [
        (
            f"plans {plans}, tokens, hidden, ffn, experts, k = {layer}, {room / GIB:.3g} GiB, "
            f"{flop:g} FLOP/s, {rate:g} bytes/s",
            ([*plans], layer, dict(FULLEST), room, flop, rate),
        )
        for plans, layer, room, flop, rate in SETTINGS
    ]


A_DICT = Cause("Return a dict of seconds by (ep, tp, capacity), with the plans that fit only.")
STATES = Cause("A parameter takes 16 bytes: itself, its gradient, and the optimizer state.")
THREE = Cause("An expert has three matrices of hidden times ffn.")
BOTH_DIVIDE = Cause("The experts of a layer are divided by ep, and each of them by tp.")
FITS = Cause("A plan fits if it needs at most room_bytes.")
FULL = Cause("The fullest rank decides: multiply its copies by fullest[ep].")
CAPPED = Cause("A capacity limits the copies of the fullest rank: the smaller of the two counts.")
COPIES = Cause("A token has k copies: each of them is sent, and computed.")
TWICE = Cause("There are two exchanges, dispatch and combine.")
STAYS = Cause("1/ep of the copies stay on their rank.")
BF16 = Cause("A number takes 2 bytes in bf16.")
GATHERS = Cause("Behind each rank's copies those of tp - 1 others have to be gathered.")
ONE_RANK = Cause("With ep = 1 ranks gather tokens, each of them once, not copies.")
REDUCES = Cause("After the experts, a reduce-scatter sends as much as the all-gather before.")
FLOP = Cause("6 hidden ffn FLOP per copy; tp changes nothing: tp times the copies, 1/tp of each.")
SUM = Cause("Sending and computing do not overlap here: add their times.")


def _by_plan(found: Any, *_arguments: Any) -> dict[str, Any]:
    """Return the seconds by plan. Raises: CheckFailed for what is no dict"""
    if not isinstance(found, dict):
        raise failed(f"need a dict of seconds by plan; got {found!r}", A_DICT)
    return {str(plan): real(found[plan]) for plan in sorted(found, key=str)}


NEEDS, ROOM = "16 * 3 * hidden * ffn * num_experts / (ep * tp)", "> room_bytes"
LOAD = "fullest[ep] if capacity is None else min(fullest[ep], capacity)"
SENT, EXCHANGED = "2 * hidden * (exchanged + gathered) / bytes_per_s", "2 * copies * (ep - 1) / ep"
GATHERED = "2 * (tp - 1) * (tokens if ep == 1 else copies)"
COMPUTED = "6 * hidden * ffn * copies / flop_per_s"

CHOICE = Exercise(
    key="experts-5",
    title="seconds of each plan",
    check=Cases(
        cases=_cases,
        show=_by_plan,
        unit=" s",
        look="The keys are the plans that fit, each with its three numbers. With infinite "
        "bandwidth a plan takes as long as it computes. If this is right, count its bytes.",
        success="Right for fast links and slow ones, with and without a capacity.",
    ),
    wrong=(
        Edit(NEEDS, "2 * 3 * hidden * ffn * num_experts / (ep * tp)", STATES),
        Edit(NEEDS, "16 * 2 * hidden * ffn * num_experts / (ep * tp)", THREE),
        Edit(NEEDS, "16 * 3 * hidden * ffn * num_experts / ep", BOTH_DIVIDE),
        Edit(NEEDS, "16 * 3 * hidden * ffn * num_experts / tp", BOTH_DIVIDE),
        Edit(ROOM, ">= room_bytes", FITS),
        Edit(ROOM, "< 0", A_DICT),
        Edit(LOAD, "1.0 if capacity is None else min(1.0, capacity)", FULL),
        Edit(LOAD, "fullest[ep] * (capacity or 1)", CAPPED),
        Edit(LOAD, "fullest[ep]", CAPPED),
        Edit(LOAD, "capacity or fullest[ep]", CAPPED),
        Edit("load * tokens * k", "load * tokens", COPIES),
        Edit(EXCHANGED, "copies * (ep - 1) / ep", TWICE),
        Edit(EXCHANGED, "2 * copies", STAYS),
        Edit(EXCHANGED, "2 * copies * (ep - 1)", STAYS),
        Edit(SENT, "hidden * (exchanged + gathered) / bytes_per_s", BF16),
        Edit(SENT, "4 * hidden * (exchanged + gathered) / bytes_per_s", BF16),
        Edit(GATHERED, "0", GATHERS),
        Edit(GATHERED, "2 * (tp - 1) / tp * (tokens if ep == 1 else copies)", GATHERS),
        Edit(GATHERED, "2 * (tp - 1) * copies", ONE_RANK),
        Edit(GATHERED, "2 * (tp - 1) * tokens", GATHERS),
        Edit(GATHERED, "(tp - 1) * (tokens if ep == 1 else copies)", REDUCES),
        Edit(COMPUTED, "6 * hidden * ffn * copies / tp / flop_per_s", FLOP),
        Edit(COMPUTED, "6 * hidden * ffn * copies * tp / flop_per_s", FLOP),
        Edit(COMPUTED, "2 * hidden * ffn * copies / flop_per_s", FLOP),
        Edit(f"sent_s + {COMPUTED}", f"max(sent_s, {COMPUTED})", SUM),
    ),
)
