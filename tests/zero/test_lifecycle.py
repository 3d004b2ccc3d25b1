"""ZeRO in a training loop that does more than steps: the numbers of one process, or a sentence."""

import copy
import pickle
import sys
import time

import cloudpickle
import pytest
import torch
from torch import nn

from course_lib.ddp import DDP
from course_lib.ranks import RankError
from course_lib.zero import ShardedOptimizer, ZeRO1, ZeRO2, ZeRO3
from tests import lifecycle
from tests.lifecycle import Loop, Net, assert_law, assert_told

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(lifecycle)


class Stage1(Loop):
    stage = ZeRO1

    def wrap(self):
        self.model = self.stage(self.module, torch.optim.SGD, bucket_bytes=80, **self.SGD)
        self.optimizer = self.model.optimizer

    def params(self):
        return list(self.module.parameters())

    def step(self):
        self.loss().backward()
        self.model.step()

    def clip(self, max_norm):
        self.optimizer.clip_grad_norm_(max_norm)

    def zero_grad(self, **options):
        self.model.zero_grad(**options)

    def weights(self):
        state = self.model.full_state_dict()["model"]
        return {name: value.clone() for name, value in state.items()}


class Stage2(Stage1):
    stage = ZeRO2


class Stage3(Stage1):
    stage = ZeRO3

    def params(self):
        return [flat_param.shard for flat_param in self.model.all_flat_params]


class Optimizer(Loop):
    def wrap(self):
        self.model = DDP(self.module, bucket_bytes=1)
        self.optimizer = ShardedOptimizer(self.module.parameters(), torch.optim.SGD, **self.SGD)

    def finish(self):
        self.model.finish()

    clip = Stage1.clip

    def no_sync(self):
        return self.model.no_sync()

    def weights(self):
        return {name: value.clone() for name, value in self.module.state_dict().items()}


LAW = [
    (lifecycle.failed_backward, {}),
    (lifecycle.failed_backward, {}, {"set_to_none": False}),
    (lifecycle.by_the_optimizer, {}),
    (lifecycle.skipped, {"build": lifecycle.InPlace}, {"set_to_none": False}),
    (lifecycle.failed_among_others, {}, {"clear": lambda loop: loop.zero_grad()}),
    (lifecycle.changed_through_data, {}),
    (lifecycle.freeze_and_unfreeze, {}),
    (lifecycle.steps, {"build": lifecycle.Normed}),
    (lifecycle.steps, {"build": lifecycle.Penalizing}),
    (lifecycle.steps, {"build": lifecycle.Complex}),
]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("loop", [Stage1, Stage2, Stage3, Optimizer])
@pytest.mark.parametrize("case", LAW, ids=lambda case: case[0].__name__)
def test_a_loop_that_does_more_ends_with_the_weights_of_one_process(pools, case, loop, world_size):
    assert_law(pools, world_size, loop, *case)


def test_the_gradient_in_flight_is_cleared_by_the_optimizer_too(pools):
    def loop(rank):
        made = Stage2()
        made.loss(10.0).backward()
        made.model.optimizer.zero_grad()
        made.step()
        return made.weights()

    alone = Loop()
    alone.step()
    for found in pools(2).run(loop):
        torch.testing.assert_close(found, alone.weights(), **lifecycle.TOLERANCE)


def test_complex_gradients_are_clipped_by_their_norm(pools):
    def norm(rank):
        loop = Stage2(lifecycle.Complex)
        loop.loss().backward()
        return loop.model.clip_grad_norm_(1.0)

    alone = Loop(lifecycle.Complex)
    alone.loss().backward()
    wanted = nn.utils.clip_grad_norm_(alone.module.parameters(), 1.0)
    for found in pools(2).run(norm):
        torch.testing.assert_close(found, wanted, **lifecycle.TOLERANCE)


def test_ranks_that_gather_other_modules_are_told_both_names(pools):
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

        def forward(self, x, number):
            return self.layers[number](x)

    def step(rank):
        ZeRO3(Either(), torch.optim.SGD, lr=0.1)(torch.ones(2, 3), number=rank)

    with pytest.raises(RankError, match=r"(?s)of layers.0.weight\n.* of layers.1.weight\n"):
        pools(2).run(step)


# --- what is told


def engine_of(stage, **options):
    loop = type("Made", (Stage1,), {"stage": stage})(**options)
    return loop, loop.model


