"""The pipeline engine gives the numbers of one process with any schedule."""

import random
import sys
from functools import cache
from itertools import product

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.core import ModelSpec
from course_lib.models import GPT, next_tokens, padded_batch, token_batch, token_loss
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
    v_placement,
    zero_bubble_h1,
    zero_bubble_v,
)
from course_lib.pipeline.actions import placement_of
from course_lib.pipeline.engine import StageExecutor

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# float64: micro-batches are summed one by one, and not as one product over all rows
TOLERANCE = {"rtol": 1e-11, "atol": 1e-15}
SIZES = (1, 2, 3, 4)
PLAIN = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zero_bubble_h1}
SPEC = ModelSpec(hidden=8, num_layers=6, num_heads=2, ffn_hidden=16, vocab=20, max_seq=6)
UNTIED = ModelSpec(
    hidden=8, num_layers=6, num_heads=2, ffn_hidden=16, vocab=20, max_seq=6, tied=False
)


# --- models, batches, and one process


def mlp():
    return nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.GELU()) for _ in range(8)))


def numbers(items):
    torch.manual_seed(99)
    return torch.randn(items, 5).double(), torch.randn(items, 5).double()


def tokens(items):
    return next_tokens(token_batch(0, batch=items, seq=6, vocab=20))


def padded(items):
    return padded_batch(0, batch=items, seq=6, vocab=20)


def partly_frozen():
    model = GPT(UNTIED)
    model.blocks[1].requires_grad_(False)
    model.embedding.requires_grad_(False)
    model.positions.requires_grad_(False)
    model.blocks[0].requires_grad_(False)  # nothing to train on the first of many stages
    return model


def frozen_embedding():
    model = GPT(SPEC)
    model.embedding.requires_grad_(False)  # tied, and so is the head
    return model


BUILDS = {
    "mlp": (mlp, numbers, F.mse_loss),
    "tied GPT": (lambda: GPT(SPEC), tokens, token_loss),
    "untied GPT, padded": (lambda: GPT(UNTIED), padded, token_loss),
    "partly frozen": (partly_frozen, tokens, token_loss),
    "frozen tied embedding": (frozen_embedding, tokens, token_loss),
}


def build(name):
    torch.manual_seed(3)
    return BUILDS[name][0]().double()


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def copy_of(values):
    return None if values is None else values.detach().clone()


@cache
def alone(name, items, steps=3):
    """One process, the whole batch: loss, gradients and weights by name, after every step."""
    model, (x, y) = build(name), BUILDS[name][1](items)
    optimizer, found = sgd(model), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = BUILDS[name][2](model(x), y)
        loss.backward()
        optimizer.step()
        named = {n: (copy_of(p.grad), copy_of(p)) for n, p in model.named_parameters()}
        found.append((loss.item(), named))
    return found


def micro_batches(name, items, m):
    return tuple(whole.tensor_split(m) for whole in BUILDS[name][1](items))


def flat(named, names):
    """Gradients and weights of these parameters in one row; which have no gradient."""
    pairs = [named[name] for name in names]
    row = [torch.zeros_like(weight) if grad is None else grad for grad, weight in pairs]
    missing = [name for name in names if named[name][0] is None]
    return torch.cat([one.flatten() for one in [*row, *(weight for _, weight in pairs)]]), missing


def together(rank, cases, engine=Pipeline, group=None):
    """The same by pipelines, case by case; each rank tells of its own layers."""
    found = []
    for name, schedule, items, options in cases:
        stage = split_model(build(name), len(schedule), rank, **options)
        pipeline, optimizer = engine(stage, BUILDS[name][2], group), sgd(stage)
        m = 1 + max(action.micro_batch for action in schedule[rank])
        inputs, targets = micro_batches(name, items, m)
        for _ in range(3):
            optimizer.zero_grad()
            loss = pipeline.step(schedule, inputs, targets)
            optimizer.step()
            named = {
                n: (p.grad, p.detach())
                for chunk in stage.chunks
                for n, p in chunk.named_parameters()
            }
            found.append((None if loss is None else loss.item(), list(named), *flat(named, named)))
    return found


def assert_law(pools, p, cases, engine=Pipeline):
    by_rank = pools(p).run(together, cases, engine)
    for number, (name, schedule, items, _) in enumerate(cases):
        for step, (loss, wanted) in enumerate(alone(name, items)):
            if "head.weight" not in wanted and "embedding.weight" in wanted:
                wanted = {**wanted, "head.weight": wanted["embedding.weight"]}
            got = [found[3 * number + step] for found in by_rank]
            losses = [one[0] for one in got]
            assert losses.pop(placement_of(schedule)[-1]) == pytest.approx(loss, rel=1e-12)
            assert losses == [None] * (p - 1)
            for _, names, row, missing in got:
                wanted_row, wanted_missing = flat(wanted, names)
                assert missing == wanted_missing
                torch.testing.assert_close(row, wanted_row, **TOLERANCE)
            seen = {name for one in got for name in one[1]}
            assert seen | {"head.weight"} >= set(wanted)


EVERYWHERE = {"tied GPT", "partly frozen"}  # the others on two and on four ranks


@pytest.mark.parametrize(
    ("name", "p"),
    [(name, p) for name, p in product(BUILDS, SIZES) if name in EVERYWHERE or p in (2, 4)],
)
def test_every_schedule_has_the_numbers_of_one_process(pools, name, p):
    sizes = {1: (3,), 2: (1, 5), 3: (2, 4), 4: (3, 8)}[p]  # fewer than stages, and more
    cases = [(name, make(p, m), 9, {}) for make, m in product(PLAIN.values(), sizes)]
    m = {1: 3, 2: 4, 3: 6, 4: 8}[p]
    cases.append((name, interleaved(p, m, 2), 9, {"num_model_chunks": 2}))
    in_a_v = {"placement": v_placement(p)}
    cases += [(name, zero_bubble_v(p, m), 9, in_a_v) for m in sizes]
    cases.append((name, dual_pipe_v(p, 2 * p), 9, in_a_v))
    assert_law(pools, p, cases)


