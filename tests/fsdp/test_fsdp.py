"""FSDP: the numbers of one process after every step, in as many messages as the formula says."""

import copy
import gc
import sys
import weakref
from contextlib import nullcontext, suppress
from functools import partial
from itertools import pairwise

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.core import ModelSpec
from course_lib.core.records import COMMUNICATION_KINDS
from course_lib.cost.bandwidth import bus_factor
from course_lib.cost.traffic import sent_bytes
from course_lib.fsdp import FSDP, MixedPrecisionPolicy, merge_shards
from course_lib.fsdp.cost import (
    UnitSizes,
    fsdp_ledger,
    fsdp_traffic,
    peak_param_bytes,
    times_plain_dp,
    unit_sent_bytes,
)
from course_lib.fsdp.lab import resident_over_time, ring_sum_error_percent, sizes_of
from course_lib.fsdp.mesh import hybrid_ranks
from course_lib.fsdp.param_group import FSDPParamGroup
from course_lib.fsdp.state import full_optim_state, load_full_optim
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import RankError, record, span
from tests.law import modules
from tests.law.law import (
    LENGTHS,
    WORLDS,
    Law,
    Replicas,
    assert_laws,
    assert_laws_in_groups,
    every_module,
    lasting,
    nightly,
    ways,
)
from tests.law.modules import HARD, Blocks, Residual, build
from tests.refusals import assert_refused

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPEC = ModelSpec(hidden=16, num_layers=3, num_heads=2, ffn_hidden=32, vocab=40, max_seq=6)
LLAMA = ModelSpec(
    hidden=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden=24,
    vocab=30,
    max_seq=6,
    gated=True,
    bias=False,
    norm="rms",
    positions="rope",
    tied=False,
)


def gpt(spec=SPEC):
    return GPT(spec)


def blocks():
    return build("blocks", 0, torch.float32)


def numbers(items):
    return HARD["blocks"].batch(items, 0)


def tokens(items):
    return next_tokens(token_batch(0, batch=items, seq=6, vocab=30))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


# --- the law: the numbers of one process


class Sharded(Replicas):
    """Ranks report the rows that they hold of gradients and moments, and the whole state."""

    name = "FSDP"
    cls = FSDP

    def wrap(self, module):
        return self.cls(module, **self.options)

    def finish(self):
        groups = self.model.param_groups
        assert not any(group.is_whole for group in groups), "something was not freed"

    def clip(self, most):
        return self.model.clip_grad_norm_(most)

    def zero_grad(self):
        self.model.zero_grad()

    def state(self):
        return self.model.full_state_dict()


class GoesOn(Sharded):
    """After each step a fresh model and optimizer go on from what each rank has saved."""

    name = "FSDP"

    def finish(self):
        self.model.finish()  # once more than backward has done
        super().finish()

    def state(self):
        found, parts = super().state(), ("model", "optimizer", "schedule")
        saved = [copy.deepcopy(getattr(self, part).state_dict()) for part in parts]
        self.__init__(self.law, self.rank, self.p)
        for part, state in zip(parts, saved, strict=True):
            getattr(self, part).load_state_dict(state)
        return found


class Hybrid(Sharded):
    """Shards with replicas, which hold the same rows."""

    reports = ("output", "state")


def is_linear(module):
    return isinstance(module, nn.Linear)


