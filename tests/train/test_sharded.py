"""The training script with shards instead of copies: the numbers of one process, GPT and BERT."""

import re
import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import cloudpickle
import pytest
import torch

from course_lib.accumulation import split_micro_batches
from course_lib.core import CourseError, ModelSpec
from course_lib.core.records import read_runs
from course_lib.frameworks import engine
from course_lib.models import BERT, GPT, IGNORED, mask_tokens, masked_accuracy, token_loss
from course_lib.models.data import mixed_seed
from course_lib.models.dialogues import MASK, SPECIAL, Dialogues, generated_dialogues
from course_lib.models.text import generated_text
from course_lib.train import data, trainer
from course_lib.train.config import TrainConfig
from course_lib.train.progress import Progress
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

# an odd vocabulary and width make shards of uneven pieces; 7 sequences make uneven shares
SPEC = ModelSpec(hidden=6, num_layers=2, num_heads=2, ffn_hidden=10, vocab=21, max_seq=8)
UNTIED = replace(SPEC, tied=False, positions="rope", norm="rms", gated=True, bias=False, hidden=8)
EXACT = TrainConfig(model=SPEC, steps=3, global_batch=7, seq=8, dtype="float64", every=0, lr=0.01)
# few words are known, so most tokens are [UNK], and some sequences have nothing to guess
TALK = replace(EXACT, masked=True, data="dialogues", model=replace(SPEC, vocab=len(SPECIAL) + 2))
# the sums over tokens and shards run in another order; float64 rounds at 1e-16
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}
SHARDED = ("zero1", "zero2", "zero3", "fsdp", "torch-fsdp")


def talks(say=print, *, vocab=TALK.model.vocab, tell=None):
    """A few dialogues, without a network."""
    return Dialogues.of(generated_dialogues(30), "talks", vocab)


def trained(rank, configs):
    """For each run: its record, the whole state on rank 0, and how far it is."""
    data.load_dialogues = talks
    found = []
    for config in configs:
        trainer = Trainer(rank, config)
        record = trainer.run()
        found.append((record, whole_state(trainer), trainer.progress))
    return found


# -- the law: the numbers of one process ---------------------------------------------------------

UNEVEN = [{"strategy": name} for name in SHARDED]
CASES = [
    *UNEVEN,
    *({"strategy": name, "global_batch": 12, "micro_batch": 2} for name in SHARDED),
    *({"strategy": name, "model": UNTIED, "optimizer": "sgd"} for name in ("zero3", "fsdp")),
    *({"strategy": f"zero{stage}-offload"} for stage in (1, 2, 3)),
    *({"strategy": name, "reshard": False} for name in ("fsdp", "torch-fsdp")),
]


@pytest.mark.parametrize("p", [2, 3])
def test_shards_give_the_losses_and_weights_of_one_process(pools, by_hand, p):
    configs = [replace(EXACT, **case) for case in (CASES if p == 2 else UNEVEN)]
    by_rank = pools(p).run(trained, configs)
    hand = cache(lambda *sizes: by_hand(replace(EXACT, **dict(sizes))))
    for number, config in enumerate(configs):
        names = ("model", "optimizer", "global_batch")
        expected, state = hand(*((name, getattr(config, name)) for name in names))
        for results in by_rank:
            record, _, progress = results[number]
            torch.testing.assert_close(losses(record), expected, **TOLERANCE)
            assert progress == Progress(step=3, tokens=3 * config.global_batch * 8)
        same(by_rank[0][number][1], by_name(state, GPT(config.model)), **TOLERANCE)
        assert all(results[number][1] is None for results in by_rank[1:])


def test_one_rank_runs_the_same_lines(alone, by_hand):
    expected, state = by_hand(EXACT)
    runs = alone(trained, [replace(EXACT, strategy=name) for name in SHARDED])
    for record, whole, _ in runs:
        torch.testing.assert_close(losses(record), expected, **TOLERANCE)
        same(whole, by_name(state, GPT(SPEC)), **TOLERANCE)


