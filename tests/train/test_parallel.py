"""The training script with --mesh: the numbers of one process, whatever the parallelism."""

import re
import sys
from collections import Counter
from dataclasses import replace
from functools import cache

import cloudpickle
import pytest
import torch

from course_lib.checkpoint import latest
from course_lib.core import CourseError, ModelSpec
from course_lib.core.records import read_runs
from course_lib.core.specs import Rope
from course_lib.mesh import clip
from course_lib.models import GPT
from course_lib.ranks import RankError
from course_lib.tensor_parallel.finish_watch import finishing
from course_lib.train import trainer
from course_lib.train.config import SCHEDULES, V_SCHEDULES, TrainConfig, schedule_of
from course_lib.train.trainer import Trainer, train
from tests.train.training_runs import (
    by_name,
    losses,
    refused,
    same,
    saved_state,
    whole_state,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# an odd vocabulary is filled up over tp = 2; 7 sequences make uneven shares and micro-batches
SPEC = ModelSpec(hidden=8, num_layers=4, num_heads=2, ffn_hidden=16, vocab=21, max_seq=8)
UNTIED = replace(SPEC, tied=False, positions="rope", norm="rms", gated=True, bias=False)
TODAY = replace(
    UNTIED,
    **{"num_kv_heads": 1, "head_dim": 6, "qk_norm": "head", "bias": ("qkv",)},
    **{"window": 3, "window_layers": (1, 3), "rope": Rope(theta=100.0)},
)
EXACT = TrainConfig(model=SPEC, steps=3, global_batch=7, seq=8, dtype="float64", every=0, lr=0.01)
# the sums over tokens, shards and micro-batches run in another order; float64 rounds at 1e-16
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def trained(rank, configs):
    """For each run: the record, how many numbers this rank trains, on rank 0 the whole state."""
    found = []
    for config in configs:
        trainer = Trainer(rank, config)
        record = trainer.run()
        size = sum(param.numel() for param in trainer.model.parameters())
        found.append((record, size, whole_state(trainer)))
    return found


# -- the law: the numbers of one process ---------------------------------------------------------

TWO_RANKS = [
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "model": TODAY},
    *({"pp": 2, "schedule": name} for name in SCHEDULES),
]
FOUR_RANKS = [
    {"tp": 2, "strategy": "ddp", "sequence_parallel": True, "model": UNTIED},
    {"tp": 2, "strategy": "torch-ddp"},
    {"pp": 2, "strategy": "naive-dp", "schedule": "interleaved", "model": UNTIED},
    {"tp": 2, "pp": 2, "sequence_parallel": True, "schedule": "zb-h1"},
    {"tp": 2, "pp": 2, "schedule": "zb-h1", "model": TODAY},
    {"tp": 2, "strategy": "ddp", "sequence_parallel": True, "model": TODAY},
]


@pytest.fixture(scope="module")
def runs(pools):
    """All runs on so many ranks, done once: their settings, and what each rank has of each."""

    @cache
    def found(p):
        configs = [replace(EXACT, **case) for case in (TWO_RANKS if p == 2 else FOUR_RANKS)]
        return configs, pools(p).run(trained, configs)

    return found


@pytest.mark.parametrize("p", [2, 4])
def test_any_parallelism_gives_the_losses_and_weights_of_one_process(runs, by_hand, p):
    configs, by_rank = runs(p)
    wanted = {spec: by_hand(replace(EXACT, model=spec)) for spec in (SPEC, UNTIED, TODAY)}
    for number, config in enumerate(configs):
        expected, state = wanted[config.model]
        records = [results[number][0] for results in by_rank]
        for record in records:
            torch.testing.assert_close(losses(record), expected, **TOLERANCE)
        same(by_rank[0][number][2], by_name(state, GPT(config.model)), **TOLERANCE)
        counted = [sum(step["num_tokens"] for step in record.steps) for record in records]
        assert sum(counted) == 3 * 7 * 8
        assert sum(count > 0 for count in counted) == p // (config.tp * config.pp)


