"""Pipeline schedules: the order of forwards and backwards on each rank (GPipe, 1F1B, ...).

A schedule is a plain list: for each rank, its actions one after another. It contains no times: a
rank starts an action as soon as the previous one has finished and its input has arrived. So one
engine can execute any schedule (`engine.py`), and one simulator can time it (`simulation.py`).
Notebook 08_pipeline.
"""

from collections.abc import Iterator, Sequence

from course_lib.pipeline.actions import Action, Schedule, ScheduleError


def naive(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the naive schedule: one micro-batch at a time through all stages, forward and back.

    One rank computes while the others wait.
    """
    check_counts("naive", num_stages, num_micro_batches)
    return [
        [
            Action(kind, stage, micro_batch)
            for micro_batch in range(num_micro_batches)
            for kind in ("forward", "backward")
        ]
        for stage in range(num_stages)
    ]


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the GPipe schedule: all forwards, then all backwards; m micro-batches in flight.

    Source: Narayanan et al. 2021, section 2.2.1
    """
    check_counts("gpipe", num_stages, num_micro_batches)
    return [
        _actions("forward", stage, num_micro_batches)
        + _actions("backward", stage, num_micro_batches)
        for stage in range(num_stages)
    ]


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the 1F1B schedule: warmup forwards, then one forward and one backward alternately.

    The bubble of `gpipe`, but at most num_stages - rank micro-batches in flight.

    Source: Narayanan et al. 2021, section 2.2.1
    """
    check_counts("one_f_one_b", num_stages, num_micro_batches)
    return [
        _warmup_steady_cooldown(
            _actions("forward", stage, num_micro_batches),
            _actions("backward", stage, num_micro_batches),
            num_warmup=num_stages - 1 - stage,
        )
        for stage in range(num_stages)
    ]


def interleaved(num_stages: int, num_micro_batches: int, num_model_chunks: int) -> Schedule:
    """Return interleaved 1F1B: several model chunks per rank, the bubble divided by their number.

    Micro-batches are processed in rounds: a whole round passes one chunk, then the next. A round
    has num_stages micro-batches, or a few more or fewer so that all rounds are equal. With one
    chunk this is `one_f_one_b`.

    Raises: ScheduleError if the micro-batches cannot be divided into equal rounds
    Source: Narayanan et al. 2021, section 2.2.2 (rounds of exactly num_stages)
    """
    check_counts("interleaved", num_stages, num_micro_batches)
    if num_model_chunks < 1:
        raise ScheduleError(
            f"interleaved: need num_model_chunks >= 1; got {num_model_chunks}. Try 2."
        )
    if num_model_chunks == 1:
        return one_f_one_b(num_stages, num_micro_batches)
    per_round = _round_length(num_stages, num_micro_batches)
    return [
        _warmup_steady_cooldown(
            _in_rounds("forward", stage, num_micro_batches, per_round, range(num_model_chunks)),
            _in_rounds(
                "backward", stage, num_micro_batches, per_round, range(num_model_chunks)[::-1]
            ),
            num_warmup=(num_model_chunks - 1) * per_round + 2 * (num_stages - 1 - stage),
        )
        for stage in range(num_stages)
    ]


def breadth_first(num_stages: int, num_micro_batches: int, num_model_chunks: int) -> Schedule:
    """Return the breadth-first schedule: all micro-batches pass a model chunk, then the next one.

    A rank goes through its chunks once, forward and back. Where it has to gather the parameters of
    a chunk (FSDP) it does so 2v - 1 times, however many micro-batches there are; all of these are
    in flight. With one chunk this is `gpipe`.

    Source: Lamy-Poirier 2023 (Breadth-first pipeline parallelism, arXiv 2211.05953)
    """
    check_counts("breadth_first", num_stages, num_micro_batches)
    chunks, m = range(num_model_chunks), num_micro_batches
    return [
        _in_rounds("forward", stage, m, m, chunks)
        + _in_rounds("backward", stage, m, m, chunks[::-1])
        for stage in range(num_stages)
    ]


def zero_bubble_h1(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return ZB-H1: 1F1B with each backward split into backward_input and backward_weight.

    Stage r defers each backward_weight by r micro-batches, so that the last ones fill the bubble at
    the end of the step. Every rank then holds as many activations as rank 0 does in 1F1B: the first
    rank no more than there, the others more. With equal times the bubble is a third of 1F1B's.
    PyTorch's ScheduleInterleavedZeroBubble with one stage per rank, which it calls ZB1P, has this
    order. The ZB-1p of the paper is another one, searched for each case in the same memory.

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), section 2.1
    """
    return [
        list(_split_backwards(actions, num_deferred=stage))
        for stage, actions in enumerate(one_f_one_b(num_stages, num_micro_batches))
    ]


def _actions(kind: str, stage: int, num_micro_batches: int) -> list[Action]:
    return [Action(kind, stage, micro_batch) for micro_batch in range(num_micro_batches)]


def _warmup_steady_cooldown(
    forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int
) -> list[Action]:
    """Order actions: warmup (forwards only), steady (alternating), cooldown (backwards only)."""
    num_warmup = min(num_warmup, len(forwards))
    actions = list(forwards[:num_warmup])
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        actions += forward, backward
    return actions + list(backwards[len(forwards) - num_warmup :])


def _in_rounds(
    kind: str, stage: int, num_micro_batches: int, per_round: int, chunks: Sequence[int]
) -> list[Action]:
    """Return the actions round by round: each round passes every chunk, in the order given."""
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


def _split_backwards(actions: Sequence[Action], num_deferred: int) -> Iterator[Action]:
    """Split each backward; its backward_weight comes `num_deferred` backwards later."""
    deferred: list[Action] = []
    for action in actions:
        if action.kind != "backward":
            yield action
            continue
        yield action._replace(kind="backward_input")
        deferred.append(action._replace(kind="backward_weight"))
        if len(deferred) > num_deferred:
            yield deferred.pop(0)
    yield from deferred


def check_counts(where: str, num_stages: int, num_micro_batches: int) -> None:
    if num_stages < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"{where}: need num_stages >= 1 and num_micro_batches >= 1; got {num_stages} and "
            f"{num_micro_batches}. Try 4 and 8."
        )
