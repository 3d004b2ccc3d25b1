"""The contract of FSDP: what a user does with a module in one process, ranks do with its shards.

A scenario is one function. One process runs it with `Plain` on the whole batch, the ranks run it
with `FSDP` on their parts of the batch. It returns named tensors, and what the ranks hold together
is what the one process holds: the same names in the same order, the same numbers and dtypes.
"""

import copy
import math
import sys
from collections import Counter

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from course_lib.fsdp import FSDP
from course_lib.ranks import RankError, record

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ITEMS = 24  # each half of the batch has equal parts for every world size
SIZES = (1, 2, 3, 4)


# --- modules of 6 numbers to 3, and their optimizers


def layers():
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))  # 7: uneven


class Nested(nn.Module):
    """Modules in lists and dictionaries, and a parameter of one row beside them."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, 3))
        self.blocks = nn.ModuleList([layers(), layers()])
        self.ends = nn.ModuleDict({"head": nn.Linear(6, 3)})

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.ends["head"](x) + self.shift


class Odd(nn.Module):
    """A scalar, buffers, a module called twice, a parameter and a layer that nobody uses."""

    def __init__(self):
        super().__init__()
        self.gain, self.never = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(5, 2))
        self.inner, self.unused = Nested(), nn.Linear(6, 5)
        self.register_buffer("scale", torch.tensor([1.0, 10.0, 0.1]))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x):
        self.calls += 1
        return self.gain * (self.inner(x) - self.inner(-x)) * self.scale * self.scratch


def tied():
    """One weight under two names, and one block under two names."""
    block, first, second = layers(), nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, block, nn.Tanh(), second, block, nn.Linear(6, 3))


def frozen():
    module = Nested()
    module.blocks[0].requires_grad_(False)
    module.ends["head"].weight.requires_grad_(False)
    return module


class Choice(nn.Module):
    """Items with a negative first number, which come first, use other parameters than the others.

    Ranks with items of one kind leave out the other's rows, and the other's layer if `chosen`.
    """

    def __init__(self, container, chosen=True):
        super().__init__()
        self.rows = nn.ParameterList([torch.randn(6, 6), torch.randn(6, 6)])
        self.container, self.chosen = container, chosen

    def forward(self, x):
        masks = (x[:, 0] < 0, x[:, 0] >= 0)
        sides = zip(masks, self.rows, self.container.children(), strict=True)
        sides = [(x[mask] @ rows, layer) for mask, rows, layer in sides if mask.any()]
        if self.chosen:
            return torch.cat([layer(part) for part, layer in sides])
        x = torch.cat([part for part, _ in sides])
        return sum(layer(x) for layer in self.container.children())


class InFloat32(nn.Linear):
    def forward(self, x):
        return super().forward(x.float()).double()


def linear():
    return nn.Linear(6, 3)


LISTED = "layers of a list unused on a rank"
BUILDS = {
    "nested": Nested,
    "odd": Odd,
    "tied": tied,
    "frozen": frozen,
    "rows unused on a rank": lambda: Choice(nn.ModuleList([linear(), linear()]), chosen=False),
    "layers unused on a rank": lambda: Choice(nn.ModuleDict({"a": linear(), "b": linear()})),
    LISTED: lambda: Choice(nn.ModuleList([linear(), linear()])),
    "two dtypes": lambda: nn.Sequential(nn.Linear(6, 7), InFloat32(7, 5), nn.Linear(5, 3)),
}
USUAL = [name for name in BUILDS if name not in (LISTED, "two dtypes")]


def build(name, seed=0):
    torch.manual_seed(seed)
    module = BUILDS[name]().double()
    for part in module.modules():
        if isinstance(part, InFloat32):
            part.float()
    return module


def batch(seed=0):
    torch.manual_seed(99 + seed)
    x, y = torch.randn(ITEMS, 6).double(), torch.randn(ITEMS, 3).double()
    x[:, 0] = torch.linspace(-1, 1, ITEMS)  # sorted: the ranks of a Choice choose differently
    return x, y


def sgd(module):
    return [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)]


def adamw(module):
    """Only matrices decay."""
    decay = [p for p in module.parameters() if p.dim() > 1]
    rest = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest}]
    return [torch.optim.AdamW(groups, lr=0.01, weight_decay=0)]


def two(module):
    biases = [p for name, p in module.named_parameters() if name.endswith("bias")]
    rest = [p for name, p in module.named_parameters() if not name.endswith("bias")]
    return [torch.optim.SGD(biases, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]


def one_each(module):
    return [torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in module.parameters()]


# --- a scenario in one process and on the ranks


class Plain:
    """One process: the module itself, used as an FSDP module is used."""

    def __init__(self, module):
        self.module, self.full_state_dict = module, module.state_dict

    def __call__(self, x):
        return self.module(x)

    def finish(self):
        pass


class PlainBfloat16(Plain):
    """One process that computes with a bfloat16 copy of the module."""

    def __call__(self, x):
        self.copy = copy.deepcopy(self.module).bfloat16()
        return self.copy(x)

    def finish(self):
        pairs = zip(self.module.parameters(), self.copy.parameters(), strict=True)
        for param, own in pairs:
            param.grad = None if own.grad is None else own.grad.to(param.dtype)


def on_rank(rank, scenario, args, options):
    p = dist.get_world_size()
    return scenario(lambda m: FSDP(m, **options), lambda x: x.chunk(p)[rank], *args)


def assert_same(by_rank, wanted, tolerance=1e-10):
    """What the ranks hold, shards on dim 0 or the same on all of them, is what one process holds.

    A scalar, which has no dim 0, is whole on all ranks or the one row of one of them.
    `tolerance`, of the largest number of each tensor: sums over the batch run in another order.
    """
    for found in by_rank:
        assert list(found) == list(wanted)
    for name, value in wanted.items():
        parts = [found[name] for found in by_rank]
        shapes = [None if part is None else part.shape for part in parts]
        if value is None or None in shapes:
            assert shapes == [None] * len(parts), f"{name}: {shapes}"
            assert value is None, f"{name} has no gradient"
            continue
        whole = set(shapes) == {value.shape}
        assert whole or not name.startswith("state"), f"{name}: {shapes}"
        assert not whole or all(torch.equal(part, parts[0]) for part in parts), f"{name} differs"
        got, said = parts[0] if whole else torch.cat(parts), f"{name}: {{}}".format
        got = got if value.dim() else got.squeeze()
        largest = value.abs().max().item()
        torch.testing.assert_close(got, value, rtol=0, atol=tolerance * largest, msg=said)


def look(model, when):
    """Copies of all parameters and their gradients, by name."""
    found = {}
    for name, param in model.module.named_parameters():
        grad = param.grad
        assert grad is None or (grad.shape, grad.dtype) == (param.shape, param.dtype), name
        found[f"{name} {when}"] = param.detach().clone()
        found[f"gradient of {name} {when}"] = None if grad is None else grad.clone()
    return found


def state(model):
    return {f"state: {name}": x.clone() for name, x in model.full_state_dict().items()}


def step(model, optimizers, x, y, when):
    """One step; the parameters and gradients after it."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    F.mse_loss(model(x).to(y.dtype), y).backward()
    model.finish()
    for optimizer in optimizers:
        optimizer.step()
    return look(model, f"after {when}")


