"""`make check` finds links that lead nowhere, and files that are too big."""

from pathlib import Path

import pytest


@pytest.fixture
def check_files(monkeypatch):
    """tools/check_files.py as a module."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "tools")
    import check_files

    return check_files


def test_links_and_sizes_of_the_course_are_right(check_files):
    files = check_files.tracked_files(Path(__file__).resolve().parents[2])
    assert len(files) > 20
    assert check_files.too_big(files) == []
    assert check_files.broken_links(files) == []


def test_a_link_that_leads_nowhere_is_found(check_files, tmp_path):
    source = tmp_path / "notebooks" / "source" / "00_ranks.py"
    source.parent.mkdir(parents=True)
    source.write_text("# [next](04_collectives.ipynb) and [up](../README.md#first)\n")
    readme = tmp_path / "README.md"
    readme.write_text("[here](notebooks) [there](https://example.org/x) [gone](gone.md) [a](#b)\n")
    problems = check_files.broken_links([source, readme])
    assert [problem.rpartition(" ")[2] for problem in problems] == [
        "04_collectives.ipynb",
        "gone.md",
    ]


def test_a_big_file_is_found(check_files, tmp_path):
    big = tmp_path / "big.bin"
    big.write_bytes(b"0" * 500_001)
    (problem,) = check_files.too_big([big])
    assert "500001 bytes" in problem