def uneven_pieces():
    """Cuts that no balancing would choose, one for each number of stages and model chunks."""
    return [
        (2, one_f_one_b(2, 3), {"num_layers": [7, 1]}),
        (2, zero_bubble_h1(2, 4), {"num_layers": [1, 7]}),  # the first one: only the embedding
        (2, interleaved(2, 4, 2), {"num_layers": [1, 5, 1, 1], "num_model_chunks": 2}),
        (2, zero_bubble_v(2, 3), {"num_layers": [1, 1, 1, 5], "placement": v_placement(2)}),
        (3, gpipe(3, 2), {"num_layers": [1, 6, 1]}),
        (3, interleaved(3, 3, 2), {"layer_times": [9, 1, 1, 1, 1, 1, 1, 1], "num_model_chunks": 2}),
    ]


@pytest.mark.parametrize("p", [2, 3])
def test_uneven_stages_have_the_numbers_of_one_process(pools, p):
    cases = [("tied GPT", schedule, 5, o) for q, schedule, o in uneven_pieces() if p == q]
    assert_law(pools, p, cases)


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


@pytest.mark.parametrize(("p", "v"), [(1, 2), (2, 1), (2, 2), (3, 2), (4, 1), (4, 2)])
def test_any_valid_schedule_has_the_numbers_of_one_process(pools, p, v):
    cases = [
        ("tied GPT", schedule, 7, {"placement": placement_of(schedule)})
        for seed, m in enumerate((1, 2, 5, 7))
        for schedule in [random_schedule(p, m, v, seed)]
    ]
    assert_law(pools, p, cases)


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
        self.kept = [copy_of(param.grad) for param in params]
        return loss


class TiedNotSummed(Pipeline):
    def __init__(self, stage, loss_fn, group):
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


@pytest.mark.parametrize("engine", BROKEN, ids=lambda engine: engine.__name__)
def test_a_broken_engine_fails_the_law(pools, engine):
    with pytest.raises(AssertionError):
        assert_law(pools, 2, [("tied GPT", zero_bubble_h1(2, 4), 7, {})], engine)


# --- gradients that add up, groups, targets that do not count


def grads_of(stage):
    return {n: copy_of(p.grad) for chunk in stage.chunks for n, p in chunk.named_parameters()}


def test_gradients_of_two_steps_add_up_also_where_they_are_tied(pools):
    def steps(rank):
        stage = split_model(build("tied GPT"), 2, rank)
        pipeline, batch = Pipeline(stage, token_loss), micro_batches("tied GPT", 6, 3)
        pipeline.step(one_f_one_b(2, 3), *batch)
        once = grads_of(stage)
        pipeline.step(gpipe(2, 3), *batch)
        return once, grads_of(stage)

    for once, twice in pools(2).run(steps):
        torch.testing.assert_close(twice, {n: 2 * grad for n, grad in once.items()}, **TOLERANCE)


def test_two_pipelines_side_by_side_have_a_group_each(pools):
    def step(rank):
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        stage = split_model(build("tied GPT"), 2, rank // 2)
        pipeline = Pipeline(stage, token_loss, pairs[rank % 2])
        inputs, targets = micro_batches("tied GPT", 6 + 2 * (rank % 2), 2)
        return pipeline.step(one_f_one_b(2, 2), inputs, targets), grads_of(stage)

    by_rank = pools(4).run(step)
    for number, items in enumerate((6, 8)):
        loss, wanted = alone("tied GPT", items)[0]
        assert by_rank[2 + number][0].item() == pytest.approx(loss, rel=1e-12)
        for rank in (number, 2 + number):
            grads = {n: g for n, g in by_rank[rank][1].items() if n in wanted}
            torch.testing.assert_close(grads, {n: wanted[n][0] for n in grads}, **TOLERANCE)


def test_a_micro_batch_without_targets_does_not_count(pools):
    def step(rank):
        stage = split_model(build("tied GPT"), 2, rank)
        inputs, targets = micro_batches("tied GPT", 6, 3)
        targets = (targets[0], torch.full_like(targets[1], -100), targets[2])
        loss = Pipeline(stage, token_loss).step(one_f_one_b(2, 3), inputs, targets)
        return loss, grads_of(stage)

    model, (x, y) = build("tied GPT"), tokens(6)
    y[2:4] = -100
    wanted = token_loss(model(x), y)
    wanted.backward()
    (_, first), (loss, _) = pools(2).run(step)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    torch.testing.assert_close(first["embedding.weight"], model.embedding.weight.grad, **TOLERANCE)


def test_only_the_first_stage_reads_inputs_and_only_the_last_targets(pools):
    def step(rank):
        stage = split_model(build("mlp"), 3, rank)
        inputs, targets = micro_batches("mlp", 7, 3)
        given = inputs if rank == 0 else [x.to("meta") for x in inputs]
        loss = run_schedule(gpipe(3, 3), stage, given, targets if rank == 2 else None, F.mse_loss)
        return loss, grads_of(stage)

    *_, (loss, grads) = pools(3).run(step)
    wanted_loss, wanted = alone("mlp", 7)[0]
    assert loss.item() == pytest.approx(wanted_loss, rel=1e-12)
    torch.testing.assert_close(grads, {n: wanted[n][0] for n in grads}, **TOLERANCE)
