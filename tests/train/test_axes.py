"""All axes together: every strategy on every mesh has the numbers of one process."""

import sys
from collections import Counter
from dataclasses import replace
from functools import cache

import cloudpickle
import pytest
import torch

from course_lib.context_parallel.cost import FORMS, AttentionSizes
from course_lib.context_parallel.lab import sent_by
from course_lib.core import CourseError, ModelSpec
from course_lib.core.specs import Experts
from course_lib.mesh import clip
from course_lib.models import GPT
from course_lib.tensor_parallel.finish_watch import finishing
from course_lib.tensor_parallel.state import partial_params
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import Trainer
from tests.train.training_runs import by_name, losses, same, whole_state

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# an odd vocabulary is filled up over tp = 2 and in shards; 7 sequences make uneven shares
SPEC = ModelSpec(hidden=8, num_layers=4, num_heads=2, ffn_hidden=16, vocab=21, max_seq=8)
UNTIED = replace(SPEC, tied=False, positions="rope", norm="rms", gated=True, bias=False)
WIDE = replace(SPEC, hidden=16, num_heads=4)  # a rank of tp = 2 has heads for cp = 2
SHARED = replace(UNTIED, num_kv_heads=1, qk_norm="head")  # both ranks of tp = 2 have its keys
ROUTED = replace(
    UNTIED,
    experts=Experts(count=4, active=2, ffn_hidden=6, shared_hidden=4, dense_layers=(1,)),
)
EXACT = TrainConfig(model=SPEC, steps=3, global_batch=7, seq=8, dtype="float64", every=0, lr=0.01)
# the sums over tokens, shards and micro-batches run in another order; float64 rounds at 1e-16
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}
CLIP = {"clip_norm": 0.05, "optimizer": "sgd", "lr": 1.0}
PARTS = {"global_batch": 8, "micro_batch": 1}
SP = {"sequence_parallel": True}
KEPT = {"reshard": False}

RING = {"cp": 2, "seq": 7}  # a length that cp does not divide
HEADS = {"cp": 2, "cp_form": "ulysses", "cp_layout": "contiguous"}
GATHER = {"cp": 2, "cp_form": "all_gather", "cp_layout": "striped", "seq": 7}

