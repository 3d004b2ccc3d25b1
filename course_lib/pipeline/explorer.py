"""Interactive picture of a pipeline schedule: timeline, memory, bubble, micro-batches in flight.

Everything is simulated (`live.py`), so a slider responds at once. Notebook 08_pipeline.
"""

from typing import Any

from matplotlib.figure import Figure

from course_lib.display.explore import Explore, explore
from course_lib.pipeline.live import SCHEDULE, schedule_finding, simulated_schedule
from course_lib.pipeline.pictures import pipelines


def schedule_explorer() -> Explore:
    """Return a picture with sliders for schedule, p, m, chunks, and times relative to a forward.

    `chunks` applies to interleaved only; `message` is the time of any message.
    """
    return explore(_draw, SCHEDULE.finding, **SCHEDULE.choices)


def _draw(**values: Any) -> Figure:
    step, name = simulated_schedule(**values), values["schedule"]
    return pipelines({name: step.events()}, schedule_finding(step, name), unit="F")