def test_dropout_is_that_of_the_whole_model(alone, pools):
    config = replace(EXACT, dropout=0.3)
    ((record, _, whole),) = alone(trained, [config])
    split = [replace(config, tp=2), replace(config, tp=2, sequence_parallel=True)]
    for results in zip(*pools(2).run(trained, split), strict=True):
        torch.testing.assert_close(losses(results[0][0]), losses(record), **TOLERANCE)
        same(results[0][2], whole, **TOLERANCE)


def sum_nothing(model, held):
    with finishing(model.parameters()):
        pass


def without_summed_norms(rank, config):
    """Train with a piece of tensor parallelism taken out; the losses."""
    original, clip.finish_gradients = clip.finish_gradients, sum_nothing
    try:
        return losses(train(rank, config))
    finally:
        clip.finish_gradients = original


def over_all_ranks(rank, config):
    """Train with the mean of gradients over all ranks, as if each held the same part."""
    naive = trainer.STRATEGIES["naive-dp"]
    world = torch.distributed.group.WORLD
    changed = {"naive-dp": lambda model, config, _: naive(model, config, world)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "STRATEGIES", trainer.STRATEGIES | changed)
        train(rank, config)


BROKEN = replace(EXACT, model=replace(SPEC, vocab=20), tp=2, sequence_parallel=True)


def test_norms_that_are_not_summed_give_other_losses(pools, by_hand):
    expected = torch.tensor(by_hand(replace(EXACT, model=BROKEN.model))[0])
    config = replace(BROKEN, strategy="naive-dp")
    for found in pools(2).run(without_summed_norms, config):
        assert (torch.tensor(found) - expected).abs().max() > 1e-4


def test_a_mean_over_different_parts_is_refused(pools):
    with pytest.raises(RankError, match="a group whose ranks hold the same parameters"):
        pools(2).run(over_all_ranks, replace(BROKEN, strategy="naive-dp"))


# -- what a rank holds, sends and leaves ---------------------------------------------------------


def test_a_rank_holds_its_part_only(runs):
    whole = sum(param.numel() for param in GPT(SPEC).parameters())
    for config, *by_rank in zip(runs(2)[0], *runs(2)[1], strict=True):
        sizes = [size for _, size, _ in by_rank]
        if config.model != SPEC:
            continue
        if config.tp == 2:
            assert max(sizes) < 0.62 * whole  # norms, positions and biases are on both
        else:
            both = config.schedule not in V_SCHEDULES  # in a V, a tied embedding is on one rank
            assert sum(sizes) == whole + both * SPEC.vocab * SPEC.hidden
            assert max(sizes) < 0.6 * whole


def test_gradients_leave_once_to_the_ranks_with_the_same_part(pools, by_hand):
    config = replace(EXACT, pp=2, strategy="ddp", micro_batch=1, global_batch=8)
    expected, _ = by_hand(config)
    for rank, record in enumerate(pools(4).run(train, config)):
        torch.testing.assert_close(losses(record), expected, **TOLERANCE)
        sent = Counter(e.group for e in record.events if e.kind == "all_reduce")
        stage = rank // 2
        copies = (2 * stage, 2 * stage + 1)
        # one bucket a step; the losses after the first step and at the end
        assert sent == {copies: 3, (0, 1, 2, 3): 2}
        computed = [e.label for e in record.events if e.kind in ("forward", "backward")]
        assert computed == 3 * [action.label for action in schedule_of(config, 4)[stage]]


def test_the_record_tells_the_parallelism(pools, tmp_path):
    pools(2).run(train, replace(EXACT, pp=2, out=str(tmp_path), steps=1))
    records = read_runs(tmp_path)
    assert [record.world_size for record in records] == [2, 2]
    parallelism = {"dp": 1, "tp": 1, "pp": 2, "schedule": "1f1b", "num_micro_batches": 4}
    for record in records:
        assert {name: record.run[name] for name in parallelism} == parallelism
        assert losses(record) == losses(records[0])