# strategy, dp, tp, pp, options, maybe with cp: on dp * tp * pp * cp ranks
TABLE = [
    ("ddp", 2, 2, 1, CLIP | SP),
    ("ddp", 2, 1, 2, CLIP),
    ("naive-dp", 1, 2, 2, CLIP | {"model": UNTIED}),
    ("single", 1, 2, 2, CLIP | SP | {"schedule": "zb-h1"}),
    ("single", 1, 1, 2, CLIP | {"schedule": "zb-v"}),
    ("torch-ddp", 2, 2, 1, CLIP),
    ("zero1", 2, 2, 1, CLIP | SP),
    ("zero1", 2, 1, 2, CLIP),
    ("zero1", 2, 1, 2, PARTS | {"schedule": "zb-h1"}),
    ("zero1", 2, 1, 2, PARTS | {"schedule": "interleaved", "model": UNTIED}),
    ("zero1", 1, 2, 2, CLIP | {"model": UNTIED}),
    ("zero1", 2, 2, 1, {"model": SHARED, **CLIP}),
    ("zero1-offload", 2, 2, 1, CLIP),
    ("zero2", 2, 2, 1, CLIP | SP),
    ("zero2", 2, 2, 1, PARTS | {"model": UNTIED}),
    ("zero2", 2, 1, 2, CLIP),
    ("zero2", 2, 1, 2, PARTS | {"schedule": "gpipe"}),
    ("zero2", 2, 2, 1, SP | {"model": SHARED, **CLIP}),
    ("zero2-offload", 2, 1, 2, CLIP),
    ("zero3", 2, 2, 1, CLIP | SP),
    ("zero3", 2, 2, 1, PARTS | {"model": SHARED}),
    ("fsdp", 2, 2, 1, CLIP | SP),
    ("fsdp", 2, 2, 1, PARTS | KEPT),
    ("fsdp", 2, 2, 1, SP | {"model": SHARED, **CLIP}),
    ("fsdp", 2, 1, 2, CLIP),
    ("fsdp", 2, 1, 2, CLIP | KEPT),
    ("fsdp", 2, 1, 2, PARTS | {"schedule": "interleaved"}),
    ("fsdp", 2, 1, 2, PARTS | KEPT | {"schedule": "interleaved", "model": UNTIED}),
    ("fsdp", 1, 2, 2, CLIP | SP | {"schedule": "gpipe"}),
    ("fsdp", 4, 1, 1, CLIP),
    ("zero2", 4, 1, 1, CLIP),
    ("fsdp", 1, 2, 1, CLIP | RING | {"model": SHARED}),
    ("ddp", 2, 1, 1, CLIP | HEADS),
    ("zero1", 1, 1, 2, CLIP | RING | {"schedule": "zb-h1"}),
    ("fsdp", 1, 1, 2, CLIP | GATHER),
    ("zero3", 2, 1, 1, CLIP | RING | {"model": UNTIED}),
    ("zero2", 1, 2, 1, CLIP | SP | HEADS | {"model": WIDE}),
    ("torch-fsdp", 2, 1, 1, CLIP | RING),
    ("naive-dp", 1, 1, 1, CLIP | {"cp": 4, "cp_layout": "striped"}),
]
EXPERTS = [
    ("ddp", 2, 1, 1, CLIP | {"ep": 2}),
    ("naive-dp", 4, 1, 1, CLIP | {"ep": 2}),
    ("ddp", 2, 1, 2, CLIP | {"ep": 2, "schedule": "zb-h1"}),
    ("ddp", 2, 2, 1, CLIP | {"ep": 2}),
    ("ddp", 2, 2, 1, CLIP | SP | {"ep": 2}),
    ("zero1", 4, 1, 1, CLIP | {"ep": 4}),
    ("zero2", 4, 1, 1, CLIP | {"ep": 2}),
    ("zero3", 2, 2, 1, CLIP | {"ep": 2}),
    ("zero1-offload", 4, 1, 1, CLIP | {"ep": 2}),
    ("fsdp", 4, 1, 1, CLIP | {"ep": 2}),
    ("fsdp", 2, 1, 2, PARTS | KEPT | {"ep": 2}),
    ("ddp", 2, 1, 1, CLIP | {"cp": 2, "ep": 2}),
    ("fsdp", 1, 1, 1, CLIP | {"cp": 4, "ep": 2, "cp_form": "all_gather"}),
    ("torch-ddp", 2, 1, 1, CLIP),
    ("fsdp", 2, 2, 1, CLIP | SP | {"ep": 2}),
    ("single", 1, 2, 2, CLIP | SP | {"schedule": "zb-h1"}),
]
EIGHT = [
    ("fsdp", 2, 1, 2, CLIP | RING),
    ("fsdp", 4, 1, 2, CLIP | {"ep": 2, "model": ROUTED}),
    ("zero1", 4, 2, 1, CLIP | SP | {"ep": 4, "model": ROUTED}),
    ("ddp", 2, 2, 1, CLIP | SP | {"cp": 2, "model": SHARED}),
    ("zero2", 1, 2, 2, CLIP | GATHER | {"model": UNTIED}),
    ("ddp", 2, 2, 2, CLIP | SP),
    ("zero1", 2, 2, 2, CLIP | SP),
    ("zero2", 2, 2, 2, CLIP | SP),
    ("fsdp", 2, 2, 2, CLIP | SP),
    ("fsdp", 2, 2, 2, CLIP | KEPT | {"model": SHARED}),
    ("fsdp", 2, 2, 2, SP | PARTS | {"schedule": "interleaved"}),
    ("fsdp", 4, 2, 1, CLIP),
    ("fsdp", 2, 1, 4, CLIP),
]


EXPERTS = [(*row[:4], row[4] | {"model": ROUTED}) for row in EXPERTS]


