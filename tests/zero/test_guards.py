"""Code that needs the whole gradient is refused where a rank has a part of it, or is right."""

import copy
import importlib
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD, AdamW, NAdam
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from course_lib.core.errors import CourseError
from course_lib.data_parallel.elementwise import ELEMENTWISE
from course_lib.data_parallel.guarded import READERS, STEP
from course_lib.fsdp import FSDP
from course_lib.zero import ShardedOptimizer, ZeRO1, ZeRO2, ZeRO3

ENGINES = {"ZeRO1": ZeRO1, "ZeRO2": ZeRO2, "ZeRO3": ZeRO3}
clip = nn.utils.clip_grad_norm_


def net():
    torch.manual_seed(0)
    return nn.Linear(2, 4, bias=False)


def after_backward(name, scale=1.0):
    """A model with gradients, and its optimizer: `infinite` in the second rank's row only."""
    module = net()
    if name == "FSDP":
        model = FSDP(module)
        optimizer = SGD(model.parameters(), lr=0.1)
    else:
        model = ENGINES[name](module, SGD, lr=0.1)
        optimizer = model.optimizer
    (model(torch.ones(1, 2)) * torch.arange(4.0) * scale).sum().backward()
    return model, module, optimizer


def clipping(clip, *arguments):
    def reader(name):
        model, module, _ = after_backward(name)
        clip(list(model.parameters() if name == "FSDP" else module.parameters()), *arguments)

    return reader


def torch_scaler(name):
    _model, _, optimizer = after_backward(name)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))  # as a loss
    scaler.step(optimizer)


def total_norm(name):
    model, _, _ = after_backward(name)
    nn.utils.get_total_norm([shard.grad for shard in model.parameters()])


READER = {
    "clip_grad_norm_": clipping(clip, 1.0),
    "clip_grads_with_norm_": clipping(nn.utils.clip_grads_with_norm_, 1.0, torch.ones(())),
    "get_total_norm": total_norm,
    "clip_grad_value_": clipping(nn.utils.clip_grad_value_, 1.0),
    "GradScaler": torch_scaler,
}
CASES = [(name, reader) for name in ("FSDP", *ENGINES) for reader in READER]
CASES = [case for case in CASES if case[1] != "get_total_norm" or case[0] == "FSDP"]
CASES.remove(("FSDP", "clip_grad_value_"))  # right: it clips each number by itself


@pytest.mark.parametrize(("name", "reader"), CASES)
def test_what_would_see_one_ranks_shards_is_refused(pools, name, reader):
    def told(rank):
        with pytest.raises(CourseError, match="need code that knows of the shards") as caught:
            READER[reader](name)
        return str(caught.value)

    for said in pools(2).run(told):
        assert f"got torch.{'amp' if reader == 'GradScaler' else 'nn.utils'}.{reader}, " in said
        assert ("Try " if reader == "GradScaler" else "clip_grad_norm_(max_norm).") in said


PLACES = {
    "clip": "torch.nn.utils.clip_grad",
    "_clip": "torch.nn.utils.clip_grad",
    "GradScaler": "torch.amp.grad_scaler",
    "Module": "torch.nn.modules.module",
    "DistributedDataParallel": "torch.nn.parallel.distributed",
    "_move": "torch.distributed.fsdp._fully_shard._fsdp_init",
    **{name.partition(".")[0]: "torch.optim" for name, kind in READERS.items() if kind == STEP},
}


@pytest.mark.parametrize("name", READERS)
def test_each_reader_is_a_name_in_this_pytorch(name):
    place = next(PLACES[start] for start in PLACES if name.startswith(start))
    found = importlib.import_module(place)
    for part in name.split("."):
        found = getattr(found, part)
    assert inspect.unwrap(found).__code__.co_qualname == name


def own_clip(name):
    """A function of a learner with the name of PyTorch's, in a folder with torch in its path."""
    space = {}
    code = "def clip_grad_norm_(params): return [param.grad for param in params]"
    exec(compile(code, "/home/me/pytorch/mine.py", "exec"), space)
    _model, module, _ = after_backward(name)
    return len(space["clip_grad_norm_"](list(module.parameters())))


def copied(name):
    """A copy of the module belongs to no engine."""
    other = copy.deepcopy(after_backward(name)[1])
    other(torch.ones(1, 2)).sum().backward()
    return clip(other.parameters(), 1.0).item()


def left(name):
    """The module when its engine is gone."""
    module = after_backward(name)[1]
    module.zero_grad()
    return len(clip(module.parameters(), 1.0).shape)


def deleted(name):
    param = next(iter(after_backward(name)[0].parameters()))
    assert type(copy.deepcopy(param.grad)) is type(pickle.loads(pickle.dumps(param.grad)))
    del param.grad
    return param.grad is None


ALLOWED = {
    own_clip: ("FSDP", "ZeRO1"),
    copied: ("ZeRO1", "ZeRO2"),
    left: ("ZeRO1", "ZeRO2"),
    deleted: ("FSDP",),
}


@pytest.mark.parametrize("use", ALLOWED)
def test_what_takes_no_part_for_the_whole_is_allowed(pools, use):
    wanted = {own_clip: 1, copied: 8**0.5, left: 0, deleted: True}[use]
    found = pools(2).run(lambda rank: [use(name) for name in ALLOWED[use]])
    assert found == [pytest.approx([wanted] * len(ALLOWED[use]))] * 2


def test_one_rank_has_the_whole_gradient_under_fsdp(pools):
    def norm(rank):
        return clip(after_backward("FSDP")[0].parameters(), 1.0).item()

    assert pools(1).run(norm) == pytest.approx([28**0.5])


