"""Bytes of optimizer states: the formula of each shape is what a real optimizer holds."""

import pytest
from torch import nn

from course_lib.core import MODELS
from course_lib.memory.optimizer_states import (
    adafactor_bytes,
    adam_8bit_bytes,
    adam_bytes,
    is_hidden_matrix,
    state_rows,
    state_table,
)
from course_lib.models import GPT


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_formulas_are_what_real_optimizers_hold(name):
    table = state_table(GPT(MODELS[name]))
    measured = {name: pair for name, pair in table.items() if pair[1] is not None}
    assert set(measured) == {"AdamW", "Adafactor", "Muon + AdamW"}
    assert all(formula == held for formula, held in measured.values())


def test_eight_bits_are_a_quarter_and_a_scale_per_block():
    assert adam_8bit_bytes((2048, 10)) == 2 * (20480 + 4 * 10)
    assert adam_8bit_bytes((2048, 2, 1, 2)) == 2 * (8192 + 4 * 4)
    assert adam_8bit_bytes((4097,)) == 2 * (4097 + 4 * 3)  # the last block is shorter
    assert adam_8bit_bytes((4095,)) == adam_bytes((4095,))


def test_adafactor_keeps_rows_and_columns_of_matrices_and_all_of_vectors():
    assert adafactor_bytes((30, 50)) == 4 * 80
    assert adafactor_bytes((50,)) == 4 * 50


def test_embeddings_output_layer_and_vectors_are_no_hidden_matrices():
    model = GPT(MODELS["tiny"])
    hidden = {n for n, param in model.named_parameters() if is_hidden_matrix(n, param.shape)}
    inside = {
        f"{name}.weight" for name, part in model.blocks.named_modules() if type(part) is nn.Linear
    }
    assert hidden == {f"blocks.{name}" for name in inside}


def test_the_table_says_what_was_not_measured():
    rows = state_rows(GPT(MODELS["tiny"])).splitlines()
    assert len(rows) == 5
    assert "not measured" in next(row for row in rows if "8-bit" in row)
