"""ZeRO: the numbers of one process, in shards that are owned once, with the predicted bytes."""

import gc
import sys
from contextlib import contextmanager

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.core import CourseError, ModelSpec
from course_lib.core.parallelism import Parallelism
from course_lib.cost.traffic import sent_bytes
from course_lib.data_parallel.guarded import GRAD
from course_lib.ddp import DDP
from course_lib.memory import model_states
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import RankError, record
from course_lib.recompute import MixedPrecisionOptimizer
from course_lib.zero import FlatLayout, ShardedOptimizer, ZeRO1, ZeRO2, ZeRO3, gather_hooks
from course_lib.zero.cost import ParamTraffic, offload_bytes, padded_bytes, zero_traffic
from course_lib.zero.flat_param import FlatParam
from tests.law.law import (
    LENGTHS,
    WORLDS,
    Law,
    Replicas,
    assert_broken,
    assert_laws,
    assert_laws_in_groups,
    by_dims,
    every_module,
    lasting,
    named_moments,
    nightly,
    ways,
)
from tests.law.modules import HARD, build
from tests.lifecycle import assert_told

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# float64: the sum over items runs in another order, and the mean over ranks rounds once more
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
STAGES = (ZeRO1, ZeRO2, ZeRO3)
SPEC = ModelSpec(
    hidden=12,
    num_layers=1,
    num_heads=2,
    ffn_hidden=20,
    vocab=23,
    max_seq=6,
    norm="rms",
    bias=False,
    tied=True,
)
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


def mlp():
    return build("in place", 0, torch.float32)


def tied_and_frozen_gpt(seed):
    torch.manual_seed(seed)
    model = GPT(SPEC).double()
    model.blocks[0].attention.requires_grad_(False)
    return model


def numbers(items):
    return HARD["in place"].batch(items, 0)


def tokens(items):
    return next_tokens(token_batch(0, batch=items, seq=6, vocab=23))


# --- the law: the numbers of one process


class Sharded(Replicas):
    """A rank reports its whole parameters, or in stage 3 those that all gather."""

    reports = ("output", "state", "optimizer")
    stage = ZeRO1

    def optimize(self, cls, groups, settings):
        options = {"find_unused": True, **self.options, **settings}
        self.model = self.stage(self.module, cls, param_groups=groups, **options)
        return self.model.optimizer

    def finish(self):
        pass

    def clip(self, most):
        return self.model.clip_grad_norm_(most)

    def zero_grad(self):
        self.model.zero_grad()

    def step(self):
        self.model.step()

    def state(self):
        self.saved = self.model.full_state_dict()
        return self.saved["model"] if self.stage is ZeRO3 else self.module.state_dict()

    def moments(self):
        return named_moments(self.saved["optimizer"])


METHODS = {cls: type(cls.__name__, (Sharded,), {"name": cls.__name__, "stage": cls})
           for cls in STAGES}  # fmt: skip


class BehindDDP(Sharded):
    """The sharded optimizer, behind DDP's gradients."""

    name = "ShardedOptimizer"

    def optimize(self, cls, groups, settings):
        self.model = DDP(self.module, find_unused=True)
        return ShardedOptimizer(groups, cls, **settings)

    finish, clip = Replicas.finish, lambda self, most: self.optimizer.clip_grad_norm_(most)
    zero_grad, step, state = Replicas.zero_grad, Replicas.step, Replicas.state

    def moments(self):
        return named_moments(self.optimizer.full_state_dict())


WAYS = [
    {"optimizer": "adamw", "bucket_bytes": 1, "find_unused": False},
    {"clip": 0.05, "parts": 2, "bucket_bytes": 100},
    {"optimizer": "adamw", "clip": 0.05, "offload": True},
    {"dtype": torch.float32},
    *({"items": items} for items in (2, 7)),
]
LAWS = [*every_module(bucket_bytes=2000), *ways(["in place"], WAYS)]
LAWS += ways(["odd", "fewer rows than ranks"], WAYS[:1])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_zero_has_the_numbers_of_one_process(pools, method, world_size, length):
    assert_laws(pools(world_size).run, method, lasting(length, LAWS))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_sharded_optimizer_has_the_numbers_of_one_process(pools, world_size, length):
    laws = lasting(length, every_module(optimizer="adamw", clip=0.01))
    assert_laws(pools(world_size).run, BehindDDP, laws)


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_each_group_trains_for_itself(pools, method):
    assert_laws_in_groups(pools(4), method, [Law("odd", clip=0.05), Law("odd", items=7)])


