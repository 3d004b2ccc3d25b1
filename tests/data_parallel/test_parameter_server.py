"""A parameter server: in lockstep the numbers of one process, and staleness counted exactly."""

import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.core import Link
from course_lib.data_parallel import ParameterServer, Update, loss_at, smoothed
from course_lib.ranks import RankError, Ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORLDS = (2, 3, 4)  # a server and 1 to 3 workers
# float64: the mean of the workers' means is summed in another order than the mean of all items
TOLERANCE = {"rtol": 1e-11, "atol": 1e-14}


def model():
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).double()


def batch(step, items=12):
    random = torch.Generator().manual_seed(step)
    x = torch.randn(items, 5, generator=random, dtype=torch.float64)
    return x, x[:, :3].tanh()


def part_of(rank, step):
    return [t.tensor_split(dist.get_world_size() - 1)[rank - 1] for t in batch(step)]


# --- synchronous: bulk-synchronous parallel


def rounds(rank, num_rounds=4):
    torch.manual_seed(10 + rank)
    mine = model()
    alone = model()
    alone.load_state_dict(mine.state_dict())
    server = ParameterServer(mine, torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9))

    def loss_of(module, step):
        x, y = part_of(rank, step)
        return F.mse_loss(module(x), y)

    updates = server.synchronous(loss_of, num_rounds)
    return updates, mine.state_dict(), alone_after(alone, num_rounds)


def alone_after(alone, num_rounds):
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(num_rounds):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = F.mse_loss(alone(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, alone.state_dict()


@pytest.mark.parametrize("p", WORLDS)
def test_synchronous_equals_one_process_on_the_whole_batch(pools, p):
    got = pools(p).run(rounds)
    updates, weights, (losses, expected) = got[0]
    torch.testing.assert_close(weights, expected, **TOLERANCE)
    assert [u.loss for u in updates] == pytest.approx(losses, rel=1e-12)
    assert all(u.workers == tuple(range(1, p)) and u.staleness == 0 for u in updates)
    for nothing, theirs, _ in got[1:]:
        assert nothing == []
        assert all(torch.equal(theirs[name], weights[name]) for name in weights)


# --- asynchronous


def single(rank, num_updates=5, order=None, **options):
    """A loss whose gradient is 10**rank everywhere: the weight tells who was applied how often."""
    weight = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(weight.weight)
    server = ParameterServer(weight, torch.optim.SGD(weight.parameters(), lr=1.0), **options)

    def loss_of(module, step):
        time.sleep(0.005)
        return module(torch.tensor([[10.0**rank]]).double()).sum()

    updates = server.asynchronous(loss_of, num_updates, order=order)
    return updates, round(-weight.weight.item())


def counted_from(updates):
    return sum(10**rank for update in updates for rank in update.workers)


def staleness_by_hand(updates):
    """Updates since this worker's last one: it pulled right after that."""
    pulled = {}
    for number, update in enumerate(updates):
        yield number - pulled.get(update.workers, 0)
        pulled[update.workers] = number + 1


@pytest.mark.parametrize("p", WORLDS)
def test_every_gradient_is_applied_once_and_its_staleness_counted(pools, p):
    got = pools(p).run(single, num_updates=9)
    updates, weight = got[0]
    assert len(updates) == 9
    assert weight == counted_from(updates)
    assert [u.staleness for u in updates] == list(staleness_by_hand(updates))
    assert all(theirs == weight for _, theirs in got)
    times = [u.time_s for u in updates]
    assert times == sorted(times)


def test_one_worker_is_never_stale(pools):
    updates, weight = pools(2).run(single)[0]
    assert [u.staleness for u in updates] == [0] * 5
    assert weight == 50


@pytest.mark.parametrize("p", WORLDS)
def test_in_lockstep_staleness_is_the_number_of_the_others(pools, p):
    w = p - 1
    updates, _ = pools(p).run(single, 4 * w, order=[*range(1, p)] * 4)[0]
    assert [u.staleness for u in updates] == [*range(w), *[w - 1] * (3 * w)]


def replayed(rank, order):
    torch.manual_seed(1)
    mine = model()
    server = ParameterServer(mine, torch.optim.SGD(mine.parameters(), lr=0.1))

    def loss_of(module, step):
        x, y = part_of(rank, step)
        return F.mse_loss(module(x), y)

    server.asynchronous(loss_of, len(order), order=order)
    torch.manual_seed(1)
    return mine.state_dict(), by_hand(model(), order)


def by_hand(alone, order):
    """The same in one process: a gradient of the weights that worker has pulled."""
    pulled = {rank: alone.state_dict() for rank in set(order)}
    pulled = {rank: {k: v.clone() for k, v in state.items()} for rank, state in pulled.items()}
    steps, worker = dict.fromkeys(order, 0), model()
    for rank in order:
        worker.load_state_dict(pulled[rank])
        worker.zero_grad()
        x, y = part_of(rank, steps[rank])
        F.mse_loss(worker(x), y).backward()
        with torch.no_grad():
            for param, theirs in zip(alone.parameters(), worker.parameters(), strict=True):
                param -= 0.1 * theirs.grad
        steps[rank] += 1
        pulled[rank] = {k: v.clone() for k, v in alone.state_dict().items()}
    return alone.state_dict()


def test_an_order_can_be_replayed(pools):
    for weights, expected in pools(3).run(replayed, [1, 2, 2, 2, 1, 2]):
        torch.testing.assert_close(weights, expected, **TOLERANCE)


# --- a straggler


def with_straggler(rank, method, count, straggler_s=0.15):
    weight = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
    server = ParameterServer(weight, optimizer, straggler=2, straggler_s=straggler_s)

    def loss_of(module, step):
        time.sleep(0.01)
        return module(torch.ones(1, 1).double()).sum()

    return getattr(server, method)(loss_of, count)


def test_a_straggler_is_stale_and_slows_only_rounds(pools):
    each = pools(3).run(with_straggler, "asynchronous", 30)[0]
    slow = [u.staleness for u in each if u.workers == (2,)]
    fast = [u.staleness for u in each if u.workers == (1,)]
    assert slow
    assert min(slow) > max(fast)
    rounds = pools(3).run(with_straggler, "synchronous", 4)[0]
    assert rounds[-1].time_s > 4 * 0.15  # a round is as long as its slowest worker
    per_gradient = rounds[-1].time_s / (4 * 2)
    assert each[-1].time_s / 30 < per_gradient / 2


# --- wires, buffers, trouble


def test_a_push_and_a_pull_for_every_gradient(pools):
    pools(3).run(single, 6, order=[1, 2] * 3)
    events = pools(3).events
    sent = [[e for e in events if (e.rank, e.kind) == (rank, "send")] for rank in range(3)]
    pushes = [e.num_bytes for rank in (1, 2) for e in sent[rank] if e.num_bytes > 8]
    assert pushes == [2 * 8] * 7  # a loss and a gradient; the last one came too late
    assert [e.num_bytes for e in sent[0]] == [2 * 8] * 7


def normed(rank):
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
    frozen = net[0].requires_grad_(False).weight.clone()
    server = ParameterServer(net, torch.optim.SGD(net.parameters(), lr=0.1))
    start = net[0].weight.clone()

    def loss_of(module, step):
        return F.mse_loss(module(part_of(rank, step)[0] + rank), part_of(rank, step)[1])

    server.synchronous(loss_of, 3)
    return torch.equal(start, net[0].weight), torch.equal(frozen, start), dict(net.named_buffers())


def test_buffers_travel_and_frozen_parameters_stay(pools):
    got = pools(3).run(normed)
    assert [same for same, _, _ in got] == [True] * 3
    assert [mine for _, mine, _ in got] == [True, False, False]  # all have the server's
    buffers = [buffers for _, _, buffers in got]
    assert buffers[0]["1.num_batches_tracked"] == 3
    assert all(torch.equal(b[k], buffers[0][k]) for b in buffers for k in b)


def test_it_waits_for_anyone_over_a_slow_wire():
    wire = Link(latency_s=0.02, bytes_per_s=1e6)
    with Ranks(3, link=wire) as ranks:
        updates, weight = ranks.run(single, 6)[0]
    assert weight == counted_from(updates)
    assert updates[-1].time_s > 3 * 2 * 0.02  # three gradients of each: push and pull


def loses_a_worker(rank):
    weight = nn.Linear(1, 1)
    server = ParameterServer(weight, torch.optim.SGD(weight.parameters(), lr=1.0))

    def loss_of(module, step):
        if rank == 2 and step == 1:
            raise ValueError("no more data")
        return module(torch.ones(1, 1)).sum()

    server.asynchronous(loss_of, 1000, order=[1, 2] * 500)


def test_a_worker_that_raises_ends_the_job(pools):
    with pytest.raises(RankError, match="rank 2 raised ValueError: no more data"):
        pools(3).run(loses_a_worker)


def alone(rank):
    ParameterServer(nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)], lr=1.0))


