"""Steps that are compared take turns, each from gradients of its own."""

import sys

import cloudpickle
import torch
from torch import nn

from course_lib.turns import in_turns

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def taken(rank):
    """In which order two steps ran, what gradient each left, and what was timed."""
    order, modules = [], {name: nn.Linear(1, 1, bias=False) for name in ("ours", "theirs")}

    def step(name):
        order.append(name)
        modules[name](torch.ones(1)).backward()

    seconds = in_turns({n: (m, lambda n=n: step(n)) for n, m in modules.items()}, turns=2)
    return order, [module.weight.grad.item() for module in modules.values()], seconds


def test_steps_take_turns_and_begin_without_gradients(pools):
    for order, grads, seconds in pools(2).run(taken):
        assert order == ["ours", "theirs"] * 3
        assert grads == [1.0, 1.0]
        assert list(seconds) == ["ours", "theirs"]
        assert all(value > 0 for value in seconds.values())
