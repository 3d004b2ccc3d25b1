"""Judge what was observed in the sandbox, in a process that never runs the learner's code.

`python -m course_lib.grading.judge` reads a question a line from stdin, {"key": ..., "folder": ...,
"out": ..., "hidden": ...}, and answers each with a line, {"status": ..., "detail": ...}. `Judge`
keeps one such process, and starts another where it hangs or ends.
"""

import json
import os
import select
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from course_lib.checks.exercise import Check, CheckFailed, NotDone, find_exercise
from course_lib.checks.right_answer import at_work_in
from course_lib.core import CourseError
from course_lib.grading.assignment import hidden_exercises
from course_lib.grading.plain_data import read_data
from course_lib.notebooks.grading import Verdict, told

HIDDEN = "hidden-"  # before the key, in the name of the file
LIMIT_S = 120.0  # the slowest takes 3 s
ENDED = "What it returned cannot be judged: the judge ended, or took too long."
SHOWN = 300


def judge(key: str, folder: Path, out: Path, *, hidden: bool = False) -> Verdict:
    """Return the verdict on what was observed of an exercise, which lies in the folder `out`.

    folder  the assignment as it is for the student
    hidden  judge the hidden cases
    """
    try:
        with at_work_in(folder):
            detail = _judged(key, folder, out, hidden=hidden)
        return Verdict(key=key, status="right", detail=told(key, detail))
    except NotDone as error:
        return Verdict(key=key, status="not done", detail=told(key, str(error)))
    except CheckFailed as error:
        return Verdict(key=key, status="wrong", detail=told(key, str(error)))
    except Exception as error:
        what = str(error) if isinstance(error, CourseError) else f"{type(error).__name__}: {error}"
        detail = f"The check cannot use what your code returned ({what[:SHOWN]})."
        return Verdict(key=key, status="wrong", detail=detail)


def _judged(key: str, folder: Path, out: Path, *, hidden: bool) -> str:
    exercise = hidden_exercises(folder)[key] if hidden else find_exercise(key)
    seen = read_data(out / f"{HIDDEN if hidden else ''}{key}.pt")
    if isinstance(exercise.check, Check):
        return exercise.check.judge(seen, exercise)
    if not isinstance(seen, str):
        raise CourseError("need one line of text")
    return seen


def main() -> None:
    """Answer one question a line until stdin ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        folder, out = Path(asked["folder"]), Path(asked["out"])
        verdict = judge(asked["key"], folder, out, hidden=asked["hidden"])
        print(json.dumps({"status": verdict.status, "detail": verdict.detail}), flush=True)


@dataclass
class Judge:
    """A process that judges; it is started when it is first asked."""

    process: subprocess.Popen[str] | None = None

    def verdict(self, key: str, folder: Path, out: Path, *, hidden: bool = False) -> Verdict:
        """Ask for a verdict; one that takes LIMIT_S, or ends the process, is `wrong`."""
        asked = {"key": key, "folder": str(folder), "out": str(out), "hidden": hidden}
        stdin, stdout = self._pipes()
        try:
            stdin.write(json.dumps(asked) + "\n")
            stdin.flush()
            ready, _, _ = select.select([stdout], [], [], LIMIT_S)
            answer: dict[str, Any] = json.loads(stdout.readline()) if ready else {}
        except (OSError, ValueError):
            answer = {}
        if not answer:
            self.close()
            answer = {"status": "wrong", "detail": ENDED}
        return Verdict(key=key, **answer)

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "course_lib.grading.judge"],
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

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            with suppress(OSError):
                self.process.communicate()
            self.process = None


if __name__ == "__main__":
    main()
