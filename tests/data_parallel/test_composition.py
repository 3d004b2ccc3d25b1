"""What does not fit together is refused in a sentence, before a wrong number can come of it."""

import copy
import inspect
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import LBFGS, SGD, Adafactor, Muon, SparseAdam

from course_lib.core.errors import CourseError, MeshError
from course_lib.core.presets import find_model
from course_lib.data_parallel import LocalSGD, NaiveDDP, ParameterServer
from course_lib.data_parallel.composition import wrapper_of
from course_lib.ddp import DDP
from course_lib.fsdp import FSDP
from course_lib.fsdp.whole import WholeFSDP
from course_lib.mesh import Mesh, RankMesh
from course_lib.models import GPT, next_tokens, token_batch
from course_lib.pipeline import Pipeline
from course_lib.tensor_parallel import ColumnParallelLinear, parallel_token_loss, parallelize
from course_lib.zero import ShardedOptimizer, ZeRO1, ZeRO2, ZeRO3

TINY = replace(
    find_model("tiny"), num_layers=1, hidden=8, num_heads=2, ffn_hidden=16, vocab=16, max_seq=8
)
ENGINES = {"ZeRO1": ZeRO1, "ZeRO2": ZeRO2, "ZeRO3": ZeRO3}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


class Blocks(nn.Module):
    """Two blocks, which become units, and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks():
    torch.manual_seed(0)
    return Blocks()


def zero(name, module):
    return ENGINES[name](module, SGD, lr=0.5)


def sharded(module):
    return ShardedOptimizer(module.parameters(), SGD, lr=0.5)


def served(module):
    return ParameterServer(module, SGD(module.parameters()))


def one_after_another(first, second):
    """Both of the same module, as in two cells of a notebook."""
    module = net()
    kept = first(module)
    return second(module), kept


def compiled(module):
    return torch.compile(module, backend="aot_eager")


def with_compiled_blocks(in_place):
    module = blocks()
    for number, block in enumerate(module.blocks):
        if in_place:
            block.compile(backend="aot_eager")
        else:
            module.blocks[number] = compiled(block)
    return module


def split_gpt():
    torch.manual_seed(0)
    return parallelize(GPT(TINY), RankMesh(Mesh(tp=2)).device_mesh("tp"))


def before_split(make):
    """An optimizer of a model that tensor parallelism splits later."""
    torch.manual_seed(0)
    model = GPT(TINY)
    optimizer = make(model)
    parallelize(model, RankMesh(Mesh(tp=2)).device_mesh("tp"))
    return optimizer


def sgd(model):
    return SGD(model.parameters(), lr=0.5)


def alone():
    """The data-parallel group of one rank, beside tensor parallelism over two."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def of_stage(wrapped):
    """The same, as one of two stages."""
    return Pipeline(wrapped, nn.functional.mse_loss).stage.chunks[0]