def assert_law(got, want, where=""):
    torch.testing.assert_close(got, want, **TOLERANCE, msg=lambda words: where + words)


def whole(engine):
    """The parameters, gathered where they are sharded."""
    for flat_param in engine.all_flat_params:
        if flat_param.is_free:
            flat_param.gather()
    found = [param.detach().clone() for param in engine.module.parameters()]
    for flat_param in engine.all_flat_params:
        flat_param.free()
    return found


def numbers_of(nested):
    """All numbers of tensors in lists."""
    if isinstance(nested, torch.Tensor):
        return nested.reshape(-1)
    return torch.cat([numbers_of(part) for part in nested])


def test_two_backward_passes_of_one_forward_add_up(pools):
    def twice(rank):
        found = []
        for stage in STAGES:
            engine = stage(build("odd", seed=rank), torch.optim.SGD, lr=0.1)
            loss = F.mse_loss(engine(numbers(24)[0]), numbers(24)[1])
            loss.backward(retain_graph=True)
            loss.backward()
            engine.step()
            found.append(whole(engine))
        return found

    module = build("odd", seed=0)
    (2 * F.mse_loss(module(numbers(24)[0]), numbers(24)[1])).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    for by_stage in pools(2).run(twice):
        for got in by_stage:
            assert_law(got, [param.detach() for param in module.parameters()])


# --- masters: parameters in 16 bits


def in_bfloat16(rank, steps=4):
    """After some steps by each stage: parameters, masters, and the state of one process."""
    found = []
    for stage, offload in [(stage, offload) for stage in STAGES for offload in (False, True)]:
        module = build("in place", seed=rank).bfloat16()
        engine = stage(module, torch.optim.AdamW, lr=1e-3, offload=offload)
        x, y = (t.bfloat16().tensor_split(dist.get_world_size())[rank] for t in numbers(24))
        for _ in range(steps):
            engine.zero_grad()
            F.mse_loss(engine(x), y).backward()
            engine.step()
        found.append((engine.full_state_dict(), whole(engine)))
    return found


def test_masters_remember_what_16_bits_round_away(pools):
    module, (x, y) = build("in place", seed=0).bfloat16(), numbers(24)
    plain = MixedPrecisionOptimizer(
        module.parameters(), lambda masters: torch.optim.AdamW(masters, lr=1e-3)
    )
    for _ in range(4):
        plain.zero_grad()
        F.mse_loss(module(x.bfloat16()), y.bfloat16()).backward()
        plain.step()
    (((alone_state, alone_weights), *others),) = pools(1).run(in_bfloat16)
    assert all(map(torch.equal, alone_weights, module.parameters()))
    assert all(map(torch.equal, alone_state["optimizer"]["masters"].values(), plain.masters))
    assert not torch.equal(plain.masters[0], plain.masters[0].bfloat16().float())
    for by_stage in [[(alone_state, alone_weights), *others], *pools(2).run(in_bfloat16)]:
        for state, weights in by_stage:  # all stages, offloaded or not: the same bits
            assert torch.equal(numbers_of(weights), numbers_of(by_stage[0][1]))
            masters = [[*one["optimizer"]["masters"].values()] for one in (state, by_stage[0][0])]
            assert torch.equal(*map(numbers_of, masters))


# --- beside PyTorch's


