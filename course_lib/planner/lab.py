"""Run the pipeline of a plan in miniature on real ranks, to compare with its prediction.

Ranks, schedule and messages are real; the kernels sleep for their predicted seconds, and all times
are divided by one number. What is measured is what `predict` adds to the kernels: the bubble, and
messages between stages. Notebook 12_planner.
"""

import math
from collections.abc import Mapping

from course_lib.core.links import Link
from course_lib.core.specs import ModelSpec
from course_lib.pipeline.actions import Schedule
from course_lib.pipeline.lab import emulated, measure
from course_lib.pipeline.times import PipelineTimes
from course_lib.planner.cluster import Cluster
from course_lib.planner.memory import stage_layers
from course_lib.planner.plan import Plan
from course_lib.planner.predicting import message_s, micro_batch, stage_times
from course_lib.planner.prediction import PredictedStep
from course_lib.ranks import Ranks


def measure_pipelines(
    model: ModelSpec,
    cluster: Cluster,
    plan: Plan,
    schedules: Mapping[str, Schedule],
    *,
    divided_by: float,
    turns: int = 3,
) -> dict[str, list[float]]:
    """Return the seconds of a plan's pipeline by schedule, one for each turn, at full length.

    schedules    of the plan's stages and micro-batches
    divided_by   how many times shorter the ranks' seconds are
    """
    layers = stage_layers(model, plan.parallelism.pp, cluster.software.balances_head)
    sent_s = message_s(model, cluster, plan)
    times = stage_times(micro_batch(model, cluster, plan), layers, sent_s)
    shorter = [[one / divided_by for one in seconds] for seconds in times[:3]]
    link = Link(latency_s=sent_s / divided_by, bytes_per_s=math.inf)
    small = PipelineTimes(
        forward_s=shorter[0], backward_input_s=shorter[1], backward_weight_s=shorter[2], link=link
    )
    runs = {name: emulated(schedule, small) for name, schedule in schedules.items()}
    with Ranks(plan.parallelism.pp, link=link, cluster="laptop") as ranks:
        found = measure(ranks, runs, turns)
    return {name: [one * divided_by for one in run.seconds] for name, run in found.items()}


def pipeline_s(predicted: PredictedStep) -> float:
    """Return the predicted seconds of the pipeline: a step without gradients and optimizer."""
    return predicted.step_s - predicted.dp_s - predicted.optimizer_s
