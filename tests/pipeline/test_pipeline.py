"""The pipeline engine gives the numbers of one process with any schedule."""

import random
import sys
from itertools import product

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_lib.models import token_loss
from course_lib.pipeline import (
    Action,
    Pipeline,
    dual_pipe_v,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    run_schedule,
    split_model,
    zero_bubble_h1,
    zero_bubble_v,
)
from course_lib.pipeline.actions import ScheduleError, placement_of
from course_lib.pipeline.engine import StageExecutor
from course_lib.ranks import RankError
from course_lib.recompute import recompute_full
from tests.law.law import WORLDS, Alone, Law, alone, assert_laws, ways
from tests.law.modules import HARD, TINY, build, gpt

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# float64: micro-batches are summed one by one, and not as one product over all rows
TOLERANCE = {"rtol": 1e-11, "atol": 1e-15}


def random_schedule(p, m, v, seed):
    """A random order in which every input has arrived; some backwards are split.

    In each model chunk, the stages lie on the ranks in any order.
    """
    dice = random.Random(seed)
    placement = [rank for _ in range(v) for rank in dice.sample(range(p), p)]
    halved = {part for part in product(range(p * v), range(m)) if dice.random() < 0.4}
    programs = [[] for _ in range(p)]
    ready = [("F", 0, i) for i in range(m)]
    while ready:
        kind, depth, i = ready.pop(dice.randrange(len(ready)))
        name = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
        programs[placement[depth]].append(Action(name[kind], depth % p, i, depth // p))
        if kind == "F" and depth < p * v - 1:
            ready.append(("F", depth + 1, i))
            continue
        before = depth if kind == "F" else depth - 1
        if kind != "W" and before >= 0:
            ready.append(("I" if (before, i) in halved else "B", before, i))
        if kind == "I":
            ready.append(("W", depth, i))
    return programs


PLAIN = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zero_bubble_h1}
SCHEDULES = {
    **PLAIN,
    "interleaved": lambda p, m: interleaved(p, m, 2),
    "zb-v": zero_bubble_v,
    "dualpipe-v": dual_pipe_v,
    "random": random_schedule,
}


# --- the law: the numbers of one process


class Pipelined(Alone):
    """All ranks begin alike, have the whole batch, and report the layers of all of them."""

    name, same_seed = "pipeline", True
    reports = ("loss", "gradient", "state")
    engine = Pipeline

    def wrap(self, module):
        make, m, cut = (self.law.options.get(name) for name in ("schedule", "m", "cut"))
        self.actions = SCHEDULES[make](self.p, *(m if make == "random" else (m,)))
        self.placement = placement_of(self.actions)
        options = {"placement": self.placement, **(cut or {})}
        self.module = split_model(module, self.p, self.rank, **options)
        return self.engine(self.module, self.hard.loss)

    def backward(self, x, y):
        m = 1 + max(action.micro_batch for action in self.actions[self.rank])
        loss = self.model.step(self.actions, x.tensor_split(m), y.tensor_split(m))
        last = self.placement[-1]
        assert (loss is None) == (self.rank != last)
        loss = y.new_zeros((), dtype=self.law.dtype) if loss is None else loss
        dist.broadcast(loss, last)
        return loss

    def of_chunks(self, read):
        return {name: x for chunk in self.module.chunks for name, x in read(chunk)}

    def gradients(self):
        params = self.of_chunks(lambda chunk: chunk.named_parameters(remove_duplicate=False))
        return {name: param.grad for name, param in params.items()}

    def state(self):
        return self.of_chunks(lambda chunk: chunk.state_dict().items())

    def run(self):
        by_rank, whole = [None] * self.p, {}
        dist.all_gather_object(by_rank, super().run())
        for key, x in (item for found in by_rank for item in found.items()):
            said = f"copies of {key} are not equal"
            torch.testing.assert_close(whole.setdefault(key, x), x, rtol=0, atol=0, msg=said)
        return whole


def some_schedules(p):
    sizes = {1: (3,), 2: (1, 5), 3: (2, 4), 4: (3, 8)}[p]  # fewer than stages, and more
    pairs = [
        *product([*PLAIN, "zb-v"], sizes),
        ("interleaved", max(3, 2 * p)),
        ("dualpipe-v", 2 * p),
    ]
    return [{"items": 9, "schedule": name, "m": m} for name, m in pairs]


@pytest.mark.parametrize("p", WORLDS)
def test_every_schedule_has_the_numbers_of_one_process(pools, p):
    assert_laws(pools(p).run, Pipelined, ways(["GPT", "GPT, frozen ends"], some_schedules(p)))


@pytest.mark.ci
@pytest.mark.parametrize("p", WORLDS)
def test_every_model_has_the_numbers_of_one_process(pools, p):
    given = {one["schedule"]: one for one in some_schedules(p)}
    laws = ways(["layers", "tied", "two dtypes"], [*given.values()])
    laws += ways(["GPT, uneven", "GPT, of today", "GPT, parallel"], [given[one] for one in PLAIN])
    laws += ways(["GPT, recomputed"], [given[one] for one in ("naive", "gpipe", "1f1b")])
    assert_laws(pools(p).run, Pipelined, laws)


def test_recomputed_blocks_need_a_whole_backward(pools):
    def step(rank):
        model = gpt(TINY, change=recompute_full)
        pipeline = Pipeline(split_model(model, 2, rank), token_loss)
        tokens = [torch.zeros(1, 4, dtype=torch.long)] * 2
        with pytest.raises(ScheduleError, match="need a whole backward for blocks that are"):
            pipeline.step(zero_bubble_h1(2, 2), tokens, tokens)

    pools(2).run(step)


# cuts that no balancing would choose; the first stage of the second one has only the embedding
UNEVEN = {
    2: [
        ("1f1b", 3, {"num_layers": [7, 1]}),
        ("zb-h1", 4, {"num_layers": [1, 7]}),
        ("interleaved", 4, {"num_layers": [1, 5, 1, 1]}),
        ("zb-v", 3, {"num_layers": [1, 1, 1, 5]}),
    ],
    3: [
        ("gpipe", 2, {"num_layers": [1, 6, 1]}),
        ("interleaved", 3, {"layer_times": [9, 1, 1, 1, 1, 1, 1, 1]}),
    ],
}


@pytest.mark.parametrize("p", UNEVEN)
def test_uneven_stages_have_the_numbers_of_one_process(pools, p):
    cuts = [{"items": 5, "schedule": make, "m": m, "cut": cut} for make, m, cut in UNEVEN[p]]
    assert_laws(pools(p).run, Pipelined, ways(["GPT"], cuts))


@pytest.mark.parametrize(("p", "v"), [(1, 2), (2, 1), (2, 2), (3, 2), (4, 1), (4, 2)])
def test_any_valid_schedule_has_the_numbers_of_one_process(pools, p, v):
    sizes = enumerate((1, 2, 5, 7))
    given = [{"items": 7, "schedule": "random", "m": (m, v, seed)} for seed, m in sizes]
    assert_laws(pools(p).run, Pipelined, ways(["GPT"], given))


# --- engines that are broken


class NotDivided(Pipeline):
    def step(self, schedule, inputs, targets):
        return super().step(schedule, inputs, targets, [1.0] * len(inputs))


class EveryMicroBatchAlike(Pipeline):
    def step(self, schedule, inputs, targets):
        return super().step(schedule, inputs, targets, [1 / len(inputs)] * len(inputs))


class KeepsGradients(Pipeline):
    kept = ()

    def step(self, *args):
        loss = super().step(*args)
        params = list(self.stage.parameters())
        for param, old in zip(params, self.kept or [None] * len(params), strict=True):
            if old is not None:
                param.grad = param.grad + old
        self.kept = [param.grad.clone() for param in params]
        return loss


class TiedNotSummed(Pipeline):
    def __init__(self, stage, loss_fn, group=None):
        stage.tied.clear()
        super().__init__(stage, loss_fn, group)


class DropsWeights(Pipeline):
    """The weight half of the last micro-batch is forgotten."""

    def step(self, schedule, inputs, targets):
        whole, last = StageExecutor.execute, len(inputs) - 1
        forgets = {("backward_weight", last)}
        StageExecutor.execute = lambda executor, action, received: (
            None if action[::2] in forgets else whole(executor, action, received)
        )
        try:
            return super().step(schedule, inputs, targets)
        finally:
            StageExecutor.execute = whole


class InputsWithoutGradient(Pipeline):
    def step(self, *args):
        whole = StageExecutor._backward
        StageExecutor._backward = lambda executor, saved, received: (
            None if saved.x is None else torch.zeros_like(saved.x),
            whole(executor, saved, received),
        )[0]
        try:
            return super().step(*args)
        finally:
            StageExecutor._backward = whole


BROKEN = [
    NotDivided,
    EveryMicroBatchAlike,
    KeepsGradients,
    TiedNotSummed,
    DropsWeights,
    InputsWithoutGradient,
]


@pytest.mark.parametrize("engine", [Pipeline, *BROKEN], ids=lambda engine: engine.__name__)
def test_a_broken_engine_fails_the_law(pools, engine):
    method = type("Faulty", (Pipelined,), {"engine": engine})
    laws = [Law("GPT", items=7, options={"schedule": "zb-h1", "m": 4})]
    if engine is Pipeline:
        assert_laws(pools(2).run, method, laws)
        return
    with pytest.raises((AssertionError, RankError), match=r"off by|are not equal"):
        assert_laws(pools(2).run, method, laws)


# --- gradients that add up, groups, targets that do not count


def micro_batches(name, items, m):
    return tuple(whole.tensor_split(m) for whole in HARD[name].batch(items, 0))


def grads_of(stage):
    named = (item for chunk in stage.chunks for item in chunk.named_parameters())
    return {name: param.grad.clone() for name, param in named}


def assert_first_step(law, loss, grads):
    """The loss and the gradients, of some layers, are those of one process."""
    wanted = {name: alone(law)[0, "gradient", name] for name in grads}
    assert loss.item() == pytest.approx(alone(law)[0, "loss", ""].item(), rel=1e-12)
    torch.testing.assert_close(grads, wanted, **TOLERANCE)


def test_gradients_of_two_steps_add_up_also_where_they_are_tied(pools):
    def steps(rank):
        stage = split_model(build("GPT", 0), 2, rank)
        pipeline, batch = Pipeline(stage, token_loss), micro_batches("GPT", 6, 3)
        pipeline.step(one_f_one_b(2, 3), *batch)
        once = grads_of(stage)
        pipeline.step(gpipe(2, 3), *batch)
        return once, grads_of(stage)

    for once, twice in pools(2).run(steps):
        torch.testing.assert_close(twice, {n: 2 * grad for n, grad in once.items()}, **TOLERANCE)


def test_two_pipelines_side_by_side_have_a_group_each(pools):
    def step(rank):
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        stage = split_model(build("GPT", 0), 2, rank // 2)
        pipeline = Pipeline(stage, token_loss, pairs[rank % 2])
        batch = micro_batches("GPT", 6 + 2 * (rank % 2), 2)
        return pipeline.step(one_f_one_b(2, 2), *batch), grads_of(stage)

    by_rank = pools(4).run(step)
    for number, items in enumerate((6, 8)):
        (_, first), (loss, last) = by_rank[number::2]
        assert_first_step(Law("GPT", items=items), loss, first | last)


def test_a_micro_batch_without_targets_does_not_count(pools):
    def step(rank):
        stage = split_model(build("GPT", 0), 2, rank)
        inputs, targets = micro_batches("GPT", 6, 3)
        targets = (targets[0], torch.full_like(targets[1], -100), targets[2])
        loss = Pipeline(stage, token_loss).step(one_f_one_b(2, 3), inputs, targets)
        return loss, grads_of(stage)

    model, (x, y) = build("GPT", 0), HARD["GPT"].batch(6, 0)
    y[2:4] = -100
    wanted = token_loss(model(x), y)
    wanted.backward()
    (_, first), (loss, _) = pools(2).run(step)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    torch.testing.assert_close(first["embedding.weight"], model.embedding.weight.grad, **TOLERANCE)


def test_only_the_first_stage_reads_inputs_and_only_the_last_targets(pools):
    def step(rank):
        stage = split_model(build("layers", 0), 3, rank)
        inputs, targets = micro_batches("layers", 7, 3)
        given = inputs if rank == 0 else [x.to("meta") for x in inputs]
        loss = run_schedule(gpipe(3, 3), stage, given, targets if rank == 2 else None, F.mse_loss)
        return loss, grads_of(stage)

    assert_first_step(Law("layers", items=7), *pools(3).run(step)[-1])