def cleared_by_the_module(stage):
    def loop(rank):
        made, engine = engine_of(stage)
        for _ in range(2):
            made.step()
            engine.module.zero_grad()

    return loop


def failed_and_cleared_by_the_module(rank):
    made, engine = engine_of(ZeRO2)
    lifecycle.fail(made)
    engine.module.zero_grad()
    made.step()


def after_fault(stage, use):
    def loop(rank):
        made, _ = engine_of(stage)
        lifecycle.fail(made)
        use(made)

    return loop


def unfrozen(stage):
    return lambda rank: lifecycle.unfreeze(engine_of(stage, frozen="head")[0])


def late_layer(rank):
    made, engine = engine_of(ZeRO1)
    engine.module.head = nn.Sequential(engine.module.head, nn.Linear(2, 2).double())
    made.step()


def outside(use):
    """A use of a parameter outside of its module's forward."""
    return lambda rank: use(list(engine_of(ZeRO3)[1].module.parameters()))


def made_after(make):
    """Another optimizer of an engine's parameters."""

    def loop(rank):
        _made, engine = engine_of(ZeRO1)
        make(engine.module.parameters())

    return loop


def made_before(stage, *, finishes):
    def loop(rank):
        module = Net()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine = stage(module, torch.optim.SGD, lr=0.1)
        engine(torch.ones(2, 3)).sum().backward()
        if finishes:
            engine.finish()
        optimizer.step()

    return loop


def hooked(stage, *, before=False):
    """A hook steps and clears each gradient in backward."""

    def step(param):
        param.data.sub_(param.grad, alpha=0.1)
        param.grad = None

    def loop(rank):
        module = Net()
        params = [*module.parameters()]
        for param in params if before else ():
            param.register_post_accumulate_grad_hook(step)
        engine = stage(module, torch.optim.SGD, lr=0.1)
        for param in () if before else params:
            param.register_post_accumulate_grad_hook(step)
        engine(torch.ones(2, 3)).sum().backward()
        engine.step()

    return loop


def clipped_by_hand(rank):
    made, engine = engine_of(ZeRO2)
    made.loss().backward()
    for param in engine.module.parameters():
        if param.grad is not None:
            param.grad.clamp_(-1, 1)


def unfinished_ddp(use):
    def loop(rank):
        made = Optimizer()
        made.loss().backward()
        use(made.optimizer)

    return loop


def engine_gone(rank):
    optimizer = engine_of(ZeRO1)[1].optimizer
    while optimizer.engine() is not None:  # a thread that samples frames may hold it for a moment
        time.sleep(0.001)
    optimizer.step()


def loading(method, state):
    return lambda rank: getattr(engine_of(ZeRO1)[1], method)(state)


def other_shape(rank):
    _, engine = engine_of(ZeRO1)
    state = engine.full_state_dict()
    state["model"]["head.weight"] = torch.ones(3, 3)
    engine.load_full_state_dict(state)


