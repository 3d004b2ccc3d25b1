"""The derivations of lesson 01b against the library: FLOP, tokens, FLOP and bytes of operations."""

import pytest
import torch

from course_lib.checks import find_exercise
from course_lib.core import MODELS
from course_lib.cost.flops import train_step_flop
from course_lib.cost.roofline import add_intensity, data_parallel_tokens, matmul_intensity
from course_lib.speed import operations


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama-8b", "megatron-22b"])
def test_the_derived_flop_are_those_of_the_library(name, causal):
    right = find_exercise("speed-1").right(MODELS[name], 3, 1024, causal)
    assert right == train_step_flop(MODELS[name], 3, 1024, causal=causal)


@pytest.mark.parametrize("p", [1, 2, 8])
def test_the_derived_tokens_are_those_of_the_library(p):
    right = find_exercise("speed-2").right(p, 989.5e12, 5e10, 4)
    assert right == pytest.approx(data_parallel_tokens(p, 989.5e12, 5e10, grad_bytes=4))


def test_operations_are_sorted_and_counted_as_the_roofline_counts():
    found = [one.intensity for one in operations.OPERATIONS]
    assert found == sorted(found)
    assert operations.add().intensity == pytest.approx(add_intensity())
    assert operations.product(32).intensity == pytest.approx(matmul_intensity(32, 4096, 4096))
    assert operations.scores().intensity == pytest.approx(matmul_intensity(4096, 128, 4096))
    assert operations.flash_attention().intensity == operations.SEQ / 2


def test_an_adamw_step_moves_the_bytes_of_the_usual_recipe():
    sizes = {torch.float32: 4, torch.bfloat16: 2}
    grad, weight = sizes[torch.bfloat16], sizes[torch.bfloat16]
    read_and_written = 3 * sizes[torch.float32]  # master copy and two moments
    assert operations.adamw_step().num_bytes == grad + 2 * read_and_written + weight
