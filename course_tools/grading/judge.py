"""Judge what was observed in the sandbox, in a process that never runs the learner's code.

`python -m course_tools.grading.judge` reads a question a line from stdin, {"key": ...,
"folder": ..., "out": ..., "right": ..., "hidden": ...}, and answers each with a line,
{"status": ..., "detail": ..., "parts": ...}. `Judge` keeps one such process, and starts another
where it hangs or ends.
"""

import json
import os
import re
import resource
import select
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import IO, Any

from course_lib.checks.cases import Cases
from course_lib.checks.exercise import CheckFailed, NotDone, find_exercise
from course_lib.checks.on_ranks import Run
from course_lib.checks.right_answer import at_work_in
from course_lib.core import CourseError
from course_lib.workbooks.assignment import hidden_exercises
from course_lib.workbooks.check_notebook import Verdict, told
from course_tools.grading.plain_data import HIDDEN, read_data

LIMIT_S = 120.0  # the slowest takes 3 s
ENDED = "What it returned cannot be judged: the judge ended."
LATE = f"Too slow here: it took more than {LIMIT_S:g} s to judge what it returned."
MOST_BYTES = 4 * 2**30  # of memory: a small file may name values that take any amount of it
MOST_TEXT = 10_000
SHOWN = 300
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def judge(key: str, folder: Path, out: Path, right: Path, *, hidden: bool = False) -> Verdict:
    """Return the verdict on what was observed of an exercise, which lies in the folder `out`.

    folder  the assignment as it is for the student
    right   where what was observed of the right answer lies
    hidden  judge the hidden cases
    """
    try:
        with at_work_in(folder):
            detail = _judged(key, folder, out, right, hidden=hidden)
        return Verdict(key=key, status="right", detail=_cut(told(key, detail)))
    except NotDone as error:
        return Verdict(key=key, status="not done", detail=_cut(told(key, str(error))))
    except CheckFailed as error:
        detail = _cut(told(key, str(error)))
        parts = {} if hidden else _shares(key, folder, out)
        return Verdict(key=key, status="wrong", detail=detail, parts=parts)
    except Exception as error:
        what = str(error) if isinstance(error, CourseError) else f"{type(error).__name__}: {error}"
        detail = f"The check cannot use what your code returned ({what[:SHOWN]})."
        return Verdict(key=key, status="wrong", detail=detail)


def _judged(key: str, folder: Path, out: Path, right: Path, *, hidden: bool) -> str:
    exercise = hidden_exercises(folder)[key] if hidden else find_exercise(key)
    name = f"{HIDDEN if hidden else ''}{key}.pt"
    seen = read_data(out / name)
    detail = exercise.check.judge(seen, exercise)
    whole = (right / name).exists() and not isinstance(exercise.check, Cases)
    if whole and runs_of(seen) != runs_of(read_data(right / name)):
        raise CourseError("need what every run shows; some of it is missing, or of another run")
    return detail


def _shares(key: str, folder: Path, out: Path) -> dict[str, float]:
    """Return what holds of each part of a wrong answer; none where the check tells no parts."""
    with at_work_in(folder), suppress(Exception):
        exercise = find_exercise(key)
        if shares := getattr(exercise.check, "shares", None):
            return shares(read_data(out / f"{key}.pt"), exercise.right_values())
    return {}


def runs_of(seen: list[Any]) -> list[Any]:
    """Return what has to be the same for every right answer: which runs, and their labels."""
    found = list[Any]()
    for one in seen:
        if isinstance(one, Run):
            ranks = [[(label, _kind(it)) for label, it in rank.items()] for rank in one.by_rank]
            found.append((one.world_size, ADDRESS.sub("", repr(one.options)), ranks))
        else:
            found.append(_kind(one))
    return found


def _kind(seen: Any) -> str:
    """Return the class of a record; numbers may be of several kinds in right answers."""
    return type(seen).__name__ if is_dataclass(seen) else ""


def _cut(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} (cut)"


def main() -> None:
    """Answer one question a line until stdin ends."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    for line in sys.stdin:
        asked = json.loads(line)
        folder, out, right = (Path(asked[name]) for name in ("folder", "out", "right"))
        verdict = judge(asked["key"], folder, out, right, hidden=asked["hidden"])
        told = {"status": verdict.status, "detail": verdict.detail, "parts": {**verdict.parts}}
        print(json.dumps(told), flush=True)


@dataclass
class Judge:
    """A process that judges; it is started when it is first asked."""

    process: subprocess.Popen[str] | None = None

    def verdict(
        self, key: str, folder: Path, out: Path, right: Path, *, hidden: bool = False
    ) -> Verdict:
        """Ask for a verdict: `wrong` where it ends the process, `not judged` after LIMIT_S."""
        places = {"folder": str(folder), "out": str(out), "right": str(right)}
        asked = {"key": key, **places, "hidden": hidden}
        stdin, stdout = self._pipes()
        late, ended = (
            {"status": "not judged", "detail": LATE},
            {"status": "wrong", "detail": ENDED},
        )
        try:
            stdin.write(json.dumps(asked) + "\n")
            stdin.flush()
            ready, _, _ = select.select([stdout], [], [], LIMIT_S)
            answer: dict[str, Any] = json.loads(stdout.readline()) if ready else late
        except (OSError, ValueError):
            answer = ended
        if answer in (late, ended):
            self.close()
        return Verdict(key=key, **answer)

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "course_tools.grading.judge"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the grader, which then closes this
            )
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("judge: its process has no pipes")
        return stdin, stdout

    def kill(self) -> None:
        """End the process, also from another thread: the verdict that it works on is `wrong`."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """End the process."""
        self.kill()
        if self.process is not None:
            with suppress(OSError):
                self.process.communicate()
            self.process = None


if __name__ == "__main__":
    main()