TOLD = {
    "ZeRO: need code that knows of the shards of all ranks; got Adam(params)": (
        made_after(torch.optim.Adam)
    ),
    "got ShardedOptimizer(params), which sees": (
        made_after(lambda params: ShardedOptimizer(params, torch.optim.SGD))
    ),
    "got optimizer.step(), which sees this rank's alone. Try engine.step()": (
        made_before(ZeRO1, finishes=False)
    ),
    "which sees this rank's alone. Try engine.step()": made_before(ZeRO2, finishes=True),
    "this rank's alone. Try engine.step()": made_before(ZeRO3, finishes=True),
    "ZeRO: need gradients that stay until engine.step(); got none for ": hooked(ZeRO1),
    "which backward had computed. Try no hook that clears it": hooked(ZeRO2, before=True),
    "got a reader of param.grad, which the engine has moved to its shards": hooked(ZeRO2),
    "which the engine has moved to its shards": hooked(ZeRO3),
    "Try engine.clip_grad_norm_(max_norm), or param.register_hook": clipped_by_hand,
    "got ShardedOptimizer.step, which sees this rank's alone. Try model.finish() first": (
        unfinished_ddp(lambda optimizer: optimizer.step())
    ),
    "got ShardedOptimizer.clip_grad_norm_, which sees": (
        unfinished_ddp(lambda optimizer: optimizer.clip_grad_norm_(1.0))
    ),
    "need the engine that it belongs to, which reduces the gradients": engine_gone,
    "ZeRO1.load_state_dict: need a state with shards, others, optimizer; got one without shards": (
        loading("load_state_dict", Net().state_dict())
    ),
    "ZeRO1.load_full_state_dict: need a state with model, optimizer; got one without model": (
        loading("load_full_state_dict", Net().state_dict())
    ),
    "got one without optimizer. Try engine.full_state_dict()": (
        loading("load_full_state_dict", {"model": Net().state_dict()})
    ),
    "ShardedOptimizer.load_full_state_dict: need a state with state, param_groups": (
        loading("load_full_state_dict", {"model": Net().state_dict(), "optimizer": {}})
    ),
    "ZeRO1.load_full_state_dict: need head.weight of shape [2, 3]; got [3, 3]": other_shape,
    "ZeRO1: need parameters with shapes; got weight, which has none yet": (
        lambda rank: ZeRO1(nn.LazyLinear(2), torch.optim.SGD)
    ),
    "ZeRO1: need a model outside of a process group": lambda rank: copy.deepcopy(
        engine_of(ZeRO1)[1]
    ),
    "ZeRO2: need a model outside": lambda rank: pickle.dumps(engine_of(ZeRO2)[1]),
    "ZeRO3: need a model outside": lambda rank: copy.deepcopy(engine_of(ZeRO3)[1]),
    "ShardedOptimizer: need a model outside": lambda rank: copy.deepcopy(Optimizer().optimizer),
    "ZeRO3: need a parameter that is gathered": lambda rank: copy.deepcopy(
        engine_of(ZeRO3)[1].module
    ),
    "ZeRO3: need a backward that computes gradients only": (
        lambda rank: Stage3().loss().backward(create_graph=True)
    ),
    "got one that is freed between uses of its module": outside(
        lambda params: params[0].square().sum()
    ),
    "Try engine.full_state_dict() to save or copy; for an L2 term": outside(
        lambda params: params[0].data.mul_(2)
    ),
    "for an L2 term the optimizer's weight_decay": outside(torch._foreach_norm),
    "full_state_dict() to save or copy": lambda rank: engine_of(ZeRO3)[1].module.state_dict(),
    "ZeRO1: need engine.zero_grad() after each step": cleared_by_the_module(ZeRO1),
    "ZeRO3: need engine.zero_grad() after each step": cleared_by_the_module(ZeRO3),
    "got module.zero_grad(), which sees this rank's alone. Try engine.zero_grad()": (
        failed_and_cleared_by_the_module
    ),
    **{
        f"{stage.__name__}: need engine.zero_grad() after a backward that": after_fault(stage, use)
        for stage, use in {
            ZeRO1: lambda made: made.model.step(),
            ZeRO2: lambda made: made.model.clip_grad_norm_(1.0),
            ZeRO3: lambda made: made.loss(),
        }.items()
    },
    "ZeRO2: need the parameters to train when": unfrozen(ZeRO2),
    "ZeRO3: need the parameters to train when": unfrozen(ZeRO3),
    "wrapped; got head.1.weight, head.1.bias later": late_layer,
}


def test_what_an_engine_cannot_follow_is_told_in_one_sentence(pools):
    assert_told(pools, 2, TOLD)


class Counting(Net):
    """A module with a state that is no tensor."""

    count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("stage", [ZeRO1, ZeRO3])
def test_extra_state_of_modules_is_saved_and_loaded(pools, stage):
    def counts(rank):
        found = []
        for save, load in [(name, f"load_{name}") for name in ("state_dict", "full_state_dict")]:
            engines = [engine_of(stage, build=Counting)[1] for _ in range(2)]
            engines[0].module.count = 3
            getattr(engines[1], load)(getattr(engines[0], save)())
            assert "_extra_state" not in engines[0].shards()
            found.append(engines[1].module.count)
        return found

    assert pools(2).run(counts) == [[3, 3]] * 2


def test_a_whole_module_is_copied_without_its_engine(pools):
    def copied(rank):
        loop, engine = engine_of(ZeRO2)
        other = copy.deepcopy(engine.module)
        loop.step()
        return other.state_dict()

    for found in pools(2).run(copied):
        torch.testing.assert_close(found, Loop(Net).weights(), rtol=0, atol=0)
