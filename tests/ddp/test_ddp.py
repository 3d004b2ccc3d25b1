"""DDP with buckets: the numbers of one process, in as many messages as the formula says."""

import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib.core import CourseError, ModelSpec
from course_lib.ddp import DDP, Mean, make_buckets
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import RankError, record, span
from tests.law.law import (
    LENGTHS,
    WORLDS,
    Law,
    Replicas,
    assert_laws,
    assert_laws_in_groups,
    every_module,
    lasting,
    ways,
)
from tests.law.modules import HARD, Choice
from tests.refusals import assert_refused

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# float64: the sum over items runs in another order, and the mean over ranks rounds once more
TOLERANCE = {"rtol": 1e-11, "atol": 1e-14}
SPEC = ModelSpec(hidden=16, num_layers=2, num_heads=2, ffn_hidden=32, vocab=40, max_seq=6)


def mlp():
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))


def numbers(items):
    return HARD["in place"].batch(items, 0)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def numbers_of(module):
    """Gradients and weights, copied."""
    grads = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    return grads, [p.detach().clone() for p in module.parameters()]


# --- the law: the numbers of one process


class Bucketed(Replicas):
    name = "DDP"
    cls = DDP

    def wrap(self, module):
        return self.cls(module, **{"find_unused": True, **self.options})


SENDING = [
    {"overlap": False},
    {"bucket_bytes": 1},
    {"bucket_bytes": float("inf")},
    {"find_unused": False, "clip": 0.05, "optimizer": "adamw"},
    *({"parts": 2, "no_sync": True, "overlap": overlap} for overlap in (True, False)),
    *({"items": items} for items in (2, 7, 13)),
]
LAWS = [*every_module(bucket_bytes=300), *ways(["in place"], SENDING)]
LAWS += ways(["choice"], [one for one in SENDING if "find_unused" not in one], bucket_bytes=100)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_ddp_has_the_numbers_of_one_process(pools, world_size, length):
    assert_laws(pools(world_size).run, Bucketed, lasting(length, LAWS))


def test_each_group_trains_for_itself(pools):
    assert_laws_in_groups(pools(4), Bucketed, [Law("odd", clip=0.05), Law("odd", items=7)])


class NeverWaits(Mean):
    def wait(self):
        self.flat.div_(self.p)


class Sums(Mean):
    def wait(self):
        self.work.wait()


class ForgetsTheLastBucket(DDP):
    def _launch(self):
        if len(self._works) < len(self.buckets) - 1:
            return super()._launch()
        self._works.append(Done())
        self.buckets[-1].launched_at = self.buckets[-1].flat._version


class Done:
    def wait(self):
        pass


class OwnStart(DDP):
    def __init__(self, module, **options):
        own = [param.detach().clone() for param in module.parameters()]
        super().__init__(module, **options)
        for param, value in zip(module.parameters(), own, strict=True):
            param.data.copy_(value)


class Late(Bucketed):
    """Rank 1 comes late: who does not wait for it goes on without it."""

    def run(self):
        time.sleep(0.2 * self.rank)
        found = super().run()
        time.sleep(0.2)
        return found


PLANTED = {
    "never waits": (Late, {"comm_hook": NeverWaits, "find_unused": False}),
    "sums": (Bucketed, {"comm_hook": Sums}),
    "forgets the last bucket": (type("Forgets", (Bucketed,), {"cls": ForgetsTheLastBucket}), {}),
    "own start": (type("OwnStarts", (Bucketed,), {"cls": OwnStart}), {}),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_broken_ddp_fails_the_law(pools, planted):
    method, options = PLANTED[planted]
    law = Law("in place", options={"bucket_bytes": 100, **options})
    with pytest.raises(AssertionError, match=r"off by|differs between ranks"):
        assert_laws(pools(2).run, method, [law])


def norm_net():
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def with_batch_norm(rank, wrap, **options):
    """Buffers seen in each forward, and gradients, weights and buffers after each of 3 steps."""
    torch.manual_seed(rank)
    module = norm_net()
    module[1].register_buffer("own", torch.full((2,), 10.0**rank))
    model, optimizer, found = wrap(module, **options), sgd(module), []
    seen = []
    module.register_forward_pre_hook(lambda m, _: seen.append([b.clone() for b in m.buffers()]))
    x, y = (whole.tensor_split(dist.get_world_size())[rank] for whole in numbers(24))
    for _ in range(3):
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) + F.mse_loss(model(-x), y)).backward()
        if wrap is DDP:
            model.finish()
        optimizer.step()
        found.append((*numbers_of(module), [buffer.clone() for buffer in module.buffers()]))
    return seen, found


