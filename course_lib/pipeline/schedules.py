"""Pipeline schedules: in which order each rank runs its forwards and backwards.

A schedule is a plain list: for each rank, the actions it runs, one after another. It says nothing
of time: a rank starts an action as soon as the one before is done and its input has arrived. So
one simulator can play any schedule, and one engine can run it. Notebook 08_pipeline.
"""

from collections.abc import Iterator, Sequence

from course_lib.pipeline.actions import Action, Schedule, ScheduleError


def naive(num_stages: int, num_micro_batches: int) -> Schedule:
    """One micro-batch at a time, through all stages and back: one rank works, the others wait."""
    _check_counts("naive", num_stages, num_micro_batches)
    return [
        [
            Action(kind, stage, micro_batch)
            for micro_batch in range(num_micro_batches)
            for kind in ("forward", "backward")
        ]
        for stage in range(num_stages)
    ]


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards: every micro-batch is in flight at once.

    Source: Narayanan et al. 2021, section 2.2.1
    """
    _check_counts("gpipe", num_stages, num_micro_batches)
    return [
        _actions("forward", stage, num_micro_batches)
        + _actions("backward", stage, num_micro_batches)
        for stage in range(num_stages)
    ]


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """As few forwards as the pipeline needs, then one forward and one backward in turn.

    The bubble of `gpipe`, but at most num_stages - rank micro-batches in flight.

    Source: Narayanan et al. 2021, section 2.2.1
    """
    _check_counts("one_f_one_b", num_stages, num_micro_batches)
    return [
        _in_turn(
            _actions("forward", stage, num_micro_batches),
            _actions("backward", stage, num_micro_batches),
            num_warmup=num_stages - 1 - stage,
        )
        for stage in range(num_stages)
    ]


def interleaved(num_stages: int, num_micro_batches: int, num_model_chunks: int) -> Schedule:
    """1F1B where each rank holds several model chunks: the bubble divided by their number.

    The micro-batches go in rounds: a whole round through one chunk, then through the next one. A
    round takes num_stages micro-batches, or a few more or fewer so that all are equally long. With
    one chunk this is `one_f_one_b`.

    Raises: ScheduleError if the micro-batches cannot be cut into equal rounds
    Source: Narayanan et al. 2021, section 2.2.2 (rounds of exactly num_stages)
    """
    _check_counts("interleaved", num_stages, num_micro_batches)
    if num_model_chunks < 1:
        raise ScheduleError(
            f"interleaved: need num_model_chunks >= 1; got {num_model_chunks}. Try 2."
        )
    if num_model_chunks == 1:
        return one_f_one_b(num_stages, num_micro_batches)
    per_round = _round_length(num_stages, num_micro_batches)
    return [
        _in_turn(
            _in_rounds("forward", stage, num_micro_batches, per_round, range(num_model_chunks)),
            _in_rounds(
                "backward", stage, num_micro_batches, per_round, range(num_model_chunks)[::-1]
            ),
            num_warmup=(num_model_chunks - 1) * per_round + 2 * (num_stages - 1 - stage),
        )
        for stage in range(num_stages)
    ]


def zero_bubble_h1(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B with backward cut in two: the input's half at once, the weights' half where it fits.

    Stage r puts its weight halves off by r micro-batches, and fills the end of the step with them.
    Every rank so holds as much as rank 0 does in 1F1B, and the bubble is a third with equal times.

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), section 2.1
    """
    return [
        list(_halves(actions, num_deferred=stage))
        for stage, actions in enumerate(one_f_one_b(num_stages, num_micro_batches))
    ]


def _actions(kind: str, stage: int, num_micro_batches: int) -> list[Action]:
    return [Action(kind, stage, micro_batch) for micro_batch in range(num_micro_batches)]


def _in_turn(
    forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int
) -> list[Action]:
    """Warmup: forwards only; steady: one forward, one backward; cooldown: backwards only."""
    num_warmup = min(num_warmup, len(forwards))
    actions = list(forwards[:num_warmup])
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        actions += forward, backward
    return actions + list(backwards[len(forwards) - num_warmup :])


def _in_rounds(
    kind: str, stage: int, num_micro_batches: int, per_round: int, chunks: Sequence[int]
) -> list[Action]:
    """Each round of micro-batches through every chunk, in the order of `chunks`."""
    return [
        Action(kind, stage, micro_batch, chunk)
        for first in range(0, num_micro_batches, per_round)
        for chunk in chunks
        for micro_batch in range(first, first + per_round)
    ]


def _round_length(num_stages: int, num_micro_batches: int) -> int:
    num_rounds = max(1, num_micro_batches // num_stages)
    if num_micro_batches % num_rounds:
        fewer = num_micro_batches - num_micro_batches % num_rounds
        raise ScheduleError(
            f"interleaved: need num_micro_batches that make {num_rounds} equal rounds of "
            f"{num_stages} or more; got {num_micro_batches}. "
            f"Try {fewer} or {(num_rounds + 1) * num_stages}."
        )
    return num_micro_batches // num_rounds


def _halves(actions: Sequence[Action], num_deferred: int) -> Iterator[Action]:
    """Cut each backward in two; the weight half comes `num_deferred` backwards later."""
    waiting: list[Action] = []
    for action in actions:
        if action.kind != "backward":
            yield action
            continue
        yield action._replace(kind="backward_input")
        waiting.append(action._replace(kind="backward_weight"))
        if len(waiting) > num_deferred:
            yield waiting.pop(0)
    yield from waiting


def _check_counts(where: str, num_stages: int, num_micro_batches: int) -> None:
    if num_stages < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"{where}: need num_stages >= 1 and num_micro_batches >= 1; got {num_stages} and "
            f"{num_micro_batches}. Try 4 and 8."
        )
