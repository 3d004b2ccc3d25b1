"""Exercise 2 of 09_zero: each rank steps its own shard, and the parameters are gathered.

The planted mistakes are in `step_answers.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from course_lib.checks.ddp.parts import Bag, row
from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import run
from course_lib.checks.zero import step_answers as planted
from course_lib.checks.zero.parts import (
    NUMBER_BYTES,
    WORLD_SIZES,
    alive_bytes,
    calls_in,
    close,
    expect_calls,
    flat,
    only_new,
    shard_numel,
    uneven,
)
from course_lib.ranks import Ranks, record

MODELS = ((3, 4, 1, 5, 2), (1, 2, 1))  # the second one is frozen; then fewer numbers than ranks
LR, MOMENTUM, STEPS = 0.5, 0.9, 3
EVERYTHING = (
    "Everyone keeps everything: give the optimizer this rank's shard and nothing else, so that it "
    "has state for 1/p of the numbers."
)
REFERENCED = (
    "Freed, but still referenced: a slice is a view, and keeps the whole flat tensor that it was "
    "cut from; so does an attribute that holds it. Clone what you keep, the shard and its gradient."
)


@dataclass
class Stepped:
    """The state of one rank after some steps."""

    rows: list[Tensor]  # the trained numbers after each step
    calls: list[list[tuple[str, int]]]
    frozen_changed: bool
    num_state: int
    alive_bytes: int
    grads_changed: bool


def _steps(rank: int, answer: Callable[..., Any]) -> list[Stepped]:
    found = []
    for sizes in MODELS:
        module = uneven(sizes)
        with only_new():
            found.append(_one(answer, module))
    return found


def _one(answer: Callable[..., Any], module: Bag) -> Stepped:
    made, frozen = list[Optimizer](), module.weights[1].detach().clone()

    def make_optimizer(params: Any) -> Optimizer:
        made.append(torch.optim.SGD(params, lr=LR, momentum=MOMENTUM))
        return made[-1]

    stepper, rows, calls = answer(module, make_optimizer), list[Tensor](), []
    grads_changed = False
    for number in range(STEPS):
        for i in module.trained:
            module.weights[i].grad = module.slope(i) * (number + 1)
        with record() as log:
            stepper.step()
        grads_changed |= not all(_is_slope(module, i, number + 1) for i in module.trained)
        rows.append(flat([module.weights[i] for i in module.trained]))
        calls.append(calls_in(log.events))
    for param in module.parameters():
        param.grad = None
    state = [x for one in made for x in _tensors(list(one.state.values())) if x.dim()]
    return Stepped(
        rows,
        calls,
        not torch.equal(frozen, module.weights[1].detach()),
        sum(x.numel() for x in state),
        alive_bytes(module, *rows, frozen, enough=3 * _shard_bytes(rows[0].numel())),
        grads_changed,
    )


def _shard_bytes(numel: int) -> int:
    return shard_numel(numel, dist.get_world_size()) * NUMBER_BYTES


def _is_slope(module: Bag, i: int, times: int) -> bool:
    """Return whether a gradient is as it was before the step, or gone."""
    grad = module.weights[i].grad
    return grad is None or close(grad, module.slope(i) * times)


def _tensors(nested: Any) -> Iterator[Tensor]:
    for thing in nested.values() if isinstance(nested, dict) else nested:
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, dict | list):
            yield from _tensors(thing)


def check_step(answer: Callable[..., Any]) -> str:
    """Check 1 to 4 ranks, uneven, with fewer numbers than ranks: values, state, one all_gather."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            by_rank = run(ranks, _steps, answer)
        for number, sizes in enumerate(MODELS):
            for rank, stepped in enumerate(by_rank):
                where = f"rank {rank} of {p}, {sum(sizes) - sizes[1]} trained numbers"
                _judge(stepped[number], where, rank, p, uneven(sizes))
    return "As one process after every step; 1/p of the state, and one all_gather a step."


