"""Pipeline parallelism: layers split over ranks (notebook 08_pipeline).

Follow 1F1B through the files:

    whole.py            the method in one short file: 1F1B in one class; read it first
    schedules.py        its order: for each rank a list of actions (`actions.py`); GPipe, ZB-H1, ...
    v_schedules.py      the same with the layers placed in a V: ZB-V, DualPipeV
    schedule_rules.py   checks any schedule: each action once, no deadlock, few in flight
    engine.py           executes it on real ranks: `Pipeline` and `StageExecutor`
    p2p.py              sends activations and gradients between stages: `StageComm`
    split_backward.py   splits backward into input and weight gradients, for ZB-H1, ZB-V, DualPipeV
    simulation.py       simulates it with given `times.py`: step time, bubble, activations in flight
    cost.py             predicts the same by formula
    bound.py            the open puzzle: a step time that no order can beat, and how close one is
    lab.py              measures it on real ranks
    stage.py            cuts a model into stages, balanced by `balance.py`
    token_pipeline.py   pipelines the tokens of one sequence (TeraPipe)
    pictures.py, explorer.py   draw steps; live.py, live_by_hand.py in the page, by `levels.py`

The exercises that check a learner's 1F1B are in `course_lib/checks/pipeline`: `order.py`,
`engine.py` (execution) and `times.py` (simulation).
"""

from typing import TYPE_CHECKING

from course_lib.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from course_lib.pipeline.actions import (
        Action,
        Schedule,
        ScheduleError,
        read_schedule,
        v_placement,
    )
    from course_lib.pipeline.bound import ScheduleScore, schedule_bound, score_schedule
    from course_lib.pipeline.engine import Pipeline, run_schedule, shares
    from course_lib.pipeline.schedules import (
        breadth_first,
        gpipe,
        interleaved,
        naive,
        one_f_one_b,
        zero_bubble_h1,
    )
    from course_lib.pipeline.simulation import simulate
    from course_lib.pipeline.stage import Stage, split_model
    from course_lib.pipeline.times import PipelineTimes
    from course_lib.pipeline.v_schedules import dual_pipe_v, zero_bubble_v
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "Action",
    "Pipeline",
    "PipelineTimes",
    "Schedule",
    "ScheduleError",
    "ScheduleScore",
    "Stage",
    "breadth_first",
    "dual_pipe_v",
    "gpipe",
    "interleaved",
    "naive",
    "one_f_one_b",
    "read_schedule",
    "run_schedule",
    "schedule_bound",
    "score_schedule",
    "shares",
    "simulate",
    "split_model",
    "v_placement",
    "zero_bubble_h1",
    "zero_bubble_v",
]
