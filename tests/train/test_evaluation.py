"""Around the steps: validation, a start from other weights, learning rates, a loss that is nan."""

import math
import re
import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch

from course_lib.checkpoint import save
from course_lib.core import CourseError, ModelSpec
from course_lib.hub.config import read_config
from course_lib.hub.convert import to_hugging_face
from course_lib.models import BERT, GPT, IGNORED, next_tokens, token_batch, token_loss
from course_lib.models.dialogues import SPECIAL, Dialogues, generated_dialogues
from course_lib.models.text import Text, generated_text
from course_lib.train import data
from course_lib.train.config import TrainConfig
from course_lib.train.data import held_out, open_data
from course_lib.train.evaluation import BATCHES, FIRST
from course_lib.train.trainer import Trainer
from tests.train.training_runs import by_name, same, whole_state

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPEC = ModelSpec(hidden=8, num_layers=4, num_heads=2, ffn_hidden=16, vocab=21, max_seq=8)
EXACT = TrainConfig(model=SPEC, steps=2, global_batch=7, seq=8, dtype="float64", every=0, lr=0.01)
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def trained(rank, configs):
    """The validation losses and, on rank 0, the whole state after each run."""
    found = []
    for config in configs:
        trainer = Trainer(rank, config)
        found.append((trainer.run().run["validation"], whole_state(trainer)))
    return found


def validation_by_hand(model, config):
    """The mean over all tokens of the batches that no training reaches."""
    model.eval()
    parts = [
        token_batch(FIRST + n, batch=config.global_batch, seq=config.seq, vocab=SPEC.vocab)
        for n in range(BATCHES)
    ]
    inputs, targets = next_tokens(torch.cat(parts))
    with torch.no_grad():
        return token_loss(model(inputs), targets).item()


# -- validation ----------------------------------------------------------------------------------

WAYS = [
    {"strategy": "ddp", "tp": 2},
    {"strategy": "torch-ddp", "tp": 2, "sequence_parallel": True},
    {"strategy": "fsdp", "pp": 2},
    {"strategy": "fsdp", "tp": 2, "reshard": False},
    {"strategy": "zero2", "pp": 2},
    {"strategy": "zero3", "tp": 2},
    {"tp": 2, "pp": 2, "schedule": "interleaved"},
    {"strategy": "zero1", "pp": 2, "schedule": "zb-v"},
    {"strategy": "torch-fsdp"},
    {"strategy": "fsdp", "cp": 2, "pp": 2},
    {"strategy": "zero1", "cp": 2, "cp_form": "ulysses"},
]


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_validation_loss_is_that_of_one_process_and_changes_nothing(first, pools, by_hand):
    config = replace(EXACT, eval_every=1)
    model, expected = GPT(SPEC).double(), []
    for steps in (1, 2):
        _, state = by_hand(replace(EXACT, steps=steps))
        model.load_state_dict(state["model"])
        expected.append([steps, validation_by_hand(model, config)])
    results = pools(4).run(trained, [replace(config, **way) for way in WAYS[first::2]])
    for by_rank in zip(*results, strict=True):
        for found, _ in by_rank:
            torch.testing.assert_close(found, expected, **TOLERANCE)
        same(by_rank[0][1], by_name(state, GPT(SPEC)), **TOLERANCE)


def test_validation_draws_no_dropout_and_training_goes_on_with_it(alone):
    config = replace(EXACT, dropout=0.5, lr=1e-12, eval_every=1)
    ((found, state),) = alone(trained, [config])
    torch.manual_seed(0)
    expected = validation_by_hand(GPT(SPEC).double(), config)
    assert [loss for _, loss in found] == pytest.approx([expected] * 2, rel=1e-9)
    whole = Trainer(0, replace(config, eval_every=0))
    whole.run()
    same(whole_state(whole), state)


def test_masked_tokens_count_alike_wherever_they_are(monkeypatch, pools):
    config = replace(EXACT, masked=True, eval_every=2, lr=1e-12, micro_batch=1, global_batch=6)
    config = replace(config, data="dialogues", model=replace(SPEC, vocab=len(SPECIAL) + 2))
    monkeypatch.setattr(data, "load_dialogues", talks)
    batches = open_data(config)[1]
    inputs, targets = zip(
        *(batches.batch(FIRST + n, batch=6, seq=8, seed=0) for n in range(BATCHES)), strict=True
    )
    counts = [(part != IGNORED).sum() for whole in targets for part in whole]
    assert len({count.item() for count in counts}) > 1
    torch.manual_seed(0)
    model = BERT(config.model).double()
    expected = token_loss(model(torch.cat(inputs)), torch.cat(targets)).item()
    for by_rank in pools(2).run(trained_on_talks, [replace(config, strategy="fsdp")]):
        assert by_rank[0][0] == [[2, pytest.approx(expected, rel=1e-9)]]


def talks(say=print, *, vocab, tell=None):
    """A few dialogues, without a network: few words are known, so that some sequences have none."""
    return Dialogues.of(generated_dialogues(300), "talks", vocab)


def trained_on_talks(rank, configs):
    data.load_dialogues = talks
    return trained(rank, configs)