OPTIONS = [
    {"reshard_after_forward": False},
    {"prefetch": False},
    {"reshard_after_forward": False, "prefetch": False},
    {"units": []},
    {"units": is_linear},
    {"parts": 2},
    {"parts": 2, "no_sync": True},
    {"parts": 2, "no_sync": True, "reshard_after_forward": False},
    {"optimizer": "adamw", "clip": 0.05},
    {"dtype": torch.float32},
    *({"items": items} for items in (2, 7)),
]
LAWS = [
    *every_module(),
    *ways(["blocks", "adapted", "recomputed", "fewer rows than ranks"], OPTIONS),
    *ways(["odd", "choice"], [{"parts": 2}, {"parts": 2, "no_sync": True}]),
]
SMALL = [name for name, hard in HARD.items() if hard.batch is modules.numbers]
LAWS += ways(SMALL, [{"reshard_after_forward": False, "optimizer": "adamw"}])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_fsdp_has_the_numbers_of_one_process(pools, world_size, length):
    assert_laws(pools(world_size).run, Sharded, lasting(length, LAWS))


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_goes_on_has_the_numbers_of_one_process(pools, world_size):
    laws = ways(["odd", "tied", "adapted"], [{"optimizer": "adamw"}])
    assert_laws(pools(world_size).run, GoesOn, laws)


GRIDS = [
    {"mesh": (2, 2), "optimizer": "adamw", "clip": 0.05},
    {"reshard_after_forward": 2, "parts": 2, "no_sync": True},
    {"mesh": (2, 2)},
    {"mesh": (4, 1)},
    {"mesh": (1, 4), "reshard_after_forward": 2},
]


@pytest.mark.parametrize("grids", [GRIDS[:2], pytest.param(GRIDS[2:], marks=nightly)])
def test_hybrid_has_the_numbers_of_one_process(pools, grids):
    names = ("blocks", "two dtypes", "adapted", "odd", "tied", "choice")
    assert_laws(pools(4).run, Hybrid, ways(names, grids))


def test_each_group_trains_for_itself(pools):
    assert_laws_in_groups(pools(4), Sharded, [Law("odd", clip=0.05), Law("odd", items=7)])


def assert_same(by_rank, wanted, tolerance=0):
    for found in by_rank:
        torch.testing.assert_close(found, by_rank[0], rtol=0, atol=0)
    torch.testing.assert_close(by_rank[0], wanted, rtol=tolerance, atol=tolerance)


# --- FSDPs that are broken, and the laws that notice


class Broken(FSDP):
    """An FSDP with one fault in all its parameter groups."""

    def __init__(self, module, fault, **options):
        super().__init__(module, **options)
        for group in self.param_groups:
            if group.trained:
                FAULTS[fault](group, self)


@torch.no_grad()
def gathering(group, values):
    """Gather these numbers in place of the shards'."""
    kept = [shard.clone() for shard in group.shards]
    for shard, value in zip(group.shards, values, strict=True):
        shard.data.copy_(value)
    FSDPParamGroup.start_gather(group)
    group.wait_gather()
    for shard, value in zip(group.shards, kept, strict=True):
        shard.data.copy_(value)


def wrong_dtype(group, model):
    group.start_gather = lambda: gathering(group, [shard.bfloat16() for shard in group.shards])


def never_freed(group, model):
    group.free = group.wait_gather


def no_mean(group, model):
    def wait_reduce():
        reduces = group.reducing is not None
        FSDPParamGroup.wait_reduce(group)
        for shard in group.shards if reduces else ():
            shard.grad.mul_(group.groups.num_ranks)

    group.wait_reduce = wait_reduce


def padded_rows(group, model):
    """The rows behind a shard are taken for its own."""
    for layout, shard in zip(group.layouts, group.shards, strict=True):
        if group.member.rank and shard.numel() < layout.slot_numel:
            shard.data = torch.ones(layout.shard_rows, *shard.shape[1:], dtype=shard.dtype)


def not_gathered_again(group, model):
    def start_gather():
        if model._in_backward and not group.is_whole:
            group.whole.untyped_storage().resize_(group.whole.nbytes)  # some numbers, or none
            group.whole.zero_()
            group.gathering = dist.barrier(async_op=True)
        else:
            FSDPParamGroup.start_gather(group)

    group.start_gather = start_gather


def stale(group, model):
    first = [shard.detach().clone() for shard in group.shards]
    group.start_gather = lambda: gathering(group, first)


