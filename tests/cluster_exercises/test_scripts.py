"""What a lesson's script cannot do, it refuses in one sentence, before any rank is there."""

import runpy
import sys

import pytest

from tests.cluster_exercises.scripts_on_ranks import SCRIPTS

REFUSED = {
    "04_collectives --sizes 4": "need two --sizes",
    "04_collectives --sizes 4 0.5": "need two --sizes",
    "04_collectives --turns 0": "need --turns above 0",
    "05_data_parallel --turns 0": "--turns above 0",
    "06_ddp --sizes 0": "need --sizes",
    "07_tensor_parallel --model gpt9": "model: need a preset",
    "08_pipeline --model gpt9": "model: need a preset",
    "08_pipeline --micro-batches 3": "--batch: need a multiple of",
    "09_zero --model gpt9": "model: need a preset",
    "09_zero --turns 0": "--turns above 0",
    "10_fsdp --model gpt9": "model: need a preset",
    "10_fsdp --seq 1": "--seq above 1",
    "11_mesh --mesh dp=2,sp=2": "need axes out of",
    "11_mesh --model gpt9": "model: need a preset",
    "11_mesh --mesh dp=3": "need batch divisible by dp",
    "11_mesh --mesh tp=3": "need num_heads of small divisible by tp",
    "11_mesh --turns 0": "--turns above 0",
    "14_checkpoint --model gpt9": "model: need a preset",
    "14_checkpoint --mtbf-hours 0": "--mtbf-hours above 0",
    "15_context_parallel --heads 3 --kv-heads 2": "num_heads divisible by kv_heads",
    "15_context_parallel --turns 0": "--turns above 0",
    "16_experts --active 20": "active of at most experts",
    "16_experts --turns 0": "--turns above 0",
}


@pytest.mark.parametrize(("command", "says"), REFUSED.items())
def test_a_script_refuses_in_one_sentence(command, says, monkeypatch, capsys):
    name, *options = command.split()
    script = str(SCRIPTS / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, *options])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert end.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
