"""Bubbles that were published, with the times they came from, to hold a simulation against them.

Notebook 08_pipeline.
"""

from typing import NamedTuple

from course_lib.core.links import Link
from course_lib.cost.schedule_times import PipelineTimes


class Published(NamedTuple):
    """One model on 8 stages: milliseconds of F, I, W and of a message, and two bubble rates."""

    model: str
    num_micro_batches: int
    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float
    message_ms: float
    one_f_one_b: float
    zero_bubble_h1: float

    @property
    def times(self) -> PipelineTimes:
        """The same, for the simulation."""
        return PipelineTimes(
            forward_s=self.forward_ms / 1e3,
            backward_input_s=self.backward_input_ms / 1e3,
            backward_weight_s=self.backward_weight_ms / 1e3,
            link=Link(latency_s=self.message_ms / 1e3, bytes_per_s=float("inf")),
        )


NUM_STAGES = 8

# Qi et al. 2024 (Zero bubble pipeline parallelism): times of table 6, rates of table 5
PUBLISHED = (
    Published("1.5B", 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    Published("1.5B", 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
    Published("1.5B", 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    Published("6.2B", 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323),
    Published("6.2B", 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045),
    Published("6.2B", 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554),
)