def behind_ddp(rank, ours):
    """DDP of the course, and a sharded optimizer behind it: ours or PyTorch's."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns: its module uses jit.script

    module, (x, y) = tied_and_frozen_gpt(rank), tokens(24)
    model = DDP(module)
    trained = [param for param in module.parameters() if param.requires_grad]
    cls, options = OPTIMIZERS["adamw"]
    if ours:
        optimizer = ShardedOptimizer(trained, cls, **options)
    else:
        optimizer = ZeroRedundancyOptimizer(trained, cls, **options)
    p = dist.get_world_size()
    for _ in range(3):
        optimizer.zero_grad()
        token_loss(model(x.tensor_split(p)[rank]), y.tensor_split(p)[rank]).backward()
        model.finish()
        with record() as log:
            optimizer.step()
    return [param.detach().clone() for param in module.parameters()], counted(log)


@pytest.mark.parametrize(("dtype", "offload"), [(torch.bfloat16, False), (torch.float32, True)])
def test_a_step_keeps_weights_that_were_changed_from_outside(pools, dtype, offload):
    step = 2.0**-12  # less than 16 bits show

    def weights(rank):
        module = nn.Linear(2, 3, bias=False, dtype=dtype)
        engine = ZeRO1(module, torch.optim.SGD, lr=step, offload=offload)
        with torch.no_grad():
            module.weight.fill_(1.0)[0] = 3.0
        for _ in range(3):
            engine.zero_grad()
            engine(torch.ones(1, 2, dtype=dtype)).sum().backward()
            engine.step()
            with torch.no_grad():
                module.weight.clamp_(max=2.0)
        with torch.no_grad():
            module.weight[2] = 0.5
        full = engine.full_state_dict()
        return full["optimizer"].get("masters", {0: full["model"]["weight"]})[0]

    right = torch.tensor([[2 - 2 * step] * 2, [1 - 3 * step] * 2, [0.5] * 2])
    for found in pools(2).run(weights):
        torch.testing.assert_close(found.float(), right, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=nightly)])
def test_the_bits_of_torch_zero_redundancy_optimizer(pools, world_size):
    ours, theirs = (pools(world_size).run(behind_ddp, who) for who in (True, False))
    for (got, sent), (want, _) in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, got, want))
        trained = [param for param in tied_and_frozen_gpt(0).parameters() if param.requires_grad]
        numel = sum(param.numel() for param in trained)
        assert sent == [("all_gather", padded_bytes(numel, world_size, 8))]


# --- traffic


def counted(log):
    """Kind and bytes of all collectives, sorted."""
    return sorted((event.kind, event.num_bytes) for event in log.events if event.group)


def on_paper(stage, p, micro_batches, module, **options):
    """The same by formula: a flat parameter per module in stage 3, else one for all."""
    trained = [param.numel() for param in module.parameters() if param.requires_grad]
    params = [ParamTraffic(num_bytes=padded_bytes(sum(trained), p, 8))]
    if stage == 3:
        params = [one for part in module.modules() for one in traffic_of_module(part, p)]
    calls = zero_traffic(stage, params, micro_batches, **options)
    return calls, sorted((call.kind, call.num_bytes) for call in calls)


def traffic_of_module(part, p):
    """The head of a tied model has none of its own: the embedding's is needed twice."""
    own = [*part.parameters(recurse=False)]
    if not own or (isinstance(part, nn.Linear) and part.out_features == SPEC.vocab):
        return []
    times = 2 if isinstance(part, nn.Embedding) and len(own[0]) == SPEC.vocab else 1
    num_bytes = padded_bytes(sum(param.numel() for param in own), p, 8)
    trained = own[0].requires_grad
    return [ParamTraffic(num_bytes=num_bytes, forward=times, backward=times, trained=trained)]


TRAFFIC = [{"micro_batches": 1}, {"micro_batches": 2, "clips": True, "find_unused": True}]


def one_step(rank, stage, micro_batches=1, clips=False, **options):
    """The collectives of a step."""
    engine = stage(
        tied_and_frozen_gpt(0), torch.optim.SGD, lr=0.1, bucket_bytes=float("inf"), **options
    )
    x, y = tokens(4)
    with record() as log:
        engine.zero_grad()
        for _ in range(micro_batches):
            token_loss(engine(x), y).backward()
        if clips:
            engine.clip_grad_norm_(1.0)
        engine.step()
    return counted(log)


@pytest.mark.parametrize("world_size", WORLDS)
def test_traffic_is_what_the_formula_says(pools, world_size):
    def steps(rank):
        return [[one_step(rank, stage, **case) for case in TRAFFIC] for stage in STAGES]

    module = tied_and_frozen_gpt(0)
    flags = sum(param.requires_grad for param in module.parameters())
    for by_stage in pools(world_size).run(steps):
        for number, found in enumerate(by_stage, start=1):
            for case, got in zip(TRAFFIC, found, strict=True):
                paper = {"clips": case.get("clips", False)}
                paper["num_flags"] = flags * case.get("find_unused", False)
                _, want = on_paper(number, world_size, case["micro_batches"], module, **paper)
                assert got == want, (number, case)


