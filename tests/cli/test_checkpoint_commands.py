"""`course checkpoint`: what is there, is it whole, whose is it; convert and prune."""

import json
import os
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file

from course_lib.checkpoint import save
from course_lib.checkpoint.dcp import save_dcp
from course_lib.core.presets import MODELS
from course_lib.models import GPT

RUN = {"model": asdict(MODELS["tiny"]), "data": "shakespeare", "seed": 3, "dropout": None}


@pytest.fixture
def run(tmp_path):
    """A run's folder with three checkpoints of a small GPT."""
    model = GPT(MODELS["tiny"])
    for step in (10, 20, 30):
        values = {"progress": {"step": step, "tokens": 64 * step}}
        save({"model": model, **values}, tmp_path / "run/checkpoints", step=step, run=RUN)
    (tmp_path / "run/rank0.jsonl").write_text("")
    return tmp_path / "run"


def checkpoint(run, step):
    return run / f"checkpoints/step-{step:08d}"


def data_file(run, step):
    (path,) = checkpoint(run, step).glob("data-*")
    return path


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_ls_says_what_is_there_whose_it_is_and_what_is_wrong(course, run):
    os.truncate(data_file(run, 20), 1000)
    (checkpoint(run, 30) / "manifest.json").unlink()
    save_dcp({"w": torch.ones(2)}, run / "checkpoints", step=40, run={"by": "\x1b[31mme"})
    lines = [line.split() for line in course("checkpoint", "ls", str(run)).splitlines()]
    rows = {line[0]: line[1:] for line in lines if line[0].startswith(("step", "dcp"))}
    assert list(rows) == ["dcp-00000040", "step-00000020", "step-00000010", "step-00000030"]
    whose = "num_layers 2, hidden 64, data shakespeare, seed 3"
    assert " ".join(rows["step-00000010"]).endswith(f"KiB 1 1 {whose}")
    assert [rows[name][0] for name in rows] == ["published", "broken", "published", "unfinished"]
    assert rows["dcp-00000040"][-2:] == ["by", "me"]
    broken = json.loads(course("checkpoint", "ls", "--json", str(run / "checkpoints")))[1]
    assert (broken["is"], broken["step"]) == ("broken", 20)
    assert f"bytes in {data_file(run, 20).name}; got 1000." in broken["why"]


def test_ls_fails_where_nothing_is_published(course, run, tmp_path):
    for step in (10, 20, 30):
        data_file(run, step).unlink()
    assert "no such file" in course("checkpoint", "ls", str(run), fails=True)
    said = course("checkpoint", "ls", str(tmp_path / "nowhere"), fails=True)
    assert (
        said == f"{tmp_path}/nowhere: need a folder with checkpoints; it is empty or not there.\n"
    )


def test_verify_reads_every_byte(course, run):
    assert course("checkpoint", "verify", str(run)) == "3 of 3 checkpoints are whole.\n"
    flip(data_file(run, 20))
    said = course("checkpoint", "verify", str(run), fails=True)
    assert "has another hash than the manifest says" in said
    assert said.startswith("2 of 3 checkpoints are whole.\n")
    assert "1 of 1" in course("checkpoint", "verify", str(run), "--step", "30")
    said = course("checkpoint", "verify", str(run), "--step", "31", fails=True)
    assert said.startswith(f"{run}: need a checkpoint of step 31; there is none.")


def test_show_tells_run_values_and_tensors(course, run):
    said = course("checkpoint", "show", str(run), "--step", "20")
    assert "step 20, saved by 1 ranks in 1 files" in said
    assert '"tokens": 1280' in said
    assert "blocks.1.mlp.up.weight" in said
    facts = json.loads(course("checkpoint", "show", str(run), "--json"))
    assert (facts["step"], facts["run"]) == (30, json.loads(json.dumps(RUN)))
    bias = {"dtype": "float32", "shape": [64], "pieces": 1}
    assert facts["tensors"]["model.blocks.0.attention.q.bias"] == bias


