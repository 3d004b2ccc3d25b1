"""Exercise 3 of 06_ddp, with its planted mistakes: the time of a step with overlap."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake

Times = Sequence[float]


def overlapped_step_s(forward_s: float, backward_s: Times, all_reduce_s: Times) -> float:
    """Start a bucket when it is ready and the one before it has arrived: the right answer."""
    ready_s = done_s = forward_s
    for compute_s, wire_s in zip(backward_s, all_reduce_s, strict=True):
        ready_s += compute_s
        done_s = max(ready_s, done_s) + wire_s
    return done_s


# --- planted mistakes, which are also what the check compares a wrong answer with


def _one_after_the_other(forward_s: float, backward_s: Times, all_reduce_s: Times) -> float:
    return forward_s + sum(backward_s) + sum(all_reduce_s)


def _perfect(forward_s: float, backward_s: Times, all_reduce_s: Times) -> float:
    return forward_s + max(sum(backward_s), sum(all_reduce_s))


def _compute_only(forward_s: float, backward_s: Times, all_reduce_s: Times) -> float:
    return forward_s + sum(backward_s)


def _last_one_shows(forward_s: float, backward_s: Times, all_reduce_s: Times) -> float:
    return forward_s + sum(backward_s) + all_reduce_s[-1]


def _first_one_hides_nothing(forward_s: float, backward_s: Times, all_reduce_s: Times) -> float:
    return forward_s + backward_s[0] + sum(all_reduce_s)


def _bucket_by_bucket(forward_s: float, backward_s: Times, all_reduce_s: Times) -> float:
    return forward_s + sum(map(max, backward_s, all_reduce_s))


def _own_wire_each(forward_s: float, backward_s: Times, all_reduce_s: Times) -> float:
    ready = accumulate(backward_s)
    return forward_s + max(map(sum, zip(ready, all_reduce_s, strict=True)))


def _before_ready(forward_s: float, backward_s: Times, all_reduce_s: Times) -> float:
    ready_s = done_s = forward_s
    for compute_s, wire_s in zip(backward_s, all_reduce_s, strict=True):
        done_s = max(ready_s, done_s) + wire_s
        ready_s += compute_s
    return max(ready_s, done_s)


def _ready_not_kept(forward_s: float, backward_s: Times, all_reduce_s: Times) -> float:
    done_s = forward_s
    for compute_s, wire_s in zip(backward_s, all_reduce_s, strict=True):
        done_s = max(forward_s + compute_s, done_s) + wire_s
    return done_s


def _without_forward(forward_s: float, backward_s: Times, all_reduce_s: Times) -> float:
    return overlapped_step_s(0.0, backward_s, all_reduce_s)


WRONG: tuple[tuple[str, Callable[..., float], str], ...] = (
    (
        "one after the other",
        _one_after_the_other,
        "That is the time without any overlap: while a bucket travels, backward goes on.",
    ),
    (
        "perfect overlap",
        _perfect,
        "The wire cannot start before the first bucket is ready, and not everything hides.",
    ),
    (
        "compute only",
        _compute_only,
        "The last bucket is ready when backward ends: its all-reduce hides behind nothing.",
    ),
    (
        "only the last one shows",
        _last_one_shows,
        "Only the last all-reduce shows if the wire keeps up; where it does not, buckets queue.",
    ),
    (
        "the wire never idles",
        _first_one_hides_nothing,
        "Right for a slow wire only: on a fast one, a bucket is waited for.",
    ),
    (
        "bucket by bucket",
        _bucket_by_bucket,
        "max() bucket by bucket makes backward wait for the wire; only the wire waits.",
    ),
    (
        "a wire for each bucket",
        _own_wire_each,
        "There is one wire: a bucket also waits until the one before it has arrived.",
    ),
    (
        "sent before it is ready",
        _before_ready,
        "A bucket travels before its own backward is done: take the later of the two clocks, and "
        "add the time on the wire to that.",
    ),
    (
        "ready not kept",
        _ready_not_kept,
        "Every bucket's backward begins right after forward: keep ready_s, and move it on.",
    ),
    (
        "forward forgotten",
        _without_forward,
        "Forward is missing: nothing is ready before it ends.",
    ),
)


# --- the check

CASES: tuple[tuple[float, Times, Times], ...] = (
    (2.0, (3.0, 1.0, 2.0), (1.0, 4.0, 1.0)),
    (1.0, (4.0, 4.0), (1.0, 1.0)),
    (1.0, (1.0, 1.0, 1.0), (3.0, 3.0, 3.0)),
    (0.5, (2.0,), (1.5,)),
    (1.0, (1.0, 5.0, 1.0, 1.0), (2.0, 1.0, 4.0, 0.5)),
    (3.0, (2.0, 2.0), (0.0, 0.0)),
)


def check_price(answer: Callable[..., Any]) -> str:
    """Check links that keep up, links that do not, and both in one step."""
    # lists, as the exercise says, and new ones each time: an answer may use them up
    got = [
        answer(forward_s, [*backward_s], [*all_reduce_s])
        for forward_s, backward_s, all_reduce_s in CASES
    ]
    for case, seconds in zip(CASES, got, strict=True):
        right = overlapped_step_s(*case)
        if not _close(seconds, right):
            shown = f"{seconds:g} s" if isinstance(seconds, int | float) else repr(seconds)
            forward_s, backward_s, all_reduce_s = case
            raise CheckFailed(
                f"forward {forward_s:g} s, backward {_row(backward_s)} s, all-reduces "
                f"{_row(all_reduce_s)} s: need {right:g} s; got {shown}. {_why(got)}"
            )
    return "Right for fast wires, slow wires, and what is between them."


def _row(times: Times) -> str:
    return ", ".join(f"{time_s:g}" for time_s in times)


def _why(got: Sequence[Any]) -> str:
    """Return the cause that fits every case."""
    if any(seconds is None for seconds in got):
        return "Does your function return its result?"
    for _, price, says in WRONG:
        if all(_close(s, price(*case)) for s, case in zip(got, CASES, strict=True)):
            return says
    return "Go through it with two clocks: when is a bucket ready, when is the wire free?"


def _close(seconds: Any, wanted: float) -> bool:
    return isinstance(seconds, int | float) and abs(seconds - wanted) <= 1e-9 * wanted


PRICE = Exercise(
    key="ddp-3",
    title="the time of a step with overlap",
    check=check_price,
    reference=overlapped_step_s,
    mistakes=tuple(Mistake(name, wrong, says[:40]) for name, wrong, says in WRONG),
)