def test_the_norm_that_is_clipped_is_that_of_the_whole_gradient(alone, pools, by_hand):
    config = replace(EXACT, clip_norm=0.05, optimizer="sgd", lr=1.0)
    ((record, whole, _),) = alone(trained, [config])
    free, _ = by_hand(replace(config, clip_norm=None))
    expected, state = by_hand(config)
    assert abs(expected[-1] - free[-1]) > 1e-3
    torch.testing.assert_close(losses(record), expected, **TOLERANCE)
    same(whole, by_name(state, GPT(SPEC)), **TOLERANCE)
    names = ("ddp", *SHARDED)
    for found in pools(2).run(trained, [replace(config, strategy=name) for name in names])[0]:
        torch.testing.assert_close(losses(found[0]), losses(record), **TOLERANCE)
        same(found[1], whole, **TOLERANCE)


def test_the_learning_rate_grows_as_pytorchs_own_schedule_says(alone, pools, by_hand):
    config = replace(EXACT, warmup=3, steps=5, optimizer="sgd", lr=1.0)
    expected, state = by_hand(config)
    steady, _ = by_hand(replace(config, warmup=0))
    assert abs(expected[-1] - steady[-1]) > 1e-3
    names = ("ddp", "torch-ddp", *SHARDED)
    configs = [replace(config, strategy=name) for name in names]
    for record, whole, _ in (*alone(trained, [config]), *pools(2).run(trained, configs)[0]):
        torch.testing.assert_close(losses(record), expected, **TOLERANCE)
        same(whole, by_name(state, GPT(SPEC)), **TOLERANCE)


def test_sixteen_bits_compute_and_the_shards_keep_theirs(pools, by_hand):
    expected, _ = by_hand(EXACT)
    config = replace(EXACT, strategy="fsdp", compute_dtype="bfloat16")
    for record, whole, _ in (results[0] for results in pools(2).run(trained, [config])):
        torch.testing.assert_close(losses(record), expected, rtol=1e-2, atol=0)
        assert losses(record) != expected
        model = {name: x.dtype for name, x in (whole or {}).items() if name.startswith("model.")}
        assert set(model.values()) <= {torch.float64}
        assert bool(model) == (whole is not None)


# -- a BERT on dialogues -------------------------------------------------------------------------


def bert_batch(config, n):
    """What a BERT reads and has to guess, without any code of the training loop."""
    tokens = talks().batch(n, batch=config.global_batch, seq=config.seq, seed=config.seed)
    random = torch.Generator().manual_seed(mixed_seed(config.seed + 1, n))
    vocab = config.model.vocab
    return mask_tokens(tokens, random, vocab=vocab, mask=MASK, num_special=len(SPECIAL))


