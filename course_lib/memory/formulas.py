"""Formulas for the memory of training: parameters, gradients, optimizer state, activations.

Everything is arithmetic on a ModelSpec, so a model of any size takes microseconds. The tests
compare with instantiated models, with what autograd saves, and with published tables.
Notebook 01_memory.
"""

from collections.abc import Iterable
from typing import NamedTuple

from course_lib.core.errors import CourseError
from course_lib.core.layers import LayerKind, layer_kinds, layers, weights
from course_lib.core.parallelism import Parallelism
from course_lib.core.recipes import BF16, Recipe, find_recipe
from course_lib.core.records import Ledger
from course_lib.core.specs import ModelSpec
from course_lib.cost.flops import forward_flop, recompute_flop
from course_lib.cost.params import (
    ONE,
    count_tensors,
    expert_params_on_rank,
    norm_params,
    params_on_rank,
    stage_kinds,
    weights_on_rank,
)
from course_lib.memory.layer_bytes import PAPER, PARTS, Kept, Kernels, Pass, total


def model_states(
    num_params: int,
    recipe: Recipe | str = BF16,
    *,
    parallelism: Parallelism = ONE,
    expert_params: int = 0,
) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state on one rank.

    num_params      parameters that the rank computes with (count_params, or params_on_rank)
    expert_params   those of them that are experts (expert_params_on_rank): ZeRO shards them over
                    the ranks that hold the same experts, which are fewer

    Raises:  CourseError for a negative number of parameters
    Source:  Rajbhandari et al. 2020 (ZeRO), section 5, figure 1
    """
    if isinstance(num_params, bool) or not num_params >= 0:
        raise CourseError(f"model_states: need num_params of 0 or more; got {num_params!r}.")
    recipe = find_recipe(recipe)
    whole, routed = int(num_params), int(expert_params)
    if not 0 <= routed <= whole:
        raise CourseError(
            f"model_states: need expert_params from 0 to num_params; got {expert_params!r}."
        )
    shard = -(-(whole - routed) // parallelism.zero_ranks)
    shard += -(-routed // parallelism.expert_zero_ranks)
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
    num_micro_batches: int | None = None,
    num_model_chunks: int = 1,
    kernels: Kernels = PAPER,
) -> dict[str, int]:
    """Return the bytes saved for backward on one rank at the end of forward, by part of the model.

    batch             sequences per micro-batch
    recompute         "none", "selective" (attention scores are recomputed) or "full" (only the
                      inputs of the layers are saved)
    stage             pipeline stage: stage s has pp - s micro-batches in flight
    num_micro_batches of a step: fewer than pp - s are all in flight; None: more
    num_model_chunks  more than 1: interleaved 1F1B, 1 + (pp - 1) / (pp * chunks) times as much
    kernels           PAPER: as the papers count; TORCH_CPU: as autograd on a CPU, to the byte

    Raises:  CourseError for another `recompute`, and for model chunks of layers that differ, as a
             stage's are then not those next to each other; ShapeError for sizes that do not divide
    Source:  Korthikanti et al. 2022, equations 1 to 6: sbh(34 + 5as/h) bytes per layer of a GPT
    """
    _check_chunks(spec, num_model_chunks)
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
    in_flight, chunks = parallelism.pp - stage, num_model_chunks
    in_flight = min(in_flight, num_micro_batches or in_flight)
    kinds = stage_kinds(spec, parallelism, stage)
    layers = [row for kind in kinds for row in one.kept_layer(recompute, kind)]
    held = in_flight * chunks + (parallelism.pp - 1) * (chunks > 1)
    saved = {part: size * held // chunks for part, size in by_part(layers).items()}
    ends = one.embedding() * in_flight if stage == 0 else []
    ends += one.head() if stage == parallelism.pp - 1 else []
    both = {part: saved[part] + size for part, size in by_part(ends).items()}
    return both if spec.experts else {part: both[part] for part in both if part != "experts"}


def _check_chunks(spec: ModelSpec, num_model_chunks: int) -> None:
    if num_model_chunks > 1 and len(layer_kinds(spec)) > 1:
        raise CourseError(
            f"activations: need num_model_chunks=1 for a model whose layers differ; got "
            f"{num_model_chunks} and {spec.name}. Try course_lib.planner, which deals them out."
        )


def kv_cache(spec: ModelSpec, seq: int, *, number_bytes: int = 2) -> int:
    """Return the bytes of keys and values of one sequence, which generation keeps.

    A layer with a window keeps those of its window. Latent attention keeps the small vector and
    the part of the key with positions, for all heads together.

    Source:  DeepSeek-AI 2024 (DeepSeek-V2), section 2.1 and table 1
    """
    if spec.latent is None:
        each = spec.kv_heads * (spec.head_size + spec.value_size)
    else:
        each = spec.latent.kv_rank + spec.latent.rope_dim
    tokens = sum(min(seq, kind.window or seq) for kind in layers(spec))
    return tokens * each * number_bytes


def layer_coefficients(
    spec: ModelSpec, *, number_bytes: int = 2, flash: bool = True, dropout: bool = False
) -> tuple[float, float]:
    """Return c and d of sbh(c + d * as/h), the bytes that one layer saves for backward.

    In bf16, written out, with dropout, a GPT with an MLP of 4h and keys for every head has 34 and
    5. SwiGLU and grouped-query attention have their own count: with flash attention, without
    dropout, c = 12 + 4 * kv_hidden/h + 8 * ffn_hidden/h, which is 41 for llama-8b.

    Source:  Korthikanti et al. 2022, section 4.1, equation 1, for the GPT
    Raises:  CourseError for a model with experts: its layers save more than sbh(c + d * as/h)
    """
    if spec.experts is not None:
        raise CourseError(
            f"layer_coefficients: need a dense model; {spec.name} has experts. Try activations."
        )
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


class _LayerSteps(NamedTuple):
    """Bytes of a layer: kept until its backward, recomputed then, freed before; parameters."""

    kept: int
    recomputed: int
    freed_before: int
    experts: int
    others: int


def _layer_steps(one: Pass, recompute: str, kind: LayerKind) -> _LayerSteps:
    rows, kept = one.layer(kind), total(one.kept_layer(recompute, kind))
    # backward passes the MLP, and frees what it saved, before it recomputes the scores
    mlp = total([row for row in rows if row.part in ("mlp", "experts")])
    held = {True: 0, False: 0}
    for weight in weights(one.spec, kind):
        held[weight.part == "experts"] += weights_on_rank(weight, one.parallelism)
    recomputed = total(rows) - kept
    freed = mlp * (recompute == "selective" and recomputed > 0)  # a fused kernel saves no scores
    return _LayerSteps(kept, recomputed, freed, experts=held[True], others=held[False])


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
        kinds = stage_kinds(spec, parallelism, stage)
        each = {kind: _layer_steps(one, recompute, kind) for kind in set(kinds)}
        self.layers = [each[kind] for kind in kinds]
        self.embedding = total(one.embedding()) if self.first else 0
        self.head = total(one.head()) if self.last else 0
        self.experts = expert_params_on_rank(spec, parallelism, stage)
        self.others = params_on_rank(spec, parallelism, stage) - self.experts
        # a tied gradient is finished in the embedding: autograd holds it from the head on
        self.head_params = norm_params(spec) if self.last else 0
        if self.last and (not spec.tied or parallelism.pp > 1):
            self.head_params += -(-spec.padded_vocab * spec.hidden // parallelism.tp)
        forward = forward_flop(spec, one.batch, one.seq)
        share = spec.num_layers * parallelism.tp * parallelism.cp * flop_per_s
        self.head_s = forward.pop("logits") / (parallelism.tp * parallelism.cp * flop_per_s)
        self.layer_s = sum(forward.values()) / share
        self.recompute_s = recompute_flop({**forward, "logits": 0}, recompute) / share
        self.activations, self.grads = 0, (0, 0)
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
        self.grads = (0, 0)
        self._note()

    def _forward(self) -> None:
        self.activations += self.embedding
        for layer in self.layers:
            self._after(self.layer_s, layer.kept)
        if self.last:
            self._after(self.head_s, self.head)

    def _backward(self) -> None:
        others, experts = self.head_params if self.last else 0, 0
        if self.last:
            self._after(2 * self.head_s, -self.head, (others, 0))
        for layer in reversed(self.layers):
            if layer.recomputed:
                self.activations -= layer.freed_before
                self._after(self.recompute_s, layer.recomputed)
            others, experts = others + layer.others, experts + layer.experts
            freed = layer.kept + layer.recomputed - layer.freed_before
            self._after(2 * self.layer_s, -freed, (others, experts))
        self._after(0.0, -self.embedding, (self.others, self.experts))  # before the step

    def _after(self, seconds: float, more: int, grads: tuple[int, int] = (0, 0)) -> None:
        self.time_s += seconds
        self.activations += more
        self.grads = max(self.grads[0], grads[0]), max(self.grads[1], grads[1])
        self._note()

    def _note(self) -> None:
        recipe, zero, held = self.recipe, self.parallelism.zero, (self.others, self.experts)
        states = model_states(
            sum(held), recipe, parallelism=self.parallelism, expert_params=self.experts
        )
        grads = self._shard(self.grads) if zero >= 2 else sum(self.grads)
        owned = self._shard(held) if zero >= 1 else sum(held)
        accumulated = self._shard(held) if zero >= 2 else sum(held)
        self.ledger.add(
            self.time_s,
            params=states["params"],
            grads=grads * recipe.grad_bytes + accumulated * recipe.accumulator_bytes,
            optim_state=owned * (recipe.master_bytes + self.moments)
            + self.counters * (self.moments > 0),
            activations=self.activations,
        )

    def _shard(self, params: tuple[int, int]) -> int:
        """Return the part of one rank of these parameters: of all others, and of experts."""
        others, experts = params
        axes = self.parallelism
        return -(-others // axes.zero_ranks) - (-experts // axes.expert_zero_ranks)


def by_part(rows: Iterable[Kept]) -> dict[str, int]:
    """Sum the bytes of rows by part of the model."""
    sums = dict.fromkeys(PARTS, 0)
    for row in rows:
        sums[row.part] += row.num_bytes
    return sums