# -- going on ------------------------------------------------------------------------------------


def test_a_run_can_go_on_with_another_parallelism(alone, pools, by_hand, tmp_path):
    config = replace(EXACT, steps=4, out=str(tmp_path), save_every=1)
    expected, state = by_hand(config)
    parallelism = [
        (4, {"tp": 2, "strategy": "ddp", "sequence_parallel": True}),
        (2, {"pp": 2, "schedule": "interleaved"}),
        (1, {}),
        (2, {"tp": 2}),
    ]
    found = []
    for step, (p, case) in enumerate(parallelism):
        run = replace(config, **case, steps=step + 1, resume=step > 0)
        found += losses(alone(train, run) if p == 1 else pools(p).run(train, run)[0])
        assert latest(config.checkpoints).values["progress"]["step"] == step + 1
    torch.testing.assert_close(found, expected, **TOLERANCE)
    same(saved_state(config), by_name(state, GPT(SPEC)), **TOLERANCE)


def test_a_resumed_split_run_is_bit_equal_to_one_that_never_stopped(pools, tmp_path):
    config = replace(EXACT, tp=2, pp=2, dtype="float32", dropout=0.1, steps=2)
    config = replace(config, save_every=1, out=str(tmp_path / "whole"))
    part = replace(config, out=str(tmp_path / "parts"))
    (whole,) = pools(4).run(trained, [config])[0]
    runs = pools(4).run(trained, [replace(part, steps=1), replace(part, resume=True)])[0]
    assert losses(whole[0]) == losses(runs[0][0]) + losses(runs[1][0])
    same(whole[2], runs[1][2])
    same(saved_state(part), saved_state(config))


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tp": 0}, "--tp: need more than 0; got 0"),
        (
            {"model": replace(SPEC, hidden=12, num_heads=6, num_kv_heads=3), "tp": 2},
            "need kv_heads .* as a multiple or a divisor of tp, .* got 3 and 2. Try tp=1",
        ),
        ({"pp": 3, "schedule": "interleaved"}, r"got 3 \* 2. Try --layers 6"),
        ({"pp": 3, "schedule": "zb-v"}, r"got 3 \* 2. Try --layers 6"),
        ({"pp": 2, "schedule": "2f2b"}, "--schedule: need one of naive, .*; got '2f2b'"),
        ({"tp": 2, "sequence_parallel": True, "seq": 7}, "got 7 and 2. Try --seq 6"),
    ],
)
def test_a_split_that_cannot_be_is_refused_before_anything_starts(changes, says):
    with pytest.raises(CourseError, match=says):
        replace(EXACT, **changes)


CANNOT_SPLIT = [
    ({"tp": 2, "pp": 2}, r"divisible by tp \* pp \* cp; got 2 and 2 \* 2 \* 1. Try --ranks 4"),
    ({"pp": 2, "strategy": "ddp", "micro_batch": 2}, r"got 7 and 2 \* 1. Try --global-batch 8"),
    (
        {"pp": 2, "schedule": "interleaved", "micro_batch": 1},
        "--schedule interleaved: need .* 3 equal rounds of 2 or more; got 7. Try 6 or 8",
    ),
    (
        {"pp": 2, "schedule": "dualpipe-v", "micro_batch": 7},
        r"--schedule dualpipe-v: need .* >= 2 \* num_stages; got 1 and 2. Try 4",
    ),
    ({}, r"--strategy single: need one copy of the model, dp \* cp = 1; got 2 ranks, dp = 2"),
]


def test_ranks_that_cannot_split_it_are_refused_on_each_rank(pools):
    for told in pools(2).run(refused, [replace(EXACT, **changes) for changes, _ in CANNOT_SPLIT]):
        for (_, says), sentence in zip(CANNOT_SPLIT, told, strict=True):
            assert re.search(says, sentence)
