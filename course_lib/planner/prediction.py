"""The predicted bill of a step: seconds by cause, bytes by kind, and what bounds it.

Notebook 12_planner.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from course_lib.core.specs import ModelSpec
from course_lib.core.units import format_bytes
from course_lib.cost.flops import mfu, train_step_flop
from course_lib.planner.cluster import Cluster
from course_lib.planner.plan import Plan

CAUSES = {  # in the order in which a bill shows them
    "compute_s": "matrix products and the kernels between them",
    "launch_s": "the host: kernels launched too slowly, and the fixed work of a step",
    "tp_s": "exposed communication of tensor (and context) parallelism",
    "ep_s": "exposed communication of expert parallelism: tokens to their experts, and back",
    "bubble_s": "the pipeline's bubble, and stages that wait for the slowest",
    "pp_s": "exposed messages between pipeline stages",
    "dp_s": "exposed communication of gradients and of sharded parameters",
    "optimizer_s": "the optimizer's step",
}

CAUSE_NAMES = {  # in a table, and in a picture's row
    "compute_s": "compute",
    "launch_s": "host",
    "tp_s": "TP messages",
    "ep_s": "EP messages",
    "bubble_s": "bubble",
    "pp_s": "PP messages",
    "dp_s": "DP messages",
    "optimizer_s": "optimizer",
}

AT_PEAK = "the same FLOP at the GPU's peak (recomputation not counted)"

HEADERS = (
    *("plan", "schedule", "batches", "step", "tokens/s/GPU", "MFU", "memory"),
    "besides compute",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStep:
    """Step time of a plan by cause (they add up), and memory of the fullest rank by kind.

    compute_s .. optimizer_s   seconds of a step; `CAUSES` says what each is
    memory                     bytes by kind: params, grads, optim_state, activations, buffers
    """

    model: ModelSpec
    cluster: Cluster
    plan: Plan
    compute_s: float
    launch_s: float
    tp_s: float
    ep_s: float
    bubble_s: float
    pp_s: float
    dp_s: float
    optimizer_s: float
    memory: Mapping[str, int]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by cause; their sum is `step_s`."""
        return {name: getattr(self, name) for name in CAUSES}

    @property
    def shown_seconds(self) -> dict[str, float]:
        """Seconds by cause without the causes that a bill would print as zero."""
        least_s = min(5e-4, 5e-4 * self.step_s)
        return {name: seconds for name, seconds in self.seconds.items() if seconds >= least_s}

    @property
    def peak_s(self) -> float:
        """Seconds of a step whose FLOP, without recomputation, run at the GPUs' peak."""
        return self.mfu * self.step_s

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        busy_s = self.compute_s + self.launch_s + self.tp_s + self.bubble_s + self.ep_s
        return busy_s + self.pp_s + self.dp_s + self.optimizer_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput of a GPU."""
        return self.plan.tokens / (self.step_s * self.plan.world_size)

    @property
    def mfu(self) -> float:
        """Model FLOP utilization, with all attention scores and without recomputation."""
        flop = train_step_flop(self.model, self.plan.global_batch, self.plan.seq)
        peak = self.cluster.device.peak("fp32" if self.plan.precision == "fp32" else "bf16")
        return mfu(flop, self.step_s, peak, world_size=self.plan.world_size)

    @property
    def memory_bytes(self) -> int:
        """Bytes that the fullest rank holds at its peak."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits into its GPU."""
        return self.memory_bytes <= self.cluster.usable_bytes

    @property
    def bound(self) -> str:
        """One sentence: what bounds this plan, and by how much."""
        if not self.fits:
            kind = max(self.memory, key=lambda name: self.memory[name])
            return (
                f"Does not fit: needs {format_bytes(self.memory_bytes)} of "
                f"{format_bytes(self.cluster.usable_bytes)}, the largest part {kind}."
            )
        worst, share = self._largest_loss()
        if share < 0.1:
            computing = self.compute_s / self.step_s
            computing = min(computing, 0.99) if computing < 1 else 1.0  # 99.6 % is not all
            return f"Bound by compute: {100 * computing:.0f} % of the step."
        part = f"{CAUSES[worst]}: {100 * share:.0f} % of the step"
        return f"Besides computing, the largest part is {part}."

    def _largest_loss(self) -> tuple[str, float]:
        """Return the largest cause besides computing, and its share of the step."""
        losses = {name: seconds for name, seconds in self.seconds.items() if name != "compute_s"}
        worst = max(losses, key=lambda name: losses[name])
        return worst, losses[worst] / self.step_s

    @property
    def cells(self) -> tuple[str, ...]:
        """This plan's row in a table of plans, by `HEADERS`."""
        worst, share = self._largest_loss()
        chunks = self.plan.num_model_chunks
        return (
            self.plan.short,
            self.plan.pipeline_words + (f", {chunks} chunks" if chunks > 1 else ""),
            f"{self.plan.num_micro_batches} x {self.plan.micro_batch}",
            f"{self.step_s:.2f} s",
            f"{self.tokens_per_s_per_gpu:,.0f}",
            f"{100 * self.mfu:.0f} %",
            format_bytes(self.memory_bytes),
            f"{CAUSE_NAMES[worst]} {100 * share:.0f} %",
        )
