"""Megatron-Core computes what one process does, sends what ours sends, and leaves nothing."""

import math
import re
import sys
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.core import CourseError, MeshError, ModelSpec
from course_lib.core.errors import ShapeError
from course_lib.core.specs import Rope
from course_lib.frameworks import MegatronEngine
from course_lib.mesh import Mesh
from course_lib.mesh.cost import MeshStep
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.pipeline.beside_frameworks import run_pipeline
from course_lib.ranks import Ranks
from course_lib.tensor_parallel.beside_frameworks import run_tensor_parallel
from course_lib.train.beside_frameworks import run_mesh

pytest.importorskip("megatron.core")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = {"hidden": 32, "num_layers": 4, "num_heads": 4, "ffn_hidden": 64, "vocab": 50}
GPT2 = ModelSpec(**SIZES, max_seq=16)
LLAMA = ModelSpec(
    **SIZES,
    max_seq=16,
    num_kv_heads=2,
    tied=False,
    positions="rope",
    norm="rms",
    gated=True,
    bias=False,
)
NO_BIAS = ModelSpec(**SIZES, max_seq=16, bias=False, tied=False)
TODAY = replace(
    LLAMA,
    **{"head_dim": 12, "bias": ("qkv",), "rope": Rope(theta=300.0), "activation": "gelu_tanh"},
    **{"norm_eps": 1e-3, "vocab": 49, "vocab_multiple": 50},
)
SPECS = {"gpt2": GPT2, "llama": LLAMA, "no bias": NO_BIAS, "today": TODAY}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-3)  # a gradient of 0 but for rounding stays so
BATCH, STEPS = 8, 3
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}  # float64; sums run in another order


def batch_of(n):
    return next_tokens(token_batch(n, batch=BATCH, seq=16, vocab=50))


