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
from torch.nn import functional as F

from course_lib.fsdp import FSDP
from course_lib.ranks import RankError, record
from tests.law.law import WORLDS
from tests.law.modules import HARD, Choice, build, numbers

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ITEMS = 24  # each half of the batch has equal parts for every world size


def batch(seed=0):
    return numbers(ITEMS, seed)


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
    model, (x, y), found = (
        wrap(build(name, 0, torch.float32 if mixed else torch.float64)),
        batch(seed),
        {},
    )
    chosen, x = optimizers(model.module), x.bfloat16() if mixed else x
    for n, items in enumerate([slice(ITEMS), slice(ITEMS // 2), slice(ITEMS // 2, ITEMS)]):
        with torch.no_grad():
            found[f"outputs before step {n}"] = model(mine(-x[items].flip(0)))
        found |= step(model, chosen, mine(x[items]), mine(y[items]), f"step {n}")
    return found | state(model)


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
    modules, (x, y) = [build("odd", 0), nn.Linear(3, 3, dtype=torch.float64)], batch()
    model = Both(*map(wrap, modules))
    chosen = [*adamw(model.module[0]), *sgd(model.module[1])]
    steps = [step(model, chosen, mine(x), mine(y), f"step {n}") for n in range(3)]
    return {name: x for found in steps for name, x in found.items()}


# --- the law, beyond that of `test_fsdp.py`

LAW = [
    *((trains, name, by) for name in ("odd", "tied") for by in (two, one_each)),
    (trains_both,),
]
IN_BFLOAT16 = {"compute_dtype": torch.bfloat16}
MIXED = [(trains, name, sgd, 0, True) for name in ("blocks", "tied", "adapted", "choice")]


def all_on_rank(rank, cases, options):
    return [on_rank(rank, scenario, args, options) for scenario, *args in cases]


def check(pools, world_size, cases, tolerance=1e-10, plain=Plain, **options):
    by_rank = pools(world_size).run(all_on_rank, cases, options)
    for (scenario, *args), found in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert_same(found, scenario(plain, lambda x: x, *args), tolerance)


@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_have_the_numbers_of_one_process(pools, world_size):
    check(pools, world_size, LAW)


@pytest.mark.parametrize("world_size", WORLDS)
def test_bfloat16_computes_and_float32_learns(pools, world_size):
    options = {"tolerance": 2**-4, "plain": PlainBfloat16}  # 8 bits, rounded often
    check(pools, world_size, MIXED, **options, **IN_BFLOAT16)


def test_ranks_that_use_other_units_are_told(pools):
    """Each layer of a list is a unit: all ranks have to gather it, as with `fully_shard`."""

    class Listed(Choice):
        def __init__(self):
            super().__init__()
            self.layers["high"] = nn.Linear(5, 3, bias=False)
            self.units = nn.ModuleList(self.layers.values())

    def step(rank):
        model, x = FSDP(Listed()), batch()[0].float()
        model(x.chunk(2)[rank]).sum().backward()

    with pytest.raises(RankError, match="the ranks made different calls"):
        pools(2).run(step)


# --- what a rank holds and sends; groups; mixed precision


def held(rank, name):
    """Of each parameter its shape, dtype and requires_grad; the bytes of all; are they the same?"""
    model, (x, y) = FSDP(build(name, 0)), batch()
    params = dict(model.module.named_parameters())
    step(model, sgd(model.module), x, y, "a step")
    with torch.no_grad():
        model(x)
    same = all(params[n] is param for n, param in model.module.named_parameters())
    storages = [param.untyped_storage() for param in params.values()]
    about = {n: (param.shape, param.dtype, param.requires_grad) for n, param in params.items()}
    return about, sum({s.data_ptr(): s.nbytes() for s in storages}.values()), same


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_rank_holds_its_rows_of_every_parameter(pools, world_size):
    names = [name for name, hard in HARD.items() if hard.batch is numbers]
    by_rank = pools(world_size).run(lambda rank: [held(rank, name) for name in names])
    for name, found in zip(names, zip(*by_rank, strict=True), strict=True):
        assert_rows(name, found, world_size)


def assert_rows(name, by_rank, world_size):
    wanted, most_bytes = dict(build(name, 0).named_parameters()), 0
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


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_unit_sends_its_parameters_and_its_gradients_in_one_message_each(pools, world_size):
    wanted = {("all_gather", 4 * 7 * 12): 1, ("reduce_scatter", 4 * 7 * 12): 1}
    assert pools(world_size).run(messages) == [wanted] * world_size


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


@pytest.mark.parametrize("world_size", WORLDS)
def test_forward_sees_bfloat16_and_small_updates_are_kept(pools, world_size):
    options = {"tolerance": 1e-6, "plain": PlainBfloat16}
    check(pools, world_size, [(learns_slowly,)], **options, **IN_BFLOAT16)
