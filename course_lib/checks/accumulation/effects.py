"""Tools for the checks of 02 and 03: what an answer does in this process, judged label by label."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.checks.cases import NO_RESULT, Raised
from course_lib.checks.exercise import Cause, CheckFailed, Exercise, NotDone, failed
from course_lib.checks.expect import DTYPE, SHAPE, difference
from course_lib.checks.limits import little_memory
from course_lib.checks.parts import MEMORY, VALUE, part_of, whole_parts
from course_lib.checks.properties import CALLERS, TRAINS
from course_lib.checks.watch import CHANGED, changes, state_of
from course_lib.memory.saved_tensors import activation_ledger

EffectCase = tuple[str, Callable[[Callable[..., Any]], dict[str, Any]]]
Done = Sequence[Any]  # what an answer did in each case, by label; or what it raised
OLD = 1000.0  # what gradients hold before a step
HELD, LEFT = "held for backward at once", "what a micro-batch leaves in memory"
NUMBERS_BYTES = 256  # for a few losses
LOSS, GRAPH = "loss", "graph of the loss"
ALIVE = Cause(
    "The graphs of all micro-batches are alive at once: call backward in the loop, without "
    "retain_graph, and keep nothing that has a graph."
)
LEFTOVERS = Cause(
    "Backward freed the graphs, but some tensor of every micro-batch, its logits or gradients, "
    "stays in memory to the end: keep only numbers, such as loss.detach()."
)
WITH_GRAPH = Cause("The loss that you return has a graph, and keeps it alive: add loss.detach().")
NAN_LEFT_OUT = Cause("A nan in one part makes the mean nan: keep it, it shows what went wrong.")
LOOKS = {CHANGED: CALLERS, HELD: ALIVE, LEFT: LEFTOVERS, GRAPH: WITH_GRAPH}
# memory that grows: the graph of each micro-batch is kept alive
KEEP = """loss.backward(retain_graph=True)
model.kept = [*getattr(model, 'kept', []), loss]"""
# what any answer can do to the model and the tensors that it is given
TO_CALLERS = tuple(one for one in TRAINS if one.cause == CALLERS and one.name != "empties the list")


@dataclass(frozen=True, kw_only=True)
class Effects:
    """A check of what an answer does in this process: gradients, calls, bytes, each under a label.

    `cases()` returns pairs of a text and `observe`: `observe(answer)` calls the answer and returns
    plain data by label, floats as tensors; it may raise `failed("need ...", CAUSE)`. One label
    after the other is judged, in all cases: type, shape and dtype, then the numbers, which may
    differ by `rtol`, the relative difference. Its cause is that of the planted answer that first
    differs there, too, and does the same there in every case; where none does, the one that `looks`
    has for the label, else `look`.
    """

    cases: Callable[[], Sequence[EffectCase]]
    success: str
    look: Cause
    looks: Mapping[str, Cause] = field(default_factory=dict)
    rtol: float = 1e-6

    def observe(self, answer: Callable[..., Any]) -> Iterator[Any]:
        """Observe the answer in each case; yield what it did, or what it raised."""
        for _, observe in self.cases():
            try:
                # what it leaves behind of autograd and the random state is not the next case's
                with little_memory(), torch.random.fork_rng(devices=[]), torch.enable_grad():
                    done = observe(answer)
                yield done
            except (NotImplementedError, NotDone, MemoryError):
                raise
            except CheckFailed as error:
                yield error
            except Exception as error:
                yield Raised.of(error)

    def judge(self, observed: Iterable[Any], exercise: Exercise) -> str:
        """Compare with what the right answer does; raise CheckFailed for the first difference."""
        got, need = list(observed), exercise.right_values()
        end = next((n for n, done in enumerate(got) if not isinstance(done, dict)), len(got))
        if found := self._first_difference(got[:end], need[:end]):
            number, label, kind, words = found
            cause = self._why(kind, label, got[:end], need[:end], exercise)
            raise failed(f"{self.cases()[number][0]}, {label}: {words}", cause)
        if end < len(got):
            raise self._ended(self.cases()[end][0], got[end], end, exercise)
        return self.success

    def shares(self, observed: Sequence[Any], right: Sequence[Any]) -> dict[str, float]:
        """Return 1.0 for each part that holds in all cases, else 0.0 (course_lib.checks.parts)."""
        pairs = list(zip(observed, right, strict=False))
        is_whole = len(observed) == len(right)
        return whole_parts(
            (
                MEMORY if part_of(label) == MEMORY else VALUE,
                is_whole and all(self._holds(*pair, label) for pair in pairs),
            )
            for label in dict.fromkeys(label for done in right for label in done)
        )

    def _holds(self, found: Any, wanted: Any, label: str) -> bool:
        is_there = isinstance(found, dict) and found.keys() >= wanted.keys()
        return is_there and not self._differ(found, wanted, label)[0]

    def _ended(self, text: str, done: Any, number: int, exercise: Exercise) -> CheckFailed:
        """Return the error for a case that ended with one; planted answers may raise the same."""
        if isinstance(done, CheckFailed):
            return CheckFailed(f"{text}: {done}", done.cause)
        line = f" ({done.line})" if done.line else ""
        seen = f"{text}: your code raised {done.name}: {done.text}{line}"
        for cause, values in exercise.wrong_values():
            value = values[number]
            if value == done and value.text == done.text:
                return failed(seen, cause)
        return failed(seen)

    def _first_difference(self, got: Done, need: Done) -> tuple[int, str, str, str] | None:
        """Return the case, the label, the kind and the words of the first difference."""
        for label in dict.fromkeys(label for done in need for label in done):
            for number, pair in enumerate(zip(got, need, strict=True)):
                kind, words = self._differ(*pair, label)
                if kind:
                    return number, label, kind, words
        return None

    def _differ(self, found: Any, wanted: Any, label: str) -> tuple[str, str]:
        if not isinstance(found, dict) or not isinstance(wanted, dict):
            return "raised", ""
        if label not in wanted:
            return "", ""
        return difference(found[label], wanted[label], self.rtol)

    def _why(self, kind: str, label: str, got: Done, need: Done, exercise: Exercise) -> Cause:
        for cause, all_values in exercise.wrong_values():
            values = all_values[: len(got)]
            first = self._first_difference(values, need)
            same = not any(self._differ(*p, label)[0] for p in zip(got, values, strict=True))
            if same and first and first[1] == label:
                return cause
        known = {"none": NO_RESULT, "shape": SHAPE, "dtype": DTYPE}
        return known.get(kind) or self.looks.get(label) or self.look


@contextmanager
def watched(may_change: Iterable[str] = (), /, **given: Any) -> Iterator[dict[str, Any]]:
    """Yield a dict that gets, at the end, the names of what has changed of the caller's."""
    torch.rand(1)  # else who seeds as a case did changes nothing
    before, seen = state_of(given), dict[str, Any]()
    yield seen
    seen[CHANGED] = [one for one in changes(before, state_of(given)) if one not in may_change]


