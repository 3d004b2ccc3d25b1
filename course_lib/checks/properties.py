"""Mistakes that any answer of a kind can make: each breaks the right answer, whatever it computes.

An exercise takes those of its kind among its planted mistakes, `wrong=(*own, *REDUCES)`: what its
check observes has to tell each of them from a right answer.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.exercise import Cause, Exercise

Answer = Callable[..., Any]
Breaks = Callable[[Answer], Answer]

CALLERS = Cause(
    "That is the caller's: leave it as it was (numbers, lists, train or eval mode, requires_grad, "
    "hooks, random state)."
)
NOT_WAITED = Cause(
    "It is read before the other ranks' numbers are in it. Call wait() on what each call with "
    "async_op=True returns, first."
)
AT_ONCE = Cause("No overlap: start it with async_op=True, and wait only when you need the numbers.")
DIGITS = Cause("Something on the way had another dtype: keep that of what you were given.")
NAN = Cause("inf and nan have to show: they tell that a step went wrong. Change nothing else.")
EVERY_RANK = Cause(
    "Every rank has to make every call, whatever its number and its numbers are: the others wait "
    "for it."
)
SAME_CALLS = Cause("All ranks have to make the same calls in the same order.")
EVERY_HANDLE = Cause("Call wait() on every handle: one says nothing about the others.")
ONE_WORLD = Cause("Divide by the number of ranks, whatever it is: ask get_world_size.")
ONE_CALL = Cause("One call does it: put all the numbers into one tensor.")
OTHER_RANKS = Cause("Ranks of other groups are in it: pass group=group to every call.")
OTHER_SIZE = Cause("Divide by the size of the group, not by that of the world.")
SHARED = Cause(
    "Two objects share it: what one of them needs is changed by the other. Keep it in self, not in "
    "the class."
)
FROZEN = Cause("A frozen parameter gets no gradient: its grad stays None.")
FLOAT32 = Cause("float32 keeps 7 digits: real models need more. Count in int and float of Python.")
ROUNDED = Cause("Do not round: some of the right numbers are smaller than that.")
REMEMBERS = Cause("That is the result of an earlier call: keep nothing, compute it anew each time.")
IN_A_LIST = Cause("Return the number itself, not a list of it.")


@dataclass(frozen=True)
class Property:
    """A planted mistake that any right answer of a kind can be broken by."""

    name: str
    cause: Cause
    breaks: Breaks

    def answer(self, exercise: Exercise) -> Any:
        """Return the exercise's right answer, broken."""
        return self.breaks(exercise.right)


# --- ways to break an answer: a function, or a class, whose methods are then broken


def around(wraps: Callable[[Answer], Answer]) -> Breaks:
    """Break a function, or each method that a class defines, by what wraps it."""

    def breaks(answer: Answer) -> Answer:
        if not isinstance(answer, type):
            return wraps(answer)
        methods = {name: wraps(one) for name, one in vars(answer).items() if callable(one)}
        return type(answer.__name__, (answer,), methods)

    return breaks


def within(context: Callable[[], AbstractContextManager[Any]]) -> Breaks:
    """Run every call of the answer within a context, which is made anew for each."""

    def wraps(method: Answer) -> Answer:
        def broken(*given: Any) -> Any:
            with context():
                return method(*given)

        return broken

    return around(wraps)


def reducing(change: Callable[..., Any]) -> Breaks:
    """Replace all_reduce by `change(all_reduce, tensor, **options)` while the answer runs."""

    def context() -> AbstractContextManager[Any]:
        return patch.object(dist, "all_reduce", partial(change, dist.all_reduce))

    return within(context)


def afterwards(spoil: Callable[[Any], Any]) -> Breaks:
    """Spoil what a function was given, and what is in it, once it has returned."""

    def breaks(answer: Answer) -> Answer:
        def broken(*given: Any) -> Any:
            result = answer(*given)
            for one in given:
                for each in _parts(one):
                    spoil(each)
            return result

        return broken

    return breaks


def result(change: Callable[[Any], Any]) -> Breaks:
    """Change what a function returns."""
    return around(lambda answer: lambda *given: change(answer(*given)))


def _parts(thing: Any) -> Iterator[Any]:
    """Yield a thing, what is in a list of lists, and the parameters of a module."""
    inside: Iterable[Any] = ()
    if isinstance(thing, list | tuple):
        inside = [*thing]
    elif isinstance(thing, nn.Module):
        inside = [*[*thing.modules()][1:], *thing.parameters()]
    for one in inside:
        yield from [one] if isinstance(one, nn.Module) else _parts(one)
    yield thing


class Done:
    """A handle that there is nothing to wait for."""

    def wait(self) -> bool:
        """Return at once."""
        return True


def _not_waited(all_reduce: Answer, x: Tensor, *op: Any, **options: Any) -> Any:
    all_reduce(x, *op, **options | {"async_op": True})
    return Done()


def _at_once(all_reduce: Answer, x: Tensor, *op: Any, **options: Any) -> Any:
    all_reduce(x, *op, **options | {"async_op": False})
    return Done()


