"""The published tables: each row has a source, and the columns of numbers hold numbers."""

import re
from pathlib import Path

import pytest

from course_lib.core import CourseError
from course_lib.cost import published

NUMBERS = {
    "bandwidth": ("value",),
    "korthikanti22": (),
    "llama3": ("gpus", "tp", "pp", "TFLOPs_per_GPU", "bf16_mfu_pct"),
    "llm_foundry": ("SeqLen (T)", "# GPUs", "MFU", "HFU", "Throughput (T/s/GPU)"),
    "megatron_sc21": ("tp", "pp", "dp", "gpus"),
    "torchtitan": ("gpus", "fsdp", "tp", "pp", "TPS_per_GPU"),
    "moe": ("gpus", "tp", "ep", "pp", "global_batch", "step_s", "model_TFLOPs_per_GPU"),
    "ultrascale": ("nodes", "dp", "tp", "pp", "mbs", "grad_acc"),
    "ultrascale_figures": ("value",),
    "vtrain_ground_truth": ("gpus", "micro_batch", "measured_iter_time_s"),
    "zero_bubble": ("stages_p", "microbatches_m"),
    "zero_table1": ("zero_stage",),
}


def is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", text) is not None


def test_every_table_is_known():
    assert set(published.tables()) == set(NUMBERS)


@pytest.mark.parametrize("name", NUMBERS)
def test_each_row_has_a_source_and_its_numbers(name):
    rows = published.rows(name)
    assert rows
    assert all(len(row["source"]) > 10 for row in rows)
    assert all(None not in row and None not in row.values() for row in rows)  # no row is ragged
    for column in NUMBERS[name]:
        given = [row[column] for row in rows if row[column]]
        assert sum(map(is_number, given)) >= 0.9 * len(given) > 0, column


def test_an_unknown_table_is_one_sentence():
    with pytest.raises(CourseError, match=r"need one of bandwidth, .*; got 'nccl'"):
        published.rows("nccl")


def test_the_tables_are_installed_with_the_package():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"**/*.csv"' in text