def test_show_says_that_it_reads_the_courses_own_format(course, tmp_path):
    save_dcp({"w": torch.ones(2)}, tmp_path, step=5)
    said = course("checkpoint", "show", str(tmp_path), fails=True)
    assert "need a checkpoint that is whole, and in the course's own format; there is none" in said


def test_convert_writes_each_layout_and_overwrites_only_its_own(course, run, tmp_path):
    outs = {"full": tmp_path / "x.safetensors", "hf": tmp_path / "hf", "dcp": tmp_path / "dcp"}
    for layout, out in outs.items():
        convert = ("checkpoint", "convert", str(run), str(out), "--to", layout)
        assert course(*convert) == f"{out} is written, of step 30.\n"
        assert "it is there. Try --force." in course(*convert, fails=True)
        assert course(*convert, "--force", "--step", "10") == f"{out} is written, of step 10.\n"
        keep = tmp_path / "mine"
        keep.mkdir(exist_ok=True)
        (keep / "thesis.tex").write_text("years of work")
        said = course(*convert[:3], str(keep), *convert[4:], "--force", fails=True)
        assert "to overwrite; it is something else" in said
        assert os.listdir(keep) == ["thesis.tex"]
    assert "model.norm.weight" in load_file(outs["full"])
    assert "transformer.ln_f.weight" in load_file(outs["hf"] / "model.safetensors")
    assert (outs["dcp"] / ".metadata").is_file()


def test_convert_refuses_a_damaged_checkpoint_and_another_model(course, run, tmp_path):
    convert = ("checkpoint", "convert", str(run), str(tmp_path / "out"), "--to", "hf")
    said = course(*convert, "--model", "gpt2", fails=True)
    assert "Try --model with the sizes of this run" in said
    flip(data_file(run, 30))
    assert "has another hash" in course(*convert, fails=True)
    assert not (tmp_path / "out").exists()


def test_prune_asks_and_removes_the_oldest(course, run, monkeypatch):
    save_dcp({"w": torch.ones(2)}, run / "checkpoints", step=5)
    (checkpoint(run, 20) / "manifest.json").unlink()
    names = sorted(os.listdir(run / "checkpoints"))
    prune = ("checkpoint", "prune", str(run), "--keep", "1")
    monkeypatch.setattr("typer.confirm", lambda text, abort: (_ for _ in ()).throw(SystemExit(1)))
    said = course(*prune, fails=True)
    assert "step-00000010, published" in said
    assert "step-00000020" not in said
    assert sorted(os.listdir(run / "checkpoints")) == names
    assert "2 removed, 2 left." in course(*prune, "--yes")
    assert "1 removed, 1 left." in course(*prune, "--yes", "--broken")
    assert course(*prune, "--yes", "--broken") == "0 removed, 1 left.\n"
    left = [name for name in os.listdir(run / "checkpoints") if not name.startswith(".")]
    assert left == ["step-00000030"]


def test_prune_reads_what_it_keeps_before_it_removes_the_others(course, run):
    flip(data_file(run, 30))
    said = course("checkpoint", "prune", str(run), "--keep", "1", "--yes")
    assert "step-00000010, published" in said
    assert "1 removed, 2 left." in said
    assert course("checkpoint", "verify", str(run), "--step", "20") == (
        "1 of 1 checkpoints are whole.\n"
    )


def test_a_file_is_no_folder_of_checkpoints(course, run):
    assert "need a folder with checkpoints; got a file" in course(
        "checkpoint", "ls", str(checkpoint(run, 10) / "manifest.json"), fails=True
    )


def test_a_url_is_a_folder_too(course):
    for step in (1, 2):
        save({"w": torch.ones(2)}, "memory://bucket/run", step=step)
    assert course("checkpoint", "verify", "memory://bucket/run").startswith("2 of 2")
    assert "1 removed" in course(
        "checkpoint", "prune", "memory://bucket/run", "--keep", "1", "--yes"
    )
    (row,) = json.loads(course("checkpoint", "ls", "memory://bucket/run", "--json"))
    assert row["path"] == "memory://bucket/run/step-00000002"
