"""The real frameworks compute what one process does, and what runs is what was asked for."""

import os
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
from packaging.requirements import Requirement

from course_lib.core import CourseError, MeshError, ModelSpec
from course_lib.frameworks import (
    AS_IN_THE_PAPER,
    accelerate_ddp,
    accelerate_deepspeed,
    accelerate_fsdp,
    alive_bytes,
    alive_storages,
    deepspeed_config,
    deepspeed_engine,
    engine,
    fully_sharded,
    lightning_ddp,
    lightning_fsdp,
    missing,
)
from course_lib.frameworks.engine import PACKAGES, needed
from course_lib.models import BERT, GPT, mask_tokens, next_tokens, token_batch, token_loss
from course_lib.models.bert import EncoderBlock
from course_lib.models.gpt import Block
from course_lib.ranks import RankError, Ranks, record

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}  # float32: the frameworks' reductions run in it
SPEC = ModelSpec(hidden=32, num_layers=2, num_heads=4, ffn_hidden=64, vocab=50, max_seq=16)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
BATCH, STEPS = 4, 3


def gpt_batch(n):
    return next_tokens(token_batch(n, batch=BATCH, seq=16, vocab=50))


def bert_batch(n):
    random = torch.Generator().manual_seed(n)
    tokens = token_batch(n, batch=BATCH, seq=15, vocab=50)
    return mask_tokens(tokens, random, vocab=50, mask=0, num_special=1)


def seeded(kind):
    torch.manual_seed(0)
    return kind(SPEC)


def one_process(kind, batch_of):
    """Losses and weights of plain PyTorch on the whole batch."""
    model, losses = seeded(kind), []
    optimizer = SGD(model.parameters())
    for n in range(STEPS):
        inputs, targets = batch_of(n)
        loss = token_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def under(rank, world_size, make, kind, batch_of, num_parts=1):
    """The same under a framework; a rank takes its part of the batch, in `num_parts` passes."""
    engine, losses = make(seeded(kind)), []
    for n in range(STEPS):
        inputs, targets = (t.chunk(world_size)[rank].chunk(num_parts) for t in batch_of(n))
        parts = [
            engine.step(token_loss(engine.model(one), those))
            for one, those in zip(inputs, targets, strict=True)
        ]
        losses.append(sum(parts) / num_parts)
    return losses, engine.weights(), engine.name


def agrees(pool, make, name, kind=GPT, batch_of=gpt_batch, world_size=2, **how):
    """The losses' mean over the ranks and every rank's weights are those of one process."""
    losses, weights = one_process(kind, batch_of)
    results = pool(world_size).run(under, world_size, make, kind, batch_of, **how)
    found = torch.tensor([result[0] for result in results]).mean(dim=0)
    torch.testing.assert_close(found, torch.tensor(losses), **TOLERANCE)
    for _, theirs, called in results:
        torch.testing.assert_close(theirs, weights, **TOLERANCE)
        assert called == name


# -- PyTorch's own, which is always there -------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False])
def test_fully_shard_equals_one_process(pools, reshard):
    make = partial(fully_sharded, make_optimizer=SGD, unit=Block, reshard_after_forward=reshard)
    agrees(pools, make, "PyTorch fully_shard")


def test_fully_shard_of_a_bert_equals_one_process(pools):
    make = partial(fully_sharded, make_optimizer=SGD, unit=EncoderBlock)
    agrees(pools, make, "PyTorch fully_shard", BERT, bert_batch)


def test_a_unit_that_the_model_lacks_is_told(pools):
    make = partial(fully_sharded, make_optimizer=SGD, unit=EncoderBlock)
    with pytest.raises(RankError, match="need a model with modules of type EncoderBlock; there is"):
        pools(2).run(under, 2, make, GPT, gpt_batch)