@pytest.mark.parametrize("world_size", WORLDS)
def test_everybody_computes_with_the_first_ranks_buffers(pools, world_size):
    by_rank = pools(world_size).run(with_batch_norm, DDP)
    for seen, _ in by_rank:
        for got, first in zip(seen, by_rank[0][0], strict=True):
            assert all(map(torch.equal, got, first))
    mean, *_ = (found[0][2][0] for _, found in by_rank)
    assert world_size == 1 or not torch.equal(mean, by_rank[1][1][0][2][0])


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_batch_norm_has_the_numbers_of_torch_ddp(pools, world_size, broadcast):
    options = {"forward_sync_buffers": broadcast}
    ours = pools(world_size).run(with_batch_norm, DDP, broadcast_buffers=broadcast)
    theirs = pools(world_size).run(with_batch_norm, DistributedDataParallel, **options)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_a_buffer_that_backward_needs_may_be_sent_meanwhile(pools):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()
            self.register_buffer("scale", torch.full((3,), 3.0))

        def forward(self, x):
            return self.inner(x) * self.scale

    def two_passes(rank):
        model = DDP(Scaled())
        for _ in range(2):
            (model(torch.ones(2, 5)) + model(torch.zeros(2, 5))).sum().backward()
            model.finish()

    pools(2).run(two_passes)


# --- modules that torch DDP takes, in float32 and bfloat16