def bert_by_hand(config):
    """Losses, accuracies and state dicts of one process on the whole batch."""
    torch.manual_seed(config.seed)
    model, found = BERT(config.model).double(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    for n in range(config.steps):
        inputs, targets = bert_batch(config, n)
        logits = model(inputs)
        loss = token_loss(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((loss.item(), masked_accuracy(logits, targets)))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return *zip(*found, strict=True), state


@pytest.mark.parametrize("p", [2, 3])
def test_hidden_words_count_alike_wherever_they_are(pools, p):
    names = ("ddp", "zero2", "zero3", "fsdp", "torch-fsdp")
    for changes in ({"global_batch": 7}, {"global_batch": 6, "micro_batch": 1}):
        config = replace(TALK, **changes)
        expected, accuracies, state = bert_by_hand(config)
        results = pools(p).run(trained, [replace(config, strategy=name) for name in names])[0]
        for record, whole, _ in results:
            torch.testing.assert_close(losses(record), list(expected), **TOLERANCE)
            assert [step["accuracy"] for step in record.steps] == list(accuracies)
            same(whole, by_name(state, BERT(config.model)), **TOLERANCE)


def test_some_micro_batches_have_nothing_to_guess():
    config = replace(TALK, global_batch=6)
    hidden = [
        (part != IGNORED).sum().item()
        for n in range(config.steps)
        for part in split_micro_batches(bert_batch(config, n)[1], 6)
    ]
    assert min(hidden) == 0 < max(hidden)


def by_items(rank, config):
    """Train with each sequence counted alike; the losses."""
    data.load_dialogues, before = talks, trainer.by_tokens
    trainer.by_tokens = lambda part, whole: len(part) / len(whole)
    try:
        return losses(train(rank, config))
    finally:
        trainer.by_tokens = before


def test_a_mean_of_means_has_other_losses(pools):
    config = replace(TALK, strategy="fsdp", global_batch=6, lr=0.1)
    expected, *_ = bert_by_hand(config)
    for found in pools(2).run(by_items, config):
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) > 1e-4


def test_a_bert_reads_texts_and_synthetic_tokens_too(pools, tmp_path):
    path = tmp_path / "play.txt"
    path.write_text(generated_text(20))
    config = replace(EXACT, masked=True, strategy="fsdp")
    runs = pools(2).run(trained, [config, replace(config, data=str(path))])[0]
    synthetic, text = (record.run for record, *_ in runs)
    assert (synthetic["data"], synthetic["model"]["vocab"]) == ("synthetic, masked", 21)
    assert text["model"]["vocab"] == len(set(generated_text(20))) + 1  # the one that hides
    assert text["data"].endswith(", masked")


# -- going on ------------------------------------------------------------------------------------


def went_on(rank, configs):
    """Each run twice from its checkpoint after a step: by whoever wrote it, and resumed."""
    found = []
    for config in configs:
        never_stopped = Trainer(rank, replace(config, steps=1))
        never_stopped.run()
        never_stopped.config = replace(config, out=None, save_every=0)
        resumed = Trainer(rank, replace(config, resume=True))
        both = (never_stopped, resumed)
        found += [(one.run(), whole_state(one), one.progress) for one in both]
    return found


def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(pools, tmp_path):
    config = replace(EXACT, dtype="float32", dropout=0.1, clip_norm=0.05, steps=2)
    momentum = {"optimizer": "sgd", "momentum": 0.9}
    cases = [{"strategy": name} for name in SHARDED]
    cases += [momentum | {"strategy": name} for name in ("zero3", "torch-fsdp")]
    configs = [
        replace(config, **case, out=str(tmp_path / f"{number}"), save_every=1)
        for number, case in enumerate(cases)
    ]
    found = pools(2).run(went_on, configs)[0]
    for whole, resumed in zip(found[::2], found[1::2], strict=True):
        assert losses(whole[0])[1:] == losses(resumed[0])
        same(whole[1], resumed[1])
        assert whole[2] == resumed[2] == Progress(step=2, tokens=2 * 7 * 8)


def test_a_run_can_go_on_with_another_strategy_and_other_ranks(alone, pools, by_hand, tmp_path):
    legs = [(3, "zero2"), (2, "fsdp"), (1, "single"), (2, "torch-fsdp"), (3, "fsdp"), (2, "zero3")]
    legs += [(2, "ddp"), (1, "zero1")]
    config = replace(EXACT, steps=len(legs), out=str(tmp_path), save_every=1)
    expected, state = by_hand(config)
    found = []
    for step, (p, name) in enumerate(legs):
        run = replace(config, strategy=name, steps=step + 1, resume=step > 0)
        found += losses(alone(train, run) if p == 1 else pools(p).run(train, run)[0])
    torch.testing.assert_close(found, expected, **TOLERANCE)
    same(saved_state(config), by_name(state, GPT(SPEC)), **TOLERANCE)


OTHER_RUNS = [
    ({"masked": True}, "need the data of .*, 'synthetic'; got 'synthetic, masked'"),
    ({"clip_norm": 1.0}, "need the clip_norm of .*, None; got 1.0"),
    ({"compute_dtype": "bfloat16"}, "need the compute_dtype of .*, None; got 'bfloat16'"),
    ({"optimizer": "sgd", "momentum": 0.9}, "need the optimizer of .*, 'adamw'; got 'sgd'"),
]


def test_what_changes_the_numbers_is_another_run(pools, tmp_path):
    config = replace(EXACT, strategy="fsdp", steps=1, out=str(tmp_path), save_every=1)
    again = [replace(config, resume=True, **changes) for changes, _ in OTHER_RUNS]
    for told in pools(2).run(refused, [config, *again]):
        assert told[0] == "it was trained"
        for (_, says), sentence in zip(OTHER_RUNS, told[1:], strict=True):
            assert re.search(says, sentence)


# -- what a rank holds, and what a run tells -----------------------------------------------------


def test_the_record_tells_what_a_rank_holds(pools, tmp_path):
    names = ("ddp", *SHARDED)
    configs = [replace(EXACT, strategy=name, out=str(tmp_path / name)) for name in names]
    pools(2).run(trained, configs)
    held = {name: read_runs(tmp_path / name)[1].run["memory"] for name in names}
    whole = held["ddp"]
    assert whole["optim_state"] == 2 * whole["params"]
    for name in SHARDED:
        for kind in ("params", "optim_state", "grads"):
            is_whole = (name in ("zero1", "zero2") and kind == "params") or (
                name in ("zero1", "zero2", "zero3") and kind == "grads"  # on their way, or whole
            )
            assert is_whole or 0.4 < held[name][kind] / whole[kind] < 0.6, (name, kind)
    for kinds in held.values():
        assert kinds["peak"] >= kinds["params"] + kinds["grads"] + kinds["optim_state"]


def test_epochs_are_as_many_tokens_as_there_are(pools, tmp_path, capsys):
    path = tmp_path / "play.txt"
    path.write_text(generated_text(20))
    per_epoch = round(len(generated_text(20)) / (32 * 8))
    config = replace(EXACT, data=str(path), strategy="fsdp", epochs=2, global_batch=32, every=2)
    for record, _, progress in (found[0] for found in pools(2).run(trained, [config])):
        assert progress.step == len(record.steps) == 2 * per_epoch > 2
        assert record.run["steps"] == 2 * per_epoch
        seconds = [step["end_s"] - step["start_s"] for step in record.steps]
        assert record.run["epoch_s"] == pytest.approx(sum(seconds) / 2)
    told = capsys.readouterr().out
    assert f"an epoch of {per_epoch} steps" in told
    assert "rank 0 holds params" in told


def test_the_progress_line_tells_how_many_were_guessed(pools, capsys):
    pools(2).run(trained, [replace(TALK, strategy="zero3", every=1)])
    told = capsys.readouterr().out.splitlines()
    assert all("accuracy" in line for line in [*told[:3], told[-1]])


# -- frameworks ----------------------------------------------------------------------------------

FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}  # what their gradients travel in


