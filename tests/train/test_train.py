"""The training script: every strategy trains as one process does, and a run that ends can go on."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch

from course_lib.core import CourseError, find_model
from course_lib.core.presets import ENCODERS
from course_lib.core.records import read_runs
from course_lib.models import GPT
from course_lib.models.text import generated_text
from course_lib.train import __main__ as command_line
from course_lib.train import progress as train_progress
from course_lib.train.config import TrainConfig
from course_lib.train.progress import Progress, ProgressBar
from course_lib.train.trainer import train
from tests.train.training_runs import (
    EXACT,
    SPEC,
    TOLERANCE,
    losses,
    refused,
    same,
    saved_state,
    trained,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# -- the law: every strategy gives the numbers of one process ------------------------------------

RUNS = [
    ("single", 1, 12, None),
    ("single", 1, 12, 4),
    ("ddp", 1, 12, None),
    *((name, p, 12, 2) for name in ("naive-dp", "ddp", "torch-ddp") for p in (2, 3)),
    *((name, p, 7, None) for name in ("naive-dp", "ddp", "torch-ddp") for p in (2, 3)),
]


@pytest.mark.parametrize(("strategy", "p", "global_batch", "micro_batch"), RUNS)
def test_a_strategy_gives_the_losses_and_weights_of_one_process(
    alone, pools, by_hand, strategy, p, global_batch, micro_batch
):
    config = replace(
        EXACT, strategy=strategy, global_batch=global_batch, micro_batch=micro_batch, seed=0
    )
    expected, whole = by_hand(config)
    results = [alone(trained, config)] if p == 1 else pools(p).run(trained, config)
    for record, state, _, progress in results:
        torch.testing.assert_close(losses(record), expected, **TOLERANCE)
        same(dict(state), whole["model"], **TOLERANCE)
        same(dict(state), dict(results[0][1]))  # the ranks agree to the last bit
        assert progress == Progress(step=3, tokens=3 * global_batch * 8)
    tokens = [sum(step["num_tokens"] for step in record.steps) for record, *_ in results]
    assert sum(tokens) == 3 * global_batch * 8
    assert max(tokens) - min(tokens) <= 3 * 8 * (global_batch % p > 0)


def test_accumulated_steps_send_no_more_than_whole_ones(pools):
    sent = []
    for micro_batch in (None, 2):
        config = replace(EXACT, strategy="naive-dp", micro_batch=micro_batch)
        record = pools(2).run(train, config)[0]
        kinds = Counter(event.kind for event in record.events)
        assert kinds["backward"] == 3 * (1 if micro_batch is None else 3)
        sent.append(kinds["all_reduce"])
    num_params = len(list(GPT(SPEC).parameters()))
    assert sent[0] == sent[1] == 3 * num_params + 2  # and the losses, after a step and at the end


def test_text_is_learned_and_read_alike_by_all_ranks(pools, tmp_path):
    path = tmp_path / "play.txt"
    path.write_text(generated_text(300))
    config = replace(EXACT, data=str(path), steps=12, strategy="ddp", optimizer="adamw", lr=0.02)
    for record in pools(2).run(train, config):
        assert losses(record)[-1] < 0.9 * losses(record)[0]
        assert record.run["model"]["vocab"] == len(set(generated_text(300)))
        assert record.run["data"].startswith("play.txt ")


def test_a_loss_that_is_no_number_ends_the_run(pools):
    config = replace(EXACT, strategy="ddp", lr=1e200, steps=9, every=1)
    for (sentence,) in pools(2).run(refused, [config]):
        assert re.search(
            "need a loss that is a number; got nan, first on ranks 0, 1. Try an --lr below",
            sentence,
        )


# -- what a run leaves, and what it says ---------------------------------------------------------


def test_records_hold_every_step_and_the_events_of_the_last(pools, tmp_path):
    (tmp_path / "rank7.jsonl").write_text("of an earlier run on more ranks")
    config = replace(EXACT, strategy="ddp", steps=8, out=str(tmp_path))
    pools(2).run(train, config)
    records = read_runs(tmp_path)
    assert [(record.rank, record.world_size) for record in records] == [(0, 2), (1, 2)]
    for record in records:
        assert [step["step"] for step in record.steps] == list(range(8))
        ends = [time for step in record.steps for time in (step["start_s"], step["end_s"])]
        assert ends == sorted(ends)
        assert record.run["strategy"] == "ddp"
        assert record.run["progress"].items() >= {"step": 8, "tokens": 8 * 12 * 8}.items()
        assert Counter(event.kind for event in record.events)["optimizer"] == 3
        assert min(event.start_s for event in record.events) > record.steps[4]["end_s"]
    assert records[0].steps[3]["loss"] == records[1].steps[3]["loss"]


def test_without_a_terminal_there_are_plain_lines(capsys):
    progress = Progress()
    with ProgressBar(progress, num_steps=20, every=1) as tell:
        progress.step_done(640)
        tell.step()
        tell.loss(1.25)
    out, err = capsys.readouterr()
    assert re.fullmatch(r"step  1/20  loss 1\.2500  [\d,]+ tokens/s\n", out)
    assert err == ""


def test_on_a_terminal_there_is_a_bar(capsys, monkeypatch):
    console = train_progress.Console
    monkeypatch.setattr(
        train_progress, "Console", lambda file: console(file=file, force_terminal=True, width=120)
    )
    progress = Progress(step=4, tokens=2560)  # of a run that goes on
    with ProgressBar(progress, num_steps=20, every=1) as tell:
        progress.step_done(640)
        tell.step()
        tell.loss(1.25)
    out, err = capsys.readouterr()
    assert out == ""
    assert "5/20" in err
    assert "loss 1.2500" in err


def test_the_settings_are_checked_before_a_model_is_built():
    with pytest.raises(CourseError, match="--every: need 0 or more"):
        TrainConfig(model=find_model("tiny"), every=-1)


# -- the command line: what cannot be trained ----------------------------------------------------


@pytest.fixture
def say(capsys, monkeypatch, tmp_path):
    """Run the command line with bad input in this process: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            command_line.main(arguments)
        told = capsys.readouterr()
        return int(stopped.value.code or 0), told.out, told.err

    return run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--strategy dpp", "--strategy: need one of single, naive-dp, ddp, torch-ddp, zero1, "),
        (
            "--strategy single --ranks 2",
            "need one copy of the model, dp * cp = 1; got 2 ranks, dp = 2 and cp = 1. Try",
        ),
        ("--ranks 0", "--ranks: need more than 0; got 0"),
        ("--ranks 17", "need a sequence for each of dp = 17 copies of the model; got 16"),
        ("--ranks 2 --micro-batch 3", "got 16 and 3 * 2. Try --global-batch 18"),
        ("--ranks 3 --mesh tp=2", "divisible by tp * pp * cp; got 3 and 2 * 1 * 1. Try --ranks 4"),
        (
            "--mesh tp=3",
            "need num_heads of model tiny divisible by tp, as a head stays whole; got 4",
        ),
        ("--mesh tp=0", "Mesh: need tp as a whole number above 0; got 0"),
        ("--tp 2", "--tp: need all axes in one option. Try --mesh tp=2"),
        ("--pp 2 --tp 4", "--tp: need all axes in one option. Try --mesh tp=4,pp=2"),
        (
            "--mesh dp=2,tp=2 --ranks 2",
            "--mesh: need dp * pp * cp * tp ranks; got 2 * 1 * 1 * 2 and 2",
        ),
        ("--mesh tp=2,tp=2", "mesh: need axes such as dp=2,pp=2,tp=2, each once"),
        ("--mesh ep=2", "--mesh: need ep=1 for a dense model; got model tiny and ep=2."),
        ("--mesh pp=3", "at most the 2 layers of model tiny; got 3 * 1. Try --layers 3"),
        ("--mesh pp=-1", "mesh: need axes such as dp=2,pp=2,tp=2, each once; got 'pp=-1'"),
        (
            "--schedule gpipe",
            "--schedule gpipe: need two or more pipeline stages; got pp=1. Try --mesh pp=2",
        ),
        ("--mesh pp=2 --strategy torch-ddp", "--strategy torch-ddp: need pp=1"),
        (
            "--sequence-parallel",
            "--sequence-parallel: need tp of 2 or more; got 1. Try --mesh tp=2",
        ),
        ("--mesh pp=2 --model-chunks 2", "--model-chunks: need --schedule interleaved"),
        ("--micro-batch 0", "--micro-batch: need more than 0"),
        ("--global-batch -4", "--global-batch: need more than 0"),
        ("--steps 0", "--steps: need more than 0"),
        ("--lr nan", "--lr: need more than 0; got nan"),
        ("--seed -1", "--seed: need 0 or more"),
        ("--dropout 1", "--dropout: need a probability below 1; got 1"),
        ("--seq 65", "need at most the 64 tokens of model tiny; got 65. Try --seq 64"),
        ("--optimizer adam", "--optimizer: need one of sgd, adamw, muon; got 'adam'"),
        ("--dtype half", "--dtype: need one of float32, float64, bfloat16; got 'half'"),
        ("--model tinny", "got 'tinny'. Try tiny"),
        ("--model nowhere.json", "need a config.json; it cannot be read"),
        ("--model llama-405b", "this machine has"),
        ("--heads 3", "need hidden divisible by num_heads"),
        ("--data nowhere.txt", "--data: need synthetic, shakespeare, dialogues or the path"),
        ("--data shakespeare --vocab 9", "--vocab: need synthetic data"),
        ("--strategy zero3-offlod", "got 'zero3-offlod'. Try zero3-offload."),
        ("--strategy fsdp-offload", "need one of single, "),
        (f"--seed {2**63}", "--seed: need a number below 2**63; got 9223372036854775808"),
        ("--momentum 0.9", "--momentum: need --optimizer sgd or muon, and a number below 1; got"),
        ("--model bert-tin", "got 'bert-tin'. Try bert-tiny"),
        ("--model bert-tiny --mesh tp=2", "--model bert-tiny: need tp=1 and pp=1 for a BERT"),
        ("--data shakespeare --epochs 2 --steps 5", "--epochs: need it without --steps; got 2 and"),
        ("--out /dev/null", "--out: need a folder that can be made (File exists); got /dev/null"),
        ("--resume", "need a folder. Try --out runs/NAME"),
        ("--resume --out nowhere", "there is none in nowhere/checkpoints"),
        ("--keep 0", "--keep: need more than 0; got 0"),
        ("--checkpoint-format torch", "--checkpoint-format: need one of course, dcp; got 'torch'"),
        ("--checkpoint-format dcp --async-save", "--async-save: need --checkpoint-format course"),
        ("--save-every 5", "need a folder"),
        ("--eval-only", "--eval-only: need a trained model; got neither --init nor --resume"),
        ("--stop-at-loss 2", "--stop-at-loss: need validation losses; got 2.0 without them"),
        ("--lr-decay step", "--lr-decay: need one of cosine, linear; got 'step'"),
        ("--init nowhere --layers 2", "need the sizes of the model in nowhere; got --layers, too"),
        ("--init nowhere", "nowhere/config.json: need a config.json; it cannot be read"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(say, arguments, says):
    code, out, err = say(*arguments.split())
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1


def test_a_bert_has_sequences_that_it_can_read(say, monkeypatch):
    runs: list[TrainConfig] = []
    monkeypatch.setattr(command_line, "work", lambda config: runs.append(config) or 0)
    say("--model", "bert-tiny")
    say("--model", "tiny")
    bert, gpt = runs
    assert (bert.masked, bert.model, bert.seq) == (True, ENCODERS["bert-tiny"], 32)
    assert (gpt.masked, gpt.model, gpt.seq) == (False, find_model("tiny"), 64)
    assert (bert.strategy, bert.steps) == (gpt.strategy, gpt.steps) == ("single", 100)


def test_under_torchrun_ranks_must_agree_and_one_rank_speaks(say, monkeypatch):
    monkeypatch.setattr(command_line, "LATE_S", 0)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert "--ranks: need the 4 ranks that torchrun started; got 2" in say("--ranks", "2")[2]
    monkeypatch.setenv("RANK", "1")
    assert say("--ranks", "2") == (2, "", "")


def test_help_shows_examples_and_does_not_wait_for_torch():
    code = "import sys, course_lib.train.__main__ as t\n"
    code += "try: t.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert told.stdout.splitlines()[-1] == "False"
    assert "python -m course_lib.train --ranks 2 --strategy ddp --out runs/ddp" in told.stdout
    assert "torchrun --nproc-per-node 4 -m course_lib.train" in told.stdout


# -- real processes ------------------------------------------------------------------------------

SETTINGS = ["--global-batch", "6", "--seq", "16", "--every", "1", "--save-every", "2"]
TRAIN = [sys.executable, "-m", "course_lib.train", *SETTINGS]
TORCHRUN = [
    *(str(Path(sys.executable).parent / "torchrun"), "--standalone", "--local-addr", "127.0.0.1"),
    *("--nproc-per-node", "2", "-m", "course_lib.train", *SETTINGS),
]
PLANTED = """
import os
import torch
step, calls = torch.optim.AdamW.step, []
def broken(self, *args, **kwargs):
    calls.append(1)
    if os.environ.get("RANK") == "1" and len(calls) == 8:
        raise ValueError("planted")
    return step(self, *args, **kwargs)
torch.optim.AdamW.step = broken
"""
GO_ON = r"Step (\d+) is saved. To go on from there: python -m course_lib.train .* --resume"


@contextmanager
def started(command, folder, **variables):
    """A job that has trained 3 steps, and the processes it started; none is left afterwards."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    job = subprocess.Popen(
        command,
        cwd=folder,
        env=kept | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    family: list[psutil.Process] = []
    with job:
        try:
            told = ""
            while not told.startswith("step      3/"):
                told = job.stdout.readline()
                assert told, "it ended before step 3"
            family = psutil.Process(job.pid).children(recursive=True)
            yield job, family
        finally:
            for process in [job, *family]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def rank_of(family, rank):
    """The process of a rank: they are forked in their order."""
    return sorted(family, key=psutil.Process.create_time)[rank]


def end_of(job, family):
    """What a job prints until its end, which is that of its family too.

    It comes before a test's time is over: gloo itself would wait for half an hour. How soon it
    comes is printed by tests/benchmarks/bench_train.py.
    """
    told = job.stdout.read()
    job.wait(timeout=60)
    assert not psutil.wait_procs(family, timeout=10)[1]
    return told


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A job on two ranks of which one was killed: its folder, exit code and last words."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "tmp").mkdir()
    command = [*TRAIN, "--ranks", "2", "--steps", "100000", "--out", "run"]
    with started(command, folder, TMPDIR=str(folder / "tmp")) as (job, family):
        rank_of(family, 1).kill()
        told = end_of(job, family)
    return folder, job.returncode, told


def test_a_killed_rank_ends_the_job_and_is_named(killed):
    folder, code, told = killed
    assert code == 1
    assert list((folder / "tmp").iterdir()) == []
    assert told.count("rank 1 was killed by SIGKILL; the other ranks were stopped.") == 1
    assert "Traceback" not in told
    assert re.search(GO_ON, told)


def test_it_goes_on_under_torchrun_as_if_nothing_had_happened(killed, pools):
    folder, _, told = killed
    saved = int(re.search(GO_ON, told).group(1))
    steps = saved + 2
    command = [*TORCHRUN, "--steps", str(steps), "--out", "run", "--resume"]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"step {steps}/{steps}  loss" in done.stdout
    assert re.search(
        rf"^{steps} steps, {steps * 96} tokens, loss .*; median step", done.stdout, re.M
    )
    config = TrainConfig(
        model=find_model("tiny"), strategy="ddp", steps=steps, global_batch=6, seq=16, every=0
    )
    for rank, (record, weights, *_) in enumerate(pools(2).run(trained, config)):
        both = [read_runs(folder / "run")[2 * rank + part] for part in (1, 0)]  # and -from
        assert [step for part in both for step in losses(part)] == losses(record)
        whole = saved_state(replace(config, out=str(folder / "run")))
        same({name: whole[f"model.{name}"] for name in weights}, dict(weights))


def test_a_rank_that_raises_ends_the_job_with_its_traceback_once(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    command = [*TRAIN, "--mesh", "tp=2", "--steps", "100000", "--out", "run"]
    with started(command, tmp_path, PYTHONPATH=str(tmp_path)) as (job, family):
        told = end_of(job, family)
    assert job.returncode == 1
    assert told.count("Traceback (most recent call last)") == 1
    assert told.count("ValueError: planted") == 1
    assert "rank 1 failed; the other ranks were stopped." in told


def test_ctrl_c_ends_all_ranks_at_once_and_says_how_to_go_on(tmp_path):
    command = [*TRAIN, "--mesh", "pp=2", "--steps", "100000", "--out", "run"]
    with started(command, tmp_path) as (job, family):
        job.send_signal(signal.SIGINT)
        assert not psutil.wait_procs(family, timeout=30)[1]
        told = end_of(job, family)
    assert job.returncode == 130
    assert "Traceback" not in told
    assert "Stopped." in told
    assert re.search(GO_ON, told)


def test_no_rank_outlives_a_command_that_was_killed(tmp_path):
    command = [*TRAIN, "--mesh", "pp=2", "--steps", "100000", "--out", "run"]
    with started(command, tmp_path) as (job, family):
        assert len(family) == 2  # the ranks: they are forked from the command's own process
        job.kill()
        assert not psutil.wait_procs(family, timeout=60)[1]


def test_a_preempted_job_saves_its_last_step_and_asks_for_a_requeue(tmp_path):
    command = [*TRAIN, "--ranks", "2", "--steps", "100000", "--out", "run", "--save-every", "50000"]
    with started(command, tmp_path) as (job, family):
        job.send_signal(signal.SIGUSR1)
        told = end_of(job, family)
    assert job.returncode == 75
    assert "Traceback" not in told
    assert int(re.search(GO_ON, told).group(1)) >= 3


def test_ctrl_c_on_one_rank_says_how_to_go_on_as_well(say, monkeypatch, pools, tmp_path):
    run = replace(EXACT, strategy="ddp", steps=2, save_every=2, out=str(tmp_path))
    pools(2).run(train, run)

    def stopped(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "work", stopped)
    code, out, err = say("--out", run.out, "--resume", "--steps", "9")
    assert (code, out) == (130, "")
    assert err.startswith("Stopped.\nStep 2 is saved.")
    assert err.count("--resume") == 1