ONCE = {
    "DDP": DDP,
    "NaiveDDP": NaiveDDP,
    "FSDP": FSDP,
    **{name: lambda module, name=name: zero(name, module) for name in ENGINES},
}
WRAPPED, SHARDED = "need a module without another wrapper", "need whole parameters"
COPIED = "need a model outside of a process group to copy or pickle"
TENSOR_PARALLEL = (
    "and tensor parallelism has split the model with embedding.weight over ranks [0, 1]"
)
REFUSED = {
    "DDP(FSDP)": (lambda: DDP(FSDP(net())), WRAPPED),
    "NaiveDDP(FSDP)": (lambda: NaiveDDP(FSDP(net())), WRAPPED),
    "torch DDP(FSDP)": (lambda: TorchDDP(FSDP(net())), WRAPPED),
    "torch DDP(DDP)": (lambda: TorchDDP(DDP(net())), WRAPPED),
    "DDP(torch DDP)": (lambda: DDP(TorchDDP(net())), WRAPPED),
    "DDP(DDP)": (lambda: DDP(DDP(net())), WRAPPED),
    "ZeRO2(DDP)": (lambda: zero("ZeRO2", DDP(net())), WRAPPED),
    "ZeRO3(DDP)": (lambda: zero("ZeRO3", DDP(net())), WRAPPED),
    "FSDP(Sequential(FSDP))": (lambda: FSDP(nn.Sequential(FSDP(net()))), WRAPPED),
    "FSDP(fully_shard)": (lambda: FSDP(fully_shard(net())), WRAPPED),
    "DDP(fully_shard)": (lambda: DDP(fully_shard(net())), WRAPPED),
    "FSDP, then DDP": (lambda: one_after_another(FSDP, DDP), SHARDED),
    "FSDP, then FSDP": (lambda: one_after_another(FSDP, FSDP), SHARDED),
    "FSDP, then ZeRO1": (lambda: one_after_another(FSDP, lambda m: zero("ZeRO1", m)), SHARDED),
    "ZeRO3, then ZeRO3": (
        lambda: one_after_another(*[lambda m: zero("ZeRO3", m)] * 2),
        SHARDED,
    ),
    "DDP(ZeRO3.module)": (lambda: DDP(zero("ZeRO3", net()).module), SHARDED),
    "DDP(replicate)": (lambda: DDP(replicate(net())), WRAPPED),
    "FSDP, after replicate": (lambda: one_after_another(replicate, FSDP), WRAPPED),
    **{
        f"{name}(WholeFSDP)": (lambda wrap=wrap: wrap(WholeFSDP(net())), SHARDED)
        for name, wrap in ONCE.items()
    },
    "ShardedOptimizer of WholeFSDP": (lambda: sharded(WholeFSDP(net())), SHARDED),
    "WholeFSDP, then torch DDP": (
        lambda: one_after_another(WholeFSDP, TorchDDP),
        "need code that knows",
    ),
    "WholeFSDP, then fully_shard": (
        lambda: one_after_another(WholeFSDP, fully_shard),
        "need code that",
    ),
    "LocalSGD, then FSDP": (
        lambda: one_after_another(lambda m: LocalSGD(m, every=2), FSDP)[1].average(),
        SHARDED,
    ),
    "ParameterServer of FSDP": (lambda: served(FSDP(net())), SHARDED),
    "LocalSGD(FSDP)": (lambda: LocalSGD(FSDP(net()), every=2), SHARDED),
    "ShardedOptimizer of FSDP": (lambda: sharded(FSDP(net())), SHARDED),
    "ShardedOptimizer of fully_shard": (lambda: sharded(fully_shard(net())), SHARDED),
    "parallelize(FSDP.module)": (
        lambda: parallelize(FSDP(GPT(TINY)).module, RankMesh(Mesh(tp=2)).device_mesh("tp")),
        SHARDED,
    ),
    "a copy of TP": (lambda: copy.deepcopy(split_gpt()), COPIED),
    "a pickle of TP": (lambda: pickle.dumps(split_gpt()), COPIED),
    "a copy of a layer of TP": (
        lambda: copy.deepcopy(ColumnParallelLinear(4, 4)),
        "Try full_state_dict(model), loaded into another model",
    ),
    "DDP(ZeRO2)": (lambda: DDP(zero("ZeRO2", net())), "need an nn.Module; got an object of ZeRO2"),
    "FSDP, then torch DDP": (lambda: one_after_another(FSDP, TorchDDP), "need code that knows"),
    "FSDP, then fully_shard": (lambda: one_after_another(FSDP, fully_shard), "need code that"),
    "fully_shard(FSDP)": (lambda: fully_shard(FSDP(net())), "need code that knows"),
    "torch DDP(ZeRO3.module)": (lambda: TorchDDP(zero("ZeRO3", net()).module), "need code that"),
    **{
        f"{name} over TP": (lambda wrap=wrap: wrap(split_gpt()), TENSOR_PARALLEL)
        for name, wrap in {"DDP": DDP, "NaiveDDP": NaiveDDP, "FSDP": FSDP}.items()
    },
    **{
        f"{name} over TP": (lambda name=name: zero(name, split_gpt()), TENSOR_PARALLEL)
        for name in ENGINES
    },
    "clipped FSDP over TP": (
        lambda: FSDP(split_gpt(), group=alone()).clip_grad_norm_(1.0),
        "FSDP.clip_grad_norm_: need gradients of which this group holds all parts",
    ),
    "clipped FSDP over a stage": (
        lambda: of_stage(FSDP(net(), group=alone())).clip_grad_norm_(1.0),
        "got some that a pipeline has split over ranks [0, 1]. Try DDP and clip_grad_norm_across",
    ),
    "clipped ZeRO1 over TP": (
        lambda: ZeRO1(split_gpt(), SGD, alone(), lr=0.5).optimizer.clip_grad_norm_(1.0),
        "need gradients of which this group holds all parts",
    ),
    "ShardedOptimizer over TP": (
        lambda: sharded(split_gpt()),
        "split the model with parameter 0 over",
    ),
    **{
        f"ZeRO3(compiled {name})": (lambda make=make: zero("ZeRO3", make()), f"got {name} compiled")
        for name, make in {
            "the module": lambda: compiled(blocks()),
            "blocks.0": lambda: with_compiled_blocks(in_place=False),
        }.items()
    },
    "FSDP(compiled)": (lambda: FSDP(compiled(blocks())), "got the module compiled"),
    "FSDP(units compiled in place)": (
        lambda: FSDP(with_compiled_blocks(in_place=True)),
        "got blocks.0 compiled",
    ),
    "optimizer before FSDP, step": (
        lambda: one_after_another(lambda m: SGD(m.parameters()), FSDP)[1].step(),
        "so it would train nothing",
    ),
    "optimizer before FSDP, zero_grad": (
        lambda: one_after_another(lambda m: SGD(m.parameters()), FSDP)[1].zero_grad(),
        "so it would train nothing",
    ),
    "optimizer before FSDP, grad": (
        lambda: setattr(one_after_another(lambda m: [*m.parameters()], FSDP)[1][0], "grad", None),
        "so it would train nothing",
    ),
    "Muon of TP": (
        lambda: Muon([split_gpt().embedding.weight]),
        "tensor parallelism: need an optimizer that steps each number by itself",
    ),
    "LBFGS of TP": (lambda: LBFGS(split_gpt().parameters()), "each number by itself"),
    **{
        f"{name} before parallelize": (
            lambda make=make: before_split(make).step(),
            "tensor parallelism: need an optimizer of the shards; got one of a parameter that",
        )
        for name, make in {"SGD": sgd, "ShardedOptimizer": sharded}.items()
    },
    "Muon of FSDP": (
        lambda: Muon(FSDP(nn.Linear(4, 4, bias=False)).parameters()),
        "FSDP: need an optimizer that steps each number by itself",
    ),
    "Adafactor of FSDP": (
        lambda: Adafactor(FSDP(net()).parameters()),
        "FSDP: need an optimizer that steps each number by itself",
    ),
    "SparseAdam of FSDP": (lambda: SparseAdam(FSDP(net()).parameters()), "FSDP: need an optimizer"),
}


