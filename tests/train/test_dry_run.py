"""A dry run holds and sends what a real run does, to the byte, and leaves nothing behind."""

import subprocess
import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch.distributed as dist

from course_lib.core import CourseError, ModelSpec
from course_lib.core.specs import Experts
from course_lib.mesh.mesh import AXES
from course_lib.models import moe
from course_lib.planner.dry_run import predicted_text
from course_lib.ranks.dry_world import dry_world
from course_lib.ranks.world import is_dry
from course_lib.train.__main__ import main
from course_lib.train.config import TrainConfig
from course_lib.train.dry_run import dry_run, measure_step, ranks_to_look_at
from course_lib.train.trainer import Trainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPEC = ModelSpec(hidden=16, num_layers=4, num_heads=4, ffn_hidden=32, vocab=53, max_seq=16)
LLAMA = replace(SPEC, tied=False, positions="rope", norm="rms", gated=True, bias=False)
SHARED = replace(LLAMA, num_kv_heads=2, qk_norm="head", window=4)
BASE = TrainConfig(model=SPEC, steps=2, global_batch=9, seq=8, every=0, dtype="float64")
EXPERTS = Experts(count=4, active=2, ffn_hidden=6, shared_hidden=4, dense_layers=(1,))
ROUTED = {"model": replace(LLAMA, experts=EXPERTS), "ep": 2, "global_batch": 8}
RING = {"cp": 2}
TP, PP = {"tp": 2, "sequence_parallel": True, "clip_norm": 1.0}, {"pp": 2}

TABLE = [  # strategy and options, on 4 ranks (8 in the night)
    ("ddp", {"bucket_mib": 0.01}),
    ("naive-dp", {"dropout": 0.1}),
    ("zero1", TP),
    ("zero2", {"model": LLAMA, "clip_norm": 1.0}),
    ("zero3", {"model": SHARED}),
    ("zero3", {"tp": 2}),
    ("fsdp", {"model": SHARED, "clip_norm": 1.0}),
    ("fsdp", {"model": LLAMA, "dtype": "float32", "compute_dtype": "bfloat16"}),
    ("fsdp", TP | {"model": LLAMA}),
    ("fsdp", TP | PP),
    ("fsdp", PP | {"reshard": False, "schedule": "interleaved", "global_batch": 8}),
    ("ddp", PP | {"tp": 2, "schedule": "gpipe"}),
    ("zero1", PP | {"schedule": "zb-h1", "model": LLAMA}),
    ("ddp", PP | {"schedule": "zb-v"}),
    ("ddp", {"optimizer": "muon", "model": LLAMA}),
    ("fsdp", TP | {"recompute": "full"}),
    ("ddp", RING | {"cp_layout": "striped"}),
    ("ddp", RING | TP),
    ("fsdp", RING | PP | {"model": LLAMA}),
    ("zero1", {"cp": 2, "cp_form": "all_gather", "model": LLAMA}),
    ("fsdp", {"cp": 2, "cp_form": "ulysses", "cp_layout": "contiguous"}),
    ("ddp", ROUTED | {"clip_norm": 1.0, "aux_weight": 0.1}),
    ("fsdp", ROUTED | {"recompute": "full"}),
    ("zero2", ROUTED | {"dtype": "float32"}),
    ("ddp", ROUTED | PP),
    ("zero3", ROUTED | {"tp": 2, "ep": 1}),
    ("ddp", ROUTED | RING),
]


def on_a_rank(rank, config):
    """With an even load of experts, which a dry run assumes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            moe.Router, "choose", lambda self, ranked: moe.evenly_chosen(len(ranked), self.experts)
        )
        return measure_step(Trainer(rank, config))


def in_a_dry_world(rank, num_ranks, config):
    with dry_world(rank, num_ranks):
        return on_a_rank(rank, config)


def check(pools, num_ranks, strategy, options):
    config = replace(BASE, strategy=strategy, **options)
    real = pools(num_ranks).run(on_a_rank, config)
    assert all(step.memory[kind] > 0 for step in real for kind in step.memory)
    assert {axis for one in real[0].traffic for axis in one.axis.split(" x ")} <= {*AXES}
    for step in real:
        dry = in_a_dry_world(step.rank, num_ranks, config)
        assert dry.traffic == step.traffic
        assert dry.memory == step.memory
    looked_at = ranks_to_look_at(config, num_ranks)
    of_all, of_these = (max(sum(real[n].memory.values()) for n in ranks)
                        for ranks in (range(num_ranks), looked_at))  # fmt: skip
    assert of_all == of_these


@pytest.mark.parametrize(("strategy", "options"), TABLE)
def test_a_dry_run_on_4_ranks_is_the_run(pools, strategy, options):
    check(pools, 4, strategy, options)


@pytest.mark.parametrize(("strategy", "options"), TABLE)
def test_a_dry_run_on_8_ranks_is_the_run(pools, strategy, options):
    check(pools, 8, strategy, options)


COMMAND = """--mesh pp=4,dp=64,tp=4 --strategy fsdp --layers 8 --global-batch 256 --dtype bfloat16
    --dry-run --save-every 5 --out runs/none --eval-every 5 --stop-at-loss 2 --lr-decay cosine"""


def test_a_thousand_ranks_are_told_in_seconds(capsys):
    with pytest.raises(SystemExit) as ended:
        main(COMMAND.split())
    told = capsys.readouterr().out
    assert ended.value.code == 0
    assert "fullest of ranks 0, 256, 512, 768" in told
    assert "predicted on 1,024 GPUs of dgx-h100" in told
    assert {line.split()[0] for line in told.splitlines() if " all_" in line} == {"dp", "tp"}


def test_what_the_planner_has_not_is_told():
    config = replace(BASE, strategy="ddp", pp=2, schedule="naive", dtype="float32")
    assert "the planner has no --schedule naive." in predicted_text(config, 4, "laptop")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"strategy": "deepspeed-3", "dtype": "float32"}, "need a strategy of the course"),
        ({"strategy": "torch-fsdp"}, "Try --strategy fsdp"),
        ({"strategy": "ddp", "resume": True, "out": "x"}, "need a training step"),
    ],
)
def test_what_has_no_dry_run_is_told(options, sentence):
    with pytest.raises(CourseError, match=sentence):
        dry_run(replace(BASE, **options), 4)


def refused_here(rank):
    try:
        dry_run(replace(BASE, strategy="ddp"), 4)
    except CourseError as error:
        return str(error)


def test_a_rank_cannot_become_a_dry_one(pools):
    assert all("got one that is a rank" in told for told in pools(2).run(refused_here))


AFTER = """
from tests.train.test_dry_run import BASE, dry_run, replace
from course_lib.ranks import launch
from course_lib.train.trainer import train
config = replace(BASE, strategy="ddp", steps=3)
if {dry}: dry_run(config, 8)
print([step["loss"] for step in launch(train, config).steps])
"""


def test_a_run_after_a_dry_run_is_a_run():
    assert not dist.is_initialized()
    dry_run(replace(BASE, strategy="zero3"), 4)
    assert not dist.is_initialized()
    assert not is_dry()
    losses = [
        subprocess.run(
            [sys.executable, "-c", AFTER.format(dry=dry)], capture_output=True, check=True
        )
        for dry in (True, False)
    ]
    assert losses[0].stdout == losses[1].stdout
    assert losses[0].stdout.count(b",") == 2