FAULTS = {
    fault.__name__: fault
    for fault in (wrong_dtype, never_freed, no_mean, padded_rows, not_gathered_again, stale)
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_fsdp_fails_the_law(pools, fault):
    """Two models, one of them with 3 rows for 2 ranks, which counts when gradients are clipped."""
    method = type("Faulty", (Sharded,), {"cls": partial(Broken, fault=fault)})
    told = r"was not freed" if fault == "never_freed" else r"off by|differs|mismatch|of size"
    with pytest.raises((AssertionError, RankError), match=told):
        assert_laws(pools(2).run, method, ways(["one layer", "blocks"], [{"clip": 0.05}]))


# --- the same as torch's fully_shard, to the bit where a sum has two parts


def step_by_step(rank, wrap, spec, steps=3, **options):
    """Losses and weights of a GPT after every step, and the messages of the last one."""
    torch.manual_seed(0)
    model, found, p = wrap(GPT(spec), **options), [], dist.get_world_size()
    optimizer = sgd(model.parameters())
    inputs, targets = (t.tensor_split(p)[rank] for t in tokens(8))
    for _ in range(steps):
        optimizer.zero_grad()
        with record() as log:
            loss = token_loss(model(inputs), targets)
            loss.backward()
        optimizer.step()
        found.append((loss.detach(), weights_of(model)))
    return found, calls_of(log.events)


def weights_of(model):
    if isinstance(model, FSDP):
        return model.full_state_dict()
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}


def torchs(module, mixed_precision=None, reshard_after_forward=True, mesh=None):
    from torch.distributed import fsdp  # seconds of imports
    from torch.distributed.device_mesh import init_device_mesh

    policy, options = vars(mixed_precision or FULL), {}
    if mesh:
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    inner = fsdp.MixedPrecisionPolicy(**{**policy, "output_dtype": None})
    options["reshard_after_forward"] = reshard_after_forward
    for block in module.blocks:
        fsdp.fully_shard(block, mp_policy=inner, **options)
    options["reshard_after_forward"] = None  # PyTorch's default: the root stays
    return fsdp.fully_shard(module, mp_policy=fsdp.MixedPrecisionPolicy(**policy), **options)


def calls_of(events):
    """Kind and bytes of the messages, in the order in which they left."""
    ordered = sorted(events, key=lambda event: event.start_s)
    return [(e.kind, e.num_bytes) for e in ordered if e.kind in COMMUNICATION_KINDS]


def mixed(reduce_dtype, **options):
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, output_dtype=torch.float32
    )
    return {"mixed_precision": policy, **options}


FULL = MixedPrecisionPolicy()
BESIDE = [
    (SPEC, {}),
    (SPEC, {"reshard_after_forward": False}),
    (SPEC, mixed(torch.float32)),
    (SPEC, mixed(torch.bfloat16)),
    (LLAMA, mixed(torch.bfloat16)),
]
BESIDE_FOUR = [
    (SPEC, {"mesh": (2, 2)}),
    (SPEC, mixed(torch.float32, mesh=(2, 2))),
    (SPEC, {"mesh": (2, 2), "reshard_after_forward": False}),
    (SPEC, {"reshard_after_forward": 2}),
]


def side_by_side(rank, cases):
    """Of each case: what ours and torch's find."""
    return [
        [step_by_step(rank, wrap, spec, **options) for wrap in (FSDP, torchs)]
        for spec, options in cases
    ]


