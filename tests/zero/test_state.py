"""State cut into pieces and joined again: nothing is lost, and counters are never cut."""

import pytest
import torch

from course_lib.zero import FlatLayout
from course_lib.zero.state import (
    cut_state,
    join_state,
    numbered_groups,
    on_host,
)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_what_is_cut_is_joined_to_the_same(p):
    wanted = {"exp_avg": torch.randn(3, 4), "step": torch.tensor(7.0), "name": "Adam"}
    found = []
    for rank in reversed(range(p)):
        for piece in FlatLayout(((3, 4),), p).pieces(rank):
            state = {key: cut_state(key, value, piece, torch.zeros(1, dtype=torch.float64))
                     for key, value in wanted.items()}  # fmt: skip
            found.append((piece.start, state))
    whole = join_state(found, (3, 4))
    torch.testing.assert_close(whole.pop("exp_avg"), wanted.pop("exp_avg").double())
    assert whole == wanted


def test_groups_are_numbered_as_a_plain_optimizer_saves_them():
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 1.0}], lr=0.1)
    assert numbered_groups(optimizer.param_groups) == optimizer.state_dict()["param_groups"]


def test_a_host_copy_shares_nothing():
    tensor = torch.ones(2, requires_grad=True)
    copy = on_host(tensor)
    copy += 1
    assert (tensor.tolist(), copy.requires_grad, on_host("lr")) == ([1.0, 1.0], False, "lr")
