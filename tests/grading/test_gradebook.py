"""The gradebook: on disk at once, resumed after a crash, and harmless whatever it is given."""

import csv
import errno
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.core import CourseError
from course_lib.workbooks.check_notebook import Verdict
from course_tools.grading.by_hand import BY_HAND, Hand, read_by_hand
from course_tools.grading.gradebook import (
    EXERCISES,
    GRADEBOOK,
    JUNIT,
    STATE,
    Gradebook,
    csv_text,
    number_text,
)
from course_tools.grading.graded import STATUSES, Graded
from tests.grading.hostile import FORMULA, HOSTILE, is_plain

POINTS = {"ddp-1": 2.5, "ddp-2": 4}
NUMBERS = re.compile(r"\d+(\.\d+)?")
texts = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)
verdicts = st.builds(Verdict, key=texts, status=st.sampled_from(STATUSES), detail=texts, note=texts)
submissions = st.builds(
    Graded,
    student=texts,
    path=texts,
    assignment=texts,
    verdicts=st.lists(verdicts, max_size=3).map(tuple),
    notes=st.lists(texts, max_size=2).map(tuple),
    seconds=st.floats(0, 1e6),
    digest=texts,
    problem=texts,
    code=st.dictionaries(texts, texts, max_size=2),
)


def graded(student: str = "ann", *statuses: str, **fields) -> Graded:
    found = tuple(
        Verdict(key=key, status=status, detail=f"about {key}")
        for key, status in zip(POINTS, statuses or ("right", "wrong"), strict=True)
    )
    default = {"path": f"{student}.zip", "assignment": "week-3", "digest": f"of {student}"}
    return Graded(**{"student": student, "verdicts": found, **default, **fields})


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, strict=True))


def test_points_are_all_or_none():
    one = graded("ann", "right", "wrong")
    assert one.points(POINTS) == 2.5
    assert [one.points_of(key, POINTS) for key in POINTS] == [2.5, 0]
    assert one.points({"ddp-1": 1, "other": 9}) == 1


def test_no_points_for_a_verdict_that_stands_twice_or_for_a_file_that_is_not_judged():
    one = graded()
    doubled = replace(one, verdicts=(*one.verdicts, *one.verdicts))
    assert doubled.points(POINTS) == 0
    spoilt = replace(one, problem="not judged: the disk was full")
    assert (spoilt.points(POINTS), spoilt.is_judged) == (0, False)


@given(submissions)
def test_a_line_brings_back_what_was_written(one):
    line = one.to_line()
    assert line.isascii()
    assert len(line.splitlines()) == 1
    back = Graded.from_line(line)
    assert back.to_line() == line
    texts = (one.student, one.path, one.digest, one.problem, *one.code, *one.code.values())
    if all(text.isprintable() for text in texts):
        assert (back.student, back.code, back.seconds) == (one.student, one.code, one.seconds)


def test_a_line_is_equal_to_what_it_was_written_from():
    one = graded(notes=("n",), code={"ddp-1": "x = 'é\N{GRINNING FACE}'\n"}, seconds=1.5)
    assert Graded.from_line(one.to_line()) == one


@pytest.mark.parametrize(
    "change",
    [
        {"student": 3},
        {"verdicts": [{"key": "a"}]},
        {"verdicts": [["a"]]},
        {"verdicts": {}},
        {"notes": [1]},
        {"seconds": "1"},
        {"seconds": float("nan")},
        {"code": {"a": 1}},
        {"digest": None},
        {"verdicts": [{"key": "a", "status": "top", "detail": "", "note": "", "parts": {}}]},
    ],
)
def test_a_spoilt_line_is_one_sentence(change):
    value = {**json.loads(graded().to_line()), **change}
    with pytest.raises(CourseError, match="one graded submission"):
        Graded.from_line(json.dumps(value))


@pytest.mark.parametrize(
    "line", ["", "[" * 200_000, "{}", "[]", "1", '"\\ud800"', "{" * 9, "1e999"]
)
def test_what_is_no_line_of_ours_is_one_sentence(line):
    with pytest.raises(CourseError):
        Graded.from_line(line)


def test_a_row_is_on_disk_as_soon_as_it_is_added(tmp_path):
    book = Gradebook(tmp_path / "new" / "folder", POINTS)
    path = tmp_path / "new" / "folder" / GRADEBOOK
    assert rows_of(path) == []
    for count, student in enumerate(("zoe", "bob", "ann"), start=1):
        book.add(graded(student))
        assert [row["student"] for row in rows_of(path)] == ["zoe", "bob", "ann"][:count]
        assert (path.parent / STATE).read_bytes().count(b"\n") == count
    book.close()
    assert [row["student"] for row in rows_of(path)] == ["ann", "bob", "zoe"]


