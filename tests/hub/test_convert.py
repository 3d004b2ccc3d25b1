"""A converted checkpoint is the same model: the same tensors, and the same logits elsewhere."""

import json
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file

from course_lib.checkpoint import save
from course_lib.core import CourseError
from course_lib.core.presets import MODELS
from course_lib.core.specs import ModelSpec
from course_lib.hub.config import read_config
from course_lib.hub.convert import to_dcp, to_full, to_hugging_face
from course_lib.models import GPT, token_batch

TINY = MODELS["tiny"]
SIZES = {"hidden": 32, "num_layers": 2, "num_heads": 4, "ffn_hidden": 48, "vocab": 96}
LLAMA = ModelSpec(
    **{**SIZES, "num_kv_heads": 2, "max_seq": 24},
    **{"tied": False, "gated": True, "norm": "rms", "positions": "rope", "bias": False},
)
SPECS = {
    "gpt2": TINY,
    "gpt2-untied": replace(TINY, tied=False, ffn_hidden=96),
    "llama": LLAMA,
    "llama-tied-biased": replace(LLAMA, tied=True, bias=True),
}


def saved(spec, folder, **more):
    """A model of which each number differs from where it began, norms and biases too, saved."""
    torch.manual_seed(0)
    model = GPT(spec).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    return model, save({"model": model, **more}, folder, step=7, run={"model": asdict(spec)})


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_transformers_computes_the_same_logits(spec, tmp_path):
    transformers = pytest.importorskip("transformers")
    model, checkpoint = saved(spec, tmp_path / "own")
    to_hugging_face(checkpoint, tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    theirs, told = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told.values()), told
    tokens = token_batch(0, batch=2, seq=20, vocab=spec.vocab)
    with torch.no_grad():
        expected, found = model(tokens), theirs.eval()(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)  # here: equal
    places = ("qkv", "out", "mlp") if spec.bias and spec.norm == "rms" else spec.bias
    found = read_config(tmp_path / "hf/config.json")
    assert replace(found, name=spec.name) == replace(spec, bias=places)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bias": False}, "tiny is nearest to gpt2, which has other bias. Try --to full"),
        ({"norm": "rms", "num_kv_heads": 2}, "to gpt2, which has other num_kv_heads, norm"),
        ({"positions": "rope", "gated": True}, "tiny is nearest to [a-z0-9_]+, which has other"),
    ],
)
def test_a_model_that_transformers_does_not_have_is_one_sentence(change, says, tmp_path):
    _, checkpoint = saved(replace(TINY, **change), tmp_path)
    with pytest.raises(CourseError, match=says):
        to_hugging_face(checkpoint, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_the_wrong_sizes_are_one_sentence(tmp_path):
    checkpoint = save({"model": GPT(TINY)}, tmp_path, step=7)
    with pytest.raises(CourseError, match="its run does not tell them"):
        to_hugging_face(checkpoint, tmp_path / "hf")
    with pytest.raises(CourseError, match=r"need model.blocks.1.attention.k.bias .* none at all"):
        to_hugging_face(checkpoint, tmp_path / "hf", replace(TINY, num_layers=1))


def test_one_file_has_all_tensors_under_their_names(tmp_path):
    more = {
        "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,  # not contiguous
        **{"one": torch.tensor(3), "mask": torch.tensor([True, False, True])},
        **{"sizes": {"double": torch.full((2, 1, 2), 0.1, dtype=torch.float64)}, "tokens": 12},
    }
    model, checkpoint = saved(TINY, tmp_path, **more)
    seen = []
    to_full(checkpoint, tmp_path / "x.safetensors", lambda done, total: seen.append((done, total)))
    found = load_file(tmp_path / "x.safetensors")
    expected = {f"model.{name}": x for name, x in model.state_dict().items()}
    expected |= {name: more[name] for name in ("half", "one", "mask")}
    expected["sizes.double"] = more["sizes"]["double"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert all(found[name].dtype == x.dtype for name, x in expected.items())
    assert len(seen) == len(expected)
    assert seen[-1] == (sum(x.nbytes for x in expected.values()),) * 2
    header = (tmp_path / "x.safetensors").read_bytes()
    about = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]
    assert (about["step"], json.loads(about["values"])) == ("7", {"tokens": 12})


def test_plain_dcp_reads_a_converted_checkpoint(tmp_path):
    model, checkpoint = saved(TINY, tmp_path / "own", tokens=12)
    to_dcp(checkpoint, tmp_path / "dcp")
    other = GPT(TINY)
    state = {"model": other.state_dict(), "tokens": 0}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        torch_dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    assert state["tokens"] == 12