def _in_bfloat16(all_reduce: Answer, x: Tensor, *op: Any, **options: Any) -> Any:
    small = x.bfloat16()
    all_reduce(small, *op, **options | {"async_op": False})
    x.copy_(small)
    return Done()


def _finite(all_reduce: Answer, x: Tensor, *op: Any, **options: Any) -> Any:
    return all_reduce(x.copy_(x.nan_to_num(0.0, 0.0, 0.0)), *op, **options)


def _if_any(all_reduce: Answer, x: Tensor, *op: Any, **options: Any) -> Any:
    return all_reduce(x, *op, **options) if x.any() else Done()


def _first_rank(all_reduce: Answer, x: Tensor, *op: Any, **options: Any) -> Any:
    return all_reduce(x, *op, **options) if dist.get_rank() == 0 else Done()


def _one_by_one(all_reduce: Answer, x: Tensor, *op: Any, **options: Any) -> Any:
    works = [all_reduce(one, *op, **options) for one in x.view(-1).split(1)]
    for work in filter(None, works[:-1]):
        work.wait()
    return works[-1]


def _whole_world(all_reduce: Answer, x: Tensor, *op: Any, group: Any = None, **options: Any) -> Any:
    return all_reduce(x, *op, **options)


def _size(change: Callable[[Answer], Answer]) -> Breaks:
    return within(lambda: patch.object(dist, "get_world_size", change(dist.get_world_size)))


@contextmanager
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def _sharing(answer: Any) -> Any:
    """Let all objects of a class share their own lists, sets and dicts."""
    kept: dict[str, Any] = {}

    class Sharing(answer):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            for name, value in [*vars(self).items()]:
                if isinstance(value, list | set | dict) and all(value is not one for one in given):
                    setattr(self, name, kept.setdefault(name, value))

    return Sharing


def _remembering(answer: Answer) -> Answer:
    first: list[Any] = []

    def broken(*given: Any) -> Any:
        first.append(answer(*given))
        return first[0]

    return broken


def _on(kind: type, does: Callable[[Any], Any]) -> Breaks:
    return afterwards(lambda thing: does(thing) if isinstance(thing, kind) else None)


def _on_grads(does: Callable[[Tensor], Any]) -> Breaks:
    return _on(nn.Parameter, lambda param: None if param.grad is None else does(param.grad))


def _none(*_given: Any) -> None:
    """A hook that does nothing."""


def _gives_a_gradient(param: nn.Parameter) -> None:
    param.grad = torch.zeros_like(param) if param.grad is None else param.grad


# --- the kinds of answers

SEEDS = Property("seeds", CALLERS, within(_seeded))
# what leaves sums over ranks in a tensor, by calls of all_reduce that overlap with computing
REDUCES = (
    Property("not waited", NOT_WAITED, reducing(_not_waited)),
    Property("waits at once", AT_ONCE, reducing(_at_once)),
    Property("hides nan", NAN, reducing(_finite)),
    Property("one by one", ONE_CALL, reducing(_one_by_one)),
    Property("only if any", EVERY_RANK, reducing(_if_any)),
    Property("only on rank 0", EVERY_RANK, reducing(_first_rank)),
    Property("four ranks", ONE_WORLD, _size(lambda _: lambda *_group: 4)),
    SEEDS,
)
KEEPS_DTYPE = (Property("in bfloat16", DIGITS, reducing(_in_bfloat16)),)
IN_A_GROUP = (
    Property("of the world", OTHER_RANKS, reducing(_whole_world)),
    Property("size of the world", OTHER_SIZE, _size(lambda size: lambda *_group: size())),
)
HAS_STATE = (Property("shared by objects", SHARED, _sharing),)
# what is given modules, tensors or lists, and leaves gradients in the parameters
TRAINS = (
    Property("eval mode", CALLERS, _on(nn.Module, lambda module: module.train(False))),
    Property("train mode", CALLERS, _on(nn.Module, lambda module: module.train())),
    Property("unfreezes", CALLERS, _on(nn.Parameter, lambda param: param.requires_grad_())),
    Property("leaves a hook", CALLERS, _on(nn.Module, lambda m: m.register_forward_hook(_none))),
    Property("zeroes its input", CALLERS, _on(Tensor, lambda x: x.detach().zero_())),
    Property("asks for gradients", CALLERS, _on(Tensor, lambda x: x.requires_grad_())),
    Property("empties the list", CALLERS, _on(list, lambda given: given.clear())),
    Property("hides nan", NAN, _on_grads(lambda grad: grad.nan_to_num_())),
    Property("float32 inside", DIGITS, _on_grads(lambda grad: grad.copy_(grad.float()))),
    Property("a frozen gradient", FROZEN, _on(nn.Parameter, _gives_a_gradient)),
    SEEDS,
)
# what returns a number
COUNTS = (
    Property("float32", FLOAT32, result(lambda n: torch.tensor(float(n)).item())),
    Property("rounds", ROUNDED, result(lambda n: round(n, 3))),
    Property("remembers", REMEMBERS, _remembering),
    Property("in a list", IN_A_LIST, result(lambda n: [n])),
)