def test_a_server_without_workers_is_told(pools):
    with pytest.raises(RankError, match="MeshError: ParameterServer: need 2 ranks or more; got 1"):
        pools(1).run(alone)


def short_order(rank):
    single(rank, 5, order=[1, 1])


def test_an_order_that_is_too_short_is_told(pools):
    with pytest.raises(RankError, match="need a worker for each of 5 updates; got 2"):
        pools(2).run(short_order)


def test_losses_are_smoothed_and_read_at_a_moment():
    updates = [Update(workers=(1,), staleness=0, loss=4.0 - n, time_s=n + 1.0) for n in range(4)]
    assert smoothed(updates, 2) == [4.0, 3.5, 2.5, 1.5]
    assert smoothed(updates) == [4.0, 3.5, 3.0, 2.5]
    assert loss_at(updates, [0.5, 1.0, 2.9, 9.0]) == [4.0, 4.0, 3.5, 2.5]


def waits_for_nobody(rank):
    weight = nn.Linear(1, 1)
    server = ParameterServer(weight, torch.optim.SGD(weight.parameters(), lr=1.0))
    if rank == 0:
        server._next_request()


def test_a_server_that_waits_for_nobody_is_a_hang(pools):
    with pytest.raises(RankError) as caught:
        pools(3).run(waits_for_nobody)
    assert caught.value.kind == "hang"
    assert [wait.rank for wait in caught.value.waits] == [0]
