"""What `course grade` prints: a line per submission as it is judged, a table, and why not."""

import signal
from types import SimpleNamespace

import pytest

from course_lib.workbooks.check_notebook import Verdict
from course_tools.commands.grade_command import _is_settled, _progress, _show, _stopped_by_ctrl_c
from course_tools.grading.by_hand import Hand
from course_tools.grading.class_run import add_absent
from course_tools.grading.gradebook import Gradebook
from course_tools.grading.graded import Graded
from course_tools.grading.sandbox import Sandbox
from tests.grading.conftest import Class

POINTS = {"ddp-1": 3.0, "ddp-2": 2.0}
TASK = SimpleNamespace(name="hw1", points=POINTS, digest="hw1 as it is")
LATE = "Too slow here: it ran for more than 60 s."


def graded(student: str, *statuses: str, detail: str = "", **fields) -> Graded:
    verdicts = tuple(
        Verdict(key=key, status=status, detail=detail)
        for key, status in zip(POINTS, statuses, strict=False)
    )
    default = {"path": f"in/{student}.ipynb", "assignment": "hw1", "digest": student}
    return Graded(
        **{"student": student, "verdicts": verdicts, "seconds": 12.3, **default, **fields}
    )


def no_notebook(student: str) -> Graded:
    why = f"not judged: in/{student}.ipynb: need a notebook; this is none (it ends too early)."
    return graded(student, problem=why)


def test_without_a_terminal_there_is_a_line_as_soon_as_each_is_judged(capsys):
    with _progress(TASK, 2) as tell:
        tell(graded("ann", "right", "wrong"))
        assert capsys.readouterr().err == "1 of 2  ann: 1 right, 1 wrong, 12 s\n"
        tell(no_notebook("bob\n"))
        assert capsys.readouterr().err == "2 of 2  bob: not judged, 12 s\n"


def test_ctrl_c_is_told_at_once_and_again_when_all_has_ended(tmp_path, capsys):
    sandbox = Sandbox()

    def interrupted(book):
        with _stopped_by_ctrl_c(sandbox, book, 2):
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                assert capsys.readouterr().err == "stopping: ending what runs\n"
                assert sandbox.stopped.is_set()
                signal.raise_signal(signal.SIGINT)  # a second one while all is being ended

    with Gradebook(tmp_path, POINTS) as book:
        book.add(graded("ann", "right", "right"))
        book.add(graded("bob", problem="not judged: the grading ended before."))
        with pytest.raises(KeyboardInterrupt):
            interrupted(book)
    assert capsys.readouterr().err.startswith("stopped; 1 of 2 submissions are judged.")


def test_a_line_a_student_and_each_sentence_once(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    late = graded("ann", "right", "not judged", detail=LATE)
    by_hand = graded("dan", "right", "not judged", detail=LATE, hand={"ddp-2": Hand(1.0)})
    absent = graded("fay", problem="Nothing was handed in.", path="")
    _show(TASK, [late, no_notebook("bob"), no_notebook("cem"), by_hand, absent])
    table, *why = capsys.readouterr().out.split("\n\n")
    assert [row.split(maxsplit=1)[0] for row in table.splitlines()[1:]] == [
        *("ann", "bob", "cem", "dan", "fay")
    ]
    assert "4 of 5" in table
    assert why == [
        f"ann, ddp-2:\n  {LATE}",
        "bob; cem:\n  not judged: need a notebook; this is none (it ends too early).\n",
    ]
    assert [_is_settled(TASK)(one) for one in (late, no_notebook("bob"), by_hand, absent)] == [
        *(False, False, True, True)
    ]


def test_who_handed_in_nothing_has_a_row_and_who_is_not_listed_is_named(tmp_path):
    with Gradebook(tmp_path, POINTS) as book:
        book.add(graded("ann", "right", "right"))
        book.add(graded("leeann", "right", "wrong"))
        assert add_absent(["ann", "bob", "cem"], TASK, book) == ["leeann"]
        assert [one.student for one in book.rows] == ["ann", "bob", "cem", "leeann"]
        assert add_absent([], TASK, book) == []
    rows = (tmp_path / "gradebook.csv").read_text().splitlines()
    assert rows[2] == "bob,,5,,not judged,,not judged,Nothing was handed in.,"


def test_without_bubblewrap_nothing_runs_unless_it_is_trusted(tmp_path, monkeypatch, course):
    monkeypatch.setenv("PATH", "")
    toy = Class(tmp_path)
    toy.settle(("toy-1", "toy-2"))
    toy.hand_in("ann.ipynb", toy_2="def times(x, y):\n    return x - y\n")
    (toy.submissions / "bob.ipynb").write_text("no notebook")
    words = ("grade", str(toy.submissions), "--assignment", str(toy.home), "--out")
    said = course(*words, str(tmp_path / "grades"), fails=True)
    assert "need bubblewrap" in said
    assert "No isolation" not in said
    assert not (tmp_path / "grades").exists()
    said = course(*words, str(tmp_path / "grades"), "--trust", fails=True)  # bob is not judged
    assert said.count("No isolation: each submission runs as you") == 1
    rows = (tmp_path / "grades/gradebook.csv").read_text().splitlines()
    assert rows[1].startswith("ann,10,20,10,right,0,wrong,")
