"""Predict a run of the study before it starts: seconds, hours and bytes from formulas.

A step is computing, divided by the ranks; exposed communication; the bubble of a pipeline; and the
optimizer, which reads and writes its state once. Gradients of DP overlap with backward, bucket by
bucket. The messages of TP, of ZeRO and of FSDP are counted as fully exposed: right for simple TP
(Megatron overlaps one of four all-reduces), too much for the others.

Where ranks share CPU cores, three things differ: Python's time for each layer and micro-batch does
not shrink with the batch; nothing is hidden, as gloo's threads need the cores that compute; and for
the same reason messages take longer than on the link that was measured while nothing else ran. Both
constants are fitted on the 17 runs of several ranks in `data/laptop_study.json`, which they predict
within 30 %. Lesson 13_scaling_study.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from course_lib.core.layers import layers, matrices
from course_lib.core.recipes import FP32, PURE_BF16, Recipe
from course_lib.core.records import MEMORY_KINDS, Ledger
from course_lib.cost.flops import train_step_flop
from course_lib.cost.params import count_params, layer_params, params_on_rank
from course_lib.cost.traffic import traffic_s
from course_lib.ddp.cost import StepCost, exposed_s, ready_by_share
from course_lib.memory.formulas import model_states, step_ledger
from course_lib.memory.layer_bytes import PAPER, TORCH_CPU
from course_lib.pipeline.cost import BatchCost, step_parts
from course_lib.scaling_study.aggregate import Experiment
from course_lib.scaling_study.machines import Machine
from course_lib.scaling_study.study_run import StudyRun
from course_lib.tensor_parallel.cost import tensor_traffic
from course_lib.zero.cost import ParamTraffic, offload_bytes, zero_traffic

RECIPES = {
    "float32": FP32,
    "float64": replace(FP32, weight_bytes=8, grad_bytes=8, moment_bytes=8, activation_bytes=8),
    "bfloat16": PURE_BF16,
}
MIB = 2**20
HOST_LAYER_S = (
    4e-3  # Python's, for a layer's forward and backward of one micro-batch, on a CPU core
)
LOADED_LINK = 1.7  # times as long as on an idle machine, with no core left for communication


@dataclass(frozen=True, kw_only=True)
class PredictedRun:
    """The prediction for one run.

    host_s       Python's time for layers and micro-batches, where there is no GPU
    wire_s       exposed communication: what computing does not overlap
    bubble_s     what a rank idles because its pipeline fills and empties
    held         bytes by kind on the fullest rank, at its peak
    """

    run: StudyRun
    machine: Machine
    compute_s: float
    host_s: float
    wire_s: float
    bubble_s: float
    optimizer_s: float
    held: dict[str, int]

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s + self.host_s + self.wire_s + self.bubble_s + self.optimizer_s

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all ranks together."""
        return self.run.tokens_a_step / self.step_s

    @property
    def run_s(self) -> float:
        """Seconds of the whole run, including the start."""
        return self.machine.start_s(self.run.ranks) + self.run.steps * self.step_s

    @property
    def peak_bytes(self) -> int:
        """Peak memory of a rank."""
        return sum(self.held.values())

    @property
    def missing_bytes(self) -> int:
        """Bytes that a rank needs beyond its memory; 0 if the run fits."""
        return max(0, self.peak_bytes - self.machine.rank_bytes(self.run.ranks))


def predict(run: StudyRun, machine: Machine) -> PredictedRun:
    """Predict one run on this machine, with the formulas of `course_lib.cost`."""
    flop = train_step_flop(run.spec, run.global_batch, run.seq)
    compute_s = flop / run.ranks / machine.flop_per_s(run.dtype, run.ranks)
    bubble_s, wire_s = _pipeline_s(run, machine, compute_s)
    wire_s += _tensor_s(run, machine) + _gradients_s(run, machine, compute_s)
    wire_s *= LOADED_LINK if machine.is_full(run.ranks) else 1
    return PredictedRun(
        run=run,
        machine=machine,
        compute_s=compute_s,
        host_s=_host_s(run, machine),
        wire_s=wire_s + _offload_s(run, machine),
        bubble_s=bubble_s,
        optimizer_s=_optimizer_s(run, machine),
        held=_held(run, machine),
    )


