"""Exercise 1 of 13_scaling_study: the efficiency of published runs, and of what it is a share."""

from dataclasses import replace
from random import Random

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.scaling_study.playbook import PlaybookRun, efficiencies

_RUN = PlaybookRun(
    model="1B", nodes=1, dp=8, tp=1, pp=1, zero=0, micro_batch=1, num_micro_batches=32,
    failed=False, tokens_per_s_per_gpu=40_000, memory_bytes=0,
)  # fmt: skip


def _run(
    nodes: int, rate: float, batch: int = 256, model: str = "1B", seq: int = 4096
) -> PlaybookRun:
    """Return a run of this throughput per GPU in tokens per second."""
    return replace(_RUN, model=model, nodes=nodes, dp=8 * nodes, seq=seq,
                   num_micro_batches=batch // (8 * nodes), tokens_per_s_per_gpu=rate)  # fmt: skip


LARGE = [_run(nodes, rate, model="8B") for nodes, rate in ((4, 6000), (2, 7000), (8, 4000))]


def _cases() -> list[Case]:
    return [
        ("1, 2 and 8 nodes", ([_run(1, 40_000), _run(2, 38_000), _run(8, 30_000)],)),
        ("two models, no order", ([_run(8, 30_000), *LARGE, _run(1, 40_000)],)),
        ("two runs on one node", ([_run(1, 30_000), _run(2, 36_000), _run(1, 40_000)],)),
        ("the best rate is not the base", ([_run(2, 35_000), _run(4, 36_000)],)),
        ("two batches", ([_run(1, 40_000), _run(2, 30_000, batch=512), _run(4, 30_000, 512)],)),
        ("two lengths", ([_run(1, 40_000, seq=8192), _run(2, 30_000), _run(4, 24_000)],)),
    ]


def _drawn(random: Random) -> list[Case]:
    def one() -> PlaybookRun:
        return _run(2 ** random.randint(0, 4), random.randint(15_000, 40_000), model="8B")

    return [(f"{count} runs", ([one() for _ in range(count)],)) for count in (3, 6)]


WORK = "run.model, run.batch, run.seq"
OTHER = Cause("Compare runs with the same work: model, batch and sequence, all three.")
EFFICIENCY = Exercise(
    key="scaling_study-1",
    title="the efficiency of published runs",
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        show=lambda result, *_: list(result),
        unit=" %",
        library=(efficiencies,),
        unchanged=Cause("The runs belong to the caller: do not sort or change that list."),
        look="By hand: nodes times seconds of the base, divided by nodes times seconds of the run.",
        success="Each run against the fastest one on the fewest nodes that did the same work.",
    ),
    wrong=(
        Edit(WORK, "run.model", OTHER),
        Edit(WORK, "run.model, run.batch", OTHER),
        Edit(WORK, "run.model, run.seq", OTHER),
        Edit(WORK, "run.batch, run.seq", OTHER),
        Edit("key=lambda one: (one.nodes, one.step_s)", "key=lambda one: one.nodes", Cause(
            "Of several runs on the fewest nodes, the fastest is the base.")),
        Edit("key=lambda one: (one.nodes, one.step_s)", "key=lambda one: one.nodes * one.step_s",
             Cause("That is the most efficient run: the base is on the fewest nodes.")),
        Edit("100 * ", "", Cause("That is a share, from 0 to 1: in per cent it is 100 times.")),
        Edit("base.nodes * base.step_s / (run.nodes * run.step_s)", "base.step_s / run.step_s",
             Cause("That is the speed-up: divide it by how many times as many nodes there are.")),
        Edit("base.nodes * base.step_s / (run.nodes * run.step_s)",
             "base.step_s / (run.nodes * run.step_s)", Cause(
                 "The base need not be one node: its nodes count, too.")),
    ),
)  # fmt: skip
