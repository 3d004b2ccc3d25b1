"""Answers that never end, end others, or take what they can get: the class is graded all the same.

And files that are no honest notebooks: each has a row, and no points that it did not earn. All are
in one class; of the answers that do not end, one of each kind. `make faults` tries them all.
"""

import csv
import json
import os
import zipfile

import nbformat
import pytest

from course_tools.grading import class_run
from tests.grading.conftest import Class
from tests.grading.hostile_class import NOTHING, graded_class, one_of_each, statuses
from tests.grading.hostile_runs import ENDS, LEAVES, are_ended, hand_in_all

RIGHT = "def add(x, y):\n    return x + y\n"
STRANGE = '=HYPERLINK("http:x")\x1b[2J\nann'
NO_END = one_of_each(ENDS)
MEDDLED = (
    *("forged", "reversed", "twice", "renamed"),
    *("deleted", "other", "older", "anonymous"),
)


@pytest.fixture(scope="module")
def mixed_class(tmp_path_factory, proofs):
    """A class of all that is here, before it is graded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(class_run, "proved", proofs.proved)
        yield Class(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def found(mixed_class):
    """How everybody in it is graded."""
    hand_in_all(mixed_class, NO_END)
    for student, text in LEAVES.items():
        mixed_class.hand_in(f"{student}.ipynb", **{**NOTHING, "toy_1": text + RIGHT})
    mixed_class.hand_in("eve.ipynb", toy_2="import os\nos._exit(0)\n")
    hand_in_meddled(mixed_class)
    hand_in_strange(mixed_class)
    return graded_class(mixed_class, mixed_class.folder / "grades")


def changed(path, change):
    """Change a notebook that was handed in, as plain JSON."""
    notebook = json.loads(path.read_text())
    change(notebook)
    path.write_text(json.dumps(notebook))


def hand_in_meddled(small_class):
    """Hand in notebooks whose first answer is wrong, and that were changed by hand."""
    wrong = {"toy_1": "def add(x, y):\n    return x - y\n", "toy_3": ""}

    def forge(notebook):
        output = {"output_type": "stream", "name": "stdout", "text": "toy-1: right. Sums.\n"}
        for cell in notebook["cells"]:
            cell["outputs"] = [output]
            cell["metadata"]["tags"].append("nbval-skip")
        notebook["cells"][1]["source"] = "print('toy-1: right. Sums.')"

    def twice(notebook):
        notebook["cells"].append(notebook["cells"][0] | {"id": "again"})

    def renamed(notebook):
        notebook["cells"][2]["metadata"]["exercise"] = "toy-1"
        notebook["cells"][0]["metadata"]["exercise"] = "toy-9"

    def other(notebook):
        notebook["metadata"]["course"]["lesson"] = "ddp"

    def older(notebook):
        notebook["metadata"]["course"]["stubs"] = {"toy-1": "00000000"}
        notebook["cells"][0]["metadata"] |= {"exercise": ["toy-1"], "tags": "exercise"}

    for student, change in (
        ("forged", forge),
        ("reversed", lambda notebook: notebook["cells"].reverse()),
        ("twice", twice),
        ("renamed", renamed),
        ("deleted", lambda notebook: notebook["cells"].__delitem__(slice(0, 2))),
        ("other", other),
        ("older", older),
        ("anonymous", lambda notebook: notebook["metadata"].clear()),
    ):
        changed(small_class.hand_in(f"{student}.ipynb", **wrong), change)


def hand_in_strange(small_class):
    """Hand in files that are no notebooks, or strange ones."""
    place = small_class.submissions
    ann = small_class.hand_in("ann.ipynb", **{**NOTHING, "toy_1": RIGHT})
    (place / "no-format.ipynb").write_text('{"cells": [], "metadata": {}}')
    (place / "deep.ipynb").write_text("[" * 200_000)
    (place / "empty.ipynb").write_bytes(b"")
    (place / "binary.ipynb").write_bytes(bytes(range(256)))
    (place / "half.ipynb").write_text(ann.read_text().replace("x + y", "x + '\\ud800'"))
    with (place / "large.ipynb").open("wb") as file:
        file.truncate(100 * 2**20)
    (place / "linked.ipynb").symlink_to(ann)
    with zipfile.ZipFile(place / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy.ipynb", bytes(100 * 2**20))
    with zipfile.ZipFile(place / "climbs.zip", "w") as archive:
        archive.writestr("../../climbed.txt", "x")
        archive.writestr("../../toy.ipynb", "{}")
    (place / "no.zip").write_bytes(b"PK")
    (place / "folder.ipynb").mkdir()
    os.mkfifo(place / "pipe.ipynb")
    small_class.hand_in("long.ipynb", **{**NOTHING, "toy_1": f"{RIGHT}#{'x' * 200_000}\n"})
    small_class.hand_in("nested.ipynb", **{**NOTHING, "toy_1": f"add = {'-' * 90_000}1\n"})
    small_class.hand_in(
        f"{STRANGE}/toy.ipynb", **{**NOTHING, "toy_1": f"raise ValueError({STRANGE!r})"}
    )


def test_what_does_not_end_by_itself_is_ended(found):
    are_ended(found, NO_END)


def test_what_is_left_behind_is_ended_and_harms_nobody(found):
    for student in LEAVES:
        assert statuses(found[student]) == ["right", "not done", "not done"], found[student]


def test_an_answer_that_ends_the_run_leaves_the_others_of_its_student_theirs(found):
    assert statuses(found["eve"]) == ["right", "wrong", "right"], found["eve"]


def test_notebooks_that_were_meddled_with_get_what_they_earned(found):
    assert {name: statuses(found[name]) for name in ("forged", "reversed", "twice", "renamed")} == {
        "forged": ["wrong", "right", "not done"],
        "reversed": ["wrong", "right", "not done"],
        "twice": ["twice", "right", "not done"],
        "renamed": ["wrong", "missing", "not done"],
    }
    assert statuses(found["deleted"]) == ["missing", "right", "not done"]
    assert statuses(found["older"]) == ["wrong", "right", "not done"]
    assert "lost its mark" in found["older"].verdicts[0].note
    assert statuses(found["anonymous"]) == ["wrong", "right", "not done"]
    assert "this is the notebook of ddp" in found["other"].problem


def test_every_file_has_a_row_and_none_stops_the_class(mixed_class, found):
    judged = {"ann", "zoe", "eve", "long", "nested", STRANGE, *NO_END, *LEAVES, *MEDDLED}
    judged -= {"other"}
    assert {name for name, graded in found.items() if not graded.problem} == judged
    assert all(found[name].problem.startswith("not judged: ") for name in found.keys() - judged)
    assert "characters" in found["long"].verdicts[0].detail
    assert statuses(found["nested"])[0] == statuses(found[STRANGE])[0] == "wrong"
    assert not list(mixed_class.folder.rglob("climbed.txt"))
    written = (mixed_class.folder / "grades/gradebook.csv").read_text()
    assert written.isprintable() or set(written) - set("\r\n") == set(
        filter(str.isprintable, written)
    )
    with (mixed_class.folder / "grades/gradebook.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found)
    assert not any(field.startswith(("=", "+", "-", "@")) for row in rows for field in row.values())
    assert nbformat.read(mixed_class.submissions / "ann.ipynb", 4).cells[0].source == RIGHT
