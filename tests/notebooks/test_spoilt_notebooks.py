"""A notebook that is spoilt is one sentence, and never lost work."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest

from course_lib.cli import main
from course_lib.core import CourseError
from course_lib.core.files import LARGEST_BYTES
from course_lib.workbooks import learner_progress as progress_of
from course_lib.workbooks.check_notebook import GradeReport, Verdict
from course_lib.workbooks.lessons import read_notebook, write_notebook
from course_lib.workbooks.verdict_files import write_junit

RIGHT = "def add_1(x, y):\n    return x + y\n"


@pytest.fixture
def course(toy, monkeypatch, capsys):
    """Run `course ...` beside the toy lesson: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        told = capsys.readouterr()
        return int(stopped.value.code or 0), told.out, told.err

    return run


def changed(**values: object) -> Callable[[Path], None]:
    """Overwrite these fields of the notebook."""

    def spoil(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return spoil


def cell(**values: object) -> Callable[[Path], None]:
    """Overwrite these fields of a code cell."""

    def spoil(path: Path) -> None:
        notebook = json.loads(path.read_text())
        next(one for one in notebook["cells"] if one["cell_type"] == "code").update(values)
        path.write_text(json.dumps(notebook))

    return spoil


def content(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


def without_nbformat(path: Path) -> None:
    notebook = json.loads(path.read_text())
    del notebook["nbformat"]
    path.write_text(json.dumps(notebook))


def large(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(LARGEST_BYTES + 1)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


SPOILT = {
    "no nbformat": (without_nbformat, "no nbformat 4"),
    "deep": (content(b"[" * 200_000), "lists in lists, more than 100 deep"),
    "deep pairs": (content(b"[" * 500 + b"]" * 500), "lists in lists, more than 100 deep"),
    "a list": (content(b"[1, 2]"), "no nbformat 4"),
    "a number": (content(b"7"), "no nbformat 4"),
    "a number too long": (content(b"7" * 5000), "this is none"),
    "nbformat 3": (changed(nbformat=3), "no nbformat 4"),
    "cells are no list": (changed(cells={"a": 1}), "no cells or no metadata"),
    "cells are no cells": (changed(cells=[1, "a", None]), "cell 1 is no code"),
    "metadata is a list": (changed(metadata=[]), "no cells or no metadata"),
    "a kind of cell": (cell(cell_type="spoilt"), "is no code"),
    "a source of numbers": (cell(source=[1, 2]), "has no text"),
    "a source is a number": (cell(source=7), "has no text"),
    "metadata of a cell": (cell(metadata="x"), "has no metadata"),
    "half a character": (cell(source="\ud800"), "half a character"),
    "large": (large, "at most 64 MiB; got 64 MiB"),
    "zero bytes": (content(bytes(100)), "this is none"),
    "not utf-8": (content("größer".encode("latin-1")), "not a text file in UTF-8"),
    "a folder": (folder, "a folder, a pipe or a device"),
    "a pipe": (pipe, "a folder, a pipe or a device"),
    "a circle": (circle, "Too many levels of symbolic links"),
}
EACH = pytest.mark.parametrize(("spoil", "says"), SPOILT.values(), ids=SPOILT)


@EACH
def test_every_command_says_one_sentence_and_changes_nothing(course, toy, spoil, says):
    path = toy.lesson.student
    spoil(path)
    before = path.read_bytes() if path.is_file() else os.lstat(path)[:7]  # without times
    for words in (("check", "00"), ("reset", "00", "toy-1", "--yes")):
        code, out, err = course(*words)
        assert (code, out, len(err.splitlines())) == (1, "", 1), err
        assert says in err
        assert "00_toy.ipynb: need a notebook" in err
        assert "Try " in err
    code, out, err = course("progress")
    assert (code, err) == (1, "")
    assert f"{says}" in " ".join(out.split())
    assert "0 of 0 exercises are right." in out
    assert before == (path.read_bytes() if path.is_file() else os.lstat(path)[:7])


def test_update_says_one_sentence_and_touches_no_notebook(course, toy):
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *words], cwd=toy.folder, check=True)
    toy.lesson.student.write_text("[" * 200_000)
    code, out, err = course("update")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "00_toy.ipynb: need a notebook" in err
    assert toy.lesson.student.read_text() == "[" * 200_000


@pytest.mark.parametrize(
    "journal",
    ["{", "[]", '{"backups": 3}', '{"backups": {"00_toy": 5}}', '{"backups": {"../x": "y"}}'],
)
def test_a_spoilt_journal_of_an_update_says_where_the_work_is(course, toy, journal):
    (toy.folder / ".backup").mkdir()
    (toy.folder / ".backup" / "update.json").write_text(journal)
    code, out, err = course("progress")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "Your work is safe beside it." in err


def test_a_spoilt_backup_stays_and_is_told(course, toy):
    toy.fill(1, RIGHT)
    before = toy.lesson.student.read_bytes()
    (toy.folder / ".backup").mkdir()
    (toy.folder / ".backup" / "old.ipynb").write_text("spoilt")
    (toy.folder / ".backup" / "update.json").write_text('{"backups": {"00_toy": "old.ipynb"}}')
    code, _, err = course("progress")
    assert code == 0
    assert "the notebook stays as it is, and so does its backup" in err
    assert toy.lesson.student.read_bytes() == before
    assert [one.name for one in (toy.folder / ".backup").iterdir()] == ["old.ipynb"]


def test_ids_that_are_no_ids_or_another_cells_are_made_anew(toy):
    notebook = json.loads(toy.lesson.student.read_text())
    mine = {"cell_type": "code", "metadata": {}, "source": "mine = 1", "outputs": []}
    first = next(one for one in notebook["cells"] if one["cell_type"] == "code")
    for wrong in (5, None, "", "with blank", "x" * 65, first["id"], [1]):
        notebook["cells"].append({**mine, "execution_count": None, "id": wrong})
    toy.lesson.student.write_text(json.dumps(notebook))
    read = read_notebook(toy.lesson.student)
    ids = [one.id for one in read.cells]
    assert len(set(ids)) == len(ids)
    assert all(one.startswith("own-") for one in ids[-7:])
    nbformat.validate(read)
    write_notebook(read, toy.lesson.student)
    assert read_notebook(toy.lesson.student) == read


def test_outputs_that_are_none_are_left_out_and_the_work_stays(course, toy):
    toy.fill(1, RIGHT)
    notebook = json.loads(toy.lesson.student.read_text())
    stream = {"output_type": "stream", "name": "stdout", "text": ["a\n", "b"]}
    first = next(one for one in notebook["cells"] if one["cell_type"] == "code")
    first["outputs"] = [7, {"output_type": "spoilt"}, stream, {**stream, "text": 3}]
    first["execution_count"] = "x"
    first["attachments"] = [1]
    notebook["metadata"]["course"]["stubs"]["toy-\u00b2"] = 5
    toy.lesson.student.write_text(json.dumps(notebook))
    assert "toy-1 not checked" in course("progress")[1]
    assert course("reset", "00", "toy-2", "--yes")[0] == 0
    read = toy.read()
    assert toy.cell(read, "exercise-toy-1").source == RIGHT
    assert [one.text for one in read.cells[1].outputs or read.cells[2].outputs] == ["a\nb"]


@pytest.mark.parametrize("noted", [5, [], {"stubs": [1]}, {"lesson": 3, "stubs": 7}])
def test_a_note_of_the_build_that_is_none_is_none(course, toy, noted):
    notebook = json.loads(toy.lesson.student.read_text())
    notebook["metadata"]["course"] = noted
    toy.lesson.student.write_text(json.dumps(notebook))
    assert course("progress")[:2][1].endswith("0 of 0 exercises are right.\n")
    code, _, err = course("check", "00")
    assert code == 1
    assert "does not say of which lesson it is" in err


KEPT = [b"", b"{", b"[" * 200_000, b"7", b"\xff", b'{"toy-1": 5}', b'{"toy-1": {"status": []}}']


@pytest.mark.parametrize("kept", [*KEPT, b'{"toy-1": {"status": "\\u001b[31m", "written": 1}}'])
def test_spoilt_verdicts_are_none(course, toy, kept):
    (toy.folder / ".progress.json").write_bytes(kept)
    toy.fill(1, RIGHT)
    assert "toy-1 not checked; toy-2, toy-3" in course("progress")[1]
    verdict = Verdict(key="toy-1", status="right")
    report = GradeReport(lesson="00_toy", path="x", verdicts=(verdict,))
    progress_of.remember(report, toy.lesson)
    assert "toy-2, toy-3" in course("progress")[1]


def test_verdicts_that_cannot_be_kept_are_shown(course, toy):
    (toy.folder / ".progress.json").mkdir()
    code, out, err = course("check", "00", "--json")
    assert code == 1
    assert [one["status"] for one in json.loads(out)["verdicts"]] == ["not done"] * 4
    assert len(err.splitlines()) == 1
    assert "need to keep these verdicts for course progress; got: Is a directory" in err


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("folder", "Is a directory"),
        ("file/below.xml", "Not a directory|File exists"),
        ("x" * 300, "File name too long"),
        ("/proc/nowhere/x.xml", "No such file or directory"),
        ("other.ipynb", "got a notebook's"),
    ],
)
def test_a_place_that_cannot_be_written_is_told_before_the_work(
    course, toy, tmp_path, monkeypatch, place, says
):
    monkeypatch.delattr("course_lib.workbooks.check_notebook.read_notebook")  # no work is begun
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for words in (
        ("check", "00", "--junitxml", place),
        ("report", "runs", "--html", place),
    ):
        code, out, err = course(*words)
        assert (code, out, len(err.splitlines())) == (1, "", 1), err
        assert any(word in err for word in says.split("|")), err


