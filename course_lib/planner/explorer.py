"""The explorer of notebook 12_planner: model, cluster and plan in; bill and memory out."""

from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from course_lib.core.errors import CourseError
from course_lib.core.parallelism import ZERO_STAGES, Parallelism
from course_lib.core.presets import MODELS
from course_lib.core.specs import ModelSpec
from course_lib.cost.flops import RECOMPUTE
from course_lib.display.explore import Explore
from course_lib.planner.cluster import cluster_names, find_cluster
from course_lib.planner.pictures import bill_and_memory
from course_lib.planner.plan import Plan
from course_lib.planner.predicting import predict
from course_lib.planner.prediction import PredictedStep

_SIZES = [1, 2, 4, 8, 16, 32]
_BATCHES = [2**n for n in range(3, 13)]
_CHOICES = ("llama-1b", "llama-8b", "llama-70b", "llama-405b", "megatron-175b", "megatron-530b")


class PlanExplorer(Explore):
    """Sliders for a model, a cluster and a plan, with the predicted bill and memory under them.

    The data parallel size follows from the GPUs, tp and pp; the micro-batches of a step from the
    global batch. Sliders that do not go together show the sentence of the error.
    """

    def __init__(self, start: PredictedStep) -> None:
        plan, axes = start.plan, start.plan.parallelism
        self._seq = plan.seq
        self._ep, self._expert_tp = axes.ep, axes.expert_tp
        self._models = {start.model.name: start.model, **{name: MODELS[name] for name in _CHOICES}}
        super().__init__(
            self._draw,
            lambda **values: bill_and_memory(self._at(**values))[1],
            {
                "model": ([*self._models], start.model.name),
                "cluster": (cluster_names(), start.cluster.name),
                "nodes": _with(_SIZES, start.cluster.num_nodes),
                "global_batch": _with(_BATCHES, plan.global_batch),
                "tp": _with(_SIZES[:4], axes.tp),
                "pp": _with(_SIZES, axes.pp),
                "zero": ([*ZERO_STAGES], axes.zero),
                "model_chunks": _with([1, 2, 4, 5, 8], plan.num_model_chunks),
                "micro_batch": _with(_SIZES, plan.micro_batch),
                "recompute": ([*RECOMPUTE], plan.recompute),
            },
        )

    @property
    def predicted(self) -> PredictedStep:
        """Prediction for the sliders' current values."""
        return self._at(**self.values())

    def _draw(self, **values: Any) -> Figure:
        return bill_and_memory(self._at(**values))[0]

    def _at(
        self,
        model: str,
        cluster: str,
        nodes: int,
        global_batch: int,
        tp: int,
        pp: int,
        zero: int,
        model_chunks: int,
        micro_batch: int,
        recompute: str,
    ) -> PredictedStep:
        gpus = find_cluster(cluster, nodes)
        dp, rest = divmod(gpus.num_gpus, tp * pp)
        if rest:
            raise CourseError(
                f"plan_explorer: need tp * pp that divides {gpus.num_gpus} GPUs; got {tp} * {pp}. "
                "Try a smaller pp, or more nodes."
            )
        num_micro_batches, rest = divmod(global_batch, dp * micro_batch)
        if rest:
            raise CourseError(
                f"plan_explorer: need a global batch that dp * micro_batch divides; got "
                f"{global_batch}, {dp} * {micro_batch}. Try a larger global batch."
            )
        spec = self._models[model]
        axes = Parallelism(dp=dp, tp=tp, pp=pp, zero=zero, sequence_parallel=tp > 1)
        if spec.experts is not None:  # no slider has them: they stay as they were at the start
            axes = replace(axes, ep=self._ep, expert_tp=self._expert_tp)
        plan = Plan(
            parallelism=axes,
            schedule="interleaved" if model_chunks > 1 else "1f1b",
            num_model_chunks=model_chunks,
            micro_batch=micro_batch,
            num_micro_batches=num_micro_batches,
            seq=self._seq,
            recompute=recompute,
        )
        return predict(spec, gpus, plan)


def plan_explorer(model: ModelSpec, cluster: str, plan: Plan, num_nodes: int = 1) -> PlanExplorer:
    """Return sliders that begin at this plan; the plan uses all GPUs of the cluster.

    cluster   the name of a profile

    Raises: CourseError or MeshError for a plan that cannot be predicted
    """
    return PlanExplorer(predict(model, find_cluster(cluster, num_nodes), plan))


def _with(sizes: list[int], start: int) -> tuple[list[int], int]:
    """Return the choices of a slider, with the start among them."""
    return sorted({*sizes, start}), start
