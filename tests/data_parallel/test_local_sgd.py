"""Local SGD: data parallelism with `every=1`, and 1 / every of its traffic."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.core import CourseError
from course_lib.data_parallel import LocalSGD, NaiveDDP

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# float64: mean(w - lr * g) rounds otherwise than w - lr * mean(g)
TOLERANCE = {"rtol": 1e-11, "atol": 1e-14}


def net():
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def trained(rank, wrap, num_steps=6, **options):
    """Parameters after each step, buffers in the end; each rank has data of its own."""
    torch.manual_seed(20 + rank)
    module = net()
    module[2].bias.requires_grad_(False)
    model = wrap(module, **options)
    optimizer, after = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(num_steps):
        x = torch.randn(6, 5).double() * 2**rank
        optimizer.zero_grad()
        F.mse_loss(model(x), x[:, :3].tanh()).backward()
        if hasattr(model, "finish"):
            model.finish()
        optimizer.step()
        if hasattr(model, "step_done"):
            model.step_done()
        after.append([param.detach().clone() for param in module.parameters()])
    return after, [buffer.clone() for buffer in module.buffers()]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_averaging_after_each_step_is_data_parallelism(pools, p):
    ours = pools(p).run(trained, LocalSGD, every=1)
    theirs = pools(p).run(trained, NaiveDDP)
    for (mine, _), (wanted, _) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, **TOLERANCE)


def test_replicas_drift_apart_and_meet_every_few_steps(pools):
    (first, first_buffers), (second, second_buffers) = pools(2).run(trained, LocalSGD, every=3)
    same = [all(map(torch.equal, *pair)) for pair in zip(first, second, strict=True)]
    assert same == [False, False, True, False, False, True]
    assert all(map(torch.equal, first_buffers, second_buffers))
    assert all(torch.equal(step[-1], first[0][-1]) for step in (*first, *second))  # frozen


def linear_steps(rank, every, num_steps=4):
    """Gradients that do not depend on the weight: rank r steps by -10**r each time."""
    model = LocalSGD(nn.Linear(1, 1, bias=False).double(), every)
    nn.init.zeros_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    talks = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.tensor([[10.0**rank]]).double()).sum().backward()
        optimizer.step()
        talks.append(model.step_done())
    return talks, model.module.weight.item()


def test_the_mean_over_ranks_is_taken_once_in_a_while(pools):
    got = pools(3).run(linear_steps, 2)
    assert all(talks == [False, True, False, True] for talks, _ in got)
    assert [weight for _, weight in got] == pytest.approx([-4 * 111 / 3] * 3)
    with_rest = [weight for _, weight in pools(3).run(linear_steps, 3)]
    assert with_rest == pytest.approx([-111 - 1, -111 - 10, -111 - 100])


@pytest.mark.parametrize("every", [1, 2, 3, 6])
def test_the_bytes_are_one_in_every(pools, every):
    def reduced_bytes(wrap, **options):
        pools(2).run(trained, wrap, **options)
        events = [e for e in pools(2).events if (e.rank, e.kind) == (0, "all_reduce")]
        return sum(e.num_bytes for e in events)

    buffers = 2 * 4 * 8  # the running mean and variance, which are averaged too
    each_step = reduced_bytes(NaiveDDP) + 6 * buffers
    assert reduced_bytes(LocalSGD, every=every) * every == each_step


def counters(rank):
    model = LocalSGD(nn.BatchNorm1d(2).double(), 1)
    for _ in range(rank + 1):
        model(torch.randn(3, 2).double() + 10.0**rank)
    before = model.module.running_mean.clone()
    model.step_done()
    dist.all_reduce(before)
    torch.testing.assert_close(model.module.running_mean, before / 2)
    return int(model.module.num_batches_tracked)


def test_counters_stay_a_ranks_own(pools):
    assert pools(2).run(counters) == [1, 2]


def test_never_to_average_is_told():
    with pytest.raises(CourseError, match="need every >= 1; got 0"):
        LocalSGD(nn.Linear(1, 1), 0)
