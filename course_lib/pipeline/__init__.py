"""Pipeline parallelism: layers split over ranks (notebook 08_pipeline).

Follow 1F1B through the files:

    schedules.py        its order: for each rank a list of actions (`actions.py`); GPipe, ZB-H1, ...
    schedule_rules.py   checks any schedule: each action once, no deadlock, few in flight
    engine.py           executes it on real ranks: `Pipeline` and `StageExecutor`
    p2p.py              sends activations and gradients between stages: `StageComm`
    split_backward.py   splits backward into input and weight gradients, for ZB-H1
    simulation.py       simulates it: step time, bubble, activations in flight
    cost.py             predicts the same by formula
    lab.py              measures it on real ranks
    stage.py            cuts a model into stages, balanced by `balance.py`
    token_pipeline.py   pipelines the tokens of one sequence (TeraPipe)
    pictures.py, explorer.py   draw steps

The exercise that checks a learner's 1F1B is `course_lib/checks/pipeline/order.py`.
"""

from course_lib.pipeline.actions import Action, Schedule, ScheduleError
from course_lib.pipeline.engine import Pipeline, run_schedule, shares
from course_lib.pipeline.schedules import gpipe, interleaved, naive, one_f_one_b, zero_bubble_h1
from course_lib.pipeline.simulation import PipelineTimes, simulate
from course_lib.pipeline.stage import Stage, split_model

__all__ = [
    "Action",
    "Pipeline",
    "PipelineTimes",
    "Schedule",
    "ScheduleError",
    "Stage",
    "gpipe",
    "interleaved",
    "naive",
    "one_f_one_b",
    "run_schedule",
    "shares",
    "simulate",
    "split_model",
    "zero_bubble_h1",
]
