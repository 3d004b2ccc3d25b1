"""MFU of published runs: the counts that their authors used, and the picture of them."""

import pytest

from course_lib.cost import published
from course_lib.memory import count_params
from course_lib.speed import pictures
from tests.tables import every


def test_mpt_7b_has_the_parameters_that_llm_foundry_prints():
    printed = {
        row["NumParams"]
        for row in published.rows("llm_foundry")
        if row["Model"] == "7b" and row["SeqLen (T)"] == "2048"
    }
    assert printed == {str(count_params(pictures.MPT_7B))}


@every(pictures.mpt_runs())
def test_llm_foundry_counts_all_scores(run):
    seq, tokens_per_s, reported = run
    assert pictures.mfu_of_run(seq, tokens_per_s, "all scores") == pytest.approx(reported, abs=0.4)
    assert pictures.mfu_of_run(seq, tokens_per_s, "half of the scores") < reported - 0.5
    assert pictures.mfu_of_run(seq, tokens_per_s, "6ND") < reported - 1


def test_the_picture_of_real_runs_says_what_they_report():
    figure, words = pictures.mfu_of_real_runs()
    assert "38 to 56 %, on up to 16,384 GPUs" in words
    assert [len(runs) for runs in pictures.real_runs().values()] == [5, 4, 3]
    assert "Korthikanti et al. 2022" in " ".join(text.get_text() for text in figure.texts)
    assert "28 %, 18 % or 8 %" in pictures.mfu_by_convention()[1]