def test_alive_bytes_count_storages_once_and_gradients():
    before = alive_bytes()
    weight = torch.ones(1000, requires_grad=True)
    view = weight.detach()[::2]
    assert alive_bytes() - before == 4000
    (weight * 2).sum().backward()
    assert alive_bytes() - before == 8000
    del weight, view
    assert alive_bytes() == before


def shard_bytes(rank):
    """What stays of a model, and how much the sharded one holds beyond it."""
    before = alive_bytes()
    model = seeded(GPT)
    whole = alive_bytes() - before
    engine = fully_sharded(model, SGD, unit=Block)
    return whole, alive_bytes() - before, len(list(engine.model.parameters()))


def test_alive_bytes_of_a_sharded_model_are_those_of_its_shards(pools):
    for whole, held, num_params in pools(2).run(shard_bytes):
        assert whole == 4 * sum(param.numel() for param in seeded(GPT).parameters())
        assert whole / 2 <= held <= whole / 2 + 64 * num_params  # each is rounded up


# -- what DeepSpeed is told ---------------------------------------------------------------------


def test_deepspeed_is_told_not_to_clip_and_to_take_any_optimizer():
    told = deepspeed_config(2, offload=True, num_micro_batches=4, reduce_bucket_size=7)
    assert told["gradient_clipping"] == 0
    assert told["gradient_accumulation_steps"] == 4
    assert told["zero_optimization"] == {
        "stage": 2,
        "reduce_bucket_size": 7,
        "offload_optimizer": {"device": "cpu"},
    }
    assert told["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize(
    ("stage", "offload", "least"), [(4, False, 0), (-1, False, 0), (0, True, 1)]
)
def test_a_stage_that_there_is_not_is_told(stage, offload, least):
    with pytest.raises(CourseError, match=f"need a stage from {least} to 3.*; got {stage}"):
        deepspeed_config(stage, offload=offload)


# -- a framework that is not installed ----------------------------------------------------------


MAKES = {
    "deepspeed": partial(deepspeed_engine, stage=1),
    "accelerate": accelerate_ddp,
    "accelerate, deepspeed": partial(accelerate_deepspeed, stage=1),
    "accelerate, fsdp": partial(accelerate_fsdp, unit=Block),
    "lightning_fabric": lightning_ddp,
    "lightning_fabric, fsdp": partial(lightning_fsdp, unit=Block),
}


def without(rank, package, make):
    """What is said on a rank that has not got a package."""
    before = sys.path
    there = {name: sys.modules.pop(name) for name in list(sys.modules) if name == package}
    sys.path = [tempfile.gettempdir()]  # nothing can be found
    try:
        make(seeded(GPT), SGD)
    except CourseError as problem:
        return str(problem)
    finally:
        sys.path = before
        sys.modules.update(there)


@pytest.mark.parametrize("name", MAKES)
def test_a_framework_that_is_not_installed_is_one_sentence(pools, name):
    package = name.partition(",")[0]
    told = f"need {PACKAGES[package].name} {PACKAGES[package].version}; it is not installed here"
    for said in pools(2).run(without, package, MAKES[name]):
        assert told in said
        assert said.endswith("in the course's folder.")
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize("make", [*MAKES.values(), partial(fully_sharded, unit=Block)])
def test_a_process_that_is_no_rank_is_told(make):
    with pytest.raises(MeshError, match="need ranks that form a world; there is none in this pro"):
        make(seeded(GPT), SGD)


@pytest.mark.parametrize("module", PACKAGES)
@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_what_to_install_is_the_course_on_linux_or_an_extra(monkeypatch, system, module):
    monkeypatch.setattr(engine.sys, "platform", system)
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    package = PACKAGES[module]
    what = "." if package.on_linux and system == "linux" else f"'.[{package.extra}]'"
    assert f"Try pip install -e {what} in the course's folder." in missing(module)


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_the_course_and_its_extras_list_the_versions_that_are_asked_for(package):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    always = project["dependencies"] if package.on_linux else extras["dev"]
    for lines, system in ((always, "linux"), (extras[package.extra], "darwin")):
        (found,) = [one for one in map(Requirement, lines) if one.name == package.name]
        assert str(found.specifier) == f"=={package.version}"
        assert found.marker is None or found.marker.evaluate({"sys_platform": system})


