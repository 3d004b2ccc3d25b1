"""Formulas for the memory of training: parameters, gradients, optimizer state, activations.

Everything is arithmetic on a ModelSpec, so a model of any size takes microseconds. The tests
compare with instantiated models, with what autograd saves, and with published tables.
Notebook 01_memory.
"""

from collections.abc import Iterable

from course_lib.core.errors import CourseError
from course_lib.core.parallelism import Parallelism
from course_lib.core.recipes import BF16, Recipe, find_recipe
from course_lib.core.records import Ledger
from course_lib.core.specs import ModelSpec
from course_lib.cost.flops import forward_flop, recompute_flop
from course_lib.cost.params import (
    ONE,
    count_tensors,
    layer_params,
    layers_on_stage,
    norm_params,
    params_on_rank,
)
from course_lib.memory.layer_bytes import PAPER, PARTS, Kept, Kernels, Pass, total


def model_states(
    num_params: int, recipe: Recipe | str = BF16, *, parallelism: Parallelism = ONE
) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state on one rank.

    num_params   parameters that the rank computes with (count_params, or params_on_rank)

    Raises:  CourseError for a negative number of parameters
    Source:  Rajbhandari et al. 2020 (ZeRO), section 5, figure 1
    """
    if isinstance(num_params, bool) or not num_params >= 0:
        raise CourseError(f"model_states: need num_params of 0 or more; got {num_params!r}.")
    recipe = find_recipe(recipe)
    whole, shard = int(num_params), -(-int(num_params) // parallelism.zero_ranks)
    grads = shard if parallelism.zero >= 2 else whole
    return {
        "params": (shard if parallelism.zero >= 3 else whole) * recipe.weight_bytes,
        "grads": grads * (recipe.grad_bytes + recipe.accumulator_bytes),
        "optim_state": (shard if parallelism.zero >= 1 else whole) * recipe.optim_bytes,
    }


def activations(
    spec: ModelSpec,
    batch: int,
    seq: int,
    *,
    recompute: str = "none",
    flash: bool = True,
    dropout: bool = False,
    number_bytes: int = 2,
    parallelism: Parallelism = ONE,
    stage: int = 0,
    num_model_chunks: int = 1,
    kernels: Kernels = PAPER,
) -> dict[str, int]:
    """Return the bytes saved for backward on one rank at the end of forward, by part of the model.

    batch             sequences per micro-batch
    recompute         "none", "selective" (attention scores are recomputed) or "full" (only the
                      inputs of the layers are saved)
    stage             pipeline stage: stage s has pp - s micro-batches in flight
    num_model_chunks  more than 1: interleaved 1F1B, 1 + (pp - 1) / (pp * chunks) times as much
    kernels           PAPER: as the papers count; TORCH_CPU: as autograd on a CPU, to the byte

    Raises:  CourseError for another `recompute`; ShapeError for sizes that do not divide
    Source:  Korthikanti et al. 2022, equations 1 to 6: sbh(34 + 5as/h) bytes per layer of a GPT
    """
    one = Pass(
        spec=spec,
        batch=batch,
        seq=seq,
        number_bytes=number_bytes,
        flash=flash,
        dropout=dropout,
        kernels=kernels,
        parallelism=parallelism,
    )
    layers, in_flight = layers_on_stage(spec, parallelism, stage), parallelism.pp - stage
    chunks = num_model_chunks
    saved = {
        part: size * layers * (in_flight * chunks + (parallelism.pp - 1) * (chunks > 1)) // chunks
        for part, size in by_part(one.kept_layer(recompute)).items()
    }
    ends = one.embedding() * in_flight if stage == 0 else []
    ends += one.head() if stage == parallelism.pp - 1 else []
    return {part: saved[part] + size for part, size in by_part(ends).items()}


def layer_coefficients(
    spec: ModelSpec, *, number_bytes: int = 2, flash: bool = True, dropout: bool = False
) -> tuple[float, float]:
    """Return c and d of sbh(c + d * as/h), the bytes that one layer saves for backward.

    In bf16, written out, with dropout, a GPT with an MLP of 4h and keys for every head has 34 and
    5. SwiGLU and grouped-query attention have their own count: with flash attention, without
    dropout, c = 12 + 4 * kv_hidden/h + 8 * ffn_hidden/h, which is 41 for llama-8b.

    Source:  Korthikanti et al. 2022, section 4.1, equation 1, for the GPT
    """
    one = Pass(spec=spec, batch=1, seq=1, number_bytes=number_bytes, flash=flash, dropout=dropout)
    scores = total(one.scores())
    return (total(one.layer()) - scores) / spec.hidden, scores / spec.num_heads


def step_ledger(
    spec: ModelSpec,
    batch: int,
    seq: int,
    *,
    recipe: Recipe | str = BF16,
    recompute: str = "none",
    flash: bool = True,
    dropout: bool = False,
    parallelism: Parallelism = ONE,
    stage: int = 0,
    num_micro_batches: int = 1,
    num_steps: int = 4,
    kernels: Kernels = PAPER,
    flop_per_s: float = 400e12,
) -> Ledger:
    """Return the memory of one rank through its first steps, with an entry after each layer.

    Activations grow in forward and shrink in backward; gradients appear in backward and are freed
    after the step; Adam's moments appear at the end of the first step and stay. `peak_bytes()` of
    the ledger has to fit. With pp > 1 each stage runs 1F1B.

    flop_per_s   compute rate of the rank, which determines the times of the entries
    """
    one = Pass(
        spec=spec,
        batch=batch,
        seq=seq,
        number_bytes=(found := find_recipe(recipe)).activation_bytes,
        flash=flash,
        dropout=dropout,
        kernels=kernels,
        parallelism=parallelism,
    )
    steps = _Steps(one, found, recompute, stage, flop_per_s)
    for _ in range(num_steps):
        steps.run(num_micro_batches)
    return steps.ledger


class _Steps:
    """Simulation of one rank's steps, which writes its ledger; numbers are bytes per layer."""

    def __init__(
        self, one: Pass, recipe: Recipe, recompute: str, stage: int, flop_per_s: float
    ) -> None:
        spec, parallelism = one.spec, one.parallelism
        self.ledger, self.time_s = Ledger(), 0.0
        self.recipe, self.parallelism = recipe, parallelism
        self.first, self.last = stage == 0, stage == parallelism.pp - 1
        self.in_flight = parallelism.pp - stage
        self.layers = layers_on_stage(spec, parallelism, stage)
        self.layer = total(one.kept_layer(recompute))
        self.recomputed = total(one.layer()) - self.layer
        # backward passes the MLP, and frees what it saved, before it recomputes the scores
        self.freed_before = (
            total([row for row in one.layer() if row.part == "mlp"])
            if recompute == "selective"
            else 0
        )
        self.embedding = total(one.embedding()) if self.first else 0
        self.head = total(one.head()) if self.last else 0
        self.params = params_on_rank(spec, parallelism, stage)
        self.layer_params = layer_params(spec, parallelism)
        # a tied gradient is finished in the embedding: autograd holds it from the head on
        self.head_params = norm_params(spec) if self.last else 0
        if self.last and (not spec.tied or parallelism.pp > 1):
            self.head_params += -(-spec.vocab * spec.hidden // parallelism.tp)
        forward = forward_flop(spec, one.batch, one.seq)
        share = spec.num_layers * parallelism.tp * parallelism.cp * flop_per_s
        self.head_s = forward.pop("logits") / (parallelism.tp * parallelism.cp * flop_per_s)
        self.layer_s = sum(forward.values()) / share
        self.recompute_s = recompute_flop({**forward, "logits": 0}, recompute) / share
        self.activations = self.grad_params = 0
        self.moments = 0
        self.counters = 4 * count_tensors(spec) * one.kernels.statistics  # Adam's, one a tensor
        self._note()

    def run(self, num_micro_batches: int) -> None:
        """Simulate one step: 1F1B over the micro-batches, then the optimizer."""
        warmup = min(self.in_flight, num_micro_batches)
        for _ in range(warmup):
            self._forward()
        for _ in range(num_micro_batches - warmup):
            self._backward()
            self._forward()
        for _ in range(warmup):
            self._backward()
        self.moments = self.recipe.num_moments * self.recipe.moment_bytes
        self._note()
        self.grad_params = 0
        self._note()

    def _forward(self) -> None:
        self.activations += self.embedding
        for _ in range(self.layers):
            self._after(self.layer_s, self.layer)
        if self.last:
            self._after(self.head_s, self.head)

    def _backward(self) -> None:
        done = self.head_params if self.last else 0
        if self.last:
            self._after(2 * self.head_s, -self.head, done)
        for _ in range(self.layers):
            if self.recomputed:
                self.activations -= self.freed_before
                self._after(self.recompute_s, self.recomputed)
            done += self.layer_params
            freed = self.layer + self.recomputed - self.freed_before
            self._after(2 * self.layer_s, -freed, done)
        self._after(0.0, -self.embedding, self.params)  # before the optimizer's step

    def _after(self, seconds: float, more: int, grad_params: int = 0) -> None:
        self.time_s += seconds
        self.activations += more
        self.grad_params = max(self.grad_params, grad_params)
        self._note()

    def _note(self) -> None:
        recipe, shards, zero = self.recipe, self.parallelism.zero_ranks, self.parallelism.zero
        states = model_states(self.params, recipe, parallelism=self.parallelism)
        grads = -(-self.grad_params // shards) if zero >= 2 else self.grad_params
        owned = -(-self.params // shards) if zero >= 1 else self.params
        accumulated = -(-self.params // shards) if zero >= 2 else self.params
        self.ledger.add(
            self.time_s,
            params=states["params"],
            grads=grads * recipe.grad_bytes + accumulated * recipe.accumulator_bytes,
            optim_state=owned * (recipe.master_bytes + self.moments)
            + self.counters * (self.moments > 0),
            activations=self.activations,
        )


def by_part(rows: Iterable[Kept]) -> dict[str, int]:
    """Sum the bytes of rows by part of the model."""
    sums = dict.fromkeys(PARTS, 0)
    for row in rows:
        sums[row.part] += row.num_bytes
    return sums
