"""Exercise 3 of 01_memory: the bytes that autograd saves."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.nn import functional as F

from course_lib.checks.cases import Case, Cases, whole
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed

Compute = Callable[[], tuple[Tensor, list[Tensor]]]
Named = tuple[str, Compute, list[Tensor]]

NOT_CALLED = Cause("Nothing is saved before fn() runs: call it inside `with saved_tensors_hooks`.")
NO_TENSOR = Cause("Autograd keeps what `pack` returns: return the tensor, also a parameter.")
COPIES = Cause("`pack` returns a copy, which takes memory, too: return what it was given.")
CHANGED = Cause("params belongs to the caller: keep what you note in a set of your own.")
THERE = Cause("The parameter is there anyway: leave out what lies in the storage of one.")
OF_16_BIT = Cause("Not every number has 4 bytes, one of bf16 has 2: ask the storage for nbytes().")
NOT_BYTES = Cause("Those are numbers, not bytes: 2 each in bf16.")
WHOLE_STORAGE = Cause("A view keeps its whole storage alive: weigh untyped_storage().")
ONCE = Cause("Two views of one storage: it lies in memory once. Note it under its own address.")
TOLD_APART = Cause("They are two storages: only an address tells them apart for sure.")
READ_ONCE = Cause("params may be an iterator, and is read once: note addresses before fn() runs.")
ITS_STORAGE = Cause("A parameter may be a later part of a storage: note the storage's address.")
VIEWS = Cause("A view of a parameter begins elsewhere: compare the storages' addresses.")
RUNS_ONCE = Cause("fn() may be the forward pass of a large model: run it once, inside the `with`.")
NO_BACKWARD = Cause("Only the forward pass is to be weighed: call fn(), and no backward().")
LEFT_ON = Cause("Hooks slow down all that follows: `with` takes them off, also after an error.")
SWALLOWED = Cause("What fn() has saved until then is not the answer: let its error through.")
GIVEN_ONLY = Cause("Masks, indices, inputs are saved, too: leave out `params`, and nothing else.")


class Forward:
    """The fn of one case: runs `compute`, which returns its output and what autograd has to save.

    The output's own operation is the one that saves.
    """

    def __init__(self, compute: Compute, params: list[Tensor], *, fails: bool = False) -> None:
        self.compute, self.params, self.fails = compute, tuple(params), fails
        self.runs = list[tuple[Tensor, list[Tensor]]]()

    def __call__(self) -> Tensor:
        self.runs.append(self.compute())
        if self.fails:
            raise FloatingPointError("the loss is not a number")
        return self.runs[-1][0]

    def trouble(self) -> str:
        """Return what is wrong with the tensors that backward will get; empty if nothing is."""
        output, saved = self.runs[-1]
        if (node := output.grad_fn) is None:
            return ", and no graph for backward"
        try:
            found = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        except (TypeError, RuntimeError):
            return ", and backward finds no tensor"
        kept = {_address(tensor) for tensor in found if isinstance(tensor, Tensor)}
        return "" if kept == set(map(_address, saved)) else ", and backward gets other tensors"


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _saving(make: Callable[[], tuple[Tensor, ...]], build: Callable[..., Tensor]) -> Compute:
    """Compute some tensors, and from them an output whose operation has to save all of these."""

    def compute() -> tuple[Tensor, list[Tensor]]:
        made = make()
        return build(*made), [*made]

    return compute


def _times(x: Tensor, other: Tensor, *more: Tensor) -> Compute:
    """Compute x times another tensor, which has to be saved, like `more`."""
    return lambda: (x * other, [other, *more])


def _cases() -> list[Case]:
    x = torch.arange(1.0, 13.0).reshape(3, 4).requires_grad_()
    fails, once = (Forward(lambda: (x * x, [x]), [x], fails=fails) for fails in (True, False))
    found = *_storages(x), *_given(x)
    return [
        *((what, (Forward(compute, params), params)) for what, compute, params in found),
        ("fn() raises an error", (fails, [x])),
        ("params as an iterator", (once, iter([x]))),
    ]


def _storages(x: Tensor) -> list[Named]:
    """Return the cases in which one storage is saved several times, or equal ones are."""

    def double() -> tuple[Tensor]:
        return (x * 2,)

    def later_rows() -> tuple[Tensor, list[Tensor]]:
        y = x * 2
        return x[1:] * y[1:], [x, y]

    def two_dtypes() -> tuple[Tensor, list[Tensor]]:
        y = (x * 2).detach()
        return (x * y).unsqueeze(-1) * y.view(torch.bfloat16).view(3, 4, 2), [y]

    return [
        ("gelu in bf16", _saving(lambda: ((x * 2).bfloat16(),), F.gelu), [x]),
        ("gelu in float64", _saving(lambda: ((x * 2).double(),), F.gelu), [x]),
        ("two rows of one tensor", _saving(double, lambda y: y[:1] * y[1:2]), [x]),
        ("a tensor times its first row", _saving(double, lambda y: y * y[0]), [x]),
        ("a tensor times its transpose", _saving(double, lambda y: y @ y.T), [x]),
        ("gelu of a tensor, times it", _saving(double, lambda y: F.gelu(y) * y.detach()), [x]),
        ("one storage, read as float32 and as bf16", two_dtypes, [x]),
        ("two tensors of one size", _saving(lambda: (x * 2, x * 3), torch.mul), [x]),
        ("two equal tensors", _saving(lambda: (x * 2, x * 2), torch.mul), [x]),
        ("the later rows of a parameter", later_rows, [x]),
    ]


def _given(x: Tensor) -> list[Named]:
    """Return the cases with parameters, constants, masks and indices, some of them among params."""
    weight, part = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(16)[8:].view(4, 2))
    scale, number = nn.Parameter(torch.ones(4)), torch.tensor(2.0)
    same, rows, fixed = x.detach().clone(), torch.tensor([0, 2, 2]), torch.full((3, 4), 2.0)
    frozen, columns = nn.Parameter(fixed.clone(), requires_grad=False), fixed[:, :2].detach()
    by_weight = _saving(lambda: (x * 2, weight), torch.matmul)
    by_part = _saving(lambda: (x * 2, part), torch.matmul)
    masked = _saving(lambda: (x > 2,), lambda mask: torch.where(mask, x * 2, x))
    return [
        ("x @ w", by_weight, [x, weight]),
        ("x @ w, where w is a parameter, but not among params", by_weight, [x]),
        ("x @ w, where w is the later half of a parameter", by_part, [x, part]),
        ("a mask of booleans", masked, [x]),
        ("rows looked up by an index", lambda: (F.embedding(rows, x), [rows]), [x]),
        ("x times a constant tensor", _times(x, fixed), [x]),
        ("x times a buffer, which is among params", _times(x, fixed), [x, fixed]),
        ("x times its copy", _times(x, same), [x]),
        ("x times two columns of a constant", _times(x[:, :2], columns), [x]),
        ("x times itself, without params", _times(x, x), []),
        ("x times a scale of one dim, a parameter", _times(x, scale, x), [x, scale]),
        ("x times a number in a tensor", _times(x, number), [x]),
        ("x times a frozen parameter, not among params", _times(x, frozen), [x]),
    ]


def _hooks_left() -> bool:
    """Return whether hooks are still installed, and take them off."""
    left = False
    while True:
        try:
            with disable_saved_tensors_hooks(""):
                return left
        except RuntimeError:
            saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor).__exit__()
            left = True


def _weight_and_trouble(value: object, fn: Forward, params: Iterable[Tensor]) -> str:
    """Return the bytes, and what backward would complain of: `48 bytes`."""
    if _hooks_left():
        raise failed("the hooks are still installed when your function has ended", LEFT_ON)
    if not fn.runs:
        raise failed("fn was never called", NOT_CALLED)
    if len(fn.runs) > 1:
        raise failed(f"fn was called {len(fn.runs)} times", RUNS_ONCE)
    if fn.fails:
        raise failed(f"your function returned {value!r}", SWALLOWED)
    if isinstance(params, list) and list(map(id, params)) != list(map(id, fn.params)):
        raise failed("the list params has changed", CHANGED)
    if any(param.grad is not None for param in fn.params):
        raise failed("the parameters have gradients now", NO_BACKWARD)
    return f"{whole(value)} bytes{fn.trouble()}"


SIZE, LEAVE_OUT = "= storage.nbytes()", "storage.data_ptr() not in skip"
KEY = "kept[storage.data_ptr()]"
SKIP = "{param.untyped_storage().data_ptr() for param in params}"
RUN = "        fn()"
HOOKS = "    with saved_tensors_hooks(pack, lambda tensor: tensor)"
ON = "    hooks = saved_tensors_hooks(pack, lambda tensor: tensor)\n    hooks.__enter__()"

WEIGH = Exercise(
    key="memory-3",
    title="weigh what autograd keeps",
    check=Cases(
        cases=_cases,
        show=_weight_and_trouble,
        symptoms=(
            (lambda got, _need: any("no tensor" in str(one) for one in got), NO_TENSOR),
            (lambda got, _need: any("other tensors" in str(one) for one in got), COPIES),
        ),
        look="Print shape, dtype and storage of each tensor that `pack` gets in this case.",
        success="Each storage once, parameters left out, bytes by dtype.",
    ),
    wrong=(
        Edit(f"{KEY} ", "kept[tensor.data_ptr()] ", ONCE),
        Edit(f"{KEY} ", "kept[id(tensor)] ", ONCE),
        Edit(f"{KEY} ", "kept[storage.nbytes()] ", TOLD_APART),
        Edit(LEAVE_OUT, "True", THERE),
        Edit(LEAVE_OUT, "tensor.data_ptr() not in skip", VIEWS),
        Edit(LEAVE_OUT, "not tensor.is_leaf", GIVEN_ONLY),
        Edit(LEAVE_OUT, f"{LEAVE_OUT} and tensor.requires_grad", GIVEN_ONLY),
        Edit("param.untyped_storage()", "param", ITS_STORAGE),
        Edit(
            LEAVE_OUT, f"storage.data_ptr() not in {SKIP}", READ_ONCE, also=((f"{SKIP}\n", "()\n"),)
        ),
        Edit(SIZE, "= tensor.numel()", NOT_BYTES),
        Edit(SIZE, "= tensor.numel() * 4", OF_16_BIT),
        Edit(SIZE, "= tensor.nbytes", WHOLE_STORAGE),
        Edit("return tensor\n", "", NO_TENSOR),
        Edit("return tensor\n", "return tensor.clone()\n", COPIES),
        Edit(f"{HOOKS}:\n{RUN}", f"{ON}\n{RUN[4:]}", LEFT_ON),
    ),
)