def trains(wrap, mine, name, optimizers=sgd, seed=0, mixed=False):
    """Three steps with evaluations between them; the last two with one half of the batch each."""
    model, (x, y), found = wrap(build(name).float() if mixed else build(name)), batch(seed), {}
    chosen, x = optimizers(model.module), x.bfloat16() if mixed else x
    for n, items in enumerate([slice(ITEMS), slice(ITEMS // 2), slice(ITEMS // 2, ITEMS)]):
        with torch.no_grad():
            found[f"outputs before step {n}"] = model(mine(-x[items].flip(0)))
        found |= step(model, chosen, mine(x[items]), mine(y[items]), f"step {n}")
    return found | state(model)


def accumulates(wrap, mine, name, finish_each):
    model, (x, y) = wrap(build(name)), batch()
    for n in range(2):
        F.mse_loss(model(mine(x.chunk(2)[n])), mine(y.chunk(2)[n])).backward()
        if finish_each or n == 1:
            model.finish()
    return look(model, "after two backwards")


def clips(wrap, mine):
    """The user clips by the norm over all ranks."""
    model, (x, y) = wrap(build("frozen")), batch()
    F.mse_loss(model(mine(x)), mine(y)).backward()
    model.finish()
    grads = [param.grad for param in model.module.parameters() if param.grad is not None]
    norm = sum(grad.square().sum() for grad in grads)
    if dist.is_initialized():
        dist.all_reduce(norm)
    for grad in grads:
        grad.mul_(0.1 / norm.sqrt())
    sgd(model.module)[0].step()
    return {"norm": norm.sqrt()} | look(model, "after a step")


class Both:
    """Two models with one loss, each called twice before backward."""

    def __init__(self, *models):
        self.models, self.module = models, nn.ModuleList([model.module for model in models])

    def __call__(self, x):
        first, second = self.models
        return second(first(x)) - second(first(-x))

    def finish(self):
        for model in self.models:
            model.finish()


def trains_both(wrap, mine):
    modules, (x, y) = [build("nested"), nn.Linear(3, 3, dtype=torch.float64)], batch()
    model = Both(*map(wrap, modules))
    chosen = [*adamw(model.module[0]), *sgd(model.module[1])]
    steps = [step(model, chosen, mine(x), mine(y), f"step {n}") for n in range(3)]
    return {name: x for found in steps for name, x in found.items()}


def starts_again(wrap, mine, name):
    """From the full state dict: the plain module, and a fresh one that trains on."""
    model, plain, (x, y) = wrap(build(name)), build(name, seed=1), map(mine, batch())
    step(model, sgd(model.module), x, y, "a step")
    plain.load_state_dict(model.full_state_dict())
    found = state(model) | {"outputs": plain(x).detach()}
    fresh = wrap(plain)
    return found | step(fresh, adamw(fresh.module), x, y, "a new step") | state(fresh)


def goes_on(wrap, mine, name):
    """From the state dicts of each rank's own parameters and optimizer."""
    model, fresh, (x, y) = wrap(build(name)), wrap(build(name, seed=1)), map(mine, batch())
    (old,), (new,) = adamw(model.module), adamw(fresh.module)
    step(model, [old], x, y, "a step")
    fresh.module.load_state_dict(copy.deepcopy(model.module.state_dict()))
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    return step(fresh, [new], x, y, "the next step") | state(fresh)


# --- the law

LAW = [
    *((trains, name) for name in USUAL),
    *((trains, name, by) for name in ("odd", "tied") for by in (adamw, two, one_each)),
    *((accumulates, name, each) for name in ("odd", *USUAL[-2:]) for each in (True, False)),
    *((go, name) for go in (starts_again, goes_on) for name in ("odd", "tied", "frozen")),
    (trains_both,),
    (clips,),
]


def check(pools, world_size, scenario, *args, tolerance=1e-10, plain=Plain, **options):
    by_rank = pools(world_size).run(on_rank, scenario, args, options)
    assert_same(by_rank, scenario(plain, lambda x: x, *args), tolerance)


def words(case):
    return ", ".join(getattr(part, "__name__", str(part)) for part in case)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("case", LAW, ids=words)
def test_ranks_have_the_numbers_of_one_process(pools, case, world_size):
    check(pools, world_size, *case)


@pytest.mark.parametrize("world_size", SIZES)
def test_two_dtypes_have_the_numbers_of_one_process(pools, world_size):
    check(pools, world_size, trains, "two dtypes", tolerance=1e-5)


@pytest.mark.parametrize("world_size", SIZES)
def test_ranks_may_use_other_layers_of_a_unit(pools, world_size):
    check(pools, world_size, trains, LISTED, units=[])


def test_ranks_that_use_other_units_are_told(pools):
    """Each layer of a list is a unit: all ranks have to gather it, as with `fully_shard`."""
    with pytest.raises(RankError, match="the ranks made different calls"):
        check(pools, 2, trains, LISTED)


@pytest.mark.parametrize("name", USUAL)
def test_parameters_may_stay_between_forward_and_backward(pools, name):
    check(pools, 3, trains, name, reshard_after_forward=False)


# --- what a rank holds and sends; groups; mixed precision


def held(rank, name):
    """Of each parameter its shape, dtype and requires_grad; the bytes of all; are they the same?"""
    model, (x, y) = FSDP(build(name)), batch()
    params = dict(model.module.named_parameters())
    step(model, sgd(model.module), x, y, "a step")
    with torch.no_grad():
        model(x)
    same = all(params[n] is param for n, param in model.module.named_parameters())
    storages = [param.untyped_storage() for param in params.values()]
    about = {n: (param.shape, param.dtype, param.requires_grad) for n, param in params.items()}
    return about, sum({s.data_ptr(): s.nbytes() for s in storages}.values()), same


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", BUILDS)
def test_a_rank_holds_its_rows_of_every_parameter(pools, name, world_size):
    by_rank, most_bytes = pools(world_size).run(held, name), 0
    wanted = dict(build(name).named_parameters())
    for n, whole in wanted.items():
        shapes = [about[n][0] for about, _, _ in by_rank]
        assert {about[n][1:] for about, _, _ in by_rank} == {(whole.dtype, whole.requires_grad)}
        assert {shape[1:] for shape in shapes} == {whole.shape[1:]}, n
        if whole.dim():
            rows = [shape[0] for shape in shapes]
            assert (sum(rows), max(rows)) == (len(whole), math.ceil(len(whole) / world_size)), n
        most_bytes += max(map(math.prod, shapes)) * whole.itemsize
    for about, num_bytes, same in by_rank:
        assert list(about) == list(wanted)
        assert same
        assert num_bytes <= most_bytes


def messages(rank):
    model = FSDP(nn.Linear(6, 12), reshard_after_forward=False)
    with record() as log:
        model(torch.ones(2, 6)).sum().backward()
        model.finish()
    kinds = ("all_gather", "reduce_scatter")
    return Counter((event.kind, event.num_bytes) for event in log.events if event.kind in kinds)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_unit_sends_its_parameters_and_its_gradients_in_one_message_each(pools, world_size):
    wanted = {("all_gather", 4 * 7 * 12): 1, ("reduce_scatter", 4 * 7 * 12): 1}
    assert pools(world_size).run(messages) == [wanted] * world_size


def in_pairs(rank):
    """Ranks 0 and 2 train on one batch, 1 and 3 on another."""
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    wrap, mine = lambda m: FSDP(m, group=group), lambda x: x.chunk(2)[rank // 2]
    return trains(wrap, mine, "nested", seed=rank % 2)


def test_each_group_trains_a_model_of_its_own(pools):
    by_rank = pools(4).run(in_pairs)
    for seed in range(2):
        assert_same(by_rank[seed::2], trains(Plain, lambda x: x, "nested", seed=seed))


def on_mesh(rank, name):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return goes_on(lambda m: FSDP(m, mesh=mesh), lambda x: x.chunk(4)[rank], name)


@pytest.mark.parametrize("name", USUAL)
def test_shards_inside_a_node_are_replicated_across_nodes(pools, name):
    by_rank = pools(4).run(on_mesh, name)
    assert_same(by_rank[:2], goes_on(Plain, lambda x: x, name))
    torch.testing.assert_close(by_rank[2:], by_rank[:2], rtol=0, atol=0)


IN_BFLOAT16 = {"plain": PlainBfloat16, "compute_dtype": torch.bfloat16}


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", ["nested", "tied", "frozen", "rows unused on a rank"])
def test_bfloat16_computes_and_float32_learns(pools, name, world_size):
    args = (trains, name, sgd, 0, True)
    check(pools, world_size, *args, tolerance=2**-4, **IN_BFLOAT16)  # 8 bits, rounded often


class Notes(nn.Linear):
    def forward(self, x):
        Notes.seen = self.weight.detach().clone()
        return super().forward(x)


def learns_slowly(wrap, mine):
    """Updates that bfloat16 would round away, and the weight that forward has seen."""
    layer, x = Notes(6, 5, bias=False), torch.ones(ITEMS, 6, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    model = wrap(layer)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=2**-14)
    for _ in range(2):
        optimizer.zero_grad()
        model(mine(x)).float().mean(0).sum().backward()
        model.finish()
        optimizer.step()
    return {"weight in forward": Notes.seen} | look(model, "after two steps")


@pytest.mark.parametrize("world_size", SIZES)
def test_forward_sees_bfloat16_and_small_updates_are_kept(pools, world_size):
    check(pools, world_size, learns_slowly, tolerance=1e-6, **IN_BFLOAT16)
