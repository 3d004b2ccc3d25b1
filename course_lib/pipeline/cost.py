"""Cost of a pipeline in formulas: bubble and activations in flight; p stages, m micro-batches.

The bubble is the time in which a rank is idle. The overhead is bubble / computing time, the
fraction is bubble / step time; v is the number of model chunks per rank. The formulas assume that
all stages take equally long; `simulation.py` covers the other cases. Notebook 08_pipeline.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from course_lib.core.links import Link, TwoLevelLink
from course_lib.core.presets import MODELS
from course_lib.core.specs import ModelSpec
from course_lib.cost.flops import forward_flop, layers_flop
from course_lib.cost.published import rows
from course_lib.pipeline.actions import Schedule
from course_lib.pipeline.balance import balance_stages, stage_times
from course_lib.pipeline.schedules import one_f_one_b, zero_bubble_h1
from course_lib.pipeline.simulation import SimulatedStep, simulate
from course_lib.pipeline.times import INSTANT, PipelineTimes


def bubble_overhead(num_stages: int, num_micro_batches: float, num_model_chunks: int = 1) -> float:
    """Return (p - 1) / (v m): idle time / computing time, for GPipe, 1F1B and interleaved 1F1B.

    For v > 1 it is exact if each round of the schedule has p micro-batches.

    Source: Narayanan et al. 2021, sections 2.2.1 and 2.2.2
    """
    return (num_stages - 1) / (num_model_chunks * num_micro_batches)


def bubble_fraction(num_stages: int, num_micro_batches: int, num_model_chunks: int = 1) -> float:
    """Return (p - 1) / (v m + p - 1): the same bubble divided by the step time."""
    return (num_stages - 1) / (num_model_chunks * num_micro_batches + num_stages - 1)


def one_f_one_b_bubble_s(
    num_stages: int, forward_s: float, backward_input_s: float, backward_weight_s: float
) -> float:
    """Return (p - 1)(F + I + W): seconds that each rank is idle in a step of 1F1B, or of GPipe.

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), table 2
    """
    return (num_stages - 1) * (forward_s + backward_input_s + backward_weight_s)


def zero_bubble_h1_bubble_s(
    num_stages: int,
    num_micro_batches: int,
    forward_s: float,
    backward_input_s: float,
    backward_weight_s: float,
) -> float:
    """Return (p - 1)(F + I) - (min(p, m) - 1) W: seconds that each rank is idle with ZB-H1.

    It holds if W is at most F and at most I. For m >= p it is (p - 1)(F + I - W), a third of the
    bubble of 1F1B when the three are equal.

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), table 2; m <= p: appendix H
    """
    num_filled = min(num_stages, num_micro_batches) - 1
    unfilled_s = (num_stages - 1) * (forward_s + backward_input_s)
    return unfilled_s - num_filled * backward_weight_s


# --- micro-batches in flight: those whose activations a rank holds


def one_f_one_b_in_flight(num_stages: int, num_micro_batches: int, rank: int) -> int:
    """Return min(p - rank, m): a rank runs ahead only as far as the stages after it need.

    Source: Narayanan et al. 2021, section 2.2.1 (at most p)
    """
    return min(num_stages - rank, num_micro_batches)


# --- where the time of a step goes


@dataclass(frozen=True, kw_only=True)
class BatchCost:
    """Cost of a whole batch on one stage, before it is divided into micro-batches.

    forward_s, backward_s   seconds of one stage for the batch
    message_bytes           bytes that the stage sends forward for the batch
    start_s                 fixed seconds of each forward and each backward, whatever its size
    """

    forward_s: float
    backward_s: float
    message_bytes: float = 0.0
    start_s: float = 0.0

    def times(self, num_micro_batches: int, link: Link | TwoLevelLink = INSTANT) -> PipelineTimes:
        """Return the times of one micro-batch out of `num_micro_batches`."""
        half_s = (self.backward_s / num_micro_batches + self.start_s) / 2
        return PipelineTimes(
            forward_s=self.forward_s / num_micro_batches + self.start_s,
            backward_input_s=half_s,
            backward_weight_s=half_s,
            link=link,
            message_bytes=self.message_bytes / num_micro_batches,
        )


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Decomposition of a step's seconds for one number of micro-batches; the sum is `step_s`.

    compute_s   the batch itself, the same for any number of micro-batches
    start_s     fixed costs of all forwards and backwards
    bubble_s    idle time if messages took no time
    wire_s      exposed communication: what the messages add to that
    played      the simulated step, messages included
    """

    num_micro_batches: int
    compute_s: float
    start_s: float
    bubble_s: float
    wire_s: float
    played: SimulatedStep

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.played.step_s


