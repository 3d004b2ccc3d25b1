"""Exercise 1 of 12_planner: the model states of one rank of a plan."""

from random import Random

from course_lib.checks.cases import Case, Cases, real
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise

GB = Cause("A GiB is 2**30 bytes, 7 % more than a GB.")
WORLD = Cause("ZeRO shards over the ranks with the same parameters: dp, not the whole world.")
ONLY_STAGE = Cause("ZeRO-2 and ZeRO-3 shard the optimizer state, too.")
GRADS = Cause("Gradients are sharded from ZeRO-2 on.")
WEIGHTS = Cause("Weights are sharded from ZeRO-3 on.")
ALWAYS = Cause("zero=0 shards nothing: every replica has all states.")
MASTER = Cause("The optimizer keeps three fp32 numbers: a master copy and two moments.")
BF16_GRADS = Cause("Gradients are in fp32 here: 4 bytes.")
NO_TP = Cause("TP splits the parameters, too.")
NO_PP = Cause("PP splits the parameters, too: a stage has its layers only.")
DP_SPLITS = Cause("DP splits the batch: without ZeRO, dp divides no parameters.")
ALL_RANKS = Cause("That is the sum over all ranks: need one of them.")

FIELDS = ("num_params", "dp", "tp", "pp", "zero")


def _case(*plan: int) -> Case:
    words = ", ".join(f"{name}={value:g}" for name, value in zip(FIELDS[1:], plan[1:], strict=True))
    return f"{plan[0]:.3g} parameters, {words}", plan


B = 10**9
EXACT = [(70 * B, 4, 8, 2, 3), (8_030_261_248, 8, 2, 1, 3), (1_235_814_400, 2, 1, 1, 1)]


def _cases() -> list[Case]:
    plans = [(13 * B, 32, 1, 1, stage) for stage in range(4)]
    plans += [(13 * B, 4, 8, 1, 0), (13 * B, 8, 1, 4, 0), (70 * B, 4, 8, 2, 1)]
    plans += [(803 * B // 100, 3, 2, 4, 2), (405 * B, 64, 8, 16, 1), (B, 1, 1, 1, 3)]
    return [_case(*plan) for plan in [*plans, *EXACT]]


def _drawn(random: Random) -> list[Case]:
    sizes = (1, 2, 3, 4, 6, 8)
    return [
        _case(random.randint(1, 99) * B // 10, *random.choices(sizes, k=3), random.randint(1, 3))
        for _ in range(3)
    ]


STATES = Exercise(
    key="planner-1",
    title="the memory of a plan",
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        rtol=1e-5,  # shards of whole parameters, rounded up or down, are right, too
        show=real,
        unit=" GiB",
        look="Go through it by hand: which parameters are here, which of their bytes dp divides.",
        success="Right for thirteen plans: 18 bytes per parameter, each divided by who shares it.",
    ),
    wrong=(
        Edit("2**30", "1e9", GB),
        Edit("states /= dp", "states /= dp * tp * pp", WORLD),
        Edit("zero >= 1", "zero == 1", ONLY_STAGE),
        Edit("zero >= 2", "zero >= 1", GRADS),
        Edit("zero >= 3", "zero >= 2", WEIGHTS),
        Edit("zero >= 1", "zero >= 0", ALWAYS),
        Edit("12 * mine", "8 * mine", MASTER),
        Edit("4 * mine", "2 * mine", BF16_GRADS),
        Edit("num_params / (tp * pp)", "num_params / pp", NO_TP),
        Edit("num_params / (tp * pp)", "num_params / tp", NO_PP),
        Edit("num_params / (tp * pp)", "num_params / (tp * pp * dp)", DP_SPLITS),
        Edit("/ 2**30", "* dp * tp * pp / 2**30", ALL_RANKS),
    ),
)
