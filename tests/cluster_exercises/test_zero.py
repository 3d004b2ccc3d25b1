"""Lesson 09: its lab and its script work."""

import sys
from dataclasses import replace
from functools import partial
from itertools import product

import cloudpickle
import pytest
import torch
from torch import nn

from course_lib.core import MODELS
from course_lib.core.errors import CourseError
from course_lib.core.parallelism import Parallelism
from course_lib.core.records import read_runs
from course_lib.core.units import GIB
from course_lib.frameworks import missing
from course_lib.memory import model_states
from course_lib.models import GPT, next_tokens, token_batch
from course_lib.zero import FlatLayout, ZeRO1, ZeRO2, ZeRO3
from course_lib.zero import beside_frameworks as beside
from course_lib.zero.explorer import draw_stages
from course_lib.zero.lab import (
    H100_NUM_PARAMS,
    H100_PEAK_GIB,
    owned_after_backward,
    owned_over_time,
)
from course_lib.zero.live import STAGES
from course_lib.zero.pictures import flat_param_shards, saved_by_stage_1, stage_1_on_gpus
from tests.cluster_exercises.scripts_on_ranks import said_by

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCRIPT = "09_zero"


def test_ownership_over_time_ends_where_the_formula_is(pools):
    def owned(rank):
        found = []
        for stage in (ZeRO1, ZeRO2, ZeRO3):
            layers = [nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 12)) for _ in range(3)]
            module = nn.Sequential(*layers)
            engine = stage(module, torch.optim.AdamW, lr=1e-3, bucket_bytes=1300)
            with owned_over_time(engine) as ledger:
                after = owned_after_backward(engine, partial(module_sum, engine))
            found.append((after, ledger))
        return found

    def module_sum(engine):
        return engine(torch.ones(2, 12)).sum()

    for by_stage in pools(2).run(owned):
        for zero, (after, ledger) in enumerate(by_stage, start=1):
            assert after == model_states(3 * 612, "fp32", parallelism=Parallelism(dp=2, zero=zero))
            last = {kind: ledger.bytes_by_kind[kind][-1] for kind in after}
            assert last == after
        most = [max(ledger.bytes_by_kind["params"]) for _, ledger in by_stage]
        assert most[0] == most[1] == 3 * 612 * 4
        assert most[2] == 3 * 612 * 4 / 2 + 312 * 4, "the shards, and one module's parameters"
        grads = [max(ledger.bytes_by_kind["grads"]) for _, ledger in by_stage]
        assert grads[0] > grads[1]


@pytest.mark.skipif(bool(missing("deepspeed")), reason="DeepSpeed is not installed")
def test_ours_and_deepspeed_keep_what_the_formula_says(pools):
    spec = replace(MODELS["tiny"], vocab=320)
    num = sum(param.numel() for param in GPT(spec).parameters())
    batch = next_tokens(token_batch(0, batch=4, seq=8, vocab=256))
    for zero, is_ours in product((1, 2, 3), (True, False)):
        _, _, kib = pools(2).run(beside.run_stage, spec, batch, zero, is_ours)[0]
        paper = sum(beside.kept_bytes(zero, num, 2, is_ours).values()) / 2**10
        assert kib == pytest.approx(paper, rel=0.01), (zero, is_ours)


def test_stage_1_saves_on_gpus_what_the_formula_says():
    for p, measured in H100_PEAK_GIB[1].items():
        left = H100_PEAK_GIB[0][p] - saved_by_stage_1(H100_NUM_PARAMS, p) / GIB
        assert measured == pytest.approx(left, rel=0.1)
    states = [
        sum(model_states(1000, "bf16", parallelism=Parallelism(dp=8, zero=zero)).values())
        for zero in (0, 1)
    ]
    assert saved_by_stage_1(1000, 8) == states[0] - states[1]
    assert stage_1_on_gpus()[1].startswith(
        "Stage 1 on 8 H100 saves 12.5 GiB of 36.7; formula: 13.1"
    )


def test_a_flat_row_needs_its_names():
    layout = FlatLayout(((2, 2), (3,)), 2)
    title = flat_param_shards(layout, ("a", "b"), "7 numbers").texts[0].get_text()
    assert title == "7 numbers"
    with pytest.raises(CourseError, match="need a name for each of 2 tensors"):
        flat_param_shards(layout, ("a",), "7 numbers")


@pytest.mark.parametrize(
    ("recipe", "p", "says"),
    [
        ("bf16", 1, "on 1 rank fit into an H100 at no stage"),
        ("bf16", 2, "on 2 ranks fit into an H100 with stage 1"),
        ("fp32", 2, "on 2 ranks fit into an H100 with stage 2"),
    ],
)
def test_the_explorer_names_the_lowest_stage_that_fits(recipe, p, says):
    assert says in STAGES.compute("llama-8b", recipe, p, "NVLink", 4).finding
    assert draw_stages("llama-8b", recipe, p, "NVLink", 4)


def test_the_script_measures_on_ranks(tmp_path):
    said = said_by(
        SCRIPT, f"--model tiny --micro-batches 2 --seq 8 --turns 1 --record-to {tmp_path}"
    )
    head, *rows = said.splitlines()
    assert head == "tiny on 2 ranks, fp32, AdamW; fastest of its turns"
    told = dict(row.strip().split(": ", 1) for row in rows)
    for zero, who in product((1, 2, 3), ("ours", "PyTorch's")):
        words = told[f"stage {zero}, 2 micro-batches, {who}"]
        assert 0 < float(words.partition(" % communicating")[0].split()[-1]) <= 100
    assert float(told["largest difference of their parameters"]) < 1e-6  # of steps of 1e-4
    assert ("not installed" in told.get("DeepSpeed's", "")) == bool(missing("deepspeed"))
    records = read_runs(tmp_path)
    assert [record.rank for record in records] == [0, 1]
    kinds = {event.kind for record in records for event in record.events}
    assert {"compute", "all_gather", "reduce_scatter"} <= kinds