def test_the_bits_and_the_messages_of_fully_shard(pools):
    for pairs in pools(2).run(side_by_side, BESIDE):
        for (_, options), ((found, calls), (wanted, their_calls)) in zip(
            BESIDE, pairs, strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            assert calls == their_calls, options


def test_fully_shard_on_three_ranks_to_rounding(pools):
    for [((found, calls), (wanted, their_calls))] in pools(3).run(side_by_side, [(SPEC, {})]):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        assert calls == their_calls, "rows that 3 does not divide are padded alike"


def test_hybrid_and_partly_resharded_as_fully_shard(pools):
    for pairs in pools(4).run(side_by_side, BESIDE_FOUR):
        for (_, options), ((found, calls), (wanted, their_calls)) in zip(
            BESIDE_FOUR, pairs, strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
            assert sorted(calls) == sorted(their_calls), options


# --- behaviour: messages, memory, order


def watched_all(rank, build, ways, **dtypes):
    return [watched(rank, build, **dtypes, **options) for options in ways]


def watched(rank, build, parts=1, sync=True, **options):
    """Of the third step: what was held, the messages, and what the plan has to know."""
    model, held = FSDP(build(), **options), []
    inputs, targets = tokens(6)
    for _ in range(3):
        model.zero_grad()
        held.clear()
        with resident_over_time(model) as ledger, record() as log:
            for part in range(parts):
                with nullcontext() if sync or part == parts - 1 else model.no_sync():
                    token_loss(model(inputs), targets).backward()
                held.append(
                    sum(g.nbytes for group in model.param_groups for g in group.kept_grads.values())
                )
    return ledger, calls_of(log.events), sizes_of(model), held


def changes(numbers):
    """Without repetitions."""
    return [b for a, b in pairwise([None, *numbers]) if a != b]


WAYS = [
    {},
    {"prefetch": False},
    {"reshard_after_forward": False},
    {"reshard_after_forward": False, "prefetch": False},
]


WAYS_OF_FOUR = [{"mesh": (2, 2)}, {"reshard_after_forward": 2}]


@pytest.mark.parametrize("world_size", WORLDS)
def test_messages_and_bytes_are_those_of_the_plan(pools, world_size):
    dtypes = {"compute_dtype": torch.bfloat16} if world_size == 2 else {}
    ways = WAYS_OF_FOUR if world_size == 4 else WAYS
    for by_way in pools(world_size).run(watched_all, gpt, ways, **dtypes):
        for found, (ledger, calls, sizes, _) in zip(ways, by_way, strict=True):
            options = {key: value for key, value in found.items() if key != "mesh"}
            assert calls == [(c.kind, c.num_bytes) for c in fsdp_traffic(sizes, **options)]
            planned, params = fsdp_ledger(sizes, **options), ledger.bytes_by_kind["params"]
            assert changes(params) == changes(planned.bytes_by_kind["params"])
            assert max(params) == peak_param_bytes(sizes, **options)
            assert ledger.peak_bytes() == pytest.approx(planned.peak_bytes(), rel=0.01)
            assert params[-1] == sizes.shard_bytes(), "something was not freed"


@pytest.mark.parametrize("sync", [True, False])
def test_accumulation_sends_every_time_or_once_and_keeps_whole_gradients(pools, sync):
    for _, calls, sizes, held in pools(2).run(watched, gpt, parts=3, sync=sync):
        planned = fsdp_traffic(sizes, num_micro_batches=3, sync=sync)
        assert calls == [(c.kind, c.num_bytes) for c in planned]
        whole = sum(sizes.numels) * sizes.reduce_bytes
        assert held == ([0, 0, 0] if sync else [whole, whole, 0])


def test_a_step_sends_one_and_a_half_times_as_much_as_plain_data_parallelism():
    sizes = UnitSizes(numels=(0, *[1000] * 8), p=4)
    plain = bus_factor("all_reduce", 4) * 8000 * 4
    assert sent_bytes(fsdp_traffic(sizes), 4) == 1.5 * plain
    assert unit_sent_bytes(fsdp_traffic(sizes)) == 1.5 * plain
    hybrid = UnitSizes(numels=sizes.numels, p=4, replicas=2)
    across = bus_factor("all_reduce", 2) * 8000 // 4 * 4
    assert unit_sent_bytes(fsdp_traffic(hybrid)) == 1.5 * plain + across
    assert sent_bytes(fsdp_traffic(sizes, reshard_after_forward=False), 4) == plain


@pytest.mark.parametrize(
    ("gather", "reduce", "ddp", "freed", "kept"),
    [
        (4, 4, 4, 1.5, 1.0),
        (2, 4, 4, 1.0, 0.75),
        (2, 4, 2, 2.0, 1.5),
        (2, 2, 2, 1.5, 1.0),
        (2, 2, 4, 0.75, 0.5),
    ],
)
def test_how_much_more_fsdp_sends_depends_on_the_precisions(gather, reduce, ddp, freed, kept):
    numels = {"numels": (0, *[1000] * 8), "p": 4}
    sizes = UnitSizes(**numels, compute_bytes=gather, reduce_bytes=reduce)
    plain = bus_factor("all_reduce", 4) * 8000 * ddp
    for frees, ratio in ((True, freed), (False, kept)):
        assert times_plain_dp(gather, reduce, ddp, reshard_after_forward=frees) == ratio
        sent = sent_bytes(fsdp_traffic(sizes, reshard_after_forward=frees), 4)
        assert sent == pytest.approx(ratio * plain)


def test_a_sum_in_bf16_loses_digits_with_the_square_root_of_its_ranks():
    off = [ring_sum_error_percent(p) for p in (4, 16, 64, 256)]
    for few, many in pairwise(off):
        assert many / few == pytest.approx(2, rel=0.1)
    assert ring_sum_error_percent(256, dtype=torch.float32) < 1e-4


def frozen_traffic(rank, name):
    """Messages of the second step, the most bytes of parameters, and those of each unit."""
    module, hard = build(name, 0), HARD[name]
    if hasattr(module, "head"):
        module.blocks.requires_grad_(False)
    model = FSDP(module)
    x, y = hard.batch(8, 0)
    for _ in range(2):
        with resident_over_time(model) as ledger, record() as log:
            hard.loss(model(x), y).backward()
    params = ledger.bytes_by_kind["params"]
    units = [
        (group.whole.nbytes, sum(group.layouts[n].slot_numel for n in group.trained) * 8 * 2)
        for group in model.param_groups
    ]
    return calls_of(log.events), max(params) - params[0], units


@pytest.mark.parametrize("name", ["GPT, uneven", "adapted"])
def test_frozen_weights_are_gathered_and_freed_and_send_no_gradient(pools, name):
    for calls, peak, units in pools(2).run(frozen_traffic, name):
        reduced = [size for kind, size in calls if kind == "reduce_scatter"]
        assert sorted(reduced) == sorted(trained for _, trained in units if trained)
        root, *blocks = (whole for whole, _ in units)
        assert sum(size for kind, size in calls if kind == "all_gather") == root + 2 * sum(blocks)
        assert peak == root + max(root, 2 * max(blocks))


class Spoken(Residual):
    """Says when it computes."""

    def forward(self, x):
        with span("forward"):
            return super().forward(x)


def leaving(rank, **options):
    """Of the second step: when gathers left, and when blocks computed, in forward."""
    model = FSDP(Blocks(Spoken(), Spoken(), Spoken()), **options)
    for _ in range(2):
        with record() as log:
            out = model(torch.ones(2, 5))
        out.sum().backward()
    gathers = sorted(e.start_s for e in log.events if e.kind == "all_gather")
    return gathers, sorted(e.start_s for e in log.events if e.kind == "forward")


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_next_unit_leaves_before_this_one_computes(pools, prefetch):
    for gathers, computes in pools(2).run(leaving, prefetch=prefetch):
        assert len(gathers) == 4
        assert len(computes) == 3
        for following, begins in zip(gathers[2:], computes, strict=False):
            assert (following < begins) is prefetch
        assert all(own < begins for own, begins in zip(gathers[1:], computes, strict=True))


def test_the_whole_weights_are_gone_and_no_step_brings_them_back(pools):
    def sizes(rank):
        module = gpt()
        before = [weakref.ref(param) for param in module.parameters()]
        model = FSDP(module, reshard_after_forward=False)
        gc.collect()
        alive, seen = [ref() for ref in before if ref() is not None], []
        for training in (True, False):
            with torch.set_grad_enabled(training):
                loss = token_loss(model(tokens(4)[0]), tokens(4)[1])
                seen.append(sum(group.is_whole for group in model.param_groups))
            if training:
                loss.backward()
            seen.append(sum(group.is_whole for group in model.param_groups))
        shards = [
            param is shard
            for param, shard in zip(module.parameters(), model.parameters(), strict=True)
        ]
        return len(alive), seen, all(shards)

    assert pools(2).run(sizes) == [(0, [4, 0, 0, 0], True)] * 2


# --- what is saved


def trained_state(rank, start, steps, optim):
    """Go on from a whole state, or from the seed; the whole state after some more steps."""
    model, p = FSDP(build("blocks", 0)), dist.get_world_size()
    optimizer, (x, y) = optim(model.parameters()), numbers(24)
    if start:
        model.load_full_state_dict(start[0])
        load_full_optim(model.param_groups, optimizer, start[1])
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x.tensor_split(p)[rank]), y.tensor_split(p)[rank]).backward()
        optimizer.step()
    whole = model.full_state_dict(), full_optim_state(model.param_groups, optimizer)
    return whole, model.state_dict(), model.full_state_dict(rank=1)