def one_process(spec, make_optimizer):
    """Losses, first gradients and weights of plain PyTorch on the whole batch."""
    torch.manual_seed(0)
    model, losses = GPT(spec).double(), []
    optimizer = make_optimizer(model.parameters())
    for n in range(STEPS):
        inputs, targets = batch_of(n)
        optimizer.zero_grad()
        loss = token_loss(model(inputs), targets)
        loss.backward()
        if n == 0:
            grads = {name: param.grad.clone() for name, param in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, grads, {name: param.detach() for name, param in model.named_parameters()}


def under(rank, spec, make_optimizer, num_micro_batches, sizes):
    """The same under Megatron-Core; a copy of the model takes its part of the batch."""
    torch.manual_seed(0)
    model, losses, tp = GPT(spec).double(), [], sizes.get("tp", 1)
    engine = MegatronEngine(model, make_optimizer, **sizes)
    dp = dist.get_world_size() // (tp * sizes.get("pp", 1))
    for n in range(STEPS):
        inputs, targets = (whole.chunk(dp)[rank // tp % dp] for whole in batch_of(n))
        losses.append(engine.step(inputs, targets, num_micro_batches))
        if n == 0:
            grads = engine.grads()
    weights = engine.weights()
    engine.close()
    return losses, grads, weights


@pytest.mark.parametrize("make_optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("world_size", "num_micro_batches", "sizes"),
    [
        (2, 2, {}),
        (2, 1, {"tp": 2}),
        (2, 2, {"tp": 2, "sequence_parallel": True}),
        (2, 4, {"pp": 2}),
        (2, 4, {"pp": 2, "model_chunks": 2}),
        (4, 4, {"tp": 2, "pp": 2}),
        (4, 2, {"pp": 2}),
        (4, 2, {"tp": 2}),
    ],
)
def test_it_equals_one_process(pools, spec, make_optimizer, world_size, num_micro_batches, sizes):
    losses, grads, weights = one_process(SPECS[spec], make_optimizer)
    args = (SPECS[spec], make_optimizer, num_micro_batches, sizes)
    results = pools(world_size).run(under, *args)
    known = torch.tensor([found for found, *_ in results], dtype=torch.float64).nanmean(dim=0)
    torch.testing.assert_close(known, torch.tensor(losses, dtype=torch.float64), **TOLERANCE)
    assert sum(math.isnan(found[0]) for found, *_ in results) == world_size * (
        1 - 1 / sizes.get("pp", 1)
    )
    for _, their_grads, their_weights in results:
        torch.testing.assert_close(their_grads, grads, **TOLERANCE)
        torch.testing.assert_close(their_weights, weights, **TOLERANCE)


BATCHES = [batch_of(n) for n in range(3)]


@pytest.mark.parametrize("spec", SPECS)
def test_tensor_parallel_sends_the_bytes_that_ours_sends(pools, spec):
    ours, theirs = (
        pools(2).run(run_tensor_parallel, SPECS[spec], BATCHES, is_ours)
        for is_ours in (True, False)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-5)
        (mine, yours) = (run.calls()["all_reduce"] for run in (one, other))
        # a token's logit and its sum of exponentials: two calls there, one of both numbers here
        assert yours == (mine[0] + 1, mine[1])
        assert other.calls().keys() == {"all_reduce"}


@pytest.mark.parametrize("model_chunks", [1, 2])
@pytest.mark.parametrize("spec", SPECS)
def test_a_pipeline_sends_the_bytes_that_ours_sends(pools, spec, model_chunks):
    ours, theirs = (
        pools(2).run(run_pipeline, SPECS[spec], BATCHES, 4, is_ours, model_chunks)
        for is_ours in (True, False)
    )
    tied = 4 * 50 * 32 if SPECS[spec].tied else 0  # the gradient of the embedding, once
    for one, other in zip(ours, theirs, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-5, nan_ok=True)
        assert other.calls().pop("broadcast") == (1, 4)  # the number of tokens, from the last stage
        for kind in ("send", "recv")[model_chunks - 1 :]:  # a last send is not waited for
            count, size = one.calls()[kind]
            assert other.calls()[kind] == (count - bool(tied), size - tied)
        assert other.calls().get("all_reduce", (0, 0)) == (int(bool(tied)), tied)


def test_three_axes_train_alike():
    step = MeshStep(
        spec=GPT2, mesh=Mesh(pp=2, dp=2, tp=2), batch=BATCH, seq=16, num_micro_batches=2
    )
    with Ranks(8) as ranks:
        ours, theirs = (ranks.run(run_mesh, step, 3, is_ours) for is_ours in (True, False))
    known = torch.tensor([run.losses for run in theirs]).nanmean(dim=0)
    torch.testing.assert_close(known, torch.tensor(ours[0].losses), rtol=1e-5, atol=0)


def patched():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    places = (torch.Tensor, "cuda"), (torch.cuda, "current_device"), (torch.cuda, "synchronize")
    return [getattr(*place) for place in places] + [CudaRNGStatesTracker.fork]


def before_and_after(rank):
    """What Megatron-Core's stand-ins replace, before an engine and after it."""
    import megatron.core.tensor_parallel.random  # noqa: F401

    before = patched()
    engine = MegatronEngine(GPT(GPT2), SGD, tp=2)
    engine.step(*batch_of(0))
    after = patched()
    engine.close()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1, device="cuda")
    return [one is other for one, other in zip(before, after, strict=True)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is replaced on a GPU")
def test_the_stand_ins_last_as_long_as_the_call(pools):
    for same in pools(2).run(before_and_after):
        assert same == [True] * 4


def test_it_says_nothing_and_engines_follow_one_another():
    with Ranks(2) as ranks:
        for sizes in ({"tp": 2}, {"pp": 2}, {}):
            ranks.run(under, GPT2, SGD, 2, sizes)
        assert [ranks.output(rank) for rank in range(2)] == ["", ""]


def refused(rank, spec, sizes, how):
    """The sentence; ranks that raised would have to start again."""
    try:
        engine = MegatronEngine(GPT(spec, dropout=how.get("dropout", 0.0)), SGD, **sizes)
        tokens = token_batch(0, batch=BATCH, seq=how.get("seq", 16), vocab=50)
        engine.step(*next_tokens(tokens), num_micro_batches=how.get("num_micro_batches", 1))
    except CourseError as error:
        return str(error)


@pytest.mark.parametrize(
    ("spec", "sizes", "how", "says"),
    [
        (GPT2, {}, {"dropout": 0.1}, r"need no dropout, .* got 0\.1"),
        (
            GPT2,
            {"pp": 2, "model_chunks": 4},
            {},
            r"need num_layers divisible by pp \* model_chunks; got 4 and 8",
        ),
        (
            replace(LLAMA, qk_norm="head"),
            {},
            {},
            r"need a model whose qk_norm it maps .* got qk_norm = 'head'",
        ),
        (replace(LLAMA, window=4), {}, {}, r"need a model whose window it maps .* got window = 4"),
        (replace(LLAMA, nope_layers=(0,)), {}, {}, r".* got nope_layers = \(0,\) of own"),
        (replace(GPT2, parallel=True), {}, {}, ".* got parallel = True"),
        (replace(LLAMA, rope=Rope(share=0.5)), {}, {}, r".* got rope = Rope\(.*share=0\.5"),
        (replace(GPT2, bias=("mlp", "norm")), {}, {}, r".* got bias = \('mlp', 'norm'\)"),
        (LLAMA, {"tp": 4}, {}, "need kv_heads divisible by tp; got 2 and 4"),
        (GPT2, {"tp": 3}, {}, "need num_heads divisible by tp; got 4 and 3"),
        (GPT2, {"pp": 4}, {}, r"need ranks divisible by tp \* pp; got 2 and 1 \* 4"),
        (GPT2, {}, {"num_micro_batches": 3}, "need a batch divisible by the 3 micro-batches; got"),
        (GPT2, {"tp": 0}, {}, r"need tp as a whole number above 0; got 0\. Try tp=1"),
        (GPT2, {"tp": -1}, {}, r"need tp as a whole number above 0; got -1\. Try tp=1"),
        (GPT2, {"pp": True}, {}, r"need pp as a whole number above 0; got True\. Try pp=1"),
        (
            GPT2,
            {"model_chunks": 0},
            {},
            r"need model_chunks as a whole number above 0; got 0\. Try model_chunks=1",
        ),
        (
            GPT2,
            {"model_chunks": 2},
            {},
            r"need pp of 2 or more for model_chunks = 2; got pp = 1\. Try model_chunks=1",
        ),
        (
            GPT2,
            {},
            {"num_micro_batches": 0},
            r"need num_micro_batches as a whole number above 0; got 0\. Try num_micro_batches=1",
        ),
        (
            GPT2,
            {"pp": 2, "model_chunks": 2},
            {},
            r"need num_micro_batches divisible by pp for the interleaved schedule; got 1 and 2\. "
            r"Try 2",
        ),
        (
            GPT2,
            {"tp": 2, "sequence_parallel": True},
            {"seq": 15},
            r"need seq divisible by tp with sequence_parallel; got 15 and 2\. Try 14 tokens",
        ),
        (
            GPT2,
            {},
            {"seq": 17},
            r"need 1 to max_seq = 16 tokens a sequence; got 17\. Try tokens\[:, :max_seq\]",
        ),
    ],
)
def test_what_cannot_be_is_told(pools, spec, sizes, how, says):
    for told in pools(2).run(refused, spec, sizes, how):
        assert re.match(f"MegatronEngine: {says}", told)
        assert ". Try " in told
        assert len(told.splitlines()) == 1


def test_a_process_that_is_no_rank_is_told():
    with pytest.raises(MeshError, match="need ranks that form a world; there is none"):
        MegatronEngine(GPT(GPT2), SGD)
    assert issubclass(MeshError, CourseError)
    assert issubclass(ShapeError, CourseError)
