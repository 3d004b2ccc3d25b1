"""Models of transformers become checkpoints and go back: the same logits, the same tensors."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from course_lib.checkpoint import load
from course_lib.cli.commands import app
from course_lib.core import CourseError
from course_lib.core.presets import MODELS
from course_lib.core.specs import Rope
from course_lib.hub.config import read_config
from course_lib.hub.convert import spec_of, to_hugging_face
from course_lib.hub.loading import from_hugging_face, load_hugging_face
from course_lib.hub.writing import config_of
from course_lib.models import GPT, token_batch
from course_lib.train.checkpoint import check_identity
from tests.models.test_beside_transformers import CASES, EXPERTS, theirs

CASES = {**CASES, **EXPERTS}
SAME_NAMES = [case for case in CASES if not case.startswith("phi3")]  # joined matrices: a mistral


@pytest.fixture(params=CASES)
def hub(request, tmp_path):
    """A model of transformers, and the folder to which transformers saves it."""
    model = theirs(*CASES[request.param])
    model.save_pretrained(tmp_path / "hub", max_shard_size="20kB")  # several files
    return request.param, model, tmp_path


def test_there_and_back(hub):
    case, model, folder = hub
    checkpoint = from_hugging_face(folder / "hub", folder / "own")
    spec = spec_of(checkpoint)
    assert spec == read_config(folder / "hub/config.json")
    own = GPT(spec).eval()
    load({"model": own}, folder / "own")
    tokens = token_batch(0, batch=2, seq=40, vocab=96)
    with torch.no_grad():
        torch.testing.assert_close(own(tokens), model(tokens).logits, rtol=0, atol=1e-5)
    to_hugging_face(checkpoint, folder / "again")
    again = load_file(folder / "again/model.safetensors")
    if case in SAME_NAMES:
        before = {}
        for file in (folder / "hub").glob("*.safetensors"):
            before |= load_file(file)
        assert again.keys() == before.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in before.items())
    else:
        assert replace(read_config(folder / "again/config.json"), name=spec.name) == spec


def test_training_does_not_resume_from_weights_alone(tmp_path):
    model = theirs(*CASES["gpt2"])
    model.save_pretrained(tmp_path / "hub")
    weights = from_hugging_face(tmp_path / "hub", tmp_path / "own")
    with pytest.raises(CourseError, match="need a checkpoint of a training run"):
        check_identity(weights.path, weights.run, {"model": weights.run["model"], "seq": 64})


def test_files_without_the_models_prefix_and_with_old_buffers(tmp_path):
    model = theirs(*CASES["gpt2"])
    model.config.save_pretrained(tmp_path)
    tensors = {
        name.removeprefix("transformer."): tensor.clone()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file({**tensors, "h.0.attn.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    _, state = load_hugging_face(tmp_path)
    assert torch.equal(state["head.weight"], model.transformer.wte.weight)


def changed(tensors, folder):
    save_file(tensors, folder / "model.safetensors")
    load_hugging_face(folder)


NORM = "model.layers.0.input_layernorm.weight"


def test_files_that_do_not_fit_are_one_sentence(tmp_path):
    model = theirs(*CASES["llama"])
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    with pytest.raises(CourseError, match=f"need {NORM} of shape .32., as config.json says; got"):
        changed({**tensors, NORM: torch.ones(31)}, tmp_path)
    with pytest.raises(CourseError, match=f"need the tensor {NORM}; no file has it"):
        changed({name: x for name, x in tensors.items() if name != NORM}, tmp_path)
    with pytest.raises(CourseError, match=r"model.layers.0.mlp.extra is none of them"):
        changed({**tensors, "model.layers.0.mlp.extra": torch.ones(1)}, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345678{}")
    with pytest.raises(CourseError, match="need a safetensors file"):
        load_hugging_face(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CourseError, match="need a safetensors file"):
        load_hugging_face(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")  # opening it would wait for ever
    with pytest.raises(CourseError, match="need a safetensors file; got a folder, a pipe"):
        load_hugging_face(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = "olmo2"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CourseError, match="need qk_norm 'head' or 'none', as GPT builds no other"):
        load_hugging_face(tmp_path)


def test_a_tied_model_whose_file_has_another_head_is_refused(tmp_path):
    model = theirs(*CASES["llama"])
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    changed({**tensors, head: tensors[embedding].clone()}, tmp_path)
    with pytest.raises(CourseError, match=r"need lm_head\.weight equal to the embedding"):
        changed({**tensors, head: tensors[embedding] + 1}, tmp_path)


def test_the_command(tmp_path):
    theirs(*CASES["qwen3"]).save_pretrained(tmp_path / "hub")
    command = ["checkpoint", "convert", str(tmp_path / "hub"), str(tmp_path / "run")]
    found = CliRunner().invoke(app, [*command, "--to", "course"])
    assert (found.exit_code, "of step 0" in found.output) == (0, True)
    back = ["checkpoint", "convert", str(tmp_path / "run"), str(tmp_path / "again"), "--to", "hf"]
    assert CliRunner().invoke(app, back).exit_code == 0
    assert json.loads((tmp_path / "again/config.json").read_text())["model_type"] == "qwen3"
    assert CliRunner().invoke(app, [*command, "--to", "course"]).exit_code != 0
    assert CliRunner().invoke(app, [*command, "--to", "course", "--step", "3"]).exit_code != 0


@pytest.mark.parametrize("name", ["gpt2", "llama-8b", "study-1b"])
def test_presets_are_written_as_they_are_read(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of(MODELS[name])))
    assert replace(read_config(tmp_path / "config.json"), name=name) == MODELS[name]


def test_what_transformers_does_not_have_names_the_fields():
    odd = replace(MODELS["tiny"], norm="rms", rope=Rope(theta=7.0))
    with pytest.raises(CourseError, match="tiny is nearest to gpt2, which has other norm, rope"):
        config_of(odd)