def config_of(row):
    strategy, _, tp, pp, options = row
    return replace(EXACT, strategy=strategy, tp=tp, pp=pp, **options)


def size_of(row):
    return row[1] * row[2] * row[3] * row[4].get("cp", 1)


def trained(rank, configs):
    """For each run: the record, and on rank 0 the whole state."""
    found = []
    for config in configs:
        trainer = Trainer(rank, config)
        found.append((trainer.run(), whole_state(trainer)))
    return found


def assert_that_of_one_process(rows, pools, by_hand):
    hand = cache(lambda *sizes: by_hand(replace(EXACT, **dict(sizes))))
    names = ("model", "optimizer", "global_batch", "clip_norm", "lr", "seq")
    for p in {size_of(row) for row in rows}:
        own = [row for row in rows if size_of(row) == p]
        configs = [config_of(row) for row in own]
        by_rank = pools(p).run(trained, configs)
        for number, (row, config) in enumerate(zip(own, configs, strict=True)):
            expected, state = hand(*((name, getattr(config, name)) for name in names))
            told = f"{row}: {{}}".format
            for results in by_rank:
                torch.testing.assert_close(
                    losses(results[number][0]), expected, **TOLERANCE, msg=told
                )
            wanted = by_name(state, GPT(config.model))
            same(by_rank[0][number][1], wanted, **TOLERANCE, msg=told)
            norms = {step.get("grad_norm") for step in by_rank[0][number][0].steps}
            assert norms == {None} or min(norms) > 2 * config.clip_norm, "it does not clip"


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_every_strategy_on_every_mesh_has_the_numbers_of_one_process(first, pools, by_hand):
    assert_that_of_one_process(TABLE[first::2], pools, by_hand)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_so_it_has_with_experts_divided_over_ranks(first, pools, by_hand):
    assert_that_of_one_process(EXPERTS[first::2], pools, by_hand)


@pytest.mark.nightly
def test_so_it_has_on_eight_ranks(pools, by_hand):
    assert_that_of_one_process(EIGHT, pools, by_hand)


# -- what would be wrong without a part of it --------------------------------------------------