class LiveStorages(TorchDispatchMode):
    """The memory that operations in this context made, and how much of it is still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; note the storages of the tensors of floats that it returns."""
        result = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(t.untyped_storage()) for t in _floats((args, kwargs))}
        for tensor in _floats(result):
            storage = tensor.untyped_storage()
            if (ref := StorageWeakRef(storage)) not in given:
                self._sizes[ref] = storage.nbytes()
        return result

    def num_bytes(self) -> int:
        """Return the bytes that are still alive."""
        gc.collect(1)  # what a cycle of young objects keeps alive
        return sum(size for ref, size in self._sizes.items() if not ref.expired())


def _floats(tree: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point()]


def called(
    answer: Callable[..., Any], model: nn.Module, *arguments: Any, steps: bool = False, **given: Any
) -> tuple[dict[str, Any], list[int], Any]:
    """Call the answer; return what `watched` saw, the items in each call of the model, the result.

    `given` are tensors and lists in the arguments that should not change. Only an answer that
    `steps` may change the numbers of parameters.
    """
    calls, modes = list[int](), [_modes(model)]

    def note(_module: Any, inputs: Any) -> None:
        calls.append(len(inputs[0]))
        modes.append(_modes(model))

    model.register_forward_pre_hook(note)
    frozen = [param for param in model.parameters() if not param.requires_grad]
    had_none = [param for param in frozen if param.grad is None]
    numbers = dict(model.named_parameters("model")) if steps else ()
    with watched(numbers, model=model, **given) as seen:
        result = answer(model, *arguments)
    if any(mode != modes[0] for mode in modes):
        seen[CHANGED].append("train or eval mode in a call")
    if any(param.grad is not None for param in had_none):
        seen[CHANGED].append("the gradient of a frozen parameter")
    return seen, calls, result


def _modes(model: nn.Module) -> list[bool]:
    """Return of each part whether it is in training."""
    return [part.training for part in model.modules()]


def held_at_once(
    make: Callable[[int], tuple[nn.Module, Tensor, Tensor]],
    run: Callable[[nn.Module, Tensor, Tensor, int], Any],
) -> dict[str, str]:
    """Compare the memory of 4 micro-batches with that of one, and with what they leave behind.

    `make(items)` returns a model, inputs and targets; `run` gets them, and into how many
    micro-batches they are to be cut.
    """

    def measured(count: int) -> tuple[int, list[int]]:
        model, x, y = make(4 * count)
        alive = list[int]()  # at the start of each forward
        with LiveStorages() as live:
            model.register_forward_pre_hook(lambda *_: alive.append(live.num_bytes()))
            ledger = activation_ledger(
                lambda: run(model, x, y, count), given=[*model.parameters(), x, y]
            )
        return ledger.peak_bytes(), alive

    (one, _), (four, alive) = measured(1), measured(4)
    more = f"{four} bytes for 4 micro-batches, {one} for one"
    grows = alive[-1] - alive[-2] if len(alive) > 3 else 0  # gradients and sums are there by then
    return {
        HELD: "one micro-batch" if four <= one + NUMBERS_BYTES else more,
        LEFT: "numbers at most" if grows <= NUMBERS_BYTES else "more with each micro-batch",
    }


def with_old_grads(model: nn.Module) -> nn.Module:
    """Return the model with OLD in every gradient."""
    for param in model.parameters():
        param.grad = torch.full_like(param, OLD)
    return model


def about_loss(loss: Any) -> dict[str, Any]:
    """Return what is known about a loss: the number, in its own dtype, and if it has a graph."""
    is_tensor = isinstance(loss, Tensor)
    graph = "there" if is_tensor and loss.requires_grad else "none"
    return {LOSS: loss.detach() if is_tensor else as_number(loss), GRAPH: graph}


def as_number(value: Any) -> Any:
    """Return a number, or a tensor of one, as a tensor in float64; everything else as it is."""
    if isinstance(value, int | float):
        return torch.tensor(float(value)).double()
    return value.detach().clone().double() if isinstance(value, Tensor) else value


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return all numbers of some tensors in one tensor; an empty one where there are none."""
    return torch.cat([torch.zeros(0), *(tensor.detach().flatten() for tensor in tensors)])


def flat_grads(model: nn.Module) -> Tensor:
    """Return all gradients of a model in one tensor; one that is not there counts as zeros."""
    pairs = ((param, param.grad) for param in model.parameters())
    return flat(torch.zeros_like(p) if grad is None else grad for p, grad in pairs)