@pytest.mark.parametrize(
    "source", [Text.of(generated_text(20)), Dialogues.of(generated_dialogues(30))]
)
def test_the_last_tenth_is_in_no_batch_of_the_training(source):
    first, last = held_out(source)
    assert torch.equal(torch.cat([first.tokens, last.tokens]), source.tokens)
    assert 0.05 < len(last.tokens) / len(source.tokens) < 0.15
    assert first.vocab == last.vocab == source.vocab
    assert len({first.identity, last.identity, source.identity}) == 3
    for part in (first, last):
        assert part.batch(0, batch=50, seq=8).shape[0] == 50


# -- learning rates ------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_after_the_warm_up_the_learning_rate_decays_as_pytorch_says(decay):
    config = replace(EXACT, steps=12, warmup=4, lr=0.5, lr_decay=decay)
    assert [config.lr_at(n) for n in range(4)] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.5)
    schedules = torch.optim.lr_scheduler
    schedule = (
        schedules.CosineAnnealingLR(optimizer, 8)
        if decay == "cosine"
        else schedules.LinearLR(optimizer, 1.0, 0.0, 8)
    )
    for n in range(4, 12):
        assert config.lr_at(n) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert config.lr_at(12) == pytest.approx(0)
    identity = config.identity(SPEC, "synthetic")
    assert identity != replace(config, steps=13).identity(SPEC, "synthetic")


# -- a loss that is no number --------------------------------------------------------------------


def poisoned(rank, config, sick):
    """What a rank is told, and how far it came, where one rank's part of the model is spoilt."""
    trainer = Trainer(rank, config)
    if rank == sick:
        for param in trainer.model.parameters():
            param.data.fill_(math.nan)
    with pytest.raises(CourseError) as told:
        trainer.run()
    return str(told.value), trainer.progress.step


@pytest.mark.parametrize("way", [{"strategy": "ddp"}, {"strategy": "zero2"}])
def test_a_nan_on_one_rank_is_told_by_all_within_a_few_steps(pools, way):
    config = replace(EXACT, **way, steps=10_000, every=5000)
    for told, step in pools(3).run(poisoned, config, 2):
        assert re.fullmatch(r"step 0: need a loss .* got nan, first on rank 2. Try an .*", told)
        assert step <= 10


# -- a start from a model of transformers --------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A model in the files of transformers, and its weights."""
    torch.manual_seed(7)
    spec = replace(SPEC, positions="rope", norm="rms", gated=True, bias=False, activation="silu")
    model = GPT(spec)
    checkpoint = save({"model": model}, tmp_path / "own", step=0, run={})
    to_hugging_face(checkpoint, tmp_path / "hub", spec)
    return tmp_path / "hub", model


def test_init_starts_from_the_weights_of_the_files(pools, alone, folder):
    path, model = folder
    spec = read_config(path / "config.json")
    config = replace(EXACT, model=spec, init=str(path), eval_only=True)
    expected = [[0, validation_by_hand(model.double(), config)]]
    ways = [{"strategy": "fsdp", "tp": 2}, {"strategy": "zero1", "pp": 2}]
    for by_rank in pools(4).run(trained, [replace(config, **way) for way in ways]):
        for found, _ in by_rank:
            torch.testing.assert_close(found, expected, **TOLERANCE)


# -- a run that stops early ----------------------------------------------------------------------


def stopped(rank, configs):
    """What each run has evaluated, how far it came, and whether it is over."""
    found = []
    for config in configs:
        trainer = Trainer(rank, config)
        record = trainer.run()
        losses = record.run.get("validation", [])
        found.append((losses, trainer.progress.step, trainer.is_done, "memory" in record.run))
    return found


def test_all_ranks_stop_at_the_first_validation_loss_that_is_low_enough(pools, tmp_path, capsys):
    config = replace(EXACT, strategy="ddp", steps=9, eval_every=2, every=9, lr=1.0, optimizer="sgd")
    whole = pools(3).run(stopped, [config])[0][0]
    assert whole[1:] == (9, True, True)
    (_, first), (_, second), *later = whole[0]
    assert first > second
    config = replace(config, out=str(tmp_path), save_every=5)
    stops = replace(config, stop_at_loss=(second + first) / 2)
    again = replace(stops, resume=True)
    lower = replace(again, stop_at_loss=second / 2)
    for results in pools(3).run(stopped, [stops, again, lower]):
        assert results[0] == ([[2, first], [4, second]], 4, True, True)
        assert results[1][:3] == ([], 4, True)  # a run that is over stays over
        assert results[2] == (later, 9, True, True)
    assert f"step 4  validation loss {second:.4f}, at most" in capsys.readouterr().out


def slow(rank, config):
    """A run with a NaN from the third step on, whose steps seem to take a minute each."""
    trainer, before = Trainer(rank, config), Trainer._step

    def step(self):
        before(self)
        self.record.steps[-1]["end_s"] += 60
        if rank == 1 and self.progress.step == 2:
            for param in self.model.parameters():
                param.data.fill_(math.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        with pytest.raises(CourseError) as told:
            trainer.run()
    return str(told.value), trainer.progress.step


def test_a_nan_in_slow_steps_is_told_after_its_own(pools):
    config = replace(EXACT, strategy="ddp", steps=99, every=0)
    for told, step in pools(2).run(slow, config):
        assert re.fullmatch(r"step 2: need a loss .* got nan, first on rank 1. Try an .*", told)
        assert step == 3
