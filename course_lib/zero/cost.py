"""Predict the traffic of ZeRO's stages: every collective of a step, by flat parameter.

Plain data parallelism all-reduces the gradients, which on a ring is a reduce_scatter followed by an
all_gather. Stages 1 and 2 put the optimizer's step between the two, so with one micro-batch they
send as many bytes; stage 2 reduce-scatters once per micro-batch. Stage 3 gathers the parameters
twice, for forward and for backward: 1.5 times as many.
Notebooks 09_zero and 10_fsdp.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_lib.core.errors import CourseError
from course_lib.core.parallelism import ZERO_STAGES
from course_lib.cost.traffic import CollectiveCall

NORM_BYTES = 8  # the sum of squares that clipping adds up, in float64


@dataclass(frozen=True, kw_only=True)
class ParamTraffic:
    """A flat parameter: its bytes with padding, and how often it is gathered.

    forward, backward   gathers per micro-batch under stage 3: one for each module that uses it
    trained             False: frozen, so it has no gradient and no step
    """

    num_bytes: int
    forward: int = 1
    backward: int = 1
    trained: bool = True


def padded_bytes(numel: int, p: int, number_bytes: int) -> int:
    """Return the bytes of `numel` numbers, padded so that p ranks can share them evenly."""
    return -(-numel // p) * p * number_bytes


def zero_traffic(
    zero: int,
    flat_params: Sequence[ParamTraffic],
    num_micro_batches: int = 1,
    *,
    all_reduce: bool = False,
    clips: bool = False,
    num_flags: int = 0,
) -> list[CollectiveCall]:
    """Return the collectives of one step under ZeRO stage `zero`; 0 is plain data parallelism.

    `num_bytes` is the size of the whole tensor, as in `Event.num_bytes`. A model with buffers also
    broadcasts them before each forward. `course_lib.cost.traffic.sent_bytes` sums what a rank
    sends.

    all_reduce  stage 1 with DDP, which all-reduces first: 1.5 times plain data parallelism
    clips       add the all_reduce of one number for the norm of the gradient
    num_flags   with find_unused: number of parameters, of 1 byte each

    Raises:  CourseError for a stage that is not 0 to 3, or no micro-batch
    Source:  Rajbhandari et al. 2020 (ZeRO), section 7
    """
    if zero not in ZERO_STAGES or num_micro_batches < 1:
        raise CourseError(
            "zero_traffic: need zero as 0, 1, 2 or 3, and a micro-batch or more; got "
            f"{zero!r} and {num_micro_batches!r}."
        )
    trained = [one for one in flat_params if one.trained]
    calls = []
    for _ in range(num_micro_batches if zero == 3 else 0):
        calls += _gathers("forward", [(one, one.forward) for one in flat_params])
        calls += _gathers("backward", [(one, one.backward) for one in flat_params])
    reduce = "all_reduce" if zero == 0 or all_reduce else "reduce_scatter"
    phase = "backward" if zero >= 2 else "finish"
    for _ in range(num_micro_batches if zero >= 2 else 1):
        calls += [_call(phase, "grads", reduce, one.num_bytes) for one in trained]
    if num_flags:
        calls.append(_call("finish", "unused", "all_reduce", num_flags))
    if clips and zero:
        calls.append(_call("finish", "norm", "all_reduce", NORM_BYTES))
    if zero in (1, 2):
        calls += _gathers("finish", [(one, 1) for one in trained])
    return calls


def offload_bytes(
    zero: int, flat_params: Sequence[ParamTraffic], p: int, num_micro_batches: int = 1
) -> tuple[int, int]:
    """Return the bytes a rank copies to its host in a step (gradients), and back (parameters).

    The host holds what one rank owns. Under stage 3 this includes the parameters, so each gather of
    a flat parameter begins with a transfer; under stages 1 and 2 the parameters are copied back
    once, after the step.
    """
    grads = sum(one.num_bytes for one in flat_params if one.trained) // p
    gathered = sum(one.num_bytes * (one.forward + one.backward) for one in flat_params) // p
    return grads, gathered * num_micro_batches if zero == 3 else grads


def _gathers(phase: str, times: Iterable[tuple[ParamTraffic, int]]) -> list[CollectiveCall]:
    return [
        _call(phase, "params", "all_gather", one.num_bytes)
        for one, count in times
        for _ in range(count)
    ]


def _call(phase: str, part: str, kind: str, num_bytes: int) -> CollectiveCall:
    return CollectiveCall(phase=phase, part=part, kind=kind, num_bytes=num_bytes)