def test_a_package_that_is_there_is_the_package():
    assert missing("torch") is None
    assert needed("torch", "here") is torch


# -- DeepSpeed and Accelerate, where they are installed -----------------------------------------


@pytest.mark.parametrize(
    ("stage", "offload"),
    [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)],
)
def test_deepspeed_equals_one_process(pools, stage, offload):
    pytest.importorskip("deepspeed")
    make = partial(deepspeed_engine, make_optimizer=SGD, stage=stage, offload=offload)
    agrees(pools, make, f"DeepSpeed ZeRO-{stage}" + " + offload" * offload)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_accumulates_over_micro_batches(pools, stage):
    pytest.importorskip("deepspeed")
    make = partial(deepspeed_engine, make_optimizer=SGD, stage=stage, num_micro_batches=2)
    agrees(pools, make, f"DeepSpeed ZeRO-{stage}", num_parts=2)


def test_deepspeed_keeps_to_itself_that_it_warns():
    pytest.importorskip("deepspeed")
    make = partial(deepspeed_engine, make_optimizer=SGD, stage=3)
    with Ranks(2) as ranks:  # new ones, that import it now
        ranks.run(under, 2, make, GPT, gpt_batch)
        assert [ranks.output(rank) for rank in range(2)] == ["", ""]


def carried(rank, make):
    """The bytes of a step's collectives, for each byte of the parameters; then of the embedding."""
    model = seeded(GPT)
    whole = 4 * sum(param.numel() for param in model.parameters())
    embedding = 4 * model.embedding.weight.numel() / whole
    engine = make(model)
    for n in range(4):  # DeepSpeed looks on in the first ones
        inputs, targets = gpt_batch(n)
        with record() as log:
            engine.step(token_loss(engine.model(inputs), targets))
    found = {}
    for event in log.events:
        found[event.kind] = found.get(event.kind, 0) + event.num_bytes / whole
    return {kind: part for kind, part in found.items() if part > 0.01}, embedding


@pytest.mark.parametrize(
    ("stage", "settings", "expected"),
    [
        (0, {}, {"all_reduce": 1}),
        (2, {}, {"all_reduce": 1, "all_gather": 1}),
        (3, {}, {"all_gather": 1, "reduce_scatter": 1}),
        (2, AS_IN_THE_PAPER, {"reduce": 1, "all_gather": 1}),
        (3, AS_IN_THE_PAPER, {"all_gather": 2, "reduce_scatter": 1}),
    ],
)
def test_a_step_of_deepspeed_carries_what_is_written(pools, stage, settings, expected):
    pytest.importorskip("deepspeed")
    make = partial(deepspeed_engine, make_optimizer=SGD, stage=stage, **settings)
    for found, embedding in pools(2).run(carried, make):
        again = 2 * embedding if stage == 3 and settings else 0  # it is the head, too
        sizes = {kind: size + again * (kind == "all_gather") for kind, size in expected.items()}
        found.pop("wait", None)
        assert found == pytest.approx(sizes, rel=0.02)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("Accelerate FSDP", partial(accelerate_fsdp, unit=Block)),
        ("Accelerate, DeepSpeed ZeRO-1", partial(accelerate_deepspeed, stage=1)),
        ("Accelerate, DeepSpeed ZeRO-3", partial(accelerate_deepspeed, stage=3)),
        ("Accelerate DDP", accelerate_ddp),  # last: nothing is left of the others
    ],
)
def test_accelerate_equals_one_process(pools, name, make):
    for package in ("accelerate", "deepspeed", "transformers"):
        pytest.importorskip(package)
    agrees(pools, partial(make, make_optimizer=SGD), name)