def test_stages_1_and_2_send_what_plain_data_parallelism_sends_and_stage_3_half_more():
    params = [ParamTraffic(num_bytes=1200), ParamTraffic(num_bytes=240)]
    sent = [sent_bytes(zero_traffic(zero, params), 4) for zero in range(4)]
    assert [number / sent[0] for number in sent] == [1, 1, 1, 1.5]
    assert sent_bytes(zero_traffic(1, params, all_reduce=True), 4) == 1.5 * sent[0]
    many = [sent_bytes(zero_traffic(zero, params, 4), 4) / sent[0] for zero in range(4)]
    assert many == [1, 1, 2.5, 6]  # stages 2 and 3 pay for each micro-batch
    with pytest.raises(CourseError, match="need zero as 0, 1, 2 or 3"):
        zero_traffic(4, params)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_offload_transfers_the_bytes_that_the_formula_says(pools, micro_batches):
    def transfers(rank):
        found = []
        for stage, dtype in [(stage, dtype) for dtype in DTYPES.values() for stage in STAGES]:
            engine = stage(even_mlp().to(dtype), torch.optim.AdamW, lr=1e-3, offload=True)
            with record() as log:
                for _ in range(micro_batches):
                    engine(torch.ones(2, 12, dtype=dtype, requires_grad=True)).sum().backward()
                engine.step()
            events = [event for event in log.events if event.label.startswith("offload: ")]
            assert sum(event.num_bytes for event in events) == engine.offload.num_bytes
            found.append(
                [sum_of(events, "grads to the host"), sum_of(events, "params to the device")]
            )
        return found

    for found in pools(2).run(transfers):
        numels, want = [312, 300], []
        for dtype in DTYPES.values():
            params = [ParamTraffic(num_bytes=padded_bytes(n, 2, dtype.itemsize)) for n in numels]
            want += [list(offload_bytes(zero, params, 2, micro_batches)) for zero in (1, 2, 3)]
        assert found == want


def sum_of(events, what):
    return sum(event.num_bytes for event in events if event.label == f"offload: {what}")


# --- what a rank holds


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def even_mlp():
    """Modules whose numbers 1, 2, 3 and 4 ranks can share: 312 + 300."""
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))


