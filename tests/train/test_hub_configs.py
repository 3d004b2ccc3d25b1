"""`--model CONFIG.json`: small models of today's architectures train as one process does."""

import json
import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch

from course_lib.models import GPT
from course_lib.train import __main__ as command_line
from course_lib.train.trainer import Trainer
from tests.train.training_runs import by_name, losses, same, whole_state

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = {
    **{"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 32},
}
SCALED = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8,
}
CONFIGS = {
    "qwen3": {**SIZES, "head_dim": 6, "tie_word_embeddings": True},
    "mistral": {**SIZES, "num_key_value_heads": 2, "sliding_window": 5},
    "llama": {**SIZES, "rope_theta": 500.0, "rope_scaling": SCALED},
}
RUNS = (
    "--strategy ddp",
    "--strategy fsdp",
    "--strategy zero2",
    "--mesh tp=2 --sequence-parallel",
    "--mesh tp=2 --dropout 0",
    "--mesh pp=2 --schedule zb-h1",
)
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def trained(rank, configs):
    found = []
    for config in configs:
        trainer = Trainer(rank, config)
        found.append((losses(trainer.run()), whole_state(trainer)))
    return found


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The settings that a command line asks for."""
    runs = []
    monkeypatch.setattr(command_line, "run_ranks", lambda p, config, _: runs.append(config) or 0)

    def config_of(model, line):
        path = tmp_path / f"{model}.json"
        path.write_text(json.dumps({"model_type": model, **CONFIGS[model]}))
        usual = "--ranks 2 --steps 2 --global-batch 4 --seq 16 --dtype float64 --every 0"
        with pytest.raises(SystemExit) as stopped:
            command_line.main(["--model", str(path), *usual.split(), *line.split()])
        assert not stopped.value.code
        return runs.pop()

    return config_of


@pytest.mark.parametrize("model", CONFIGS)
def test_every_parallelism_has_the_losses_and_weights_of_one_process(asked, pools, by_hand, model):
    configs = [asked(model, line) for line in RUNS]
    expected, state = by_hand(configs[0])
    wanted = by_name(state, GPT(configs[0].model))
    for number, ranks in enumerate(zip(*pools(2).run(trained, configs), strict=True)):
        for found, _ in ranks:
            torch.testing.assert_close(found, expected, **TOLERANCE, msg=RUNS[number])
        same(ranks[0][1], wanted, **TOLERANCE)


def test_a_run_of_today_goes_on_elsewhere(asked, pools, by_hand, tmp_path):
    """Heads that two ranks share are saved once, and read back by one rank that has them all."""
    usual = f"--out {tmp_path} --save-every 1 --mesh "
    config = replace(asked("qwen3", usual + "tp=2"), steps=4)
    expected, state = by_hand(config)
    runs = [{"tp": 2}, {"pp": 2, "tp": 1}, {"tp": 1, "strategy": "fsdp"}, {"tp": 2}]
    found = []
    for step, how in enumerate(runs):
        run = replace(config, **how, steps=step + 1, resume=step > 0)
        ((one, state_then),) = pools(2).run(trained, [run])[0]
        found += one
    torch.testing.assert_close(found, expected, **TOLERANCE)
    same(state_then, by_name(state, GPT(config.model)), **TOLERANCE)


def test_what_is_not_built_is_one_sentence(asked, capsys, monkeypatch):
    monkeypatch.setitem(CONFIGS, "olmo2", SIZES)
    with pytest.raises(AssertionError):
        asked("olmo2", "")
    said = capsys.readouterr().err
    assert "--model: need qk_norm 'head' or 'none', as GPT builds no other; model olmo2" in said
    assert "course memory counts this one" in said
    assert len(said.splitlines()) == 1


def test_heads_that_the_files_keys_and_values_do_not_divide_are_one_sentence(asked, capsys):
    with pytest.raises(AssertionError):
        asked("mistral", "--heads 3")
    said = capsys.readouterr().err
    assert "--heads: need a multiple of the 2 heads of keys and values of mistral; got 3" in said
    assert "Try --heads 4" in said