class Mixed(nn.Module):
    """A bfloat16 layer between two of float32."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.middle = nn.Linear(6, 6).bfloat16()
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.middle(self.first(x).bfloat16()).float())


def with_mixed(rank, wrap):
    torch.manual_seed(rank)
    module = Mixed()
    model, optimizer, found = wrap(module), sgd(module), []
    x, y = (t.float().tensor_split(dist.get_world_size())[rank] for t in numbers(24))
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if wrap is DDP:
            model.finish()
        optimizer.step()
        found.append(numbers_of(module))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_two_dtypes_have_the_numbers_of_torch_ddp(pools, world_size):
    ours, theirs = (pools(world_size).run(with_mixed, w) for w in (DDP, DistributedDataParallel))
    if world_size <= 2:  # sums of two, and their halves: the same bits in any order
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    # bfloat16 keeps 8 bits, and the order of four numbers in a sum is gloo's choice
    torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-10)


def train_gpt(rank, spec, wrap, **options):
    """Gradients after each of 3 steps in float32, and the all-reduces of the last step."""
    torch.manual_seed(rank)
    module = GPT(spec)
    model, optimizer, found = wrap(module, **options), sgd(module), []
    for step in range(3):
        batch = token_batch(step, batch=4, seq=spec.max_seq, vocab=spec.vocab)
        x, y = (t.tensor_split(dist.get_world_size())[rank] for t in next_tokens(batch))
        optimizer.zero_grad()
        with record() as log, span("backward"):
            token_loss(model(x), y).backward()
            if wrap is DDP:
                model.finish()
        found.append(numbers_of(module)[0])
        optimizer.step()
    return found, sizes_of(log)


def sizes_of(log):
    events = [event for event in log.events if event.kind == "all_reduce"]
    return [event.num_bytes for event in sorted(events, key=lambda event: event.start_s)]


def test_gpt_has_the_bits_of_torch_ddp_on_two_ranks(pools):
    ours = pools(2).run(train_gpt, SPEC, DDP, bucket_bytes=4096)
    theirs = pools(2).run(train_gpt, SPEC, DistributedDataParallel, bucket_cap_mb=4096 / 2**20)
    for (got, _), (wanted, _) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert sum(ours[0][1]) == sum(theirs[0][1])


# --- behaviour: number, order and bytes of the messages


def one_step(rank, build, wrap=DDP, steps=1, **options):
    """Spans and all-reduces of the last of some steps."""
    module = build()
    model = wrap(module, **options)
    for _ in range(steps):
        module.zero_grad()
        with record() as log:
            with span("forward"):
                loss = model(torch.full((2, module[0].in_features), 10.0**rank)).sum()
            with span("backward"):
                loss.backward()
            if wrap is DDP:
                model.finish()
    buckets = model.buckets if wrap is DDP else []
    return log.events, [(bucket.names, bucket.num_bytes) for bucket in buckets]


def even_layers():
    """Eight layers of 16 KiB, all alike."""
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))


def all_reduces(events):
    found = [event for event in events if event.kind == "all_reduce"]
    return sorted(found, key=lambda event: event.start_s)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_leave_before_backward_ends(pools, overlap, world_size):
    options = {"bucket_bytes": 2 * 16 * 2**10, "overlap": overlap}
    for events, buckets in pools(world_size).run(one_step, even_layers, **options):
        (backward,) = (event for event in events if event.kind == "backward")
        sent = all_reduces(events)
        assert [event.num_bytes for event in sent] == [2**15] * 4 == [b[1] for b in buckets]
        assert buckets[0][0] == ["7.weight", "6.weight"], "the last layer's gradient comes first"
        assert all((event.start_s < backward.end_s) is overlap for event in sent)
        assert all(event.start_s > backward.start_s for event in sent)
        assert all(event.group == tuple(range(world_size)) for event in sent)


@pytest.mark.parametrize(
    ("bucket_bytes", "sizes"),
    [
        (1, [12, 84, 28, 140]),  # a bucket a parameter: bias 3, weight 3 x 7, bias 7, weight 7 x 5
        (95, [12, 84, 28, 140]),
        (96, [96, 28, 140]),
        (124, [124, 140]),  # what is larger than a bucket has its own, and nothing is cut
        (263, [124, 140]),
        (264, [264]),
        (float("inf"), [264]),
    ],
)
def test_a_bucket_takes_what_fits(bucket_bytes, sizes):
    assert [bucket.num_bytes for bucket in make_buckets(mlp(), bucket_bytes)] == sizes


def test_dtypes_have_buckets_of_their_own_which_leave_when_they_are_full():
    sizes = [(bucket.names, bucket.num_bytes) for bucket in make_buckets(Mixed(), 1000)]
    assert sizes == [
        (["middle.bias", "middle.weight"], 2 * 42),  # full while the other waits for first.weight
        (["last.bias", "last.weight", "first.bias", "first.weight"], 4 * (21 + 36)),
    ]


def test_tied_and_frozen_parameters_are_not_sent_twice_nor_at_all():
    model = GPT(SPEC)
    model.blocks[0].requires_grad_(False)
    (bucket,) = make_buckets(model, float("inf"))
    trained = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    assert bucket.num_bytes == trained
    assert bucket.names[-1] == "embedding.weight"
    assert not any("blocks.0" in name for name in bucket.names)


def test_the_buckets_of_torch_ddp_where_the_rules_coincide(pools):
    cap = 2 * 16 * 2**10
    ours = pools(2).run(one_step, even_layers, bucket_bytes=cap, steps=3)
    theirs = pools(2).run(torch_buckets, even_layers, cap)
    for (events, _), (their_events, rebuilt) in zip(ours, theirs, strict=True):
        sizes = [event.num_bytes for event in all_reduces(events)]
        assert sizes == [event.num_bytes for event in all_reduces(their_events)] == rebuilt


def torch_buckets(rank, build, cap):
    events = []

    def wrap(module, **options):
        events.append(DistributedDataParallel(module, bucket_cap_mb=cap / 2**20))
        return events[0]

    found, _ = one_step(rank, build, wrap, steps=3)
    sizes = events[0]._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return found, [int(size) for size in sizes.split(",")]


def test_unused_parameters_cost_a_byte_each_to_find(pools):
    for events, buckets in pools(2).run(one_step, even_layers, find_unused=True):
        assert [event.num_bytes for event in all_reduces(events)] == [8 * 2**14, 8]
        assert len(buckets) == 1


class EitherOrder(nn.Module):
    """Two layers that do not stand on each other: their gradients come in an order of choice."""

    def __init__(self, first):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 4)])
        self.first = first

    def forward(self, x):
        order = (self.first, 1 - self.first)
        return sum(self.layers[number](x).sum() for number in order)


def test_buckets_leave_in_one_order_whatever_comes_first(pools):
    def step(rank):
        model, came = DDP(EitherOrder(first=rank), bucket_bytes=1), []
        for name, param in model.module.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
        with record() as log:
            model(torch.ones(2, 3)).backward()
            model.finish()
        return came, [event.num_bytes for event in all_reduces(log.events)]

    (came, sizes), (other_came, other_sizes) = pools(2).run(step)
    assert came != other_came, "the ranks' gradients came in the same order: nothing was tested"
    assert sizes == other_sizes == [16, 48, 12, 36]


def test_accumulation_sends_once(pools):
    def steps(rank):
        module = nn.Linear(3, 1, bias=False)
        module.register_buffer("own", torch.ones(2))
        model = DDP(module)
        with record() as log:
            for _ in range(2):
                module.zero_grad()
                for micro_batch in range(4):
                    with model.no_sync() if micro_batch < 3 else record():
                        model(torch.full((1, 3), 10.0**rank)).sum().backward()
                        model.finish()
        return [event.kind for event in log.events if event.kind != "wait"], module.weight.grad

    for kinds, grad in pools(2).run(steps):
        assert kinds == ["all_reduce", "broadcast", "all_reduce"]
        assert grad.tolist() == [[22.0] * 3]


def test_finish_sends_what_was_added_without_a_hook(pools):
    def step(rank):
        model = DDP(nn.Linear(3, 1, bias=False))
        with model.no_sync():
            model(torch.full((1, 3), 10.0**rank)).sum().backward()
        model.finish()
        return model.module.weight.grad.tolist()

    assert pools(2).run(step) == [[[5.5] * 3]] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_views_of_the_bucket(pools, set_to_none):
    def steps(rank):
        model, found = DDP(nn.Linear(3, 1, bias=False)), []
        (bucket,) = model.buckets
        for factor in (1, 2):
            model.zero_grad(set_to_none=set_to_none)
            model(torch.full((1, 3), factor * 10.0**rank)).sum().backward()
            model.finish()
            grad = model.module.weight.grad
            found.append((grad.tolist(), grad.data_ptr() == bucket.flat.data_ptr()))
        return found

    wanted = [([[5.5] * 3], True), ([[11.0] * 3], True)]
    assert pools(2).run(steps) == [wanted] * 2


def test_a_gradient_that_was_not_cleared_counts_too(pools):
    def steps(rank):
        model = DDP(nn.Linear(3, 1, bias=False))
        for _ in range(2):
            model(torch.full((1, 3), 10.0**rank)).sum().backward()
            model.finish()
        return model.module.weight.grad.tolist()

    assert pools(2).run(steps) == [[[11.0] * 3]] * 2


def test_a_module_may_be_wrapped_again(pools):
    def steps(rank):
        module = nn.Linear(3, 1, bias=False)
        for _ in range(3):
            model = DDP(module)  # the one before does nothing any more
            for _ in range(2):
                module.zero_grad()
                model(torch.full((1, 3), 10.0**rank)).sum().backward()
                model.finish()
        return module.weight.grad.tolist()

    assert pools(2).run(steps) == [[[5.5] * 3]] * 2


def test_a_module_without_parameters_to_train(pools):
    def step(rank):
        model = DDP(nn.Linear(3, 1).requires_grad_(False), find_unused=True)
        model.finish()
        return model(torch.ones(1, 3)).shape

    assert pools(2).run(step) == [(1, 1)] * 2


# --- what goes wrong is told


def unused(rank):
    model = DDP(Choice())
    model(torch.ones(2, 5)).sum().backward()
    model.finish()


def second_backward(overlap):
    def step(rank):
        model = DDP(mlp(), overlap=overlap)
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()

    return step


def another_ranks_group(rank):
    pairs = [dist.new_group([0]), dist.new_group([1])]
    DDP(mlp(), group=pairs[1 - rank])


def sparse(rank):
    model = DDP(nn.Embedding(4, 3, sparse=True))
    model(torch.tensor([1])).sum().backward()


SECOND = "rank {rank}, DDP: need finish() after each backward; got a second gradient for 2.bias"
SECOND += " ... Try model.finish(), or no_sync()"
REFUSED = [
    (
        "rank {rank}, DDP.finish: need a gradient for every parameter; got none for "
        "layers.never.bias, layers.never.weight, layers.low.bias, layers.low.weight. Try"
        " ... DDP(..., find_unused=True)",
        unused,
    ),
    (
        "got none for norm.bias, norm.weight,  ...  and 32 more. Try finish() after backward()",
        lambda rank: DDP(GPT(SPEC)).finish(),
    ),
    (SECOND, second_backward(overlap=True)),
    (SECOND, second_backward(overlap=False)),
    ("MeshError: rank {rank}, DDP: need a group that holds this rank", another_ranks_group),
    ("DDP: need dense gradients; got a sparse one for weight. Try sparse", sparse),
    *(
        (
            "DDP: need bucket_bytes above 0; got  ... . Try 1",
            lambda rank, n=n: make_buckets(mlp(), n),
        )
        for n in (0, -1, float("nan"))
    ),
]


def test_what_cannot_be_is_told_in_one_sentence(pools):
    assert_refused(pools(2), REFUSED)


def test_after_an_error_a_step_is_right_again(pools):
    def steps(rank):
        model = DDP(nn.Linear(3, 1, bias=False), bucket_bytes=1)
        with pytest.raises(CourseError):
            model.finish()
        for _ in range(2):
            model(torch.full((1, 3), 10.0**rank)).sum().backward()
            with pytest.raises(CourseError):
                model(torch.ones(1, 3)).sum().backward()
            with pytest.raises(CourseError, match=r"need model.zero_grad\(\) after an error"):
                model.finish()
            model.zero_grad()
        model(torch.full((1, 3), 10.0**rank)).sum().backward()
        model.finish()
        return model.module.weight.grad.tolist()

    assert pools(2).run(steps) == [[[5.5] * 3]] * 2


def test_what_a_finish_that_raised_has_launched_is_waited_for_and_discarded(pools):
    def steps(rank):
        events = []

        class Noted(Mean):
            def wait(self):
                events.append("wait")
                super().wait()

        module = nn.ModuleDict({"never": nn.Linear(2, 1), "used": nn.Linear(3, 1, bias=False)})
        model = DDP(module, bucket_bytes=1, comm_hook=Noted)  # in a bucket each, "used" first
        model.module.forward = module["used"].forward
        model(torch.full((1, 3), 10.0**rank)).sum().backward()
        with pytest.raises(CourseError, match=r"got none for never\.bias"):
            model.finish()
        with pytest.raises(CourseError, match=r"need model.zero_grad\(\) after an error"):
            model(torch.ones(1, 3))
        model.zero_grad()
        module["never"].requires_grad_(False)
        out = model(torch.full((1, 3), 10.0**rank))
        assert events == ["wait"]
        out.sum().backward()
        model.finish()
        return module["used"].weight.grad.tolist()

    assert pools(2).run(steps) == [[[5.5] * 3]] * 2


def test_other_parameters_on_another_rank_are_told(pools):
    def step(rank):
        DDP(nn.Linear(3 + rank, 1))

    with pytest.raises(RankError, match=r"broadcast .*float32 \[4\].*float32 \[5\]|mismatch"):
        pools(2).run(step)


def test_a_parameter_missing_on_one_rank_only_ends_the_job_with_its_name(pools):
    def step(rank):
        model = DDP(EitherOrder(first=0), bucket_bytes=1)
        loss = model.module.layers[0](torch.ones(1, 3)).sum() if rank else model(torch.ones(1, 3))
        loss.backward()
        model.finish()

    with pytest.raises(RankError, match=r"rank 1 raised CourseError.*layers.1.bias, layers.1.weig"):
        pools(2).run(step)
