"""Pipeline parallelism: layers split over ranks (notebook 08_pipeline).

Where is 1F1B? Its order: `schedules.py` (GPipe, 1F1B, interleaved, ZB-H1), a list of actions
(`actions.py`) for each rank, checked by `schedule_rules.py`. Executed: `engine.py`, with
`stage.py`, the point-to-point messages of `p2p.py`, and `split_backward.py`. Simulated:
`simulation.py`. Predicted: `cost.py`. Measured: `lab.py`. Besides, `balance.py` cuts a model into
stages, `token_pipeline.py` is TeraPipe, `pictures.py` and `explorer.py` draw.
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
