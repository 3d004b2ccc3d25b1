"""The explorer of notebook 12_planner: model, cluster and plan in; bill and memory out."""

from typing import Any

from matplotlib.figure import Figure

from course_lib.core.presets import MODELS
from course_lib.core.specs import ModelSpec
from course_lib.display.explore import Explore
from course_lib.planner.cluster import find_cluster
from course_lib.planner.live import CHOICES, PLAN, step_of_choices
from course_lib.planner.pictures import bill_and_memory
from course_lib.planner.plan import Plan
from course_lib.planner.predicting import predict
from course_lib.planner.prediction import PredictedStep


class PlanExplorer(Explore):
    """Sliders for a model, a cluster and a plan, with the predicted bill and memory under them.

    The data parallel size follows from the GPUs, tp and pp; the micro-batches of a step from the
    global batch. Sliders that do not go together show the sentence of the error.
    """

    def __init__(self, start: PredictedStep) -> None:
        plan, axes = start.plan, start.plan.parallelism
        self._seq = plan.seq
        self._ep, self._expert_tp = axes.ep, axes.expert_tp  # no slider has them
        self._models = {start.model.name: start.model, **{name: MODELS[name] for name in CHOICES}}
        values = {
            "model": start.model.name,
            "cluster": start.cluster.name,
            "nodes": start.cluster.num_nodes,
            "global_batch": plan.global_batch,
            "tp": axes.tp,
            "pp": axes.pp,
            "zero": axes.zero,
            "model_chunks": plan.num_model_chunks,
            "micro_batch": plan.micro_batch,
            "recompute": plan.recompute,
        }
        offered = {name: options for name, (options, _) in PLAN.options().items()}
        offered["model"] = [*self._models]
        super().__init__(
            self._draw,
            lambda **values: bill_and_memory(self._at(**values))[1],
            {name: _with(offered[name], value) for name, value in values.items()},
        )

    @property
    def predicted(self) -> PredictedStep:
        """Prediction for the sliders' current values."""
        return self._at(**self.values())

    def _draw(self, **values: Any) -> Figure:
        return bill_and_memory(self._at(**values))[0]

    def _at(self, model: str, **values: Any) -> PredictedStep:
        kept: dict[str, Any] = {"seq": self._seq, "ep": self._ep, "expert_tp": self._expert_tp}
        return step_of_choices(self._models[model], **values, **kept)


def plan_explorer(model: ModelSpec, cluster: str, plan: Plan, num_nodes: int = 1) -> PlanExplorer:
    """Return sliders that begin at this plan; the plan uses all GPUs of the cluster.

    cluster   the name of a profile

    Raises: CourseError or MeshError for a plan that cannot be predicted
    """
    return PlanExplorer(predict(model, find_cluster(cluster, num_nodes), plan))


def _with(options: list[Any], start: Any) -> tuple[list[Any], Any]:
    """Return the choices of a slider, with the start among them."""
    return options if start in options else sorted([*options, start]), start
