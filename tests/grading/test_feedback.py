"""The feedback pages: what they say, and that nothing of a submission is more than text."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.workbooks.check_notebook import Verdict
from course_tools.grading.by_hand import Hand
from course_tools.grading.feedback import (
    FOLDER,
    OVERVIEW,
    SIMILARITY,
    cause_of,
    page_names,
    student_page,
    write_feedback,
)
from course_tools.grading.graded import Graded
from tests.grading.hostile import HOSTILE, Page, is_plain

POINTS = {"ddp-1": 2.5, "ddp-2": 4, "own-1": 1}
SUMMED = "You sum the gradients: divide them by {p}. Look at what all_reduce returns."


def graded(student: str, *verdicts: Verdict, **fields) -> Graded:
    default = {"path": f"in/{student}.zip", "assignment": "Week 3", "digest": student}
    return Graded(**{"student": student, "verdicts": verdicts, **default, **fields})


def wrong(key: str, detail: str) -> Verdict:
    return Verdict(key=key, status="wrong", detail=detail)


def right(key: str) -> Verdict:
    return Verdict(key=key, status="right", detail="The same gradients as one process.")


def test_a_page_says_points_cause_next_and_notes():
    verdicts = (
        Verdict(key="ddp-1", status="not done"),
        wrong("ddp-2", f"2 ranks: need 3; got 6. {SUMMED.format(p=2)}"),
        Verdict(key="own-1", status="right", note="The check cell was changed."),
    )
    page = Page(student_page("ann", [graded("ann", *verdicts, notes=("One note.",))], POINTS))
    assert "Feedback for ann" in page.text
    assert "1 of 7.5 points" in page.text
    assert "Begin with ddp-2 (wrong)" in page.text
    assert "Then go on with ddp-1 (not done)." in page.text
    assert SUMMED.format(p=2) in page.text
    assert "The check cell was changed." in page.text
    assert "One note." in page.text


def test_a_page_is_ordered_for_a_screen_reader():
    content = student_page("ann", [graded("ann", right("ddp-1"))], POINTS)
    page = Page(content)
    levels = [int(tag[1]) for tag in page.tags if tag in ("h1", "h2", "h3")]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(later - first <= 1 for first, later in pairwise(levels))
    assert 'lang="en"' in content
    assert "<caption>" in content
    assert 'scope="col"' in content
    assert 'scope="row"' in content


def test_the_policy_allows_one_style_and_nothing_else():
    page = Page(student_page("ann", [graded("ann", right("ddp-1"))], POINTS))
    assert page.policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in page.policy
    assert page.links == []


def test_everything_right_has_no_begin():
    page = Page(student_page("ann", [graded("ann", *map(right, POINTS))], POINTS))
    assert "7.5 of 7.5 points" in page.text
    assert "Everything is right" in page.text
    assert "Begin with" not in page.text


def test_an_exercise_without_a_verdict_is_not_judged():
    page = Page(student_page("ann", [graded("ann", right("ddp-1"))], POINTS))
    assert "an exercise is not judged yet" in page.text
    assert "Begin with ddp-2 (not judged)" in page.text


def test_a_file_that_is_not_judged_shows_no_points():
    one = graded("ann", problem="not judged: no notebook")
    page = Page(student_page("ann", [one], POINTS))
    assert "not judged: no notebook" in page.text
    assert "7.5" not in page.text


def test_two_files_of_a_student_are_on_one_page(tmp_path):
    files = [graded("ann", right("ddp-1"), path=f"in/{name}.zip") for name in ("one", "two")]
    write_feedback(tmp_path, files, POINTS)
    (path,) = (tmp_path / FOLDER).iterdir()
    text = Page(path.read_text()).text
    assert path.name == "ann.html"
    assert "one.zip" in text
    assert "two.zip" in text


def test_a_changed_check_or_a_foreign_line_does_not_pass_for_the_cause():
    assert cause_of("2 ranks: need 3; got 6. You sum. Divide.") == "You sum. Divide."
    assert cause_of("need 0.5; got 1.5: too large. `n` is wrong.") == "`n` is wrong."
    assert cause_of("your code raised KeyError: 'a'\n    line 3 of your cell: x['a']. Y") == (
        "your code raised KeyError: 'a'"
    )
    assert cause_of("Only one sentence.") == "Only one sentence."
    assert cause_of("need this\nand that.\nYou sum.") == "You sum."
    assert cause_of("") == ""


def test_the_overview_counts_causes_whatever_their_numbers(tmp_path):
    rows = [
        graded("ann", wrong("ddp-1", f"2 ranks: got 6. {SUMMED.format(p=2)}")),
        graded("bob", wrong("ddp-1", f"4 ranks: got 12. {SUMMED.format(p=4)}")),
        graded("cem", wrong("ddp-1", "4 ranks: got 1. Another cause.")),
        graded("dan", *map(right, POINTS)),
    ]
    page = Page(write_feedback(tmp_path, rows, POINTS).read_text())
    first, second = (page.text.index(f"{n} student") for n in ("2", "1"))
    assert first < second
    assert "2 students: You sum the gradients: divide them by" in page.text
    assert "1 student: Another cause." in page.text
    assert "7.5 of 7.5 points on average; 3 not judged yet" in page.text
    assert "25%" in page.text


def test_the_title_and_what_a_person_gave_are_on_the_page(tmp_path):
    hand = {"ddp-2": Hand(1.5, "Nearly: <see> line 3."), "": Hand(None, "Well done.")}
    rows = [graded("ann", right("ddp-1"), wrong("ddp-2", "no"), right("own-1"), hand=hand)]
    overview = write_feedback(tmp_path, rows, POINTS, "Rings and buckets")
    page = Page((tmp_path / FOLDER / "ann.html").read_text())
    for text in (
        *("Rings and buckets", "5 of 7.5 points", "1.5 (by hand)"),
        *("Nearly: <see> line 3.", "Well done."),
    ):
        assert text in page.text
    assert "Rings and buckets" in Page(overview.read_text()).text


def test_what_is_not_counted_is_in_no_share(tmp_path):
    rows = [
        graded("ann", *map(right, POINTS)),
        graded("bob", *(wrong(key, "no") for key in POINTS)),
        graded("cem", problem="not judged: no notebook"),
        graded("dan", problem="Nothing was handed in.", path=""),
    ]
    page = Page(write_feedback(tmp_path, rows, POINTS).read_text())
    assert "50%" in page.text
    assert "25%" not in page.text
    assert "3 submissions" in page.text
    assert "Nothing was handed in." in Page((tmp_path / FOLDER / "dan.html").read_text()).text


def test_the_overview_links_to_each_page_and_to_the_similarity_report(tmp_path):
    rows = [graded(name, right("ddp-1")) for name in ("Ann", "ann", "../x", "a b#?%")]
    overview = Page(write_feedback(tmp_path, rows, POINTS).read_text())
    assert SIMILARITY not in overview.links
    pages = [link for link in overview.links if link.startswith(FOLDER)]
    assert len(set(pages)) == 4
    assert all((tmp_path / link.replace("%7E", "~")).is_file() for link in pages)
    (tmp_path / SIMILARITY).write_text("")
    assert SIMILARITY in Page(write_feedback(tmp_path, rows, POINTS).read_text()).links


def test_a_class_without_submissions_has_an_overview(tmp_path):
    page = Page(write_feedback(tmp_path, [], POINTS).read_text())
    assert "0 submissions" in page.text


def test_two_students_of_one_name_in_different_case_have_two_pages(tmp_path):
    write_feedback(tmp_path, [graded("Ann", right("ddp-1")), graded("ann")], POINTS)
    names = [path.name.casefold() for path in (tmp_path / FOLDER).iterdir()]
    assert len(set(names)) == 2


def test_plain_names_are_kept():
    assert page_names(["ann.lee", "b-2_c"]) == {"ann.lee": "ann.lee.html", "b-2_c": "b-2_c.html"}


@given(
    st.lists(st.text(st.characters(codec=None, exclude_categories=())) | st.sampled_from(HOSTILE))
)
def test_file_names_are_safe_and_distinct(students):
    names = page_names(students)
    assert names.keys() == set(students)
    assert len({name.casefold() for name in names.values()}) == len(names)
    for name in names.values():
        assert name.isascii()
        assert not set(name) & set('/\\:*?"<>|\0 \n')
        assert not name.startswith((".", "-~"))
        assert len(name) < 90
        assert name.split(".")[0].casefold() not in ("con", "nul", "com1", "")


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:20])
def test_no_field_injects_anything(tmp_path, text):
    verdicts = [
        Verdict(key=key, status="wrong", detail=f"need 1; got 2. {text}", note=text)
        for key in ("ddp-1", text)
    ]
    fields = {"path": text, "assignment": text, "notes": (text,)}
    rows = [graded(text, *verdicts, **fields), graded("bob", problem=text, **fields)]
    write_feedback(tmp_path / "out", rows, {"ddp-1": 1, text: 2})
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 3
    for path in written:
        content = path.read_text(encoding="utf-8")
        page = Page(content)
        assert is_plain(content)
        assert len(content) < 60_000
        places = (FOLDER, OVERVIEW, "gradebook.csv", "exercises.csv")
        assert all(link.startswith(places) for link in page.links)
