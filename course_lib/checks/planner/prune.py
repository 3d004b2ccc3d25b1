"""Exercise 3 of 12_planner: prune the plans that cannot run."""

from collections import Counter
from itertools import product
from random import Random
from typing import Any

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed

PlanDict = dict[str, int]
JobDict = dict[str, int]

GPUS = Cause("dp * tp * pp has to be the number of GPUs: neither more nor fewer.")
HEADS = Cause("A head stays whole: tp has to divide the heads.")
LAYERS = Cause("A stage needs a layer: pp of at most the layers.")
UNEVEN = Cause("A valid plan is lost: stages may differ by a layer, so pp need not divide them.")
NODE = Cause("tp has to stay inside a node.")
BATCH = Cause("The batch is another one: dp * micro_batch * num_micro_batches sequences.")
NO_MICRO = Cause("A micro-batch has micro_batch sequences: count them.")
NO_DP = Cause("Every replica computes its own sequences: count dp of them.")
MEMORY = Cause("A plan that does not fit is no plan: compare with memory(plan).")
FULL = Cause("A valid plan is lost: one that needs exactly the GPU's GiB fits.")
OTHER_PLAN = Cause("That is the memory of another plan: ask memory(plan).")
PLANS = Cause("Need those of the plans that were given, as they are.")
UNCHANGED = Cause("The plans and the job belong to the caller: return a new list.")

JOB: JobDict = {"gpus": 16, "gpus_per_node": 4, "layers": 6, "heads": 12, "batch": 32, "gib": 40}
GIB = 160.0


def memory(plan: PlanDict) -> float:
    """Return the GiB that a plan needs on its fullest rank: states, a part of them over dp."""
    states = GIB * (1 + 2 / plan["dp"]) / 3 / (plan["tp"] * plan["pp"])
    return states + plan["micro_batch"] * min(plan["pp"], plan["num_micro_batches"]) / 2


def _memory_of_more(plan: PlanDict) -> float:
    return 1.5 * memory(plan)


def _all_plans(job: JobDict, most: int) -> list[PlanDict]:
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16) if size <= most]
    names = ("dp", "tp", "pp", "micro_batch", "num_micro_batches")
    return [
        dict(zip(names, (dp, tp, pp, *batches), strict=True))
        for dp, tp, pp, *batches in product(sizes, sizes, sizes, (1, 2), (2, 3, 4, 6, 8, 12, 16))
        if dp * tp * pp <= 2 * job["gpus"]
    ]


def _cases() -> list[Case]:
    roomy = {**JOB, "gib": 1000}
    exact = {**JOB, "gib": 21, "layers": 4, "heads": 8}
    large = {**JOB, "gpus": 24, "gpus_per_node": 8, "batch": 48}
    odd = {"gpus": 12, "gpus_per_node": 4, "layers": 5, "heads": 8, "batch": 48, "gib": 60}
    jobs = {"16 GPUs": JOB, "much memory": roomy, "four layers": exact, "12 GPUs": odd}
    found: list[Case] = [("no plan", ([], dict(JOB), memory))]
    for name, job in jobs.items():
        plans = _all_plans(job, 16)
        found.append((f"{name}, {len(plans)} plans", (plans, dict(job), memory)))
    for name, job in (("nodes of 8", large), ("a larger model", JOB)):
        plans = _all_plans(job, 12)
        found.append((f"{name}, {len(plans)} plans", (plans, dict(job), _memory_of_more)))
    return found


def _drawn(random: Random) -> list[Case]:
    job = {**JOB, "gib": random.randint(20, 90), "heads": random.choice((4, 8, 24))}
    plans = random.sample(_all_plans(job, 16), 200)
    return [("a drawn job", (plans, job, memory))]


def _shown(result: Any, plans: list[PlanDict], *_: Any) -> dict[str, str]:
    """Return what became of each plan that is left: the exercise leaves their order free."""
    try:
        left = list(result)
    except TypeError:
        left = [None]
    if any(plan not in plans for plan in left):
        raise failed(f"got {result!r}"[:200], PLANS)
    counts = Counter(", ".join(f"{name} {size}" for name, size in plan.items()) for plan in left)
    return {plan: "kept" if n == 1 else f"kept {n} times" for plan, n in counts.items()}


SPLIT = 'plan["dp"] * plan["tp"] * plan["pp"] == job["gpus"]'
TOGETHER = 'plan["dp"] * plan["micro_batch"] * plan["num_micro_batches"]'

PRUNE = Exercise(
    key="planner-3",
    title="prune",
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        show=_shown,
        look="Take this plan, and go through the six rules by hand.",
        success="All plans that obey the rules are left, and no other, in seven lists.",
        unchanged=UNCHANGED,
    ),
    wrong=(
        Edit(SPLIT, "True", GPUS),
        Edit('job["heads"] % plan["tp"] == 0', "True", HEADS),
        Edit('plan["pp"] <= job["layers"]', "True", LAYERS),
        Edit('plan["pp"] <= job["layers"]', 'job["layers"] % plan["pp"] == 0', UNEVEN),
        Edit('plan["tp"] <= job["gpus_per_node"]', "True", NODE),
        Edit(f'{TOGETHER} == job["batch"]', "True", BATCH),
        Edit(TOGETHER, 'plan["dp"] * plan["num_micro_batches"]', NO_MICRO),
        Edit(TOGETHER, 'plan["micro_batch"] * plan["num_micro_batches"]', NO_DP),
        Edit('memory(plan) <= job["gib"]', "True", MEMORY),
        Edit('memory(plan) <= job["gib"]', 'memory(plan) < job["gib"]', FULL),
        Edit("memory(plan)", 'memory({**plan, "dp": 1})', OTHER_PLAN),
    ),
)
