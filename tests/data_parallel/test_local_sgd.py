"""Local SGD and DiLoCo: data parallelism with `every=1`, and 1 / every of its traffic."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.core import CourseError
from course_lib.data_parallel import DiLoCo, LocalSGD, NaiveDDP, outer_step
from tests.law.law import LENGTHS, WORLDS, Replicas, assert_laws, every_module, lasting
from tests.refusals import assert_refused

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


PLAIN = {"outer_lr": 1.0, "momentum": 0.0}  # the outer step is then the mean


class Local(Replicas):
    """With plain SGD, the mean of stepped weights is a step with the mean gradient."""

    name = "LocalSGD"
    reports = ("output", "state")

    def wrap(self, module):
        return LocalSGD(module, every=1)

    def finish(self):
        pass

    def step(self):
        super().step()
        self.model.step_done()


class Outer(Local):
    name = "DiLoCo"

    def wrap(self, module):
        return DiLoCo(module, every=1, **PLAIN)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("p", WORLDS)
@pytest.mark.parametrize("method", [Local, Outer])
def test_averaging_after_each_step_has_the_numbers_of_one_process(pools, method, p, length):
    assert_laws(pools(p).run, method, lasting(length, every_module(optimizer="plain sgd")))


@pytest.mark.parametrize("wrap", [LocalSGD, DiLoCo])
def test_replicas_drift_apart_and_meet_every_few_steps(pools, wrap):
    (first, first_buffers), (second, second_buffers) = pools(2).run(trained, wrap, every=3)
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


@pytest.mark.parametrize("wrap", [LocalSGD, DiLoCo])
def test_never_to_average_is_told(wrap):
    with pytest.raises(CourseError, match=f"{wrap.__name__}: need every >= 1; got 0"):
        wrap(nn.Linear(1, 1), 0)


def later(wrap, change, frozen=False):
    """Two rounds, and a change of the module between them: its first layer's bias."""

    def broken(rank):
        module = net()
        module[0].bias.requires_grad_(not frozen)
        model = wrap(module, every=1)
        model.average()
        change(module)
        with torch.no_grad():
            module[0].weight.add_(1)
        model.average()
        return module[0].bias

    return broken


def late_layer(module):
    module.append(nn.Linear(3, 3).double())


def test_what_is_not_in_the_first_round_is_told(pools):
    table = [
        ("LocalSGD: need the parameters to train when", later(LocalSGD, late_layer)),
        ("DiLoCo: need the parameters to train when", later(DiLoCo, late_layer)),
        (
            "got 0.bias later",
            later(DiLoCo, lambda module: module.requires_grad_(True), frozen=True),
        ),
    ]
    assert_refused(pools(2), table)


def test_diloco_leaves_alone_what_is_frozen_meanwhile(pools):
    """Without a gradient, momentum does not move it either."""

    def moved(rank):
        module = net()
        model = DiLoCo(module, every=1)
        with torch.no_grad():
            module[0].bias.add_(1)
        model.average()
        before = module[0].bias.detach().clone()
        module[0].bias.requires_grad_(False)
        model.average()
        return (module[0].bias - before).abs().max().item()

    assert pools(2).run(moved) == [0.0, 0.0]


# --- DiLoCo


@pytest.mark.parametrize("every", [2, 3])
def test_diloco_with_a_plain_outer_step_is_local_sgd(pools, every):
    ours = pools(3).run(trained, DiLoCo, every=every, **PLAIN)
    theirs = pools(3).run(trained, LocalSGD, every=every)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


def one_process(rank, p, every, outer_lr, momentum, num_steps=6):
    """DiLoCo of p workers by hand, in one process: the parameters after each step, by worker."""
    workers, random = [], []
    for worker in range(p):
        torch.manual_seed(20 + worker)
        module = net()
        module[2].bias.requires_grad_(False)
        random.append(torch.get_rng_state())
        workers.append(module)
        module.load_state_dict(workers[0].state_dict())
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in workers]
    start = [param.detach().clone() for param in workers[0].parameters()]
    velocity, after = [torch.zeros_like(x) for x in start], [[] for _ in range(p)]
    for step in range(num_steps):
        for worker, module in enumerate(workers):
            torch.set_rng_state(random[worker])
            x = torch.randn(6, 5).double() * 2**worker
            random[worker] = torch.get_rng_state()
            optimizers[worker].zero_grad()
            F.mse_loss(module(x), x[:, :3].tanh()).backward()
            optimizers[worker].step()
        if (step + 1) % every == 0:
            with torch.no_grad():
                for i, replicas in enumerate(zip(*(m.parameters() for m in workers), strict=True)):
                    gradient = start[i] - sum(replicas) / p
                    velocity[i] = momentum * velocity[i] + gradient
                    start[i] -= outer_lr * (gradient + momentum * velocity[i])
                    for param in replicas:
                        param.copy_(start[i])
        for worker, module in enumerate(workers):
            after[worker].append([param.detach().clone() for param in module.parameters()])
    return after


@pytest.mark.parametrize("p", WORLDS)
@pytest.mark.parametrize("every", [1, 2])
def test_diloco_is_the_one_process_version(pools, p, every):
    options = {"every": every, "outer_lr": 0.7, "momentum": 0.9}
    got = pools(p).run(trained, DiLoCo, **options)
    wanted = one_process(0, p, **options)
    for (mine, _), by_hand in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, by_hand, **TOLERANCE)


@pytest.mark.parametrize("every", [1, 3])
def test_diloco_sends_the_bytes_of_local_sgd(pools, every):
    sizes = []
    for wrap in (LocalSGD, DiLoCo):
        pools(2).run(trained, wrap, every=every)
        events = [e for e in pools(2).events if (e.rank, e.kind) == (0, "all_reduce")]
        sizes.append([e.num_bytes for e in events])
    assert sizes[0] == sizes[1]


def with_adam(rank):
    """Any optimizer may take the outer step."""
    start, param = torch.zeros(2), nn.Parameter(torch.tensor([-1.0, 3.0]) * 10**rank)
    outer_step([start], [param], torch.optim.Adam([start], lr=0.5))
    return start.tolist(), param.tolist(), param.requires_grad


def test_the_outer_optimizer_may_be_another_one(pools):
    for start, param, trains in pools(2).run(with_adam):
        assert start == param == pytest.approx([-0.5, 0.5])  # toward the mean of the parameters
        assert trains
