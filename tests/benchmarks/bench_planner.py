"""Print the planner's error on every published table, and how many plans it prices per second."""

import time

from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import MODELS
from course_lib.planner import Plan, find_cluster, predict
from course_lib.planner.published_runs import published_runs
from course_lib.planner.scores import alternatives, regrets, score_table


def show_scores() -> None:
    print(f"{'published table':44} {'rows':>5} {'error':>14} {'bias':>7} {'promised':>9}")
    for one in score_table():
        limit = f"{one.limit:.1%}" if one.limit else ""
        error = f"{one.kind} {one.error:.1%}{'' if one.holds else ' !'}"
        print(f"{one.table:44} {one.count:5} {error:>14} {one.bias:+7.1%} {limit:>9}")
    lost = regrets(alternatives())
    print("\nthroughput lost by the first choice:")
    print("  " + ", ".join(f"{group} {share:.0%}" for group, share in lost.items()))


def show_experts() -> None:
    print("\nmodels with experts, published and predicted step:")
    for run in published_runs("experts"):
        said_s = run.predicted().step_s
        words = f"{run.group}, {run.plan.seq} tokens, {run.plan.short}, {run.plan.precision}"
        error = f"{said_s / run.step_s - 1:+.0%}{' fitted' if run.fitted else ''}"
        print(f"  {words:90} {run.step_s:7.2f} s {said_s:7.2f} s {error}")


def show_speed() -> None:
    model, cluster = MODELS["llama-70b"], find_cluster("hf-h100", 64)
    axes = [
        Parallelism(dp=512 // tp // pp, tp=tp, pp=pp, zero=zero, sequence_parallel=tp > 1)
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8)
        for zero in (0, 1, 2, 3)
    ]
    plans = [
        Plan(parallelism=one, micro_batch=size, num_micro_batches=16, recompute=recompute)
        for one in axes
        for size in (1, 2, 4, 8)
        for recompute in ("none", "full")
    ]
    begin = time.process_time()
    for plan in plans:
        predict(model, cluster, plan)
    seconds = time.process_time() - begin
    print(f"\n{len(plans)} plans in {seconds:.3f} s of one core: {len(plans) / seconds:,.0f}/s")


if __name__ == "__main__":
    show_scores()
    show_experts()
    show_speed()
