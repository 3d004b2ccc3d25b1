"""Answers that never end, end others, or take what they can get: the class is graded all the same.

And files that are no honest notebooks: each has a row, and no points that it did not earn.
"""

import csv
import json
import os
import zipfile

import nbformat
import pytest

from tests.grading.hostile_class import LEFT_OVER, NOTHING, graded_class, statuses

ENDS = {  # what the answer to toy-1 does; why it is wrong
    "exits": ("import os\nos._exit(0)\n", "ended the Python process"),
    "system-exit": ("raise SystemExit\n", "SystemExit"),
    "interrupts": ("raise KeyboardInterrupt\n", "KeyboardInterrupt"),
    "shuts-down": ("get_ipython().kernel.do_shutdown(False)\nget_ipython().ask_exit()\n", ""),
    "asks": ("name = input()\n", "StdinNotImplementedError"),
    "kills-parent": ("import os\nos.kill(os.getppid(), 9)\n", "ended the Python process"),
    "kills-all": ("import os\nos.kill(-1, 9)\n", "ended the Python process"),
    "forks": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n",
        "more processes",
    ),
    "takes-memory": (
        "kept = []\nwhile True:\n    kept.append(bytearray(b'x' * 2**28))\n",
        "memory",
    ),
    "prints": ("while True:\n    print('x' * 1000)\n", "It printed without end"),
    "loops": (
        "while True:\n    try:\n        while True:\n            pass\n"
        "    except KeyboardInterrupt:\n        pass\n",
        "",
    ),
    "stops-parent": ("import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nwhile True: pass\n",
                     "the whole run was ended"),
    "fills-disk": (
        "import itertools\nfor place in ('/out', '/tmp', '/dev/shm', '/home/learner'):\n"
        "    try:\n        with open(f'{place}/full', 'wb') as file:\n"
        "            for _ in range(200):\n                file.write(bytes(2**20))\n"
        "    except OSError:\n        pass\nimport os\nos._exit(1)\n",
        "",
    ),
}  # fmt: skip
LEAVES = {  # what stays behind, or would harm the next: each answer is right but for that
    "left-over": (
        "import subprocess\n"
        f"subprocess.Popen(['sleep', '{LEFT_OVER}'], start_new_session=True)\n"
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(10**6,)).start()\n"
    ),
    "start-up": (
        "import os\nfrom pathlib import Path\n"
        "for home in (Path.home(), Path('/root')):\n"
        "    try:\n        place = home / '.ipython/profile_default/startup'\n"
        "        place.mkdir(parents=True, exist_ok=True)\n"
        "        (place / '00.py').write_text('raise SystemExit')\n"
        "    except OSError:\n        pass\n"
    ),
    "rewrites": (
        "import course_lib.checks\nfrom pathlib import Path\n"
        "for path in [*Path('/course').rglob('*.py'), *Path('/work').rglob('*')]:\n"
        "    try:\n        path.write_text('raise SystemExit')\n"
        "    except OSError:\n        continue\n    raise RuntimeError(path)\n"
    ),
}
RIGHT = "def add(x, y):\n    return x + y\n"


@pytest.mark.parametrize("part", [0, 1, 2])
def test_what_does_not_end_by_itself_is_ended(small_class, tmp_path, part):
    mine = dict(list(ENDS.items())[part::3])
    for student, (text, _) in mine.items():
        small_class.hand_in(f"{student}.ipynb", **{**NOTHING, "toy_1": text})
    found = graded_class(small_class, tmp_path / "grades", timeout_s=15)
    for student, (_, says) in mine.items():
        assert statuses(found[student]) == ["wrong", "not done", "not done"], found[student]
        assert says in found[student].verdicts[0].detail, found[student]


def test_what_is_left_behind_is_ended_and_harms_nobody(small_class, tmp_path):
    for student, text in LEAVES.items():
        small_class.hand_in(f"{student}.ipynb", **{**NOTHING, "toy_1": text + RIGHT})
    found = graded_class(small_class, tmp_path / "grades")
    for student in LEAVES:
        assert statuses(found[student]) == ["right", "not done", "not done"], found[student]


def test_an_answer_that_ends_the_run_leaves_the_others_of_its_student_theirs(small_class, tmp_path):
    small_class.hand_in("eve.ipynb", toy_2="import os\nos._exit(0)\n")
    assert statuses(graded_class(small_class, tmp_path / "grades")["eve"]) == [
        "right",
        "wrong",
        "right",
    ]


def changed(path, change):
    """Change a notebook that was handed in, as plain JSON."""
    notebook = json.loads(path.read_text())
    change(notebook)
    path.write_text(json.dumps(notebook))


def test_notebooks_that_were_meddled_with_get_what_they_earned(small_class, tmp_path):
    wrong = {"toy_1": "def add(x, y):\n    return x - y\n"}

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
    found = graded_class(small_class, tmp_path / "grades")
    assert {name: statuses(found[name]) for name in ("forged", "reversed", "twice", "renamed")} == {
        "forged": ["wrong", "right", "right"],
        "reversed": ["wrong", "right", "right"],
        "twice": ["twice", "right", "right"],
        "renamed": ["wrong", "missing", "right"],
    }
    assert statuses(found["deleted"]) == statuses(found["older"]) == ["missing", "right", "right"]
    assert "this is the notebook of ddp" in found["other"].problem
    assert "this is no notebook of it" in found["anonymous"].problem


def test_every_file_has_a_row_and_none_stops_the_class(small_class, tmp_path):
    place = small_class.submissions
    ann = small_class.hand_in("ann.ipynb")
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
    strange = '=HYPERLINK("http:x")\x1b[2J\nann'
    small_class.hand_in(
        f"{strange}/toy.ipynb", **{**NOTHING, "toy_1": f"raise ValueError({strange!r})"}
    )
    found = graded_class(small_class, tmp_path / "grades")
    judged = {"ann", "zoe", "long", "nested", strange}
    assert {name for name, graded in found.items() if not graded.problem} == judged
    assert all(found[name].problem.startswith("not judged: ") for name in found.keys() - judged)
    assert "characters" in found["long"].verdicts[0].detail
    assert statuses(found["nested"])[0] == statuses(found[strange])[0] == "wrong"
    assert not list(tmp_path.rglob("climbed.txt"))
    written = (tmp_path / "grades/gradebook.csv").read_text()
    assert written.isprintable() or set(written) - set("\r\n") == set(
        filter(str.isprintable, written)
    )
    with (tmp_path / "grades/gradebook.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found)
    assert not any(field.startswith(("=", "+", "-", "@")) for row in rows for field in row.values())
    assert nbformat.read(ann, 4).cells[0].source == RIGHT
