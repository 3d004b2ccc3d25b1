"""How long the actions of a pipeline take, and its messages. Notebook 08_pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.core.errors import CourseError
from course_lib.core.links import Link, TwoLevelLink

INSTANT = Link(name="instant", latency_s=0.0, bytes_per_s=float("inf"))


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """Seconds of the actions of one micro-batch on one stage, and the wire between stages.

    The three times are one number for all stages; or one for each stage, which its model chunks
    share evenly; or one for each model chunk, in the order of the layers. A whole backward takes
    both halves. `message_bytes` is the size of an activation, and of its gradient: one number, or
    one for each micro-batch. `micro_batch_scale` makes micro-batches longer or shorter than that.

    A wire that takes t seconds for any message is Link(latency_s=t, bytes_per_s=math.inf).
    """

    forward_s: float | Sequence[float] = 1.0
    backward_input_s: float | Sequence[float] = 1.0
    backward_weight_s: float | Sequence[float] = 1.0
    link: Link | TwoLevelLink = INSTANT
    message_bytes: float | Sequence[float] = 0.0
    micro_batch_scale: Sequence[float] = ()

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_input_s", "backward_weight_s", "message_bytes"):
            value = getattr(self, name)
            if any(one < 0 for one in (value if isinstance(value, Sequence) else (value,))):
                raise CourseError(f"PipelineTimes: need {name} >= 0; got {value}. Try 1.0.")

    def by_depth(self, num_stages: int, num_model_chunks: int) -> dict[str, list[float]]:
        """Seconds of each kind of action, for each model chunk in the order of the layers."""
        spread = {
            kind: _spread(kind, value, num_stages, num_model_chunks)
            for kind, value in (
                ("forward", self.forward_s),
                ("backward_input", self.backward_input_s),
                ("backward_weight", self.backward_weight_s),
            )
        }
        halves = zip(spread["backward_input"], spread["backward_weight"], strict=True)
        return {**spread, "backward": [one + other for one, other in halves]}

    def scale(self, micro_batch: int) -> float:
        """How long a micro-batch is, in parts of an ordinary one."""
        return self.micro_batch_scale[micro_batch] if self.micro_batch_scale else 1

    def bytes_of(self, micro_batch: int) -> float:
        """The size of the messages of a micro-batch."""
        sizes = self.message_bytes
        return sizes[micro_batch] if isinstance(sizes, Sequence) else sizes


def _spread(
    kind: str, value: float | Sequence[float], num_stages: int, num_model_chunks: int
) -> list[float]:
    """One number for each depth."""
    num_depths = num_stages * num_model_chunks
    if not isinstance(value, Sequence):
        value = [value] * num_stages
    if len(value) == num_stages:
        return [one / num_model_chunks for one in value] * num_model_chunks
    if len(value) == num_depths:
        return list(value)
    wanted = dict.fromkeys((num_stages, num_depths))
    raise CourseError(
        f"PipelineTimes: need {' or '.join(map(str, wanted))} times of {kind}; got {len(value)}. "
        "Try one number for all stages."
    )