def test_each_row_and_its_exercises(tmp_path):
    with Gradebook(tmp_path, POINTS) as book:
        book.add(graded("bob", notes=("A cell is strange.",)))
    assert rows_of(tmp_path / GRADEBOOK) == [
        {
            "student": "bob",
            "total": "2.5",
            "out of": "6.5",
            "ddp-1": "2.5",
            "ddp-1 status": "right",
            "ddp-2": "0",
            "ddp-2 status": "wrong",
            "note": "A cell is strange.",
            "path": "bob.zip",
        }
    ]
    rows = rows_of(tmp_path / EXERCISES)
    assert [(row["exercise"], row["status"], row["points"]) for row in rows] == [
        ("ddp-1", "right", "2.5"),
        ("ddp-2", "wrong", "0"),
    ]
    assert rows[1]["detail"] == "about ddp-2"


def test_what_is_not_judged_has_no_points_yet(tmp_path):
    with Gradebook(tmp_path, POINTS) as book:
        book.add(graded("ann", "right", "not judged"))
        book.add(graded("bob", problem="not judged: no notebook"))
    ann, bob = rows_of(tmp_path / GRADEBOOK)
    assert (ann["total"], ann["ddp-1"], ann["ddp-2"]) == ("", "2.5", "")
    assert (bob["total"], bob["ddp-1"], bob["note"]) == ("", "", "not judged: no notebook")
    tree = ElementTree.parse(tmp_path / JUNIT)
    assert [suite.get("errors") for suite in tree.getroot()] == ["1", "1"]
    assert "no notebook" in (tree.find(".//testsuite[@name='bob']//error").text or "")


def test_what_a_person_gave_is_in_every_later_run(tmp_path):
    lines = "student,exercise,points,comment\nann,ddp-2,1.5,Nearly.\nann,,,Well done.\n"
    with Gradebook(tmp_path, POINTS) as book:
        book.add(graded("ann", "right", "not judged"))
    assert (tmp_path / BY_HAND).read_text() == "student,exercise,points,comment\n"
    (tmp_path / BY_HAND).write_text(lines)
    for _ in range(2):
        with Gradebook(tmp_path, POINTS) as book:
            book.add(book.known("of ann"))
            book.add(graded("bob"))  # handed in again
        ann, bob = rows_of(tmp_path / GRADEBOOK)
        assert (ann["total"], ann["ddp-2"], ann["ddp-2 status"]) == ("4", "1.5", "not judged")
        assert "By hand, ddp-2: 1.5 points. Nearly. By hand, all of it: Well done." in ann["note"]
        assert (bob["total"], bob["note"]) == ("2.5", "")
        assert [row["points"] for row in rows_of(tmp_path / EXERCISES)] == [
            "2.5",
            "1.5",
            "2.5",
            "0",
        ]
    assert (tmp_path / BY_HAND).read_text() == lines


def test_a_spreadsheet_may_write_what_a_person_gave(tmp_path):
    text = "\N{BYTE ORDER MARK}student;exercise;points;comment\r\nann;ddp-1;1,5;a, b\r\n;;;\r\n"
    (tmp_path / BY_HAND).write_text(text, encoding="utf-8", newline="")
    assert read_by_hand(tmp_path, POINTS) == {"ann": {"ddp-1": Hand(1.5, "a, b")}}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ann,ddp-9,1,", "line 2: need one of ddp-1, ddp-2, late; got 'ddp-9'"),
        (",ddp-1,1,", "line 2: need a student; got ''"),
        ("ann,ddp-1,many,", "line 2: need points as a number; got 'many'"),
        ("ann,ddp-1,nan,", "line 2: need points as a number; got 'nan'"),
        ("ann,,1,", "line 2: need the exercise that gets 1 points"),
        ("ann,ddp-1,1,\nann,ddp-1,2,", "line 3: need one line for ann, ddp-1; got 2"),
    ],
)
def test_a_line_by_hand_that_cannot_be_meant_is_one_sentence(tmp_path, line, says):
    (tmp_path / BY_HAND).write_text(f"student,exercise,points,comment\n{line}\n")
    with pytest.raises(CourseError, match=re.escape(says)):
        Gradebook(tmp_path, POINTS)
    (tmp_path / BY_HAND).write_text("name\n")
    with pytest.raises(CourseError, match="these are missing: comment, exercise"):
        Gradebook(tmp_path, POINTS)


def test_one_row_per_file_the_last_one(tmp_path):
    with Gradebook(tmp_path, POINTS) as book:
        book.add(graded("ann", "wrong", "wrong"))
        book.add(graded("ann", "right", "right"))
        book.add(graded("ann", path="second.zip"))
    rows = rows_of(tmp_path / GRADEBOOK)
    assert [(row["path"], row["total"]) for row in rows] == [
        ("ann.zip", "6.5"),
        ("second.zip", "2.5"),
    ]


def test_a_later_run_knows_what_an_earlier_one_judged(tmp_path):
    if (pid := os.fork()) == 0:
        book = Gradebook(tmp_path, POINTS)
        book.add(graded("ann"))
        book.add(graded("bob"))
        os.kill(os.getpid(), signal.SIGKILL)  # and no close
    os.waitpid(pid, 0)
    with Gradebook(tmp_path, POINTS) as later:
        assert later.known("of ann") == graded("ann")
        assert later.known("of eve") is None
        size = (tmp_path / STATE).stat().st_size
        later.add(graded("ann"))
        assert (tmp_path / STATE).stat().st_size == size
    assert [row["student"] for row in rows_of(tmp_path / GRADEBOOK)] == ["ann"]


