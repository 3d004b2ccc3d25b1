"""The memory calculator: option lines, largest batch, sliders, `course memory`, other tools."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from course_lib.cli.commands import main
from course_lib.core import MODELS, CourseError
from course_lib.cost.hardware import DEVICES
from course_lib.memory import count_params, explorer
from course_lib.memory.calculator import Setup, read_setup
from course_lib.memory.estimators import (
    accelerate_estimate,
    all_estimates,
    deepspeed_estimate,
    estimates_text,
    ours,
    pytorch_tracker,
    tracker_gap,
)
from course_lib.memory.explorer import calculator, draw_setup

LINES = [
    "--model llama-8b --gpu h100",
    "--model llama-8b --gpu h100 --dp 8 --zero 2 --micro-batches 4",
    "--model gpt2 --gpu laptop --recipe fp32 --seq 512 --unfused --dropout",
    "--model llama-405b --gpu h200 --tp 8 --pp 16 --dp 8 --zero 1 --recompute full "
    "--sequence-parallel --step-time-s 12.5",
    # the first 3 of 61 layers are dense: a stage in the middle is the fullest
    "--model deepseek-v3 --gpu h200 --pp 16 --dp 8 --ep 8 --zero 1 --seq 1024",
]


@pytest.mark.parametrize("line", LINES)
def test_a_line_gives_the_same_setup_again(line):
    setup = read_setup(line)
    assert read_setup(setup.text()) == setup
    assert read_setup(f"course memory {setup.text()}") == setup
    assert set(setup.text().split()) == set(line.split())


@pytest.mark.parametrize("gpu", ["laptop", "a6000", "h100"])
@pytest.mark.parametrize("line", LINES)
def test_the_largest_batch_fits_and_one_more_does_not(line, gpu):
    setup = replace(read_setup(line), gpu=gpu)
    batch = setup.largest_batch()
    assert not replace(setup, batch=batch + 1).fits
    assert batch == 0 or replace(setup, batch=batch).fits


def test_mfu_of_a_known_run():
    # 8B on 8 cards, 1 sequence of 4096 each: 1.687e15 FLOP in 0.5 s of 8 * 989.5e12
    setup = read_setup("--model llama-8b --dp 8 --zero 1 --step-time-s 0.5")
    assert setup.mfu() == pytest.approx(1.6866e15 / (0.5 * 8 * 989.5e12), rel=1e-4)
    assert replace(setup, recompute="full").mfu() == setup.mfu()
    assert replace(setup, step_time_s=0.0).mfu() == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model gpt5", r"need a preset or the path of a config.json; got 'gpt5'"),
        ("--modle gpt2", r"got '--modle'\. Try --model"),
        ("--seq", "need a value after --seq"),
        ("--batch two", "need a whole number for --batch; got 'two'"),
        ("--micro-batches 1.5", "need a whole number for --micro-batches; got '1.5'"),
        ("--step-time-s two", "need a number for --step-time-s; got 'two'"),
        ("runs/config.json", r"got 'runs/config.json'\. Try --model runs/config.json"),
        ("llama-8b", r"Try --model llama-8b"),
        ("--batch -3", "need batch as a whole number above 0; got -3"),
        ("--tp 3", "need num_heads of llama-8b divisible by tp; got 32 and 3"),
        ("--zero 7", "need zero as 0, 1, 2 or 3; got 7"),
        ("--model gpt2 --seq 5000", "at most 1024, the learned positions of gpt2; got 5000"),
        ("--micro-batches 0", "need micro_batches of at least 1"),
        ("--gpu tpu", "need one of laptop"),
        ("--model nowhere/config.json", "cannot be read"),
    ],
)
def test_nonsense_is_one_sentence(line, words):
    with pytest.raises(CourseError, match=words) as caught:
        read_setup(line)
    assert "\n" not in str(caught.value)


def course(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["memory", *arguments])
    told = capsys.readouterr()
    return stopped.value.code or 0, told.out, told.err


def test_course_memory_prints_a_table_that_ends_in_its_own_line(capsys):
    code, out, _ = course(
        capsys, "--model", "llama-8b", "--gpu", "h100", "--dp", "8", "--zero", "2"
    )
    assert code == 0
    assert out.rstrip().endswith("course memory --model llama-8b --gpu h100 --dp 8 --zero 2")
    for words in ("8,030,261,248 parameters on 8 ranks", "optim_state", "80 GiB", "It fits: 61%"):
        assert words in out


PARTS = [
    "--model llama-8b",
    "--model llama-8b --pp 8 --micro-batches 3",
    "--model llama-8b --pp 8 --micro-batches 30 --tp 2",
    "--model qwen3-30b-a3b --gpu h100 --dp 8 --ep 8 --pp 4",
    "--model qwen3-30b-a3b --gpu h100 --dp 8 --ep 4 --zero 3 --tp 2 --sequence-parallel",
    "--model deepseek-v3 --gpu h200 --dp 8 --ep 8 --pp 8 --zero 1",  # layers of two kinds
]


@pytest.mark.parametrize("line", PARTS)
def test_the_parts_of_a_rank_add_up_to_their_kind(line):
    told = read_setup(line).accounting()
    assert sum(told["activation_bytes"].values()) == told["most_bytes"]["activations"]
    held = 2 * sum(told["params_on_rank"].values())
    assert held == pytest.approx(told["most_bytes"]["params"], abs=16)  # rounded up by part


@pytest.mark.parametrize("line", PARTS)
def test_where_nothing_fits_it_says_what_does(line):
    setup = replace(read_setup(line), gpu="a6000", batch=2)
    more = setup.with_more_ranks()
    assert more is None or (more.fits and more.zero and more.dp % setup.dp == 0)
    half = more and more.dp > setup.dp and replace(more, dp=more.dp // 2)
    assert not half or not half.fits


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--model llama-8b --gpu h100", "It fits on 2 ranks with --dp 2 --zero 3."),
        ("--model llama-8b --seq 1000000", "No --dp up to 1024 makes it fit"),
        ("--model gpt2 --seq 64", "Largest micro-batch that fits:"),
    ],
)
def test_course_memory_says_how_it_fits(capsys, line, sentence):
    assert sentence in course(capsys, *line.split())[1]


def test_course_memory_prints_a_long_line_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    line = (
        "--model deepseek-v3 --gpu h200 --seq 2048 --recompute full --dp 32 --pp 8 --zero 1 --ep 8"
    )
    assert course(capsys, *line.split())[1].rstrip().endswith(f"\ncourse memory {line}")
    with_signs = [word.replace(" ", "=") for word in line.replace("--", "\n--").split("\n")[1:]]
    assert read_setup([word.strip("=") for word in with_signs]) == read_setup(line)


def test_course_memory_lists_the_presets(capsys):
    code, out, _ = course(capsys, "--model", "list")
    assert code == 0
    assert "llama-8b" in out


def test_the_help_names_every_option(capsys):
    out = course(capsys, "--help")[1]
    for name in Setup.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in out
    for gpu in DEVICES:
        assert gpu in out


def test_course_memory_as_json_is_the_same_accounting(capsys):
    code, out, _ = course(capsys, "--json", "--model", "gpt2", "--seq", "512", "--batch", "4")
    told, setup = json.loads(out), Setup(model="gpt2", seq=512, batch=4)
    assert code == 0
    assert told == setup.accounting()
    assert told["total_bytes"] == sum(told["peak_bytes"].values()) == setup.peak_bytes
    assert told["most_bytes"]["params"] == 2 * count_params(MODELS["gpt2"])


def test_course_memory_reads_a_config_json(capsys, tmp_path):
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
              "n_positions": 1024, "vocab_size": 50257}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    told = json.loads(course(capsys, "--json", "--model", str(path), "--seq", "64")[1])
    assert told["num_params"] == 124_439_808


def test_course_memory_refuses_in_one_sentence():
    ran = subprocess.run(
        [sys.executable, "-m", "course_lib.cli", "memory", "--model", "lama-8b"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert "Try llama-8b" in ran.stderr


def test_moving_a_slider_moves_bar_words_and_line():
    calc = calculator("--model llama-8b --gpu h100")
    before = calc.image.picture["png"]
    calc.sliders["recompute"].value = "full"
    calc.sliders["dp"].value = 8
    calc.sliders["zero"].value = 3
    assert calc.image.picture["png"] != before
    assert calc.line.value == "--model llama-8b --gpu h100 --recompute full --dp 8 --zero 3"
    assert "fits in 80 GiB" in calc.image.picture["alt"]
    assert calc.line.value in calc.image.picture["alt"]


def test_a_pasted_line_moves_the_sliders_and_a_wrong_one_is_answered():
    calc = calculator()
    line = "--model gpt2 --gpu a6000 --batch 3 --seq 512 --step-time-s 0.25"
    calc.line.value = line
    assert calc.sliders["batch"].value == 3
    assert calc.sliders["gpu"].value == "a6000"
    assert calc.setup == read_setup(line)
    calc.line.value = "--bach 3"
    assert "Try --batch" in calc.image.picture["alt"]
    assert calc.setup == read_setup(line)


def test_a_setup_that_cannot_be_says_why_where_the_picture_was():
    calc = calculator("--model gpt2 --seq 512")
    calc.sliders["seq"].value = 2048
    assert calc.image.picture["failed"]
    assert "at most 1024" in calc.image.picture["alt"]


def test_a_move_draws_one_picture_from_a_few_ledgers(monkeypatch):
    """How long that takes is printed by tests/benchmarks/bench_display.py."""
    calc = calculator("--model llama-405b --gpu h200 --tp 8 --pp 8")
    drawn, ledgers, ledger = [], [], Setup.ledger
    monkeypatch.setattr(explorer, "draw_setup", lambda s: drawn.append(s) or draw_setup(s))
    monkeypatch.setattr(
        Setup, "ledger", lambda *args, **kwargs: ledgers.append(1) or ledger(*args, **kwargs)
    )
    calc.sliders["batch"].value = 32
    assert len(drawn) == 1
    assert len(ledgers) < 20  # two lines tell every batch: nothing is tried out


@pytest.mark.parametrize(("model", "batch", "seq"), [("small", 2, 256), ("gpt2", 4, 256)])
def test_pytorchs_tracker_agrees_and_every_byte_between_has_a_name(model, batch, seq):
    mine, theirs = (tool(MODELS[model], batch, seq) for tool in (ours, pytorch_tracker))
    assert theirs.states_bytes == mine.states_bytes
    assert theirs.activations_bytes == mine.activations_bytes + 4  # the loss
    gap = tracker_gap(MODELS[model], batch, seq)
    assert theirs.total_bytes - mine.total_bytes == sum(gap.values())


def test_tools_that_are_not_installed_say_so_in_one_line(monkeypatch):
    for name in ("accelerate.commands.estimate", "deepspeed.runtime.zero"):
        monkeypatch.setitem(sys.modules, name, None)
    found, missing = all_estimates(MODELS["tiny"], 1, 64)
    assert missing == [f"{name} is not installed here, so its estimate is left out."
                       for name in ("accelerate", "deepspeed")]  # fmt: skip
    assert len(estimates_text(found).splitlines()) == 1 + 2 * len(found)


def test_accelerate_tells_the_largest_and_not_the_sum():
    pytest.importorskip("accelerate")
    num_params = count_params(MODELS["gpt2"])
    assert accelerate_estimate(MODELS["gpt2"]).total_bytes == 16 * num_params
    assert accelerate_estimate(MODELS["gpt2"], "bfloat16").total_bytes == 8 * num_params


def test_deepspeed_tells_twenty_bytes_a_parameter():
    pytest.importorskip("deepspeed")
    num_params = count_params(MODELS["gpt2"])
    assert deepspeed_estimate(MODELS["gpt2"]).total_bytes == 20 * num_params
