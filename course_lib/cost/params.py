"""Number of parameters of a model, whole and on one rank.

Matrices and vectors are counted from the sizes of a ModelSpec; the tests count instantiated models.
Lessons import it as `course_lib.memory.count_params`. Notebook 01_memory.
"""

from course_lib.core.parallelism import Parallelism
from course_lib.core.specs import ModelSpec

ONE = Parallelism()


def count_params(spec: ModelSpec) -> int:
    """Return the number of parameters of the whole model; a tied embedding counts once."""
    return sum(param_parts(spec).values())


def param_parts(spec: ModelSpec) -> dict[str, int]:
    """Return the number of parameters by part of the model, all layers together."""
    h, kv, f, bias = spec.hidden, spec.kv_hidden, spec.ffn_hidden, int(spec.bias)
    wide = 2 if spec.gated else 1  # matrices that go up to ffn_hidden
    attention = 2 * h * (h + bias) + 2 * kv * (h + bias)  # q and out, k and v
    mlp = wide * f * (h + bias) + h * (f + bias)
    return {
        "embedding": spec.vocab * h,
        "positions": spec.max_seq * h if spec.positions == "learned" else 0,
        "attention": spec.num_layers * attention,
        "mlp": spec.num_layers * mlp,
        "norms": (2 * spec.num_layers + 1) * norm_params(spec),
        "head": 0 if spec.tied else spec.vocab * h,
    }


def norm_params(spec: ModelSpec) -> int:
    """Return the number of parameters of one norm."""
    return spec.hidden * (2 if spec.norm == "layer" and spec.bias else 1)


def count_tensors(spec: ModelSpec) -> int:
    """Return the number of parameter tensors: Adam keeps a step counter for each."""
    norm = 2 if spec.norm == "layer" and spec.bias else 1
    linears = 7 if spec.gated else 6  # q, k, v, out, and the MLP's
    layer = linears * (2 if spec.bias else 1) + 2 * norm
    ends = 1 + (spec.positions == "learned") + norm + (not spec.tied)
    return spec.num_layers * layer + ends


def params_on_rank(spec: ModelSpec, parallelism: Parallelism = ONE, stage: int = 0) -> int:
    """Return the parameters that a rank computes with: its layers, its shard of each matrix.

    ZeRO is not counted. Matrices are split over tp, norms and the biases of `out` are not. The
    embedding is on the first stage and the head on the last; a tied one is on both.

    Raises: MeshError when the model cannot be split that way
    """
    parallelism.check(spec)
    layers = layers_on_stage(spec, parallelism, stage) * layer_params(spec, parallelism)
    table = -(-spec.vocab * spec.hidden // parallelism.tp)  # split by rows, rounded up
    first, last = stage == 0, stage == parallelism.pp - 1
    positions = param_parts(spec)["positions"] if first else 0
    tables = first + (last and (not spec.tied or parallelism.pp > 1))
    return layers + tables * table + positions + (norm_params(spec) if last else 0)


def layer_params(spec: ModelSpec, parallelism: Parallelism = ONE) -> int:
    """Return the number of parameters of one layer on one rank."""
    parts = param_parts(spec)
    whole = 2 * spec.hidden * spec.bias  # the biases of attention's and the MLP's `out`
    split = (parts["attention"] + parts["mlp"]) // spec.num_layers - whole
    return split // parallelism.tp + whole + 2 * norm_params(spec)


def layers_on_stage(spec: ModelSpec, parallelism: Parallelism, stage: int = 0) -> int:
    """Return the layers of one pipeline stage: split evenly, the first stages get one more."""
    fewest, rest = divmod(spec.num_layers, parallelism.pp)
    return fewest + (stage < rest)