def step_parts(
    num_stages: int,
    num_micro_batches: int,
    batch: BatchCost,
    link: Link | TwoLevelLink,
    schedule: Callable[[int, int], Schedule] = one_f_one_b,
) -> StepParts:
    """Simulate the step over the link and over an instant one; return the parts of its time."""
    actions = schedule(num_stages, num_micro_batches)
    played = simulate(actions, batch.times(num_micro_batches, link))
    ideal = simulate(actions, batch.times(num_micro_batches))
    compute_s, start_s = batch.forward_s + batch.backward_s, 2 * num_micro_batches * batch.start_s
    return StepParts(
        num_micro_batches=num_micro_batches,
        compute_s=compute_s,
        start_s=start_s,
        bubble_s=ideal.step_s - compute_s - start_s,
        wire_s=played.step_s - ideal.step_s,
        played=played,
    )


class Published(NamedTuple):
    """Published numbers of 8 stages: measured milliseconds of F, I, W and a message, and the
    bubble rates that the paper calculates from them."""

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
        """Measured times in seconds, as input of `simulate`."""
        return PipelineTimes(
            forward_s=self.forward_ms / 1e3,
            backward_input_s=self.backward_input_ms / 1e3,
            backward_weight_s=self.backward_weight_ms / 1e3,
            link=Link(latency_s=self.message_ms / 1e3, bytes_per_s=float("inf")),
        )


