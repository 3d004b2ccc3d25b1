"""The pipeline engine: the numbers of one process with any schedule; what it holds and says."""

import sys
from functools import cache
from itertools import product

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_lib.core import ModelSpec
from course_lib.models import GPT, next_tokens, padded_batch, token_batch, token_loss
from course_lib.pipeline import (
    Pipeline,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    split_model,
    zero_bubble_h1,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# float64: micro-batches are summed one by one, and not as one product over all rows
TOLERANCE = {"rtol": 1e-11, "atol": 1e-15}
SIZES = (1, 2, 3, 4)
PLAIN = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zero_bubble_h1}
SPEC = ModelSpec(hidden=8, num_layers=4, num_heads=2, ffn_hidden=16, vocab=20, max_seq=6)
UNTIED = ModelSpec(
    hidden=8, num_layers=4, num_heads=2, ffn_hidden=16, vocab=20, max_seq=6, tied=False
)


# --- models, batches, and one process


def mlp():
    return nn.Sequential(*(layer for n in range(4) for layer in (nn.Linear(5, 5), nn.GELU())))


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


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny products are faster so, and the ranks have a thread each too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def together(rank, cases, engine=Pipeline, group=None):
    """The same by pipelines, case by case; each rank tells of its own layers."""
    found = []
    for name, schedule, items, options in cases:
        stage = split_model(build(name), len(schedule), rank, **options)
        pipeline, optimizer = engine(stage, BUILDS[name][2], group), sgd(stage)
        m = 1 + max(action.micro_batch for action in schedule[rank])
        inputs, targets = micro_batches(name, items, m)
        steps = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = pipeline.step(schedule, inputs, targets)
            optimizer.step()
            named = {
                n: (copy_of(p.grad), copy_of(p))
                for chunk in stage.chunks
                for n, p in chunk.named_parameters()
            }
            steps.append((None if loss is None else loss.item(), named))
        found.append(steps)
    return found


def assert_law(pools, p, cases, engine=Pipeline):
    by_rank = pools(p).run(together, cases, engine)
    for number, (name, _, items, _) in enumerate(cases):
        for step, (loss, wanted) in enumerate(alone(name, items)):
            seen = set()
            for rank in range(p):
                got_loss, named = by_rank[rank][number][step]
                if rank == p - 1:
                    assert got_loss == pytest.approx(loss, rel=1e-12)
                else:
                    assert got_loss is None
                seen |= set(named)
                tied = {"head.weight"} if "head.weight" not in wanted else set()
                torch.testing.assert_close(
                    {n: got for n, got in named.items() if n not in tied},
                    {n: wanted[n] for n in named if n not in tied},
                    **TOLERANCE,
                )
                for n in tied & set(named):
                    torch.testing.assert_close(named[n], wanted["embedding.weight"], **TOLERANCE)
            assert seen >= set(wanted)


@pytest.mark.parametrize("p", SIZES)
@pytest.mark.parametrize("name", list(BUILDS))
def test_every_schedule_has_the_numbers_of_one_process(pools, name, p):
    sizes = (1, 3, 8) if p in (1, 4) else (2, 5)  # micro-batches, fewer than stages and more
    cases = [(name, make(p, m), 9, {}) for make, m in product(PLAIN.values(), sizes)]
    m = {1: 3, 2: 4, 3: 6, 4: 2}[p]
    if p < 4 or name != "mlp":
        chunks = 2 if p < 4 else 1
        cases.append((name, interleaved(p, m, chunks), 9, {"num_model_chunks": chunks}))
    assert_law(pools, p, cases)
