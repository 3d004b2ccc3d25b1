"""What tensor parallelism sends in a step: every collective, in the order of the program.

A region of split matrices costs one all_reduce of [batch, seq, hidden] forward and one backward, or
an all_gather and a reduce_scatter instead of each: the ring sends the same bytes either way. And
nothing hides it behind computing, because the next matrix waits for it. Notebook
07_tensor_parallel.
"""

from course_lib.core.errors import ShapeError
from course_lib.core.specs import ModelSpec
from course_lib.cost.params import norm_params, param_parts
from course_lib.cost.traffic import CollectiveCall

PHASES = ("forward", "backward", "finish")


def tensor_traffic(
    spec: ModelSpec,
    batch: int,
    seq: int,
    number_bytes: int = 2,
    *,
    sequence_parallel: bool = False,
) -> list[CollectiveCall]:
    """The collectives of one step, as every rank of the group makes them: all of them, in order.

    `num_bytes` is the size of the whole tensor, as in `Event.num_bytes`; how many ranks there are
    does not change it. Everything is trained, and the logits stay split.

    Raises:  ShapeError for a batch or a sequence of no tokens
    Source:  Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022, section 4
    """
    if min(batch, seq, number_bytes) < 1:
        raise ShapeError(
            "tensor_traffic: need batch, seq and number_bytes above 0; got "
            f"{batch, seq, number_bytes}."
        )
    stream = batch * seq * spec.hidden * number_bytes
    enters = "all_gather" if sequence_parallel else ""
    leaves = "reduce_scatter" if sequence_parallel else "all_reduce"
    back = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "": "all_reduce"}
    parts = [part for n in range(spec.num_layers) for part in (f"attention {n}", f"mlp {n}")]
    boundaries = [("embedding", leaves)]
    boundaries += [(part, kind) for part in parts for kind in (enters, leaves)]
    boundaries += [("head", enters)]
    forward = [_call("forward", *boundary, stream) for boundary in boundaries if boundary[1]]
    loss = [_call("forward", "loss", "all_reduce", n * _loss_bytes(batch * seq, number_bytes))
            for n in (1, 2)]  # fmt: skip
    adjoint = [(part, back.get(kind, "")) for part, kind in reversed(boundaries)]
    backward = [_call("backward", *boundary, stream) for boundary in adjoint if boundary[1]]
    finish = [_call("finish", "norms", "all_reduce", replicated_params(spec) * number_bytes)]
    return [*forward, *loss, *backward, *finish[: int(sequence_parallel)]]


def layer_traffic(
    spec: ModelSpec,
    batch: int,
    seq: int,
    number_bytes: int = 2,
    *,
    sequence_parallel: bool = False,
) -> list[CollectiveCall]:
    """Those of `tensor_traffic` that belong to one layer: its attention and its MLP."""
    calls = tensor_traffic(spec, batch, seq, number_bytes, sequence_parallel=sequence_parallel)
    return [call for call in calls if call.part in ("attention 0", "mlp 0")]


def replicated_params(spec: ModelSpec) -> int:
    """Parameters that every rank of the group holds: norms, positions, the biases after a sum."""
    out_biases = 2 * spec.num_layers * spec.hidden * spec.bias
    norms = (2 * spec.num_layers + 1) * norm_params(spec)
    return norms + param_parts(spec)["positions"] + out_biases


def _loss_bytes(tokens: int, number_bytes: int) -> int:
    """One number a token, in fp32 at least."""
    return tokens * max(4, number_bytes)


def gathered_bytes(spec: ModelSpec, batch: int, seq: int, tp: int, number_bytes: int = 2) -> int:
    """Sequence parallel: bytes a rank keeps because it gathers tokens once and not twice.

    `cost.layer_bytes` counts as the paper does: a rank keeps its own tokens of each matrix's input,
    and backward gathers them again, one all_gather more a region. Here the gathered input stays.

    Source:  Korthikanti et al. 2022, section 4
    """
    stream = batch * seq * spec.hidden * number_bytes
    return (2 * spec.num_layers + 1) * (stream - stream // tp)


def _call(phase: str, part: str, kind: str, num_bytes: int) -> CollectiveCall:
    return CollectiveCall(phase=phase, part=part, kind=kind, num_bytes=num_bytes)
