"""What lesson 03 says of large models: the best segments, and the published bytes and times."""

import pytest
import torch

from course_lib.core.specs import ModelSpec
from course_lib.memory.saved_tensors import activation_ledger
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.recompute import pictures, recompute_segments


def peak(num_layers, k, block=17):
    """The peak of segments of k blocks, in inputs of a block."""
    return -(-num_layers // k) + k * block


def best(num_layers, block=17):
    return min(range(1, num_layers + 1), key=lambda k: peak(num_layers, k, block))


def test_single_blocks_are_best_up_to_35_layers_and_segments_of_2_or_3_beyond():
    assert {best(num_layers) for num_layers in range(1, 36)} == {1}
    assert {best(num_layers) for num_layers in range(36, 100)} == {2}
    assert best(126) == 3
    assert [peak(80, k) for k in (1, 2, 3)] == [97, 74, 78]
    assert [peak(126, k) for k in (1, 3)] == [143, 93]


def test_a_deep_gpt_holds_least_with_the_segments_that_the_formula_says():
    num_layers = 80
    spec = ModelSpec(
        hidden=32, num_layers=num_layers, num_heads=2, ffn_hidden=128, vocab=8, max_seq=64
    )
    torch.manual_seed(0)
    model, batch = GPT(spec), next_tokens(token_batch(0, batch=2, seq=64, vocab=8))

    def held(k):
        recompute_segments(model, k)
        step = lambda: token_loss(model(batch[0]), batch[1]).backward()  # noqa: E731
        return activation_ledger(step, given=[*model.parameters(), *batch]).peak_bytes()

    measured = {k: held(k) for k in (1, 2, 3)}
    assert min(measured, key=measured.get) == 2
    assert measured[2] / measured[1] == pytest.approx(peak(80, 2) / peak(80, 1), rel=0.05)


@pytest.mark.parametrize("size", pictures.SIZES)
def test_the_formula_has_the_bytes_of_the_paper(size):
    shares = {how: pictures.share_of_none(size, how) for how in ("selective", "full")}
    for how, share in shares.items():
        assert share == pytest.approx(pictures.published_share(size, how), abs=0.2)
    assert 49 < shares["selective"] < 62
    assert 7.5 < shares["full"] < 10


def test_the_published_price_is_higher_than_the_flops():
    price = pictures.published_price()
    assert price["none"] == (1, 1)
    assert price["selective"] == pytest.approx((1.0175, 1.066), abs=1e-3)
    assert price["full"] == pytest.approx((4 / 3, 1.388), abs=1e-3)