def numbers_of(rank, config, fault):
    """The losses of a run with a fault."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        return losses(Trainer(rank, config).run())


def no_sum_of_ties(patch):
    patch.setattr(clip, "sum_copies", lambda grad, *_: grad)


def no_sum_over_tp(patch):
    def nothing(model, held):
        with finishing(partial_params(model)):
            pass

    patch.setattr(clip, "finish_gradients", nothing)


def each_number_where_it_is(patch):
    patch.setattr(clip, "counted_here", lambda module, mesh: set(module.parameters()))


FAULTS = [
    (no_sum_of_ties, ("zero2", 2, 1, 2, {})),
    (no_sum_of_ties, ("fsdp", 2, 1, 2, {})),
    (no_sum_over_tp, ("zero2", 2, 2, 1, SP | {"optimizer": "sgd", "lr": 1.0})),
    (no_sum_over_tp, ("fsdp", 2, 2, 1, {"model": SHARED, "optimizer": "sgd", "lr": 1.0})),
    (each_number_where_it_is, ("fsdp", 2, 2, 1, CLIP)),
    (each_number_where_it_is, ("zero1", 2, 1, 2, CLIP)),
]


@pytest.mark.parametrize(("fault", "row"), FAULTS)
def test_a_part_that_is_left_out_shows(pools, by_hand, fault, row):
    config = config_of(row)
    expected, _ = by_hand(config)
    for found in pools(size_of(row)).run(numbers_of, config, fault):
        apart = [abs(a - b) for a, b in zip(found, expected, strict=True)]
        assert max(apart) > 1e-6


# -- checkpoints: a shard of a shard is boxes of the whole ---------------------------------------

LEGS = [
    ("fsdp", 2, 2, 1, {}),
    ("zero2", 2, 1, 2, {}),
    ("fsdp", 2, 1, 2, KEPT),
    ("zero3", 2, 2, 1, {}),
    ("zero1", 2, 2, 1, SP),
    ("single", 1, 2, 2, {}),
    ("zero1", 2, 1, 2, {"schedule": "zb-h1"}),
    ("fsdp", 4, 1, 1, {}),
    ("fsdp", 1, 2, 1, {"cp": 2}),
    ("zero1", 2, 1, 1, {"cp": 2}),
]


@pytest.mark.parametrize("format_", ["course", "dcp"])
@pytest.mark.parametrize("spec", [SPEC, SHARED], ids=["tied", "shared heads"])
def test_a_run_goes_on_with_any_strategy_on_any_mesh(pools, by_hand, tmp_path, spec, format_):
    config = replace(EXACT, model=spec, steps=len(LEGS), out=str(tmp_path), save_every=1)
    expected, state = by_hand(config)
    configs = [
        replace(
            config_of(row), model=spec, steps=step + 1, resume=step > 0, out=config.out,
            save_every=1, checkpoint_format=format_,
        )
        for step, row in enumerate(LEGS)
    ]  # fmt: skip
    by_rank = pools(4).run(trained, configs)
    found = [loss for record, _ in by_rank[0] for loss in losses(record)]
    torch.testing.assert_close(found, expected, **TOLERANCE)
    same(by_rank[0][-1][1], by_name(state, GPT(spec)), **TOLERANCE)


def went_on(rank, configs):
    """Each run once without a stop, and once from its checkpoint after a step."""
    found = []
    for config in configs:
        whole = Trainer(rank, replace(config, out=None, save_every=0))
        found.append((losses(whole.run()), whole_state(whole)))
        Trainer(rank, replace(config, steps=1)).run()
        resumed = Trainer(rank, replace(config, resume=True))
        found.append((losses(resumed.run()), whole_state(resumed)))
    return found


def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(pools, tmp_path):
    rows = [
        ("fsdp", 2, 2, 1, SP), ("fsdp", 2, 1, 2, KEPT), ("zero2", 2, 1, 2, {}),
        ("zero1", 1, 2, 2, {}), ("zero3", 2, 2, 1, {}),
    ]  # fmt: skip
    usual = {"dtype": "float32", "dropout": 0.1, "clip_norm": 0.05, "steps": 2, "save_every": 1}
    configs = [
        replace(config_of(row), **usual, out=str(tmp_path / str(number)))
        for number, row in enumerate(rows)
    ]
    found = pools(4).run(went_on, configs)[0]
    for whole, resumed in zip(found[::2], found[1::2], strict=True):
        assert whole[0][1:] == resumed[0]
        same(whole[1], resumed[1])


# -- what a rank sends ---------------------------------------------------------------------------


def calls_of(rank, configs):
    """The number of gathers and reductions of parameters in the last step of each run."""
    found = []
    for config in configs:
        events = Trainer(rank, config).run().events
        kinds = Counter(event.kind for event in events if event.num_bytes > 8)
        found.append((kinds["all_gather"] / config.steps, kinds["reduce_scatter"] / config.steps))
    return found


def test_what_stays_is_gathered_and_reduced_once_for_all_micro_batches(pools):
    row = ("fsdp", 2, 1, 2, PARTS | {"model": UNTIED})  # 4 micro-batches, 2 blocks and the root
    freed, kept = config_of(row), replace(config_of(row), reshard=False)
    for (gathers, reduces), once in pools(4).run(calls_of, [freed, kept]):
        assert once == (3, 3)
        assert reduces == 4 * 3
        assert 4 * 3 < gathers <= 4 * 2 * 3


SENT = [
    ("fsdp", 2, 1, 1, PARTS | RING, "ring"),
    ("zero1", 2, 1, 1, PARTS | GATHER, "all-gather"),
    ("ddp", 1, 2, 1, PARTS | HEADS | {"model": WIDE}, "Ulysses"),
]


def sent_along_cp(rank, configs):
    """This rank's index along cp, and the bytes that it has sent along it in each run."""
    trainers = [Trainer(rank, replace(config, steps=1)) for config in configs]
    pairs = [trainer.mesh.mesh.group(rank, "cp") for trainer in trainers]
    return [
        (
            trainer.mesh.index("cp"),
            sent_by(e for e in trainer.run().events if {*e.group} == {*pair}),
        )
        for trainer, pair in zip(trainers, pairs, strict=True)
    ]