@pytest.mark.parametrize(
    "tail", [b'{"student": "ha', b"\xff\xfe\n", b"[" * 200_000 + b"\n", b"\0\n\n{}\n", b"\n"]
)
def test_spoilt_lines_of_the_state_are_left_out(tmp_path, tail):
    with Gradebook(tmp_path, POINTS) as book:
        book.add(graded("ann"))
    with (tmp_path / STATE).open("ab") as file:
        file.write(tail)
    with Gradebook(tmp_path, POINTS) as book:
        assert book.known("of ann")
        book.add(graded("bob"))
    with Gradebook(tmp_path, POINTS) as book:
        assert book.known("of ann")
        assert book.known("of bob")


@given(st.binary(max_size=60), st.integers(0, 400))
def test_no_damage_to_the_state_ends_a_run(tmp_path_factory, damage, place):
    folder = tmp_path_factory.mktemp("damaged")
    whole = f"{graded('ann').to_line()}\n{graded('bob').to_line()}\n".encode()
    (folder / STATE).write_bytes(whole[:place] + damage + whole[place + len(damage) :])
    with Gradebook(folder, POINTS) as book:
        for name in ("ann", "bob"):
            known = book.known(f"of {name}")
            assert known is None or isinstance(known.points(POINTS), float)


@pytest.mark.parametrize("name", [GRADEBOOK, EXERCISES, JUNIT, STATE])
def test_a_place_that_cannot_be_written_is_said_before_the_work(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(CourseError, match="can be written"):
        Gradebook(tmp_path, POINTS)


def test_a_file_in_place_of_the_folder_is_one_sentence(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(CourseError, match="can be written"):
        Gradebook(tmp_path / "out", POINTS)


def test_one_run_at_a_time_writes_into_a_folder(tmp_path):
    with Gradebook(tmp_path, POINTS) as book:
        book.add(graded("ann"))
        with pytest.raises(CourseError, match="another run is grading into it"):
            Gradebook(tmp_path, POINTS)
    assert [row["student"] for row in rows_of(tmp_path / GRADEBOOK)] == ["ann"]
    Gradebook(tmp_path, POINTS).close()


def test_a_full_disk_is_one_sentence_and_the_rows_before_are_kept(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Gradebook(tmp_path, POINTS) as book:
        book.add(graded("ann"))
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(CourseError, match="No space left"):
                book.add(graded("bob"))
    assert [row["student"] for row in rows_of(tmp_path / GRADEBOOK)] == ["ann"]


def hostile(text: str) -> Graded:
    found = tuple(Verdict(key=key, status="wrong", detail=text, note=text) for key in POINTS)
    return Graded(
        student=text, path=text, assignment=text, verdicts=found, notes=(text,), digest=text,
        code={"ddp-1": text}, problem="" if text.isalpha() else text,
    )  # fmt: skip


def check_files(folder: Path, count: int) -> None:
    """Check that the tables have `count` submissions, and that no cell can do anything."""
    for name, rows_each in ((GRADEBOOK, 1), (EXERCISES, len(POINTS))):
        content = (folder / name).read_bytes().decode()
        assert len(content.split("\r\n")) == 2 + count * rows_each
        assert is_plain(content.replace("\r\n", "\n"))
        rows = list(csv.reader(content.splitlines(), strict=True))
        assert {len(row) for row in rows} == {len(rows[0])}
        other = list(csv.reader(content.splitlines(), delimiter=";"))  # a German spreadsheet
        for cell in (cell for row in (*rows, *other) for cell in row):
            assert not cell.strip().startswith(FORMULA) or NUMBERS.fullmatch(cell)
    suites = ElementTree.fromstring((folder / JUNIT).read_bytes())
    assert len(suites) == count
    assert {element.tag for element in suites.iter()} <= {
        *("testsuites", "testsuite", "testcase", "failure", "error")
    }
    assert all(is_plain(text) for element in suites.iter() for text in element.attrib.values())
    assert all(is_plain(element.text or "") for element in suites.iter())


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:20])
def test_no_field_injects_anything(tmp_path, text):
    with Gradebook(tmp_path, POINTS) as book:
        book.add(hostile(text))
    check_files(tmp_path, 1)
    assert sum(path.stat().st_size for path in tmp_path.glob("[!.]*")) < 60_000


@given(st.lists(submissions, min_size=1, max_size=3, unique_by=lambda one: one.path))
def test_no_submission_breaks_a_file(tmp_path_factory, found):
    folder = tmp_path_factory.mktemp("class")
    with Gradebook(folder, POINTS) as book:
        for one in found:
            book.add(one)
    check_files(folder, len(found))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (10, "10"), (2.5, "2.5"), (1 / 3, "0.333333"), (1e9, "1000000000")],
)
def test_points_are_written_as_a_person_would(value, text):
    assert number_text(value) == text
    assert csv_text([[value]]) == f"{text}\r\n"