def states_of(run: StudyRun) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state on the fullest device."""
    params = max(params_on_rank(run.spec, run.parallelism, stage) for stage in (0, run.pp - 1))
    return model_states(params, _recipe(run), parallelism=run.parallelism)


def fit_machine(machine: Machine, baseline: Experiment) -> Machine:
    """Return the machine with the speed of the one-rank run: only the rest is predicted.

    What Python and the optimizer take is left as it is, so that the prediction of that run is its
    own time.
    """
    told = predict(baseline.run, machine)
    rest_s = told.optimizer_s + told.host_s
    compute_s = max(baseline.step_s - rest_s, baseline.step_s / 10)
    return replace(machine, reached=machine.reached * told.compute_s / compute_s)


def hours(predictions: Iterable[PredictedRun]) -> tuple[float, float]:
    """Return the hours of all these runs in sequence, and the same weighted by their ranks."""
    times = [(one.run_s, one.run_s * one.run.ranks) for one in predictions]
    return sum(wall for wall, _ in times) / 3600, sum(of_ranks for _, of_ranks in times) / 3600


def _recipe(run: StudyRun) -> Recipe:
    recipe = RECIPES[run.dtype]
    return replace(recipe, num_moments=0, master_bytes=0) if run.offload else recipe


def _host_s(run: StudyRun, machine: Machine) -> float:
    """Return Python's time in a rank's layers; ranks beyond the cores take turns."""
    if machine.cores is None:
        return 0.0
    turns = max(1.0, run.ranks / machine.cores)
    return HOST_LAYER_S * run.num_micro_batches * run.spec.num_layers / run.pp * turns


def _pipeline_s(run: StudyRun, machine: Machine, compute_s: float) -> tuple[float, float]:
    """Return bubble and communication of 1F1B; idle ranks leave shared cores to the others."""
    if run.pp == 1:
        return 0.0, 0.0
    alone_s = (
        compute_s * machine.flop_per_s(run.dtype, run.ranks) / machine.flop_per_s(run.dtype, 1)
    )
    stream = run.micro_batch * run.num_micro_batches * run.seq * run.spec.hidden
    batch = BatchCost(
        forward_s=alone_s / 3,
        backward_s=alone_s * 2 / 3,
        message_bytes=stream * RECIPES[run.dtype].activation_bytes,
    )
    parts = step_parts(run.pp, run.num_micro_batches, batch, machine.link)
    return max(0.0, alone_s + parts.bubble_s - compute_s), parts.wire_s


def _tensor_s(run: StudyRun, machine: Machine) -> float:
    """Return the time of tensor parallelism's all-reduces, which are fully exposed."""
    if run.tp == 1:
        return 0.0
    number_bytes = RECIPES[run.dtype].activation_bytes
    calls = tensor_traffic(run.spec, run.micro_batch, run.seq, number_bytes, tp=run.tp)
    return run.num_micro_batches * traffic_s(calls, run.tp, machine.link) / run.pp


def _gradients_s(run: StudyRun, machine: Machine, compute_s: float) -> float:
    """Return the exposed communication between copies of the model, or between their shards."""
    parallelism = run.parallelism
    if parallelism.dp == 1:
        return 0.0
    link = machine.link_between_copies(parallelism.dp, run.tp * run.pp)
    sizes = _gradient_bytes(run)
    if parallelism.zero:
        rows = [row for size in sizes for row in _sent_together(run, size)]
        calls = zero_traffic(parallelism.zero, rows, run.num_micro_batches)
        return traffic_s(calls, parallelism.dp, link)
    last_s = compute_s / run.num_micro_batches  # only the last backward sends
    if machine.is_full(run.ranks):
        last_s = 0.0  # nothing is hidden
    cost = StepCost(
        forward_s=last_s / 3,
        ready_s=ready_by_share(sizes, last_s * 2 / 3),
        grad_bytes=tuple(sizes),
    )
    return exposed_s(cost, run.bucket_mib * MIB, parallelism.dp, link)


