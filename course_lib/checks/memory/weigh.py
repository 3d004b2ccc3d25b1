"""Exercise 3 of 01_memory, measuring what autograd saves: its check and its planted mistakes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from course_lib.checks.exercise import CheckFailed
from course_lib.checks.expect import Cause, expect_equal

Case = tuple[str, Callable[[], Any], list[Any], int, list[Cause]]


def check_weigh(answer: Callable[..., int]) -> str:
    """Check views, parameters, dtypes and a matrix product."""
    for where, fn, params, right, causes in [*_plain_cases(), *_view_cases()]:
        outputs: list[Tensor] = []
        got = answer(lambda fn=fn, to=outputs: to.append(fn()), params)
        expect_equal(got, right, where=where, causes=causes)
        _expect_backward(outputs, where)
    return "Each storage once, parameters left out, bytes by dtype."


def _expect_backward(outputs: list[Tensor], where: str) -> None:
    """Demand that backward gets what pack returned."""
    if not outputs:
        raise CheckFailed(f"{where}: fn was never called.")
    try:
        outputs[0].sum().backward()
    except (TypeError, RuntimeError):
        raise CheckFailed(
            f"{where}: the bytes are right, but backward found no tensor: pack has to return it."
        ) from None


def _parameter() -> Tensor:
    return torch.arange(1.0, 13.0).reshape(3, 4).requires_grad_()


def _plain_cases() -> list[Case]:
    """Check tensors that are saved whole: two bytes per number, and a matrix product."""
    x, weight = _parameter(), torch.ones(4, 2, requires_grad=True)
    there = "The parameter is there anyway: leave it out."
    return [
        (
            "gelu in bf16",
            lambda: F.gelu((x * 2).bfloat16()),
            [x],
            24,
            [
                (12, "Numbers are not bytes: 2 each in bf16."),
                (48, "A number of bf16 has 2 bytes, not 4: ask the storage for nbytes()."),
            ],
        ),
        (
            "x @ w",
            lambda: (x * 2) @ weight,
            [x, weight],
            48,
            [(80, there), (20, "Those are numbers.")],
        ),
    ]


def _view_cases() -> list[Case]:
    """Check storages behind several tensors, several of one size, views of a parameter."""
    x = _parameter()
    alive = "A view keeps its whole storage alive: weigh untyped_storage()."
    sizes = "They are two storages: an address tells them apart, a size or an id may not."
    elsewhere = "A view of a parameter begins elsewhere: compare the storages' addresses."

    def product_of_rows() -> Any:
        y = x * 2
        return y[:1] * y[1:2]

    return [
        (
            "two rows of one tensor",
            product_of_rows,
            [x],
            48,
            [(96, "Two views of one storage: it lies in memory once."), (32, alive), (16, alive)],
        ),
        ("two tensors of one size", lambda: (x * 2) * (x * 3), [x], 96, [(48, sizes)]),
        (
            "the later rows of a parameter",
            lambda: x[1:] * (x * 2)[1:],
            [x],
            48,
            [(96, elsewhere)],
        ),
    ]


def weigh(fn: Callable[[], Any], params: list[Tensor]) -> int:
    """Return the bytes that autograd saves when fn() runs; params do not count."""
    return _weigh(fn, params, lambda tensor: tensor.untyped_storage().nbytes())


def _weigh(
    fn: Callable[[], Any],
    params: list[Tensor],
    size: Callable[[Tensor], int],
    key: Callable[[Tensor], int] = lambda tensor: tensor.untyped_storage().data_ptr(),
) -> int:
    kept: dict[int, int] = {}
    skip = {param.untyped_storage().data_ptr() for param in params}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in skip:
            kept[key(tensor)] = size(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return sum(kept.values())


def _views_twice(fn: Callable[[], Any], params: list[Tensor]) -> int:
    return _weigh(fn, params, lambda tensor: tensor.untyped_storage().nbytes(), Tensor.data_ptr)


def _with_params(fn: Callable[[], Any], params: list[Tensor]) -> int:
    return weigh(fn, params[:1])


def _in_numbers(fn: Callable[[], Any], params: list[Tensor]) -> int:
    return _weigh(fn, params, Tensor.numel)


def _view_only(fn: Callable[[], Any], params: list[Tensor]) -> int:
    return _weigh(fn, params, lambda tensor: tensor.nbytes)


def _returns_nothing(fn: Callable[[], Any], params: list[Tensor]) -> int:
    kept: dict[int, int] = {}
    skip = {param.untyped_storage().data_ptr() for param in params}

    def pack(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            kept[storage.data_ptr()] = storage.nbytes()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return sum(kept.values())


def _by_size(fn: Callable[[], Any], params: list[Tensor]) -> int:
    size = lambda tensor: tensor.untyped_storage().nbytes()  # noqa: E731
    return _weigh(fn, params, size, size)


def _views_of_params(fn: Callable[[], Any], params: list[Tensor]) -> int:
    """Leave out tensors that begin where a parameter begins."""
    kept: dict[int, int] = {}
    skip = {param.data_ptr() for param in params}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in skip:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return sum(kept.values())


WEIGH = (
    ("views counted twice", _views_twice, "it lies in memory once"),
    ("parameters counted", _with_params, "leave it out"),
    ("numbers for bytes", _in_numbers, "not bytes"),
    ("only the view weighed", _view_only, "whole storage"),
    ("pack returns nothing", _returns_nothing, "has to return it"),
    ("told apart by size", _by_size, "two storages"),
    ("a parameter's view counted", _views_of_params, "begins elsewhere"),
)