def test_a_full_disk_is_told_before_the_work(course, toy, tmp_path, monkeypatch):
    def full(*given: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.delattr("course_lib.workbooks.check_notebook.read_notebook")
    monkeypatch.setattr("course_lib.core.files.whole_file", full)
    code, out, err = course("check", "00", "--junitxml", "marks.xml")
    assert (code, out) == (1, "")
    assert "No space left on device. Try a path" in err
    monkeypatch.undo()


def test_a_disk_that_fills_up_meanwhile_costs_the_file_and_no_verdict(course, toy):
    code, out, err = course("check", "00", "--junitxml", "/dev/full")
    assert code == 1
    assert "0 of 4" in out
    assert err.startswith("/dev/full: need a file that can be written; got: No space left")


def evil(status: str) -> GradeReport:
    text = "=cmd|' /C calc'!A0\x00\x1b]0;title\x07\x08\ufffe\ud800"
    verdict = Verdict(key=text, status=status, detail=text, note="\r+1")
    return GradeReport(lesson="00_toy", path=f"{text}.ipynb", verdicts=(verdict,))


def test_nothing_from_a_notebook_gets_into_the_file_for_instructors(tmp_path):
    write_junit([evil("wrong")], tmp_path / "marks.xml")
    assert ElementTree.parse(tmp_path / "marks.xml").getroot()[0].get("failures") == "1"
    assert not set((tmp_path / "marks.xml").read_text()) & set("\x00\x07\x08\x1b\ufffe")


@pytest.mark.parametrize("name", ["[red]x[/]\x1b[2J", "[/]", "a\x1b]0;x\x07", "\udcff", "a[/b]"])
def test_nothing_from_a_notebook_controls_the_terminal(course, toy, tmp_path, name):
    path = tmp_path / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(toy.lesson.student.read_bytes())
    code, out, err = course("check", str(path))
    assert (code, err) == (1, "")
    assert "0 of 4 exercises are right." in out
    path.write_text("spoilt")
    code, more, err = course("check", str(path))
    assert (code, more) == (1, "")
    assert "\x1b" not in out + err


def test_a_link_to_a_notebook_is_read(toy, tmp_path):
    (tmp_path / "link.ipynb").symlink_to(toy.lesson.student)
    assert read_notebook(tmp_path / "link.ipynb") == read_notebook(toy.lesson.student)
    with pytest.raises(CourseError, match="a zero byte in its name"):
        read_notebook(Path("a\0b"))


@pytest.mark.parametrize(
    ("data", "outputs_may_be_why"),
    [
        (b'{"cells": [', False),
        (bytes(range(256)), False),
        (b"[]", False),
        (b'{"cells": [{"outputs": ["\\ud800"]}]}', True),
        (b"x" * (LARGEST_BYTES + 1), True),
    ],
    ids=["cut off", "no text", "no notebook", "half a character", "large"],
)
def test_outputs_are_to_be_cleared_only_where_they_may_be_why(tmp_path, data, outputs_may_be_why):
    (tmp_path / "a.ipynb").write_bytes(data)
    with pytest.raises(CourseError) as caught:
        read_notebook(tmp_path / "a.ipynb")
    assert ("Clear Outputs of All Cells" in str(caught.value)) == outputs_may_be_why