@pytest.mark.parametrize("package", ["deepspeed", "accelerate", "lightning", "megatron"])
def test_frameworks_train_the_same(pools, by_hand, package):
    pytest.importorskip("lightning_fabric" if package == "lightning" else package)
    names = [name for name in trainer.STRATEGIES if name.startswith(package)]
    if not find_spec("deepspeed"):
        names.remove("accelerate-deepspeed")
    configs = [replace(EXACT, dtype="float32", strategy=name) for name in names]
    small = [one for one in configs if one.strategy != "accelerate-deepspeed"]
    configs += [replace(one, global_batch=12, micro_batch=2) for one in small]
    for config, (record, *_) in zip(configs, pools(2).run(trained, configs)[0], strict=True):
        torch.testing.assert_close(losses(record), by_hand(config)[0], **FLOAT32)
        assert record.run["memory"]["tensors"] > 0


@pytest.mark.parametrize(
    ("p", "sizes"),
    [
        (2, {"tp": 2}),
        (2, {"tp": 2, "sequence_parallel": True}),
        (2, {"pp": 2, "schedule": "interleaved", "model": replace(SPEC, vocab=20, num_layers=4)}),
        (2, {"pp": 2, "micro_batch": 2}),
        (4, {"tp": 2, "pp": 2}),
        (4, {"pp": 2, "micro_batch": 1}),
    ],
)
def test_megatron_splits_the_model_itself(pools, by_hand, p, sizes):
    pytest.importorskip("megatron.core")
    one = replace(EXACT, model=sizes.pop("model", replace(SPEC, vocab=20)), global_batch=8)
    config = replace(one, strategy="megatron", **sizes)
    record = pools(p).run(trained, [config])[0][0][0]
    torch.testing.assert_close(losses(record), by_hand(one)[0], **TOLERANCE)