def sentence_for(rank, name):
    """The error of one case, as it is made."""
    with pytest.raises(CourseError) as caught:
        REFUSED[name][0]()
    return str(caught.value), isinstance(caught.value, MeshError)


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_composition_is_refused_in_one_sentence(pools, name):
    wanted = REFUSED[name][1]
    for said, is_mesh_error in pools(2).run(sentence_for, name):
        assert wanted in said
        assert "; got " in said
        assert " Try " in said
        assert is_mesh_error == (" over " in name)


def test_a_module_whose_wrapper_is_gone_is_wrapped_again(pools):
    def wrapped(rank):
        module = net()
        names = ("DDP", "ZeRO2", "DDP")
        found = [wrapper_of(next(iter(ONCE[name](module).module.parameters()))) for name in names]
        copied = pickle.loads(pickle.dumps(copy.deepcopy(module)))
        inspect.getmembers(DDP(copied))  # which asks for all that PyTorch's DDP asks for
        return found

    assert pools(2).run(wrapped) == [[None] * 3] * 2


def losses(rank, wrap, make_optimizer=None):
    """Losses of the whole batch in three steps, and the parameters behind them."""
    model = wrap()
    optimizer = make_optimizer(model) if make_optimizer else model
    found = []
    for n in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(n)).chunk(2)[rank]
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if isinstance(model, DDP | NaiveDDP):
            model.finish()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(total.item() / 2)
    return found