# Qi et al. 2024 (Zero bubble pipeline parallelism): times of table 6, rates of table 5
PUBLISHED = (
    Published("1.5B", 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    Published("1.5B", 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
    Published("1.5B", 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    Published("6.2B", 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323),
    Published("6.2B", 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045),
    Published("6.2B", 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554),
)


def parts_table(
    num_stages: int, numbers: Sequence[int], batch: BatchCost, link: Link | TwoLevelLink
) -> str:
    """Return the parts of a 1F1B step as text, in milliseconds, a line per micro-batch count."""
    lines = [" m   compute    bubble   exposed messages   (ms, 1F1B, simulated)"]
    for number in numbers:
        parts = step_parts(num_stages, number, batch, link)
        shown = (parts.compute_s, parts.bubble_s, parts.wire_s)
        lines.append(f"{number:2}" + "".join(f"{1e3 * seconds:10.1f}" for seconds in shown))
    return "\n".join(lines)


def bubble_rate_table() -> str:
    """Return the bubble rates of `PUBLISHED` as text, each beside the simulated one."""
    lines = [
        "model   m   1F1B: paper, simulated   ZB-H1: paper, simulated   (idle part of the time)"
    ]
    for row in PUBLISHED:
        rates = [
            simulate(make(8, row.num_micro_batches), row.times).bubble_rate
            for make in (one_f_one_b, zero_bubble_h1)
        ]
        pairs = zip((row.one_f_one_b, row.zero_bubble_h1), rates, strict=True)
        words = " ".join(f"{paper:13.4f} {ours:10.4f}" for paper, ours in pairs)
        lines.append(f"{row.model:5} {row.num_micro_batches:3} {words}")
    return "\n".join(lines)


# --- beside real GPUs

ZERO_BUBBLE_RUN = (
    "Qi et al. 2024 (Zero bubble pipeline parallelism), 1.5B model, 8 A100, tables 4 to 6"
)
H100_RUN = "Ultra-Scale Playbook (Tazi et al. 2025), 1B model, 8 H100, benchmark of all layouts"
# tokens/s per GPU by number of stages: micro-batches of one sequence of 4096 tokens, 256 sequences
# a batch, dp = 8 / p, no ZeRO
H100_TOKENS_PER_S = {1: 39273, 2: 37995, 4: 36910, 8: 27437}


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Samples/s per GPU on 8 stages, by schedule, for each number of micro-batches."""

    num_micro_batches: list[int]
    simulated: dict[str, list[float]]
    published: dict[str, list[float]]


def zero_bubble_throughput(model: str = "1.5B") -> Throughput:
    """Simulate 1F1B and ZB-H1 with the published F, I, W; return them beside published steps.

    ZB-1p is found by the paper's automatic search; both it and ZB-H1 keep at most as many
    micro-batches in flight as 1F1B's first rank.

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), tables 4 to 6
    """
    steps = [
        row
        for row in rows("zero_bubble")
        if row["model"] == model and row["T_F_ms"] and row["samples_per_gpu_per_s"]
    ]
    found: dict[str, list[float]] = {"1F1B": [], "1F1B-I": [], "ZB-1p": []}
    for row in steps:
        if row["schedule"] in found:
            found[row["schedule"]].append(float(row["samples_per_gpu_per_s"]))
    size = int(steps[0]["micro_batch"])
    cases = [case for case in PUBLISHED if case.model == model]

    def samples_per_s(make: Callable[[int, int], Schedule], case: Published) -> float:
        step_s = simulate(make(8, case.num_micro_batches), case.times).step_s
        return size * case.num_micro_batches / step_s / 8

    return Throughput(
        num_micro_batches=[case.num_micro_batches for case in cases],
        simulated={
            "1F1B": [samples_per_s(one_f_one_b, case) for case in cases],
            "ZB-H1": [samples_per_s(zero_bubble_h1, case) for case in cases],
        },
        published=found,
    )


@dataclass(frozen=True, kw_only=True)
class H100Stages:
    """Tokens/s per GPU of a 1B model on 8 H100, for each number of stages.

    bubble_only   what the bubble leaves of the speed with one stage
    formula       what the bubble and the slowest stage leave of it
    """

    stages: list[int]
    published: list[float]
    bubble_only: list[float]
    formula: list[float]
    head_layers: float


def h100_stages() -> H100Stages:
    """Compare the published tokens/s with 1 / (1 + bubble) and the best balance of the layers.

    Nothing is fitted but the speed with one stage. Layers count by their forward FLOP.
    """
    spec, seq = replace(MODELS["llama-1b"], num_kv_heads=32, vocab=131072), 4096
    layers = _layer_flop(spec, seq)
    num_stages = list(H100_TOKENS_PER_S)
    bubble_only = [
        H100_TOKENS_PER_S[1] * (1 - bubble_fraction(p, 256 * p // 8)) for p in num_stages
    ]
    slowest = [max(stage_times(layers, balance_stages(layers, p))) for p in num_stages]
    balance = [sum(layers) / p / stage for p, stage in zip(num_stages, slowest, strict=True)]
    return H100Stages(
        stages=num_stages,
        published=[float(tokens) for tokens in H100_TOKENS_PER_S.values()],
        bubble_only=bubble_only,
        formula=[tokens * part for tokens, part in zip(bubble_only, balance, strict=True)],
        head_layers=layers[-1] / layers[1],
    )


def _layer_flop(spec: ModelSpec, seq: int) -> list[int]:
    """Return the forward FLOP of embedding, each block, and output layer."""
    return [0, *layers_flop(spec, 1, seq), forward_flop(spec, 1, seq)["logits"]]
