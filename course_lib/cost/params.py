"""Number of parameters of a model, whole and on one rank.

All counts are sums over the matrices and vectors that `course_lib.core.layers` lists; the tests
count instantiated models. Lessons import it as `course_lib.memory.count_params`. Notebook
01_memory.
"""

from collections import Counter

from course_lib.core.layers import (
    LayerKind,
    WeightMatrix,
    WeightVector,
    layer_kinds,
    layers,
    matrices,
    norm_vectors,
    vectors,
    weights,
)
from course_lib.core.parallelism import Parallelism
from course_lib.core.specs import ModelSpec

ONE = Parallelism()


def count_params(spec: ModelSpec) -> int:
    """Return the number of parameters of the whole model; a tied embedding counts once."""
    return sum(param_parts(spec).values())


def active_params(spec: ModelSpec, *, embedding: bool = True) -> int:
    """Return the parameters that one token uses: all but the experts to which it is not sent.

    embedding   count its table too, of which a token reads one row; published counts differ in it
    """
    idle = sum(
        count * (one.copies - one.active) * (one.inputs + one.bias) * one.outputs
        for layer, count in layer_kinds(spec).items()
        for one in matrices(spec, layer)
    )
    read = spec.padded_vocab * spec.hidden if not (embedding or spec.tied) else 0
    return count_params(spec) - idle - read


def param_parts(spec: ModelSpec) -> dict[str, int]:
    """Return the number of parameters by part of the model, all layers together.

    A model with experts has the parts "experts" and "router", too.
    """
    table, routed = spec.padded_vocab * spec.hidden, spec.experts is not None
    parts = {
        "embedding": table,
        "positions": spec.max_seq * spec.hidden if spec.positions == "learned" else 0,
        "attention": 0,
        "mlp": 0,
        **({"experts": 0, "router": 0} if routed else {}),
        "norms": norm_params(spec),
        "head": 0 if spec.tied else table,
    }
    for layer, count in layer_kinds(spec).items():
        for one in weights(spec, layer):
            parts[one.part] += count * weights_on_rank(one)
    return parts


def norm_params(spec: ModelSpec) -> int:
    """Return the number of parameters of one norm."""
    return sum(one.size for one in norm_vectors(spec))


def count_tensors(spec: ModelSpec) -> int:
    """Return the number of parameter tensors: Adam keeps a step counter for each."""
    found = 1 + (spec.positions == "learned") + len(norm_vectors(spec)) + (not spec.tied)
    for layer, count in layer_kinds(spec).items():
        each = sum(one.copies * (1 + one.bias) for one in matrices(spec, layer))
        found += count * (each + len(vectors(spec)))
    return found


def weights_on_rank(one: WeightMatrix | WeightVector, parallelism: Parallelism = ONE) -> int:
    """Return the numbers of a matrix, with its bias, or of a vector, on one rank.

    Experts are divided over ep, and each over the tensor parallelism of its own. Heads of keys and
    values that are fewer than tp are on several ranks.
    """
    if isinstance(one, WeightVector):
        return one.size // min(parallelism.tp, one.pieces)
    routed = one.part == "experts"
    ranks = parallelism.expert_tensor if routed else parallelism.tp
    ways = min(ranks, one.pieces) if one.split else 1
    copies = one.copies // (parallelism.ep if routed else 1)
    bias = one.bias * one.outputs // (ways if one.split == "outputs" else 1)
    return copies * (one.inputs * one.outputs // ways + bias)


def params_on_rank(spec: ModelSpec, parallelism: Parallelism = ONE, stage: int = 0) -> int:
    """Return the parameters that a rank computes with: its layers, its shard of each matrix.

    ZeRO is not counted. Matrices are split over tp, experts over ep, norms, routers and the biases
    of `out` are not split. The embedding is on the first stage and the head on the last; a tied one
    is on both.

    Raises: MeshError when the model cannot be split that way
    """
    parallelism.check(spec)
    held = sum(layers_params(spec, parallelism, stage).values())
    table = -(-spec.padded_vocab * spec.hidden // parallelism.tp)  # split by rows, rounded up
    first, last = stage == 0, stage == parallelism.pp - 1
    positions = param_parts(spec)["positions"] if first else 0
    tables = first + (last and (not spec.tied or parallelism.pp > 1))
    return held + tables * table + positions + (norm_params(spec) if last else 0)


def expert_params_on_rank(spec: ModelSpec, parallelism: Parallelism = ONE, stage: int = 0) -> int:
    """Return those of `params_on_rank` that are experts: other ranks hold the same ones."""
    return layers_params(spec, parallelism, stage)["experts"]


def layers_params(
    spec: ModelSpec, parallelism: Parallelism = ONE, stage: int = 0
) -> dict[str, int]:
    """Return the parameters of a stage's layers on one rank, by what divides them.

    "split" is divided by tp, "whole" by nothing (norms, routers, biases of `out`), "experts" by ep
    and the tensor parallelism of their own.

    Source: Megatron-Core's theoretical_memory_usage.py has the same three kinds
    """
    held = {"split": 0, "whole": 0, "experts": 0}
    for layer, number in Counter(stage_kinds(spec, parallelism, stage)).items():
        for one in weights(spec, layer):
            params = number * weights_on_rank(one, parallelism)
            if one.part == "experts":
                held["experts"] += params
            elif isinstance(one, WeightMatrix) and one.split:
                bias = number * one.bias * one.outputs * (one.split == "inputs")
                held["whole"] += bias
                held["split"] += params - bias
            else:
                is_split = isinstance(one, WeightVector) and one.pieces > 1
                held["split" if is_split else "whole"] += params
    return held


def stage_kinds(spec: ModelSpec, parallelism: Parallelism, stage: int = 0) -> tuple[LayerKind, ...]:
    """Return the kinds of the layers of one pipeline stage, first to last."""
    first = sum(layers_on_stage(spec, parallelism, before) for before in range(stage))
    return layers(spec)[first : first + layers_on_stage(spec, parallelism, stage)]


def layer_params(spec: ModelSpec, parallelism: Parallelism = ONE) -> int:
    """Return the number of parameters of the largest layer on one rank."""
    return max(kind_params(spec, layer, parallelism)[0] for layer in layer_kinds(spec))


def kind_params(
    spec: ModelSpec, layer: LayerKind, parallelism: Parallelism = ONE
) -> tuple[int, int]:
    """Return the parameters of a layer of that kind on one rank, and those that are experts."""
    every = [(one.part, weights_on_rank(one, parallelism)) for one in weights(spec, layer)]
    experts = sum(params for part, params in every if part == "experts")
    return sum(params for _, params in every), experts


def layers_on_stage(spec: ModelSpec, parallelism: Parallelism, stage: int = 0) -> int:
    """Return the layers of one pipeline stage: split evenly, the first stages get one more."""
    fewest, rest = divmod(spec.num_layers, parallelism.pp)
    return fewest + (stage < rest)
