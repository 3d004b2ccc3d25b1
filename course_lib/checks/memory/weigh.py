"""Exercise 3 of 01_memory: the bytes that autograd saves."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from course_lib.checks.cases import A_FLOAT, Case, Cases, whole
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed

Compute = Callable[[], tuple[Tensor, list[Tensor]]]

NOT_CALLED = Cause("Nothing is saved before fn() runs: call it inside `with saved_tensors_hooks`.")
NO_TENSOR = Cause(
    "What `pack` returns is what autograd keeps: return the tensor, also where it is a parameter."
)
COPIES = Cause(
    "`pack` returns a copy, which takes memory of its own: return the tensor that it was given."
)
CHANGED = Cause("params belongs to the caller: keep what you note in a set of your own.")
THERE = Cause("The parameter is there anyway: leave out what lies in the storage of one.")
OF_16_BIT = Cause("Not every number has 4 bytes, one of bf16 has 2: ask the storage for nbytes().")
ONCE = Cause("Two views of one storage: it lies in memory once. Note it under its own address.")
TOLD_APART = Cause("They are two storages: an address tells them apart, a size or an id may not.")
GIVEN_ONLY = Cause(
    "A mask, an index or an input is saved as well, whatever its dtype and whether or not it needs "
    "a gradient: leave out `params`, and nothing else."
)


class Forward:
    """The fn of one case: runs `compute`, which returns its output and what autograd has to save.

    The output's own operation is the one that saves.
    """

    def __init__(self, compute: Compute, params: list[Tensor]) -> None:
        self.compute, self.params = compute, tuple(params)
        self.runs = list[tuple[Tensor, list[Tensor]]]()

    def __call__(self) -> None:
        self.runs.append(self.compute())

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


def _cases() -> list[Case]:
    x, weight = torch.arange(1.0, 13.0).reshape(3, 4).requires_grad_(), torch.ones(4, 2)
    weight.requires_grad_()
    fixed, rows = torch.full((3, 4), 2.0), torch.tensor([0, 2, 2])

    def gelu(dtype: torch.dtype) -> Compute:
        def compute() -> tuple[Tensor, list[Tensor]]:
            y = (x * 2).to(dtype)
            return F.gelu(y), [y]

        return compute

    def product() -> tuple[Tensor, list[Tensor]]:
        y = x * 2
        return y @ weight, [y, weight]

    def two_rows() -> tuple[Tensor, list[Tensor]]:
        y = x * 2
        return y[:1] * y[1:2], [y]

    def two_of_one_size() -> tuple[Tensor, list[Tensor]]:
        y, z = x * 2, x * 3
        return y * z, [y, z]

    def later_rows() -> tuple[Tensor, list[Tensor]]:
        y = x * 2
        return x[1:] * y[1:], [x, y]

    def masked() -> tuple[Tensor, list[Tensor]]:
        mask = x > 2
        return torch.where(mask, x * 2, x), [mask]

    cases: list[tuple[str, Compute, list[Tensor]]] = [
        ("gelu in bf16", gelu(torch.bfloat16), [x]),
        ("gelu in float64", gelu(torch.float64), [x]),
        ("x @ w", product, [x, weight]),
        ("x @ w, where w is not among params", product, [x]),
        ("two rows of one tensor", two_rows, [x]),
        ("two tensors of one size", two_of_one_size, [x]),
        ("the later rows of a parameter", later_rows, [x]),
        ("a mask of booleans", masked, [x]),
        ("rows looked up by an index", lambda: (F.embedding(rows, x), [rows]), [x]),
        ("x times a constant tensor", lambda: (x * fixed, [fixed]), [x]),
        ("x times a buffer, which is among params", lambda: (x * fixed, [fixed]), [x, fixed]),
        ("x times itself, without params", lambda: (x * x, [x]), []),
    ]
    return [(what, (Forward(compute, params), params)) for what, compute, params in cases]


def _weight_and_trouble(value: object, fn: Forward, params: list[Tensor]) -> str:
    """Return the bytes, and what backward would complain of: `48 bytes`."""
    if not fn.runs:
        raise failed("fn was never called", NOT_CALLED)
    if list(map(id, params)) != list(map(id, fn.params)):
        raise failed("the list params has changed", CHANGED)
    return f"{whole(value)} bytes{fn.trouble()}"


SIZE, LEAVE_OUT = "= storage.nbytes()", "storage.data_ptr() not in skip"
KEY = "kept[storage.data_ptr()]"

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
        Edit(LEAVE_OUT, "True", THERE),
        Edit(
            LEAVE_OUT,
            "tensor.data_ptr() not in skip",
            Cause("A view of a parameter begins elsewhere: compare the storages' addresses."),
        ),
        Edit(LEAVE_OUT, "not tensor.is_leaf", GIVEN_ONLY),
        Edit(LEAVE_OUT, "not (tensor.is_leaf and tensor.requires_grad)", GIVEN_ONLY),
        Edit(LEAVE_OUT, f"{LEAVE_OUT} and tensor.requires_grad", GIVEN_ONLY),
        Edit(LEAVE_OUT, f"{LEAVE_OUT} and tensor.is_floating_point()", GIVEN_ONLY),
        Edit(SIZE, "= tensor.numel()", Cause("Those are numbers, not bytes: 2 each in bf16.")),
        Edit(SIZE, "= tensor.numel() * 4", OF_16_BIT),
        Edit(SIZE, "= storage.nbytes() // tensor.element_size() * 4", OF_16_BIT),
        Edit(
            SIZE,
            "= tensor.nbytes",
            Cause("A view keeps its whole storage alive: weigh untyped_storage()."),
        ),
        Edit(f"{KEY} ", "kept[storage.nbytes()] ", TOLD_APART),
        Edit(SIZE, "= storage.nbytes() / 1", A_FLOAT),
        Edit("return tensor\n", "", NO_TENSOR),
        Edit(f"if {LEAVE_OUT}:", "if storage.data_ptr() in skip:\n    return\nelse:", NO_TENSOR),
        Edit("return tensor\n", "return tensor.clone()\n", COPIES),
        Edit("return tensor", "params.append(tensor)\nreturn tensor", CHANGED),
        Edit("        fn()", "        pass", NOT_CALLED),
    ),
)