def losses_after(rank, earlier, name):
    """Losses of a module that an earlier wrapper still holds, and what using that one says."""
    module = blocks()
    first = ONCE[earlier](module)
    first(torch.ones(2, 4)).sum().backward()
    found = losses(rank, lambda: ONCE[name](module), None if name in ENGINES else sgd)
    said = []
    for use in (lambda: first(torch.ones(2, 4)), first.finish):
        with pytest.raises(CourseError) as caught:
            use()
        said.append(str(caught.value))
    return found, said


@pytest.mark.parametrize("name", ONCE)
def test_a_cell_that_wraps_a_module_can_be_run_again(pools, name):
    make_optimizer = None if name in ENGINES else sgd
    wanted = pools(2).run(losses, lambda: ONCE[name](blocks()), make_optimizer)
    for earlier in ("DDP", "NaiveDDP", "ZeRO1", "ZeRO2"):
        for rank, (found, said) in enumerate(pools(2).run(losses_after, earlier, name)):
            assert found == wanted[rank]
            for sentence in said:
                assert f"{earlier}: need the wrapper that a module has got last" in sentence
                assert f"which {name} has replaced. Try the model that {name} returned" in sentence


def test_a_cell_of_ddp_and_a_sharded_optimizer_can_be_run_again(pools):
    def after_itself(rank):
        model = DDP(blocks())
        first = model, sharded(model)
        losses(rank, lambda: model, lambda _: first[1])
        model.module.load_state_dict(blocks().state_dict())
        return losses(rank, lambda: DDP(model.module), sharded)

    assert pools(2).run(after_itself) == pools(2).run(losses, lambda: DDP(blocks()), sharded)


RIGHT = {
    "FSDP": (lambda: FSDP(blocks()), sgd),
    "FSDP of compiled units": (lambda: FSDP(with_compiled_blocks(in_place=False)), sgd),
    "DDP of compiled blocks": (lambda: DDP(with_compiled_blocks(in_place=True)), sgd),
    "DDP and ShardedOptimizer": (lambda: DDP(blocks()), sharded),
    "ZeRO1 of a compiled module": (lambda: zero("ZeRO1", compiled(blocks())), None),
    "ZeRO2 of compiled blocks": (lambda: zero("ZeRO2", with_compiled_blocks(True)), None),
    "ZeRO3": (lambda: zero("ZeRO3", blocks()), None),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_fits_together_has_the_losses_of_ddp(pools, name):
    wanted = pools(2).run(losses, lambda: DDP(blocks()), sgd)[0]
    assert pools(2).run(losses, *RIGHT[name])[0] == pytest.approx(wanted, rel=1e-5)


def tp_and_dp(rank, wrap):
    """Losses of two steps with TP over one axis and data parallelism over the other."""
    torch.manual_seed(0)
    mesh = RankMesh(Mesh(dp=2, tp=2))
    split = parallelize(GPT(TINY), mesh.device_mesh("tp"))
    model, optimizer = wrap(split, mesh.group("dp"))
    found = []
    for n in range(2):
        batch = next_tokens(token_batch(n, batch=4, seq=8, vocab=16))
        x, y = (tensor.chunk(2)[mesh.index("dp")] for tensor in batch)
        optimizer.zero_grad()
        loss = parallel_token_loss(model(x), y, group=mesh.group("tp"))
        loss.backward()
        if isinstance(model, DDP):
            model.finish()
        optimizer.step()
        found.append(loss.item())
    return found


def fsdp_over(module, group):
    model = FSDP(module, group=group)
    return model, sgd(model)


def zero_over(name):
    def wrap(module, group):
        engine = ENGINES[name](module, SGD, group, lr=0.5)
        return engine, engine

    return wrap


def ddp_over(module, group):
    model = DDP(module, group=group)
    return model, ShardedOptimizer(module.parameters(), SGD, group, lr=0.5)


def test_data_parallelism_over_the_other_axis_of_tp_stays_possible(pools):
    wanted = pools(4).run(tp_and_dp, ddp_over)
    for wrap in (fsdp_over, zero_over("ZeRO1"), zero_over("ZeRO3")):
        for mine, theirs in zip(pools(4).run(tp_and_dp, wrap), wanted, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