def test_all_ranks_skip_a_step_together_with_the_sharded_scaler(pools):
    def moved(rank):
        model = FSDP(net())
        before = [shard.detach().clone() for shard in model.parameters()]
        optimizer, scaler = SGD(model.parameters(), lr=0.1), ShardedGradScaler("cpu", 2.0)
        factors = torch.tensor([1.0, 1.0, 1.0, float("inf")])  # a row of the last rank's shard
        scaler.scale((model(torch.ones(1, 2)) * factors).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        pairs = zip(before, model.parameters(), strict=True)
        return any(not torch.equal(old, new) for old, new in pairs), scaler.get_scale()

    assert pools(2).run(moved) == [(False, 1.0)] * 2


class SignSGD(torch.optim.Optimizer):
    """An optimizer of a learner, which says of itself that it steps each number alone."""

    elementwise = True

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad.sign(), alpha=group["lr"])


class Unmarked(SignSGD):
    """One that says nothing of itself: nobody can know."""

    elementwise = False


class OwnStep(AdamW):
    """One of PyTorch's, with a step of its own."""

    step = Unmarked.step


class Named(AdamW):
    """One of PyTorch's, with its step."""


@pytest.mark.parametrize("optimizer_cls", [Unmarked, OwnStep])
@pytest.mark.parametrize("name", ["FSDP", "ShardedOptimizer"])
def test_an_optimizer_with_a_step_of_its_own_has_to_say_what_it_is(pools, name, optimizer_cls):
    def told(rank):
        params = (FSDP(net()) if name == "FSDP" else net()).parameters()
        args = (optimizer_cls,) if name == "ShardedOptimizer" else ()
        make = ShardedOptimizer if args else optimizer_cls
        with pytest.raises(CourseError, match="elementwise = True in a class of your own") as said:
            make(params, *args, lr=0.1)
        return f"got {optimizer_cls.__name__}" in str(said.value)

    assert pools(2).run(told) == [True] * 2


@pytest.mark.parametrize("name", ["ZeRO2", "ZeRO3"])
def test_the_module_does_not_clear_what_an_engine_keeps(pools, name):
    def told(rank):
        model, module, _ = after_backward(name)
        with pytest.raises(CourseError, match=r"got module.zero_grad\(\).* Try engine.zero_grad"):
            module.zero_grad()
        model.zero_grad()
        module.zero_grad()

    pools(2).run(told)


@pytest.mark.parametrize("optimizer_cls", [SignSGD, Named, NAdam])
def test_an_elementwise_optimizer_steps_shards_as_one_process(pools, optimizer_cls):
    def weights(rank, sharded):
        module = net()
        model = FSDP(module) if sharded else module
        optimizer = optimizer_cls(model.parameters(), lr=0.1)
        (model(torch.ones(1, 2)) * torch.arange(1.0, 5)).sum().backward()
        optimizer.step()
        return (model.full_state_dict() if sharded else module.state_dict())["weight"]

    sharded, whole = (pools(2).run(weights, how)[0] for how in (True, False))
    torch.testing.assert_close(sharded, whole, rtol=0, atol=1e-7)


@pytest.mark.parametrize("offload", [False, True])
def test_every_elementwise_optimizer_has_the_state_of_one_process(pools, offload):
    """Also where the state was saved and loaded after each step."""

    def trained(rank, sharded):
        found = {}
        for cls in ELEMENTWISE:
            module = net()
            engine = ZeRO1(module, cls, lr=0.1, offload=offload) if sharded else None
            optimizer = engine.optimizer if engine else cls(module.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                ((engine or module)(torch.ones(1, 2)) * torch.arange(1.0, 5)).sum().backward()
                optimizer.step()
                if engine:
                    engine.load_full_state_dict(engine.full_state_dict())
            state = optimizer.full_state_dict() if sharded else optimizer.state_dict()
            found[cls.__name__] = module.weight.detach().clone(), state["state"]
        return found

    sharded, whole = (pools(2).run(trained, how)[0] for how in (True, False))
    torch.testing.assert_close(sharded, whole, rtol=0, atol=1e-6)


def one_cycle(optimizer):
    return OneCycleLR(optimizer, 0.1, total_steps=6)


def cyclic(optimizer):
    return CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, base_momentum=0.5, max_momentum=0.9)


SCHEDULES = {
    "OneCycleLR": (one_cycle, AdamW, {}),
    "CyclicLR": (cyclic, SGD, {"momentum": 0.9}),
}


@pytest.mark.parametrize("kind", ["ShardedOptimizer", "ZeRO1", "ZeRO3"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_that_cycle_momentum_find_the_defaults(pools, kind, name):
    make, optimizer_cls, settings = SCHEDULES[name]

    def weights(rank, kind):
        model, settings_ = net(), {"lr": 0.1, **settings}
        engine = None
        if kind == "plain":
            optimizer = optimizer_cls(model.parameters(), **settings_)
        elif kind == "ShardedOptimizer":
            optimizer = ShardedOptimizer(model.parameters(), optimizer_cls, **settings_)
        else:
            engine = ENGINES[kind](model, optimizer_cls, **settings_)
            optimizer = engine.optimizer
        schedule = make(optimizer)
        for _ in range(4):
            stepped = engine or optimizer
            stepped.zero_grad()
            output = (engine or model)(torch.ones(1, 2))
            (output * torch.arange(1.0, 5)).sum().backward()
            stepped.step()
            schedule.step()
        return engine.full_state_dict()["model"]["weight"] if engine else model.weight.detach()

    sharded, whole = (pools(2).run(weights, one)[0] for one in (kind, "plain"))
    torch.testing.assert_close(sharded, whole, rtol=0, atol=1e-6)
