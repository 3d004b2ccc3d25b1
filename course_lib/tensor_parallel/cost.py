"""Communication of tensor parallelism: every collective of a step, in program order.

A parallel region costs one all_reduce of [batch, seq, hidden] in forward and one in backward, or an
all_gather and a reduce_scatter instead of each; with the ring the bytes sent are the same. In this
simple version the communication is fully exposed, because the next matrix multiplication needs its
result. Notebook 07_tensor_parallel.
"""

from course_lib.core.errors import ShapeError
from course_lib.core.specs import ModelSpec
from course_lib.cost.params import norm_params, param_parts
from course_lib.cost.traffic import CollectiveCall


def tensor_traffic(
    spec: ModelSpec,
    batch: int,
    seq: int,
    number_bytes: int = 2,
    *,
    sequence_parallel: bool = False,
) -> list[CollectiveCall]:
    """Return the collectives of one step in the order in which each rank calls them.

    `num_bytes` is the size of the whole tensor, as in `Event.num_bytes`, whatever the number of
    ranks. All parameters are trained, and the logits stay split. The phase is forward, backward or
    finish (`finish_gradients`).

    Raises:  ShapeError for an empty batch or sequence
    Source:  Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022, section 4
    """
    if min(batch, seq, number_bytes) < 1:
        raise ShapeError(
            "tensor_traffic: need batch, seq and number_bytes above 0; got "
            f"{batch, seq, number_bytes}."
        )
    residual_bytes = batch * seq * spec.hidden * number_bytes
    enter = "all_gather" if sequence_parallel else ""
    leave = "reduce_scatter" if sequence_parallel else "all_reduce"
    adjoints = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "": "all_reduce"}
    parts = [part for n in range(spec.num_layers) for part in (f"attention {n}", f"mlp {n}")]
    boundaries = [("embedding", leave)]
    boundaries += [(part, kind) for part in parts for kind in (enter, leave)]
    boundaries += [("head", enter)]
    forward = [_call("forward", part, kind, residual_bytes) for part, kind in boundaries if kind]
    loss = [_call("forward", "loss", "all_reduce", n * _loss_bytes(batch * seq, number_bytes))
            for n in (1, 2)]  # fmt: skip
    reverse = [(part, adjoints.get(kind, "")) for part, kind in reversed(boundaries)]
    backward = [_call("backward", part, kind, residual_bytes) for part, kind in reverse if kind]
    finish = [_call("finish", "norms", "all_reduce", replicated_params(spec) * number_bytes)]
    return [*forward, *loss, *backward, *finish[: int(sequence_parallel)]]


def replicated_params(spec: ModelSpec) -> int:
    """Return the number of parameters that each rank holds whole.

    These are norms, learned positions, and the biases of row-parallel layers.
    """
    out_biases = 2 * spec.num_layers * spec.hidden * spec.bias
    norms = (2 * spec.num_layers + 1) * norm_params(spec)
    return norms + param_parts(spec)["positions"] + out_biases


def _loss_bytes(tokens: int, number_bytes: int) -> int:
    """Return the bytes of one number per token, in fp32 or wider."""
    return tokens * max(4, number_bytes)


def gathered_bytes(spec: ModelSpec, batch: int, seq: int, tp: int, number_bytes: int = 2) -> int:
    """Return the extra bytes a rank saves for backward because it gathers each input only once.

    This is for sequence parallelism. `memory/layer_bytes.py` counts as the paper does: a rank saves
    its own tokens of each matrix's input, and backward gathers them again, with one more all_gather
    per region. The layers here save the gathered input instead.

    Source:  Korthikanti et al. 2022, section 4
    """
    input_bytes = batch * seq * spec.hidden * number_bytes
    return (2 * spec.num_layers + 1) * (input_bytes - input_bytes // tp)


def _call(phase: str, part: str, kind: str, num_bytes: int) -> CollectiveCall:
    return CollectiveCall(phase=phase, part=part, kind=kind, num_bytes=num_bytes)
