"""Assumed times of a pipeline's actions, with which a schedule is simulated or emulated.

Notebook 08_pipeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.core.errors import CourseError
from course_lib.core.links import Link, TwoLevelLink

INSTANT = Link(name="instant", latency_s=0.0, bytes_per_s=float("inf"))


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """Seconds of the actions of one micro-batch on one stage, and the link between stages.

    forward_s, backward_input_s, backward_weight_s
                        one number for all ranks; or one for each rank, whose model chunks
                        share it evenly; or one for each model chunk, in the order of the layers. A
                        whole backward takes the sum of its two parts
    message_bytes       size of an activation and of its gradient: one number, or one for each
                        micro-batch
    micro_batch_scale   factor on the seconds of each micro-batch; empty: all 1
    overlap             how a forward and the whole backward directly after it, of another
                        micro-batch, share the rank: 0, one after the other, in the sum of their
                        times; 1, at once, in the longer of the two times; or between

    A link that takes t seconds for any message is Link(latency_s=t, bytes_per_s=math.inf).

    Raises: CourseError for a number below 0
    """

    forward_s: float | Sequence[float] = 1.0
    backward_input_s: float | Sequence[float] = 1.0
    backward_weight_s: float | Sequence[float] = 1.0
    link: Link | TwoLevelLink = INSTANT
    message_bytes: float | Sequence[float] = 0.0
    micro_batch_scale: Sequence[float] = ()
    overlap: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_input_s", "backward_weight_s", "message_bytes"):
            value = getattr(self, name)
            if any(one < 0 for one in (value if isinstance(value, Sequence) else (value,))):
                raise CourseError(f"PipelineTimes: need {name} >= 0; got {value}. Try 1.0.")
        if not 0 <= self.overlap <= 1:
            raise CourseError(f"PipelineTimes: need overlap from 0 to 1; got {self.overlap}.")

    def by_depth(self, placement: Sequence[int]) -> dict[str, list[float]]:
        """Return seconds by kind of action, for each model chunk in the order of the layers.

        Raises: CourseError if the number of times fits neither the ranks nor the model chunks
        """
        spread = {
            kind: _spread(kind, value, placement)
            for kind, value in (
                ("forward", self.forward_s),
                ("backward_input", self.backward_input_s),
                ("backward_weight", self.backward_weight_s),
            )
        }
        parts = zip(spread["backward_input"], spread["backward_weight"], strict=True)
        return {**spread, "backward": [input_s + weight_s for input_s, weight_s in parts]}

    def scale(self, micro_batch: int) -> float:
        """Return the factor on the seconds of a micro-batch."""
        return self.micro_batch_scale[micro_batch] if self.micro_batch_scale else 1

    def bytes_of(self, micro_batch: int) -> float:
        """Return the size of a micro-batch's messages, in bytes."""
        sizes = self.message_bytes
        return sizes[micro_batch] if isinstance(sizes, Sequence) else sizes


def _spread(kind: str, value: float | Sequence[float], placement: Sequence[int]) -> list[float]:
    """Return one number for each depth."""
    num_ranks, num_depths = max(placement) + 1, len(placement)
    num_model_chunks = num_depths // num_ranks
    if not isinstance(value, Sequence):
        value = [value] * num_ranks
    if len(value) == num_ranks:
        return [value[rank] / num_model_chunks for rank in placement]
    if len(value) == num_depths:
        return list(value)
    wanted = dict.fromkeys((num_ranks, num_depths))
    raise CourseError(
        f"PipelineTimes: need {' or '.join(map(str, wanted))} times of {kind}; got {len(value)}. "
        "Try one number for all stages."
    )