@pytest.mark.parametrize("optim", [sgd, adamw])
def test_a_state_saved_by_two_ranks_goes_on_at_three_and_alone(pools, optim):
    saved = pools(2).run(trained_state, None, 2, optim)
    assert_same([merge_shards([state for _, state, _ in reversed(saved)])], saved[0][0][0])
    assert [len(state) for _, _, state in saved] == [0, len(saved[0][0][0])]
    module, (x, y) = build("blocks", 0), numbers(24)
    optimizer = optim(module.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        optimizer.step()
    for world_size in (1, 3):
        found = pools(world_size).run(trained_state, saved[0][0], 1, optim)
        assert_same([whole[0] for whole, _, _ in found], dict(module.state_dict()), 1e-12)


class Buffered(nn.Module):
    """A buffer of whole numbers, one that is not saved, and a norm."""

    def __init__(self):
        super().__init__()
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("hidden", torch.randn(3), persistent=False)
        self.blocks = nn.ModuleList([nn.BatchNorm1d(3)])


@pytest.mark.parametrize("make", [gpt, Buffered])
def test_shards_and_buffers_go_back_where_they_came_from(pools, make):
    def there_and_back(rank):
        model, seen = FSDP(make()), []
        saved, whole = copy.deepcopy((model.state_dict(), model.full_state_dict()))
        for load, state in ((model.load_state_dict, saved), (model.load_full_state_dict, whole)):
            with torch.no_grad():
                for value in (*model.parameters(), *model.buffers()):
                    value.zero_()
            load(state)
            seen.append(model.full_state_dict())
        return whole, seen

    for before, after in pools(3).run(there_and_back):
        assert_same(after, before)


def test_shapes_alone_get_weights_and_buffers_of_the_first_rank(pools):
    def start(rank, make):
        torch.manual_seed(rank)
        with torch.device("meta") if rank else nullcontext():
            module = make()
        state = {} if rank else {name: value.clone() for name, value in module.state_dict().items()}
        model = FSDP(module)
        return state, model.full_state_dict(), getattr(module, "hidden", None)

    for make in (gpt, Buffered):
        (wanted, *_), *_ = by_rank = pools(2).run(start, make)
        for _, found, hidden in by_rank:
            assert_same([found], wanted)
            assert hidden is None or torch.equal(hidden, by_rank[0][2])


# --- what is refused


def tied_across():
    model = Blocks(Residual(), Residual())
    model.blocks[1].layer.weight = model.blocks[0].layer.weight
    return model


class Hides(nn.Linear):
    def forward(self, x):
        return iter([super().forward(x)])


def early_step(rank):
    model = FSDP(blocks())
    optimizer = sgd(model.parameters())
    for _ in range(2):
        loss = model(torch.ones(2, 5)).sum()
        with torch.no_grad():
            next(model.parameters()).add_(1)
        loss.backward()
        optimizer.step()


def sparse(rank):
    FSDP(nn.Embedding(4, 2, sparse=True))(torch.tensor([1])).sum().backward()


def other_shape(rank):
    FSDP(nn.Linear(2, 2)).load_full_state_dict(nn.Linear(2, 3).state_dict())


def wrong_rank(rank):
    model = FSDP(blocks())
    model.load_state_dict(model.state_dict() | {"rank": 7})


REFUSED = [
    (
        "need units out of model.modules",
        lambda rank: FSDP(blocks(), units=[nn.Linear(2, 2)]),
    ),
    ("got a list of modules", lambda rank: FSDP(model := blocks(), units=[model.blocks])),
    (
        "need tied parameters in one unit; got blocks.0.layer.weight in blocks.0 and blocks.1",
        lambda rank: FSDP(tied_across()),
    ),
    ("need floating dtypes", lambda rank: FSDP(blocks(), compute_dtype=torch.int8)),
    (
        "need compute_dtype or mixed_precision; got both",
        lambda rank: FSDP(blocks(), compute_dtype=torch.bfloat16, mixed_precision=FULL),
    ),
    ("need dtype and device before", lambda rank: FSDP(blocks()).double()),
    (
        "need weights on the group's first rank",
        lambda rank: FSDP(nn.Linear(2, 2, device="meta")),
    ),
    ("got a sparse one for weight", sparse),
    ("got list_iterator", lambda rank: FSDP(Hides(2, 2))(torch.ones(1, 2))),
    ("have changed since", early_step),
    ("need a group that holds this rank", lambda rank: FSDP(blocks(), group="all")),
    (
        "need the names of the model; got strange too many and",
        lambda rank: FSDP(blocks()).load_full_state_dict({"strange": 1}),
    ),
    ("need the shape", other_shape),
    ("got rank 7 of 1", wrong_rank),
    ("need the shards of all the ranks", lambda rank: merge_shards([])),
    (
        "MeshError ... need a mesh  ...  of 1 ranks; got (3, 2)",
        lambda rank: FSDP(blocks(), mesh=(3, 2)),
    ),
    (
        "a size that divides 1 ranks; got 3",
        lambda rank: FSDP(blocks(), reshard_after_forward=3),
    ),
    ("MeshError ... got 2 replicas", lambda rank: hybrid_ranks([0, 1, 2], 2)),
]


def test_what_cannot_be_is_told_in_one_sentence(pools):
    assert_refused(pools(1), REFUSED)


class FailsOnce(nn.Module):
    """A block whose first backward raises an error."""

    class Fault(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, left):
            ctx.left = left
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            if ctx.left:
                ctx.left.pop()
                raise ZeroDivisionError
            return grad * 2, None

    def __init__(self):
        super().__init__()
        self.layer, self.left = nn.Linear(4, 4), [1]

    def forward(self, x):
        return self.Fault.apply(self.layer(x), self.left)


def test_a_backward_that_raised_an_error_is_reset(pools):
    def grads(rank, fails):
        torch.manual_seed(0)
        model = FSDP(Blocks(FailsOnce(), Residual()).double())
        x, y = numbers(4)
        for block in model.module.blocks[:1]:
            block.left = [1] * fails
        for _ in range(1 + fails):
            with suppress(ZeroDivisionError):
                F.mse_loss(model(x), y).backward()
        return [shard.grad for shard in model.parameters()]

    broken, whole = (pools(2).run(grads, fails) for fails in (1, 0))
    torch.testing.assert_close(broken[0][:2], whole[0][:2], rtol=0, atol=0)
