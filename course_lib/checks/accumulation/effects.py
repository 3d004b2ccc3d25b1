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
from course_lib.checks.expect import difference
from course_lib.checks.expectations import CALLERS, DTYPE, SHAPE
from course_lib.checks.limits import little_memory
from course_lib.memory.saved_tensors import activation_ledger

EffectCase = tuple[str, Callable[[Callable[..., Any]], dict[str, Any]]]
Done = Sequence[Any]  # what an answer did in each case, by label; or what it raised
OLD = 1000.0  # what gradients hold before a step
WRITTEN, HELD = "changed", "held for backward at once"
LEFT = "what a micro-batch leaves in memory"
NUMBERS_BYTES = 256  # for a few losses
NO_GRADIENT = Cause("No parameter has a gradient. Call backward on the loss of each part.")
ALIVE = Cause(
    "The graphs of all micro-batches are alive at once: call backward in the loop, without "
    "retain_graph, and keep nothing that has a graph."
)
LEFTOVERS = Cause(
    "Backward freed the graphs, but some tensor of every micro-batch, its logits or gradients, "
    "stays in memory to the end: keep only numbers, such as loss.detach()."
)
GRAPH = "graph of the loss"
WITH_GRAPH = Cause("The loss that you return has a graph, and keeps it alive: add loss.detach().")
RANDOM = "random numbers that come next"
SEEDED = Cause(
    "A seed was set: dropout would draw the same masks for every micro-batch, or in every step. "
    "Do not touch the random state."
)
MODE, TRAINED = "mode of the model, in each call and afterwards", "parameters that need a gradient"
SWITCHED = Cause(
    "train() and eval() switch dropout and batch norm in every part of a model, and the caller may "
    "have put a part into eval mode. Call neither."
)
FROZEN = Cause("A frozen parameter stays frozen: leave requires_grad as it is.")
TIED = Cause(
    "Two layers of a model may share a weight, which was counted once for each of them here: "
    "model.parameters() returns every parameter once."
)
NO_GRAD_STAYS = Cause(
    "A parameter that is frozen, or that no output depends on, has no gradient: its .grad is None. "
    "Leave it None; with zeros there, the optimizer's weight decay moves the parameter."
)
OTHER_LOSS = Cause("That is the gradient of another loss: use loss_fn, whatever it is.")
LOSS, LOSS_BITS = "loss", "bits of a number of the loss"
FEWER_BITS = Cause(
    "What you return has fewer digits than the losses: float32 keeps 7. Start from 0.0, as given, "
    "and keep the losses' dtype."
)
NAN_LEFT_OUT = Cause(
    "If one part is nan, so is the mean of all. Leaving it out or replacing it hides that training "
    "has diverged: keep it."
)


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
                with little_memory():
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


LOOKS = {
    WRITTEN: CALLERS,
    HELD: ALIVE,
    LEFT: LEFTOVERS,
    GRAPH: WITH_GRAPH,
    LOSS_BITS: FEWER_BITS,
    MODE: SWITCHED,
    TRAINED: FROZEN,
    RANDOM: SEEDED,
}


@contextmanager
def watched(
    model: nn.Module | None = None, **inputs: Tensor | list[Any]
) -> Iterator[dict[str, Any]]:
    """Yield a dict that gets, at the end, the names of the tensors and lists that have changed.

    Of a model that draws no random numbers, it gets whether its mode is as before, in each call
    and afterwards, which parameters need a gradient, and which random numbers come next.
    """
    before = {name: _state(value) for name, value in inputs.items()}
    modes, seen = [_modes(model)], dict[str, Any]()
    random = torch.get_rng_state()
    flags = [param.requires_grad for param in model.parameters()] if model else []
    if model:
        model.register_forward_pre_hook(lambda *_: modes.append(_modes(model)))
    yield seen
    changed = (name for name, old in before.items() if not _as_before(inputs[name], old))
    seen[WRITTEN] = " and ".join(changed) or "nothing"
    if model:
        modes.append(_modes(model))
        seen[MODE] = "as before" if all(each == modes[0] for each in modes) else "another"
        same = flags == [param.requires_grad for param in model.parameters()]
        seen[TRAINED] = "the same" if same else "others"
        seen[RANDOM] = "the same" if torch.equal(random, torch.get_rng_state()) else "others"


def _state(value: Tensor | list[Any]) -> Any:
    return (value.detach().clone(), value.requires_grad) if isinstance(value, Tensor) else [*value]


def _as_before(value: Tensor | list[Any], old: Any) -> bool:
    if isinstance(value, Tensor):
        return torch.equal(value, old[0]) and value.requires_grad == old[1]
    return len(value) == len(old) and all(map(lambda one, other: one is other, value, old))


def _modes(model: nn.Module | None) -> list[bool]:
    """Return of each part whether it is in training."""
    return [module.training for module in model.modules()] if model else []


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
    answer: Callable[..., Any],
    model: nn.Module,
    *arguments: Any,
    **inputs: Tensor | list[Any],
) -> tuple[dict[str, Any], list[int], Any]:
    """Call the answer; return what `watched` saw, the items in each call of the model, the result.

    `inputs` are tensors and lists in the arguments that should not change.
    """
    calls = list[int]()
    model.register_forward_pre_hook(lambda _module, given: calls.append(len(given[0])))
    with watched(model, **inputs) as seen:
        result = answer(model, *arguments)
    return seen, calls, result


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
        HELD: "one micro-batch" if four <= one else more,
        LEFT: "numbers at most" if grows <= NUMBERS_BYTES else "more with each micro-batch",
    }


def parts_of(items: int, count: int) -> str:
    """Describe a case: `2 items in 1 micro-batch`."""
    return f"{items} items in {count} micro-batch{'es' if count > 1 else ''}"


def with_old_grads(model: nn.Module) -> nn.Module:
    """Return the model with OLD in every gradient."""
    for param in model.parameters():
        param.grad = torch.full_like(param, OLD)
    return model


def graph_of(loss: Any) -> str:
    """Return whether a loss carries a graph: `there` or `none`."""
    return "there" if isinstance(loss, Tensor) and loss.requires_grad else "none"


def about_loss(loss: Any) -> dict[str, Any]:
    """Return what is known about a loss: the number, its bits (64 in Python), if it has a graph."""
    bits = 8 * loss.dtype.itemsize if isinstance(loss, Tensor) else 64
    return {LOSS: as_number(loss), GRAPH: graph_of(loss), LOSS_BITS: bits}


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
