"""What sharding sends in a step: every collective of ZeRO's stages, by flat row.

Plain data parallelism all-reduces the gradients, which on a ring is a reduce_scatter and then an
all_gather. Stages 1 and 2 put the optimizer's step between the two, so they send as much. Stage 3
gathers parameters instead, once for forward and once for backward: 1.5 times as much.
Notebooks 09_zero and 10_fsdp.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_lib.core.errors import CourseError
from course_lib.core.parallelism import ZERO_STAGES
from course_lib.cost.traffic import CollectiveCall

NORM_BYTES = 8  # the sum of squares that clipping adds up, in float64


@dataclass(frozen=True, kw_only=True)
class RowTraffic:
    """One flat row of parameters: its bytes, filled up, and how often it is needed.

    forward, backward   gathers of a micro-batch under stage 3: one for each module that uses it
    trained             False: frozen, so it has no gradient and no step
    """

    num_bytes: int
    forward: int = 1
    backward: int = 1
    trained: bool = True


def padded_bytes(numel: int, p: int, number_bytes: int) -> int:
    """Bytes of a row of `numel` numbers, filled up so that p ranks can share it evenly."""
    return -(-numel // p) * p * number_bytes


def zero_traffic(
    zero: int,
    rows: Sequence[RowTraffic],
    num_micro_batches: int = 1,
    *,
    all_reduce: bool = False,
    clips: bool = False,
    num_flags: int = 0,
) -> list[CollectiveCall]:
    """The collectives of one step under ZeRO stage `zero`; 0 is plain data parallelism.

    `num_bytes` is the size of the whole tensor, as in `Event.num_bytes`. A model with buffers also
    broadcasts them before each forward. `course_lib.cost.traffic.sent_bytes` adds up what a
    rank sends.

    all_reduce  stage 1 behind DDP, which all-reduces first: 1.5 times plain data parallelism
    clips       the norm of the gradient costs one all_reduce of a number
    num_flags   find_unused: a byte for each of so many parameters

    Raises:  CourseError for a stage that is not 0 to 3, or no micro-batch
    Source:  Rajbhandari et al. 2020 (ZeRO), section 7
    """
    if zero not in ZERO_STAGES or num_micro_batches < 1:
        raise CourseError(
            "zero_traffic: need zero as 0, 1, 2 or 3, and a micro-batch or more; got "
            f"{zero!r} and {num_micro_batches!r}."
        )
    trained = [row for row in rows if row.trained]
    calls = []
    for _ in range(num_micro_batches if zero == 3 else 0):
        calls += _gathers("forward", [(row, row.forward) for row in rows])
        calls += _gathers("backward", [(row, row.backward) for row in rows])
    reduce = "all_reduce" if zero == 0 or all_reduce else "reduce_scatter"
    phase = "backward" if zero >= 2 else "finish"
    for _ in range(num_micro_batches if zero >= 2 else 1):
        calls += [_call(phase, "grads", reduce, row.num_bytes) for row in trained]
    if num_flags:
        calls.append(_call("finish", "unused", "all_reduce", num_flags))
    if clips and zero:
        calls.append(_call("finish", "norm", "all_reduce", NORM_BYTES))
    if zero in (1, 2):
        calls += _gathers("finish", [(row, 1) for row in trained])
    return calls


def offload_trips(
    zero: int, rows: Sequence[RowTraffic], p: int, num_micro_batches: int = 1
) -> tuple[int, int]:
    """Bytes that a rank sends to its host in a step, and back: gradients, then parameters.

    The host has what one rank owns. Under stage 3 that includes the parameters, so each gather of a
    row begins with a trip; before, they come back once, after the step.
    """
    grads = sum(row.num_bytes for row in rows if row.trained) // p
    gathered = sum(row.num_bytes * (row.forward + row.backward) for row in rows) // p
    return grads, gathered * num_micro_batches if zero == 3 else grads


def _gathers(phase: str, times: Iterable[tuple[RowTraffic, int]]) -> list[CollectiveCall]:
    return [
        _call(phase, "params", "all_gather", row.num_bytes)
        for row, count in times
        for _ in range(count)
    ]


def _call(phase: str, part: str, kind: str, num_bytes: int) -> CollectiveCall:
    return CollectiveCall(phase=phase, part=part, kind=kind, num_bytes=num_bytes)
