"""Hooks that send fewer bytes: as many as the formula says, and nothing is lost for good."""

import math
import sys

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib.ddp import DDP, PowerSGD, TopK, bf16_hook
from course_lib.ranks import record
from tests.refusals import assert_refused

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = (1, 2, 3, 4)
HOOKS = {
    "bf16": lambda: bf16_hook,
    "top k": lambda: TopK(0.1),
    "PowerSGD": lambda: PowerSGD(2),
}


def net():
    """Matrices of 16 x 12, 20 x 16 and 4 x 20, with biases; and a kernel of 4 dims."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.Flatten(),
        nn.Linear(72, 16),
        nn.Tanh(),
        nn.Linear(16, 20),
        nn.Tanh(),
        nn.Linear(20, 4),
    ).double()


def batch(rank):
    torch.manual_seed(10 + rank)
    return torch.randn(8, 12).double(), torch.randn(8, 4).double()


def train(rank, hook, steps, lr=0.05, build=net, **options):
    """Losses, weights, and the sums over steps of this rank's own and the agreed gradients."""
    module, alike = build(), build()  # `alike` computes this rank's gradient with nobody else
    model = DDP(module, comm_hook=hook, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    own = [torch.zeros_like(bucket.flat) for bucket in model.buckets]
    agreed = [torch.zeros_like(bucket.flat) for bucket in model.buckets]
    inputs, targets = batch(rank)
    losses = []
    for _ in range(steps):
        alike.load_state_dict(module.state_dict())
        alike.zero_grad()
        F.mse_loss(alike(inputs), targets).backward()
        grads = {name: param.grad for name, param in alike.named_parameters()}
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        model.finish()
        for bucket, mine, ours in zip(model.buckets, own, agreed, strict=True):
            mine += torch.cat([grads[name].flatten() for name in bucket.names])
            ours += bucket.flat
        optimizer.step()
        losses.append(loss.item())
    weights = [param.detach().clone() for param in module.parameters()]
    return losses, weights, own, agreed, [bucket.flat for bucket in model.buckets]


def plain(rank, steps, **options):
    return train(rank, None, steps, **options)


# --- every hook


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", HOOKS)
def test_all_ranks_have_the_same_bits(pools, name, world_size):
    by_rank = pools(world_size).run(train, HOOKS[name](), steps=3, bucket_bytes=4000)
    for _, weights, _, agreed, _ in by_rank[1:]:
        assert all(map(torch.equal, weights + agreed, by_rank[0][1] + by_rank[0][3]))


@pytest.mark.parametrize("name", HOOKS)
def test_training_gets_about_as_far(pools, name):
    losses = [found[0] for found in pools(2).run(plain, steps=60)]
    compressed = [found[0] for found in pools(2).run(train, HOOKS[name](), steps=60)]
    fell = [np.mean([loss[0] - loss[-1] for loss in found]) for found in (losses, compressed)]
    assert fell[0] > 0.1
    assert fell[1] > 0.8 * fell[0]


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_works_in_several_buckets_without_overlap_and_on_one_rank(pools, name):
    options = {"steps": 2, "bucket_bytes": 4000}
    early = pools(2).run(train, HOOKS[name](), **options)
    late = pools(2).run(train, HOOKS[name](), overlap=False, **options)
    assert all(map(torch.equal, early[0][1], late[0][1]))


# --- bytes against the formula


def traffic(rank, hook, build=net):
    """(kind, bytes) of the messages of the second step."""
    model = DDP(build(), comm_hook=hook)
    for _ in range(2):
        model.zero_grad()
        with record() as log:
            model(batch(rank)[0]).sum().backward()
            model.finish()
    events = sorted((e for e in log.events if e.kind != "wait"), key=lambda e: e.start_s)
    return [(event.kind, event.num_bytes) for event in events]


NUMEL = sum(param.numel() for param in net().parameters())


@pytest.mark.parametrize("world_size", SIZES)
def test_bf16_sends_two_bytes_a_number(pools, world_size):
    assert pools(world_size).run(traffic, bf16_hook) == [[("all_reduce", 2 * NUMEL)]] * world_size


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("fraction", [0.01, 0.3, 1.0])
def test_top_k_sends_k_numbers_and_k_places(pools, fraction, world_size):
    k = math.ceil(fraction * NUMEL)
    wanted = [("all_gather", world_size * k * 8), ("all_gather", world_size * k * 4)]
    assert pools(world_size).run(traffic, TopK(fraction)) == [wanted] * world_size


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("rank", [1, 3])
def test_power_sgd_sends_two_factors_and_the_rest(pools, rank, world_size):
    shapes = [(6, 9), (16, 72), (20, 16), (4, 20)]
    shapes = [(n, m) for n, m in shapes if min(rank, n, m) * (n + m) < n * m]
    rest = NUMEL - sum(n * m for n, m in shapes)
    wanted = [sum(rank * n for n, _ in shapes), rest, sum(rank * m for _, m in shapes)]
    found = pools(world_size).run(traffic, PowerSGD(rank))
    assert found == [[("all_reduce", 8 * count) for count in wanted]] * world_size
    assert sum(wanted) < NUMEL


# --- numbers


def test_bf16_rounds_once_on_the_way_there_and_once_in_the_sum(pools):
    wanted, got = pools(2).run(plain, steps=1)[0][3], pools(2).run(train, bf16_hook, steps=1)[0][3]
    assert not torch.equal(wanted[0], got[0])
    # 8 bits: each number is off by at most 2**-9 of itself, the sum once more; they may cancel
    largest = max(own.abs().max() for _, _, (own,), _, _ in pools(2).run(plain, steps=1))
    torch.testing.assert_close(got, wanted, rtol=0, atol=2 * 2**-8 * largest.item())


def test_top_k_by_hand(pools):
    def step(rank):
        grad, hook = torch.tensor([[5.0, -1, 2, 0], [1, 3, -4, 2]])[rank], TopK(0.5)
        bucket, found = torch.zeros(4), []
        for _ in range(2):
            bucket.copy_(grad)
            hook(bucket, None).wait()
            found.append(bucket.tolist())
        return found, hook.residuals[bucket].tolist()

    # rank 0 sends 5 and 2, rank 1 sends 3 and -4; then 5 and -2 (= -1 - 1), and -4 and 4 (= 2 + 2)
    means = [[2.5, 1.5, -1.0, 0.0], [2.5, -1.0, -2.0, 2.0]]
    assert pools(2).run(step) == [(means, [0.0, 0.0, 2.0, 0.0]), (means, [2.0, 3.0, 0.0, 0.0])]


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("hook", [TopK(1.0), PowerSGD(1000, min_rate=0.0)], ids=["top k", "power"])
def test_all_of_it_is_the_mean(pools, hook, world_size):
    wanted = pools(world_size).run(plain, steps=3, bucket_bytes=4000)
    found = pools(world_size).run(train, hook, steps=3, bucket_bytes=4000)
    # float64: a sum in another order; for PowerSGD two products with an orthogonal matrix besides
    for got, plain_ones in zip(found, wanted, strict=True):
        torch.testing.assert_close(got[1], plain_ones[1], rtol=1e-9, atol=1e-12)


def left_out(rank, hook, steps):
    """What this rank had to send, what all agreed on, and what is left: one tensor each."""
    *_, own, agreed, flats = train(rank, hook, steps)
    if isinstance(hook, TopK):
        return own[0], agreed[0], hook.residuals[flats[0]]
    (part,) = hook._parts.values()
    flats[0].zero_()
    for matrix, residual in zip(part.matrices, part.residuals, strict=True):
        matrix.copy_(residual)
    return own[0], agreed[0], flats[0]


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", ["top k", "PowerSGD"])
def test_what_was_sent_and_what_is_left_are_the_gradients(pools, name, world_size):
    by_rank = pools(world_size).run(left_out, HOOKS[name](), steps=5)
    own, left = (sum(found[i] for found in by_rank) / world_size for i in (0, 2))
    agreed = by_rank[0][1]
    assert left.norm() > 0.1 * own.norm(), "nothing was left out: nothing was tested"
    torch.testing.assert_close(agreed + left, own, rtol=1e-9, atol=1e-12)


def same_gradient(rank, hook, steps):
    """The error of the agreed gradient in each step, where the gradient stays as it is."""
    module = nn.Linear(30, 20, bias=False).double()
    model = DDP(module, comm_hook=hook)
    torch.manual_seed(5)
    target = torch.randn(20, 30).double() @ torch.diag(0.7 ** torch.arange(30.0).double())
    errors = []
    for _ in range(steps):
        model.zero_grad()
        (module.weight * target * (rank + 1)).sum().backward()
        model.finish()
        mean = target * (dist.get_world_size() + 1) / 2
        errors.append(((module.weight.grad - mean).norm() / mean.norm()).item())
    return errors


def test_a_matrix_of_that_rank_arrives_whole_and_a_warm_start_comes_nearer(pools):
    class NoFeedback(PowerSGD):
        def __call__(self, flat, group):
            for residual in self.residuals:
                residual.zero_()
            return super().__call__(flat, group)

    errors = pools(2).run(same_gradient, NoFeedback(2), steps=6)[0]
    best = math.sqrt(sum(0.49**k for k in range(2, 30)) / sum(0.49**k for k in range(30)))
    assert errors[0] > 1.02 * errors[-1]
    assert errors[-1] < 1.3 * best, "about the best that two columns can do"
    whole = pools(2).run(same_gradient, PowerSGD(20, min_rate=0.0), steps=1)[0]
    assert whole[0] < 1e-12


def their_power_sgd(rank, steps, seed, min_rate):
    """torch's PowerSGD: weights after each step."""
    module = net()
    model = DistributedDataParallel(module)
    state = theirs.PowerSGDState(
        None,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        min_compression_rate=min_rate,
        random_seed=seed,
    )
    model.register_comm_hook(state, theirs.powerSGD_hook)
    return weights_of_each_step(rank, model, module, steps)


def our_power_sgd(rank, steps, seed, min_rate):
    """Ours, with their first two steps as plain means, and their random numbers."""
    draw = int(np.random.RandomState(seed).randint(1_000_000_000))
    module = net()
    model = DDP(module, comm_hook=PowerSGD(2, start_step=2, min_rate=min_rate, seed=draw))
    return weights_of_each_step(rank, model, module, steps)


def weights_of_each_step(rank, model, module, steps):
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.05), []
    inputs, targets = batch(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        if isinstance(model, DDP):
            model.finish()
        optimizer.step()
        found.append([param.detach().clone() for param in module.parameters()])
    return found


@pytest.mark.parametrize("min_rate", [1.0, 2.0])
def test_power_sgd_has_the_numbers_of_torch(pools, min_rate):
    ours, torchs = (
        pools(2).run(run, steps=8, seed=7, min_rate=min_rate)
        for run in (our_power_sgd, their_power_sgd)
    )
    # float64: QR here, Gram-Schmidt there; the plane that P spans is the same
    torch.testing.assert_close(ours, torchs, rtol=1e-9, atol=1e-11)


# --- what goes wrong is told


REFUSED = [
    *(
        ("TopK: need 0 < fraction <= 1; got", lambda rank, fraction=fraction: TopK(fraction))
        for fraction in (0, -0.1, 1.5, math.nan)
    ),
    ("PowerSGD: need a rank of 1 or more; got 0", lambda rank: PowerSGD(0)),
    ("PowerSGD: need the shapes of the gradients", lambda rank: PowerSGD(2)(torch.zeros(3), None)),
]


def test_what_cannot_be_is_told_in_one_sentence(pools):
    assert_refused(pools(1), REFUSED)
