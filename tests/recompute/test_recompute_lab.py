"""What lesson 03 measures: errors and losses by number format, and the predicted peak of a step."""

import numpy as np
import pytest
import torch
from matplotlib.legend import Legend

from course_lib.core import CourseError
from course_lib.core.specs import ModelSpec
from course_lib.memory.layer_bytes import TORCH_CPU, Pass
from course_lib.memory.saved_tensors import activation_ledger
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.recompute import lab, pictures, recompute_full, recompute_none, recompute_selective
from course_lib.recompute.peak import predicted_peak_bytes

FROM_BEST = (
    *("fp32", "bf16", "E4M3, one scale", "MXFP8", "E5M2, one scale", "MXFP4", "E2M1, one scale"),
)


def test_errors_grow_as_bits_get_fewer_and_rounding_scales_up_avoids_saturation():
    errors = [lab.product_error(name) for name in FROM_BEST]
    assert errors == sorted(errors)
    assert errors[1] == pytest.approx(2**-9, rel=0.3)
    assert lab.product_error("MXFP8, scales rounded up") < lab.product_error("MXFP8")


def test_an_outlier_ruins_one_scale_and_leaves_other_blocks_as_they_are():
    for name in ("MXFP8", "MXFP4"):
        assert len({lab.product_error(name, size) for size in (1.0, 1e3, 1e6)}) == 1
    assert lab.product_error("E4M3, one scale", 1e4) < 0.04
    assert lab.product_error("E4M3, one scale", 1e6) > 0.9
    assert lab.product_error("E2M1, one scale", 1e2) > 0.9


def test_a_model_in_fp32_trains_as_one_of_plain_linear_layers():
    torch.manual_seed(0)
    model = GPT(lab.SPEC)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain = [float(lab._step(model, optimizer, n, 0)) for n in range(3)]
    assert lab.train("fp32", 3) == pytest.approx(plain, rel=1e-5)


def test_losses_have_the_order_of_the_errors():
    exact = lab.train("fp32", 20)
    names = ("bf16", "MXFP8", "MXFP4 in forward")
    apart = [np.abs(np.subtract(lab.train(name, 20), exact)).mean() for name in names]
    assert apart == sorted(apart)
    assert 0 < apart[0] < 1e-3 < apart[2] < 0.1


def test_a_seed_changes_a_run_and_a_second_run_does_not():
    assert lab.train("MXFP8", 2) == lab.train("MXFP8", 2)
    assert lab.train("MXFP8", 2) != lab.train("MXFP8", 2, seed=1)


def test_an_unknown_format_is_told():
    with pytest.raises(CourseError, match=r"format: need one of fp32, bf16, .*; got 'fp9'"):
        lab.train("fp9")
    with pytest.raises(CourseError, match=r"format: need one of .*; got 'fp9'"):
        lab.product_error("fp9")


def test_pictures_show_every_format():
    curves = {
        name: [3.0 - 0.01 * step - 0.001 * n for step in range(20)]
        for n, name in enumerate(lab.FORMATS)
    }
    figure, _ = pictures.format_losses(curves)
    above, below = figure.axes
    assert len(above.lines) == 1
    assert len(below.lines) == len(lab.FORMATS) - 1
    looks = {(line.get_color(), line.get_linestyle()) for line in below.lines}
    assert len(looks) == len(below.lines)
    legends = figure.findobj(Legend)
    words = [text.get_text() for legend in legends for text in legend.get_texts()]
    assert words == list(lab.FORMATS)[1:]


CHOOSE = {"none": recompute_none, "selective": recompute_selective, "full": recompute_full}


@pytest.mark.parametrize("how", CHOOSE)
@pytest.mark.parametrize(("layers", "heads", "batch"), [(1, 2, 3), (4, 4, 2), (6, 8, 2), (3, 8, 5)])
def test_the_predicted_peak_is_the_measured_one(how, layers, heads, batch):
    spec = ModelSpec(
        hidden=64, num_layers=layers, num_heads=heads, ffn_hidden=256, vocab=48, max_seq=96
    )
    torch.manual_seed(0)
    model, tokens = (
        GPT(spec, flash=False, dropout=0.1),
        token_batch(0, batch=batch, seq=96, vocab=48),
    )
    inputs, targets = next_tokens(tokens)
    CHOOSE[how](model)
    one = Pass(
        spec=spec, batch=batch, seq=96, number_bytes=4, flash=False, dropout=True, kernels=TORCH_CPU
    )
    ledger = activation_ledger(
        lambda: token_loss(model(inputs), targets).backward(),
        given=[*model.parameters(), inputs, targets],
    )
    assert predicted_peak_bytes(one, how) == ledger.peak_bytes()


@pytest.mark.parametrize("how", CHOOSE)
@pytest.mark.parametrize(
    "more", [{"qk_norm": "head"}, {"window": 5, "window_layers": (0,)}], ids=["normed", "mixed"]
)
@pytest.mark.parametrize(("flash", "dropout"), [(True, 0.0), (False, 0.1), (False, 0.0)])
def test_the_predicted_peak_of_layers_that_differ_is_the_measured_one(how, more, flash, dropout):
    sizes = {"hidden": 64, "num_layers": 3, "num_heads": 4, "ffn_hidden": 256, "vocab": 48}
    spec = ModelSpec(**sizes, max_seq=96, **more)
    model = GPT(spec, flash=flash, dropout=dropout)
    inputs, targets = next_tokens(token_batch(0, batch=2, seq=96, vocab=48))
    CHOOSE[how](model)
    how_saved = {"flash": flash, "dropout": dropout > 0, "kernels": TORCH_CPU}
    one = Pass(spec=spec, batch=2, seq=96, number_bytes=4, **how_saved)
    ledger = activation_ledger(
        lambda: token_loss(model(inputs), targets).backward(),
        given=[*model.parameters(), *model.buffers(), inputs, targets],
    )
    assert predicted_peak_bytes(one, how) == ledger.peak_bytes()