def _gradient_bytes(run: StudyRun) -> list[int]:
    """Return the gradients' bytes in backward's order; the tied embedding is last."""
    number_bytes = RECIPES[run.dtype].grad_bytes
    layer = layer_params(run.spec, run.parallelism)
    rest = params_on_rank(run.spec, run.parallelism) % layer or layer
    num_layers = (params_on_rank(run.spec, run.parallelism) - rest) // layer
    return [layer * number_bytes] * num_layers + [rest * number_bytes]


def _sent_together(run: StudyRun, num_bytes: int) -> list[ParamTraffic]:
    """Return a layer's messages: whole with FSDP, buckets, or with ZeRO-3 modules."""
    if run.strategy in ("fsdp", "torch-fsdp"):
        return [ParamTraffic(num_bytes=num_bytes)]
    kind = layers(run.spec)[0]
    norms = run.spec.norms_per_layer + 2 * (run.spec.qk_norm != "none")
    modules = len(matrices(run.spec, kind)) + norms if run.parallelism.zero == 3 else 1
    parts = max(modules, -(-num_bytes // int(run.bucket_mib * MIB)))
    return [ParamTraffic(num_bytes=num_bytes // parts)] * parts


def _optimizer_s(run: StudyRun, machine: Machine) -> float:
    """Return AdamW's time: it reads 4 values per parameter, and writes all but the gradient."""
    recipe = RECIPES[run.dtype]
    touched = 2 * recipe.weight_bytes + recipe.grad_bytes + 4 * recipe.moment_bytes
    params = max(params_on_rank(run.spec, run.parallelism, stage) for stage in (0, run.pp - 1))
    shares = run.parallelism.zero_ranks if run.parallelism.zero else 1
    rate = machine.host_bytes_per_s if run.offload else machine.bytes_per_s(run.ranks)
    return touched * params / shares / rate


def _offload_s(run: StudyRun, machine: Machine) -> float:
    """Return the time to copy gradients to the host, and parameters back."""
    if not run.offload:
        return 0.0
    flat_params = [ParamTraffic(num_bytes=size) for size in _gradient_bytes(run)]
    there, back = offload_bytes(
        run.parallelism.zero, flat_params, run.parallelism.dp, run.num_micro_batches
    )
    return (there + back) / machine.host_link_bytes_per_s


def _held(run: StudyRun, machine: Machine) -> dict[str, int]:
    """Return the bytes by kind on the fullest stage at its peak."""
    ledgers = [_ledger(run, machine, stage) for stage in {0, run.pp - 1}]
    fullest = max(ledgers, key=Ledger.peak_bytes)
    at = fullest.totals().index(fullest.peak_bytes())
    held = {kind: fullest.bytes_by_kind[kind][at] for kind in MEMORY_KINDS}
    if run.parallelism.zero == 3:  # one unit is gathered while it is used
        largest = max(run.spec.padded_vocab * run.spec.hidden, layer_params(run.spec))
        held["buffers"] += largest * RECIPES[run.dtype].weight_bytes
        held["params"] = (
            count_params(run.spec) * RECIPES[run.dtype].weight_bytes // run.parallelism.dp
        )
    return held


def _ledger(run: StudyRun, machine: Machine, stage: int) -> Ledger:
    return step_ledger(
        run.spec,
        run.micro_batch,
        run.seq,
        recipe=_recipe(run),
        parallelism=run.parallelism,
        stage=stage,
        num_micro_batches=min(run.num_micro_batches, run.pp + 1),
        num_steps=2,
        kernels=PAPER if machine.has_gpus else TORCH_CPU,
    )