@pytest.mark.parametrize(
    ("name", "make", "kind", "unit"),
    [
        ("Lightning FSDP2", lightning_fsdp, GPT, Block),
        ("Lightning FSDP2", lightning_fsdp, BERT, EncoderBlock),
        ("Lightning DDP", lightning_ddp, GPT, None),
        ("Lightning DDP", lightning_ddp, BERT, None),
    ],
)
def test_lightning_equals_one_process(pools, name, make, kind, unit):
    pytest.importorskip("lightning_fabric")
    how = {"unit": unit} if unit else {}
    batch_of = gpt_batch if kind is GPT else bert_batch
    agrees(pools, partial(make, make_optimizer=SGD, **how), name, kind, batch_of)


def test_lightning_keeps_to_itself_what_it_logs():
    pytest.importorskip("lightning_fabric")
    with Ranks(2) as ranks:
        ranks.run(under, 2, partial(lightning_ddp, make_optimizer=SGD), GPT, gpt_batch)
        assert [ranks.output(rank) for rank in range(2)] == ["", ""]


def test_lightning_says_which_unit_it_needs(pools):
    pytest.importorskip("lightning_fabric")
    make = partial(lightning_fsdp, make_optimizer=SGD, unit=EncoderBlock)
    with pytest.raises(RankError, match="lightning_fsdp: need a model with modules of type Encod"):
        pools(2).run(under, 2, make, GPT, gpt_batch)


def stage_2_that_is_told_1(model):
    """An engine whose stage is another one than what is checked."""
    from course_lib.frameworks.deepspeed_engine import check_deepspeed

    engine = deepspeed_engine(model, SGD, stage=1)
    check_deepspeed("here", engine.model, 2)
    return engine


def test_what_runs_otherwise_than_asked_is_told(pools):
    pytest.importorskip("deepspeed")
    with pytest.raises(RankError, match=r"here: need the stage = 2; got 1\. What runs"):
        pools(2).run(under, 2, stage_2_that_is_told_1, GPT, gpt_batch)


SCRIPT = """
from functools import partial

import torch

from course_lib.core import ModelSpec
from course_lib.frameworks import deepspeed_engine
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import launch


def main(rank):
    torch.manual_seed(0)
    spec = ModelSpec(hidden=32, num_layers=2, num_heads=4, ffn_hidden=64, vocab=50, max_seq=16)
    engine = deepspeed_engine(
        GPT(spec), partial(torch.optim.SGD, lr=0.1, momentum=0.9), stage=2
    )
    for n in range(3):
        part = token_batch(n, batch=4, seq=16, vocab=50).chunk(2)[rank]
        inputs, targets = next_tokens(part)
        engine.step(token_loss(engine.model(inputs), targets))
    if rank == 0:
        torch.save(engine.weights(), "weights.pt")


launch(main)
"""


def test_deepspeed_under_torchrun_equals_one_process(tmp_path):
    pytest.importorskip("deepspeed")
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*torchrun, "--local-addr", "127.0.0.1", "--nproc-per-node", "2", "script.py"],
        cwd=tmp_path, check=True, timeout=150, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    _, weights = one_process(GPT, gpt_batch)
    torch.testing.assert_close(torch.load(tmp_path / "weights.pt"), weights, **TOLERANCE)


def test_bytes_besides_earlier_storages_stay_right_when_an_earlier_tensor_is_freed():
    earlier_tensor = torch.ones(1000)
    earlier = alive_storages()
    later = torch.ones(7)
    assert alive_bytes(besides=earlier) == later.nbytes
    del earlier_tensor
    assert alive_bytes(besides=earlier) == later.nbytes
    again = [torch.ones(1000) for _ in range(8)]  # at the address that is free now
    assert alive_bytes(besides=earlier) == later.nbytes + sum(one.nbytes for one in again)