def _judge(got: Stepped, where: str, rank: int, p: int, module: Bag) -> None:
    if got.frozen_changed:
        raise CheckFailed(f"{where}: a frozen parameter has changed. Lay out only what is trained.")
    wanted = _rows(module)
    for number in range(STEPS):
        if not close(got.rows[number], wanted[number]):
            raise CheckFailed(
                f"{where}, after step {number + 1}: need {row(wanted[number])}; got "
                f"{row(got.rows[number])}. {_why(got, rank, p, module)}"
            )
    n = shard_numel(wanted[0].numel(), p)
    if got.num_state > n:
        raise CheckFailed(
            f"{where}: the optimizer has state for {got.num_state} numbers; the shard has {n}. "
            f"{EVERYTHING}"
        )
    for calls in got.calls:
        needed = [("all_gather", n * p * NUMBER_BYTES)]
        expect_calls(where, calls, needed, _why_calls(calls))
    if got.grads_changed:
        raise CheckFailed(
            f"{where}: step() has changed param.grad, which others may still read. Copy first."
        )
    if got.alive_bytes > 3 * n * NUMBER_BYTES:
        raise CheckFailed(
            f"{where}: the shard, its gradient and its state are {3 * n * NUMBER_BYTES} bytes; "
            f"{got.alive_bytes} are alive after the step. {REFERENCED}"
        )


def _rows(
    module: Bag, *, momentum: float = MOMENTUM, times: Sequence[float] = (1, 2, 3)
) -> list[Tensor]:
    """Return the trained numbers of one process after each step, with `times` the slopes."""
    values = flat([module.weights[i] for i in module.trained])
    slopes, moved, rows = flat([module.slope(i) for i in module.trained]), 0 * values, []
    for number in range(STEPS):
        moved = momentum * moved + slopes * times[number]
        values = values - LR * moved
        rows.append(values)
    return rows


RENAMED = (
    "Nothing has changed: `param = ...` only names another tensor. Write the new numbers into the "
    "parameters with copy_."
)
NO_GRADIENT = (
    "Nothing has changed, and the optimizer has no state: the shard had no gradient when it "
    "stepped. Give it one, self.shard.grad, before each step."
)
IN_FLOAT32 = (
    "Right up to rounding: your numbers go through float32. Keep the shard, its gradient and what "
    "is sent in the parameters' dtype, here float64."
)
MEANS = "they are means already."


def _why(got: Stepped, rank: int, p: int, module: Bag) -> str:
    """Return the cause, from the last step: after the first one, several mistakes look alike."""
    start, (*_, behind, wanted) = flat([module.weights[i] for i in module.trained]), _rows(module)
    n = shard_numel(start.numel(), p)
    mine = slice(rank * n, (rank + 1) * n)
    is_now = got.rows[-1]
    if is_now.shape == wanted.shape and torch.allclose(is_now, wanted, rtol=1e-5, atol=1e-5):
        return IN_FLOAT32
    if close(is_now, start):
        return RENAMED if got.num_state else NO_GRADIENT
    if close(is_now, behind):
        return "The numbers before this step: gather after the optimizer's step, not before it."
    others = torch.ones(start.numel(), dtype=torch.bool)
    others[mine] = False
    if close(is_now[mine], wanted[mine]):
        if close(is_now[others], start[others]):
            return (
                "Only this rank's own shard is new: after the step, all_gather what the others "
                "have stepped."
            )
        if close(is_now[others], behind[others]):
            return "The others' shards are from before the step: stale. Step first, then gather."
    causes = [
        (_rows(module, momentum=0.0), "The momentum is lost: make one optimizer, in __init__."),
        (_rows(module, times=(p, 2 * p, 3 * p)), "The gradients are summed once more: " + MEANS),
        (_rows(module, times=(1 / p, 2 / p, 3 / p)), "Divided by p once more: " + MEANS),
        (_rows(module, times=(1, 3, 6)), "Gradients of earlier steps are in it: do not add them."),
    ]
    for rows, says in causes:
        if close(is_now, rows[-1]):
            return says
    if any(close(is_now[:n], wanted[k * n : (k + 1) * n]) for k in range(1, p)):
        return "The right numbers in the wrong places: rank r has to step shard r."
    return (
        "Are this rank's numbers, this rank's gradients and the place where they go back the same "
        "slice of the flat parameter?"
    )


def _why_calls(calls: Sequence[tuple[str, int]]) -> str:
    kinds = {kind for kind, _ in calls}
    if not calls:
        return "If nobody talks, everyone has stepped everything: that shards no work."
    if kinds == {"all_reduce"}:
        return "A sum of shards among zeros sends twice the bytes of an all_gather."
    if kinds > {"all_gather"} and kinds & {"all_reduce", "reduce_scatter"}:
        return "Behind DDP the gradients are means already, and every rank knows all of them."
    if kinds == {"all_gather"} and len(calls) > 1:
        return "One call for the whole flat parameter, not one per parameter."
    return "One all_gather puts all shards together: dist.all_gather_single(flat, shard)."


STEP = Exercise(
    key="zero-2",
    title="step your own shard",
    check=check_step,
    reference=planted.ShardedStep,
    mistakes=planted.mistakes(Mistake),
)