def without_packages(rank, configs):
    engine.find_spec, before = lambda name: None, engine.find_spec
    try:
        return refused(rank, configs)
    finally:
        engine.find_spec = before


def test_a_missing_framework_is_one_sentence(pools):
    wanted = {"deepspeed-2": "deepspeed", "accelerate-ddp": "accelerate"}
    wanted["lightning-ddp"] = "lightning-fabric"
    configs = [replace(EXACT, dtype="float32", strategy=name) for name in wanted]
    for told in pools(2).run(without_packages, configs):
        for package, sentence in zip(wanted.values(), told, strict=True):
            assert re.search(rf"need {package} .* is not installed here\. Try pip", sentence)
            assert len(sentence.splitlines()) == 1


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"strategy": "deepspeed-1", "pp": 2}, "--strategy deepspeed-1: need tp=1"),
        (
            {"strategy": "megatron", "dtype": "bfloat16"},
            "--dtype: need float32 or float64 with megatron; got bfloat16",
        ),
        (
            {"strategy": "megatron", "dtype": "float32", "pp": 2, "schedule": "zb-h1"},
            "--schedule: need 1f1b or interleaved with megatron; got zb-h1",
        ),
        (
            {"strategy": "megatron", "dtype": "float32", "dropout": 0.1},
            r"--dropout: need none with megatron; got 0\.1",
        ),
        ({"strategy": "lightning-fsdp", "tp": 2}, "--strategy lightning-fsdp: need tp=1 and pp=1"),
        ({"strategy": "zero3", "reshard": False}, "--no-reshard: need --strategy fsdp or torch-"),
        ({"compute_dtype": "bfloat16"}, "--compute-dtype: need --strategy fsdp; got single"),
        ({"strategy": "fsdp", "compute_dtype": "half"}, "--compute-dtype: need one of bfloat16"),
        ({"clip_norm": 0.0}, "--clip-norm: need more than 0; got 0"),
        ({"strategy": "megatron", "clip_norm": 1.0}, "--clip-norm: need a strategy of the"),
        ({"warmup": -1}, "--warmup: need 0 or more; got -1"),
        ({"strategy": "deepspeed-3"}, "--dtype: need float32 with deepspeed-3"),
        (
            {
                "strategy": "deepspeed-3",
                "save_every": 1,
                "out": "x",
                "async_save": True,
                "dtype": "float32",
            },
            "--async-save: need a strategy of the course or of PyTorch; got deepspeed-3",
        ),
        (
            {"strategy": "accelerate-deepspeed", "dtype": "float32", "micro_batch": 2},
            "--micro-batch: need a strategy whose step is separate",
        ),
        ({"optimizer": "sgd", "momentum": 1.0}, "a number below 1; got sgd and 1.0"),
        ({"data": "dialogues"}, "--data dialogues: need a BERT, .* got the GPT own"),
        ({"epochs": 2}, "--epochs: need a data set of finite size; got synthetic"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(changes, says):
    with pytest.raises(CourseError, match=says):
        replace(EXACT, **changes)