def storage_bytes(tensors, seen):
    """Bytes of the storages that have not been seen."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


def owned_bytes(engine):
    """Bytes of parameters, gradients and optimizer state on this rank, each storage once."""
    seen, flat_params = set(), engine.all_flat_params
    params = [*engine.module.parameters(), *(t for x in flat_params for t in (x.flat, x.shard))]
    grads = [GRAD.__get__(param) for param in engine.module.parameters()]
    grads += [t for x in flat_params for t in (x.grad_shard, x.buffer)]
    state = [flat_param.master for flat_param in engine.flat_params]
    for values in engine.optimizer.inner.state.values():
        state += [value for key, value in values.items() if key != "step"]
    return {
        "params": storage_bytes(params, seen),
        "grads": storage_bytes([grad for grad in grads if grad is not None], seen),
        "optim_state": storage_bytes(state, seen),
    }


def residency(rank, stage, dtype):
    """What a rank owns after the second backward; the engine."""
    torch.manual_seed(0)
    engine = stage(even_mlp().to(dtype), torch.optim.AdamW, lr=1e-3)
    for _ in range(2):
        engine.zero_grad()
        engine(torch.ones(2, 12, dtype=dtype)).sum().backward()
        if stage is not ZeRO1:
            engine.finish()
        owned = owned_bytes(engine)
        engine.step()
    return owned, engine


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_rank_owns_what_the_formula_says(pools, world_size):
    def all_stages(rank):
        types = DTYPES.values()
        return [[residency(rank, stage, dtype)[0] for stage in STAGES] for dtype in types]

    for by_recipe in pools(world_size).run(all_stages):
        for recipe, by_stage in zip(DTYPES, by_recipe, strict=True):
            for zero, owned in enumerate(by_stage, start=1):
                parallelism = Parallelism(dp=world_size, zero=zero)
                assert owned == model_states(612, recipe, parallelism=parallelism), (recipe, zero)


def tensors_alive():
    gc.collect()
    return [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]


def test_a_rank_holds_no_other_tensor(pools):
    def held(rank):
        before = {id(x): x for x in tensors_alive()}
        engines = [residency(rank, stage, torch.bfloat16)[1] for stage in STAGES]
        alive = [x for x in tensors_alive() if id(x) not in before and x.dim() > 0]
        return sum(sum(owned_bytes(engine).values()) for engine in engines), storage_bytes(
            alive, set()
        )

    for owned, alive in pools(2).run(held):
        assert owned == alive > 0


def test_an_uneven_shard_is_at_most_one_number_per_flat_param_larger_than_its_part(pools):
    def owned(rank):
        found = []
        for stage in STAGES:
            engine = stage(build("odd", 0), torch.optim.AdamW, lr=1e-3)
            F.mse_loss(engine(numbers(4)[0]), numbers(4)[1]).backward()
            engine.step()
            found.append((owned_bytes(engine)["optim_state"], len(engine.flat_params)))
        return found

    numel = sum(param.numel() for param in build("odd", 0).parameters())
    by_rank = pools(4).run(owned)
    for stages in zip(*by_rank, strict=True):
        assert sum(state for state, _ in stages) == 2 * 8 * numel, "each number has one owner"
        assert all(state <= 2 * 8 * (numel / 4 + count) for state, count in stages)


def most_gathered(rank, name):
    """The most flat parameters gathered at once, in three steps with two micro-batches."""
    most, gather = [], FlatParam.gather

    def counting(flat_param):
        gather(flat_param)
        most.append(sum(not other.is_free for other in engine.all_flat_params))

    with planted(FlatParam, gather=counting):
        engine = ZeRO3(build(name, rank), torch.optim.SGD, lr=0.1)
        x, y = HARD[name].batch(4, 0)
        for _ in range(3):
            engine.zero_grad()
            for _ in range(2):
                HARD[name].loss(engine(x), y).backward()
                free = [one.is_free for one in engine.all_flat_params]
            engine.step()
    return max(most), free, [one.is_free for one in engine.all_flat_params]


@contextmanager
def planted(cls, **methods):
    """The class, or module, with other methods for a while."""
    own = {name: getattr(cls, name) for name in methods}
    for name, method in methods.items():
        setattr(cls, name, method)
    try:
        yield
    finally:
        for name, method in own.items():
            setattr(cls, name, method)


@pytest.mark.parametrize("name", ["in place", "GPT, uneven"])
def test_one_modules_parameters_are_gathered_at_a_time(pools, name):
    for most, after_backward, after_step in pools(2).run(most_gathered, name):
        assert most == 1
        assert all(after_backward)
        assert all(after_step)


def test_a_whole_gradient_does_not_outlive_its_bucket(pools):
    def step(rank):
        class Watched(ZeRO2):
            most = 0

            def _mark_ready(self, number, index):
                super()._mark_ready(number, index)
                in_flight = [one.pending.input for one in self.flat_params if one.pending]
                filling = [one.buffer for one in self.flat_params if one.buffer is not None]
                self.most = max(self.most, len(in_flight) + len(filling))
                assert all(GRAD.__get__(x) is None for x in self.module.parameters())

        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        engine = Watched(layers, torch.optim.SGD, lr=0.1, bucket_bytes=8 * 9 * 4)
        with record() as log:
            engine(torch.ones(2, 8)).sum().backward()
        engine.finish()
        return engine.most, len(engine.flat_params), counted(log)

    for most, count, sent in pools(2).run(step):
        assert (most, count) == (2, 6), "one is in flight, and one is being filled"
        assert len(sent) == 5, "all but the last are complete before backward ends"


# --- planted mistakes


def not_gathered(flat_param):
    flat_param.shard.copy_(flat_param.master)


def stale(flat_param):
    flat_param.gather()


def averaged_twice(flat_param, wait=FlatParam.wait_reduce_scatter):
    wait(flat_param)
    flat_param.grad_shard.div_(flat_param.p)


def local_norm(optimizer, max_norm):
    squares = sum((grad**2).sum() for one in optimizer.flat_params for _, grad in one.grads())
    for flat_param in optimizer.flat_params:
        for grad in flat_param.all_grads():
            grad.mul_(min(1.0, max_norm / squares.sqrt()))


def kept_whole(flat_param, named, group, init=FlatParam.__init__):
    init(flat_param, named, group)
    flat_param.shard = flat_param.flat
    flat_param.pieces = FlatLayout.of(flat_param.params, 1).pieces(0)
    flat_param.gather = lambda: None


PLANTED = {
    "not gathered": (FlatParam, {"copy_masters_to_params": not_gathered}, {}),
    "stale shard": (FlatParam, {"copy_masters_to_params": stale}, {"offload": True}),
    "averaged twice": (FlatParam, {"wait_reduce_scatter": averaged_twice}, {}),
    "local norm": (ShardedOptimizer, {"clip_grad_norm_": local_norm}, {"clip": 0.01}),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_broken_zero_fails_the_law(pools, mistake):
    cls, methods, options = PLANTED[mistake]
    (law,) = ways(["in place"], [options])
    assert_broken(pools(2), METHODS[ZeRO2], law, lambda: planted(cls, **methods))


def test_state_that_is_kept_whole_has_the_right_numbers_and_too_many_bytes(pools):
    def broken(rank):
        with planted(FlatParam, __init__=kept_whole):
            numbers_right = behind_ddp(rank, ours=True)[0]
            module = even_mlp()
            optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW)
            module(torch.ones(2, 12)).sum().backward()
            optimizer.step()
        state = [v for values in optimizer.inner.state.values() for v in values.values()]
        return numbers_right, storage_bytes([v for v in state if v.dim()], set())

    (want, _), *_ = pools(2).run(behind_ddp, True)
    for got, num_bytes in pools(2).run(broken):
        assert_law(got, want)
        whole_state = model_states(612, "fp32", parallelism=Parallelism(dp=2))["optim_state"]
        assert (
            num_bytes
            == whole_state
            == 2 * model_states(612, "fp32", parallelism=Parallelism(dp=2, zero=1))["optim_state"]
        )


def test_parameters_that_are_not_freed_are_seen(pools):
    def broken(rank):
        with planted(gather_hooks, _free=lambda flat_params: None):
            return most_gathered(rank, "in place")

    assert [most for most, *_ in pools(2).run(broken)] == [2, 2]


# --- saving and going on


def saved(rank, stage, full, **options):
    """The state after two of four steps, and the weights after each step."""
    engine, lr, run = trainer(rank, stage, **options)
    weights = [run() for _ in range(2)]
    state = engine.full_state_dict() if full else engine.state_dict()
    return {"engine": state, "lr": lr.state_dict()}, weights + [run() for _ in range(2)]


def resumed(rank, stage, by_rank, full, **options):
    """The weights of the other two steps, by an engine that began with other weights."""
    engine, lr, run = trainer(rank + 7, stage, place=rank, **options)
    state = by_rank[0 if full else rank]
    (engine.load_full_state_dict if full else engine.load_state_dict)(state["engine"])
    lr.load_state_dict(state["lr"])
    return [run() for _ in range(2)]


def groups_of(module):
    return by_dims([param for param in module.parameters() if param.requires_grad])


def trainer(seed, stage, place=None, **options):
    module, (x, y) = build("odd", seed=seed), numbers(24)
    engine = stage(module, torch.optim.AdamW, lr=0.01, param_groups=groups_of(module), **options)
    lr = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
    p, rank = dist.get_world_size(), seed if place is None else place

    def run():
        engine.zero_grad()
        F.mse_loss(engine(x.tensor_split(p)[rank]), y.tensor_split(p)[rank]).backward()
        engine.step()
        lr.step()
        return whole(engine)

    return engine, lr, run


def test_state_saved_by_two_goes_on_with_three_and_at_another_stage(pools):
    for before, after in [(ZeRO1, ZeRO3), (ZeRO2, ZeRO1), (ZeRO3, ZeRO2)]:
        found = pools(2).run(saved, before, full=True)
        states, ((*_, third, fourth), _) = zip(*found, strict=True)
        for got in pools(3).run(resumed, after, states, full=True, offload=True):
            assert_law(got, [third, fourth], f"{before.__name__} to {after.__name__}: ")


def test_a_shard_goes_on_to_the_bit_on_its_own_rank(pools):
    for stage in STAGES:
        found = pools(2).run(saved, stage, full=False)
        states, ((*_, third, fourth), _) = zip(*found, strict=True)
        for got in pools(2).run(resumed, stage, states, full=False):
            assert torch.equal(numbers_of(got), numbers_of([third, fourth]))
    with pytest.raises(RankError, match="need the shard of rank 0 of 2; got rank 1 of 2"):
        pools(2).run(resumed, ZeRO3, states[::-1], full=False)
    with pytest.raises(RankError, match=r"need shards of \[\[83\]\]; got \[\[10\]"):
        pools(2).run(resumed, ZeRO1, states, full=False)


def test_a_full_state_is_what_one_process_saves(pools):
    states = [state["engine"] for state, _ in pools(3).run(saved, ZeRO3, full=True)]
    module, (x, y) = build("odd", seed=0), numbers(24)
    optimizer = torch.optim.AdamW(groups_of(module), lr=0.01)
    lr = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        optimizer.step()
        lr.step()
    for state in states:
        assert_law(state["model"], dict(module.state_dict()))
        assert_law(state["optimizer"], optimizer.state_dict())


# --- groups, and what does not work


def shared_inside():
    outer = nn.Sequential(nn.Linear(3, 3))
    outer.weight = outer[0].weight
    return outer


def step_without_backward(rank):
    ZeRO2(mlp(), torch.optim.SGD, lr=0.1).step()


def moved(rank):
    module = mlp()
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    module[0].weight.data = module[0].weight.data.clone()
    optimizer.step()


def late_group(rank):
    optimizer = ShardedOptimizer(mlp().parameters(), torch.optim.SGD, lr=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def other_model(rank):
    state = ZeRO1(build("odd", 0, torch.float32), torch.optim.SGD, lr=0.1).full_state_dict()
    ZeRO1(mlp(), torch.optim.SGD, lr=0.1).load_full_state_dict(state)


def other_groups(rank):
    state = ShardedOptimizer(mlp().parameters(), torch.optim.SGD, lr=0.1).full_state_dict()
    groups = [{"params": [param]} for param in mlp().parameters()]
    ShardedOptimizer(groups, torch.optim.SGD, lr=0.1).load_full_state_dict(state)


def sparse(rank):
    engine = ZeRO2(nn.Embedding(4, 2, sparse=True), torch.optim.SGD, lr=0.1)
    engine(torch.tensor([1])).sum().backward()


def missing_groups(rank):
    module = mlp()
    ZeRO1(module, torch.optim.SGD, param_groups=[module[0].weight], lr=0.1)


def second_gradient(rank):
    engine = ZeRO2(build("unused", 0), torch.optim.SGD, find_unused=True, bucket_bytes=1)
    loss = engine(numbers(4)[0]).sum()
    loss.backward(retain_graph=True)
    loss.backward()


class Boxed(nn.Linear):
    def forward(self, x):
        return iter([super().forward(x)])


WRONG = {
    "dicts of them; got list_iterator of Boxed": (
        lambda rank: ZeRO3(Boxed(3, 3), torch.optim.SGD)(torch.ones(2, 3))
    ),
    "need a forward pass before each backward; got a second gradient for out": second_gradient,
    "need a gradient for every parameter; got none for 2.bias, 2.weight": step_without_backward,
    "need an optimizer that steps each number by itself": (
        lambda rank: ZeRO1(mlp(), torch.optim.LBFGS)
    ),
    "need parameters with floating numbers to train; got none": (
        lambda rank: ZeRO1(mlp().requires_grad_(False), torch.optim.SGD)
    ),
    "parameters with floating numbers to train; got none": (
        lambda rank: ZeRO1(nn.ReLU(), torch.optim.SGD, offload=True)
    ),
    "need a parameter to belong to modules that lie apart; got 0.weight, which the model and 0": (
        lambda rank: ZeRO3(shared_inside(), torch.optim.SGD)
    ),
    "need modules that use their own parameters only; got 0.self_attn": (
        lambda rank: ZeRO3(
            nn.Sequential(nn.TransformerEncoderLayer(4, 2, batch_first=True)), torch.optim.SGD
        )
    ),
    "need parameters that stay views of their flat parameter; parameter 0 has moved": moved,
    "need all parameters at once; got a group after": late_group,
    "need the state of the same model; got one that differs in 0.bias": other_model,
    "need the state of parameter groups of [1, 1, 1, 1] parameters; got [4]": other_groups,
    "need dense gradients; got a sparse one for weight": sparse,
    "need every trained parameter in a parameter group; got none for": missing_groups,
    "need a group that holds this rank": lambda rank: ZeRO2(mlp(), torch.optim.SGD, "all"),
}


def test_what_does_not_fit_is_told_in_one_sentence(pools):
    assert_told(pools, 2, WRONG)
