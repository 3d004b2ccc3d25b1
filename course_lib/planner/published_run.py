"""A published training run, and what `predict` says of it. Notebook 12_planner."""

from dataclasses import dataclass

from course_lib.core.specs import ModelSpec
from course_lib.planner.cluster import Cluster
from course_lib.planner.plan import Plan
from course_lib.planner.predicting import predict
from course_lib.planner.prediction import PredictedStep


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A published run.

    group          runs that are alternatives of each other, or a model to leave out of a fit
    memory_bytes   measured on a GPU; 0 if not published
    mfu            as published; 0 if it was not
    fitted         constants were fitted on it (where a table says so row by row)
    """

    group: str
    model: ModelSpec
    cluster: Cluster
    plan: Plan
    step_s: float
    memory_bytes: float = 0.0
    mfu: float = 0.0
    fitted: bool = False

    def predicted(self) -> PredictedStep:
        """Predict the run."""
        return predict(self.model, self.cluster, self.plan)