def test_what_is_sent_along_cp_is_the_forms_bytes_in_every_layer_and_micro_batch(pools):
    for by_row in pools(4).run(sent_along_cp, [config_of(row[:5]) for row in SENT]):
        for row, (index, sent) in zip(SENT, by_row, strict=True):
            config, dp, tp = config_of(row[:5]), row[1], row[2]
            sizes = AttentionSizes(
                seq=config.seq, num_heads=config.model.num_heads // tp,
                kv_heads=config.model.kv_heads // tp, head_dim=config.model.head_size,
                number_bytes=8,
            )  # fmt: skip
            passes = FORMS[row[5]](sizes, 2, index, config.cp_layout)
            assert sent == sum(passes) * config.model.num_layers * config.num_micro_batches(dp)


# -- dropout and what is refused -----------------------------------------------------------------


def drawn(rank, config):
    Trainer(rank, config).run()
    return torch.rand(1).item()


def test_ranks_with_other_tokens_draw_other_dropout_and_those_of_tp_the_same(pools):
    row = ("ddp", 1, 2, 1, {"cp": 2, "dropout": 0.3, "steps": 1})
    draws = pools(4).run(drawn, config_of(row))
    assert draws[0] == draws[1] != draws[2] == draws[3]


def test_dropout_is_that_of_the_whole_model(alone, pools):
    config = replace(EXACT, dropout=0.3)
    ((record, whole),) = alone(trained, [config])
    names = ("fsdp", "zero1", "zero2", "zero3")
    split = [replace(config, tp=2, strategy=name, sequence_parallel=True) for name in names]
    for found, state in pools(2).run(trained, split)[0]:
        torch.testing.assert_close(losses(found), losses(record), **TOLERANCE)
        same(state, whole, **TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"strategy": "zero3", "pp": 2}, "zero3: need pp=1, .* got pp=2. Try --strategy fsdp"),
        ({"strategy": "zero3-offload", "pp": 2}, "zero3-offload: need pp=1"),
        (
            {"strategy": "zero2", "pp": 2, "schedule": "interleaved"},
            "zero2: need --schedule naive or gpipe or 1f1b, .* got interleaved. Try",
        ),
        (
            {"strategy": "fsdp", "pp": 2, "schedule": "zb-h1"},
            "fsdp: need --schedule naive or gpipe or 1f1b or interleaved, .* got zb-h1",
        ),
        ({"strategy": "torch-fsdp", "tp": 2}, "torch-fsdp: need tp=1 and pp=1, .* Try --strategy"),
        ({"strategy": "deepspeed-1", "tp": 2}, "deepspeed-1: need tp=1 and pp=1"),
        ({"strategy": "deepspeed-1", "cp": 2}, "deepspeed-1: need cp=1, .* Try --strategy fsdp"),
        ({"strategy": "ddp", "cp": 9}, "need a token of every sequence .* got --seq 8 and cp=9"),
        (HEADS | {"model": SHARED, "tp": 2}, "ulysses: need the heads .* got 1, 1 and cp=2. Try"),
        ({"cp_form": "ring"}, "--cp-form: need cp of 2 or more; got ring and 1"),
        ({"cp": 2, "cp_layout": "snake"}, "--cp-layout: need one of contiguous, zigzag, striped"),
        (SP | RING | {"tp": 2}, r"need --seq divisible by tp \* cp; got 7 and 4. Try --seq 4"),
        ({"cp": 2, "model": replace(UNTIED, window=4)}, "need --seq of at most its window of 4"),
    ],
)
def test_what_cannot_be_together_is_refused_before_anything_starts(changes, says):
    with pytest.raises(CourseError, match=says):
        replace(EXACT, **changes)
