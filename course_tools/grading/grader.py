"""Grade one submission: run its answers in the sandbox, judge what was observed outside of it."""

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from nbformat import NotebookNode

from course_lib.checks.expect import SYMPTOMS
from course_lib.checks.right_answer import SETTINGS
from course_lib.core import CourseError
from course_lib.core.files import parse_json, read_text
from course_lib.ranks.fork_server import LATER
from course_lib.workbooks.check_notebook import Verdict, first_look, verdict_of
from course_lib.workbooks.lessons import exercise_cells, short_hash, write_notebook
from course_lib.workbooks.nbval_run import STOPPED_S, Outcome
from course_tools.grading.bare_course import PACKAGES
from course_tools.grading.graded import Graded
from course_tools.grading.inside import OUTCOMES
from course_tools.grading.judge import ENDED as JUDGE_ENDED
from course_tools.grading.judge import Judge
from course_tools.grading.observing import FOLDER as OUT_FOLDER
from course_tools.grading.part_points import HIDDEN_PART, with_points
from course_tools.grading.plain_data import HIDDEN
from course_tools.grading.sandbox import Ended, Sandbox
from course_tools.grading.submission import HandedIn
from course_tools.grading.task import GIVEN, GradingTask
from course_tools.grading.watchdog import RunLimits

MOST_TEXT = 100_000  # characters of an answer
MOST_OUTCOMES = 8 * 2**20
START_S = 45  # for Python, nbval and the kernel to start, on a busy machine
ENDS_RUN = ("died", "printing", "memory")  # outcomes of a cell behind which none runs
ENDED_BY = {
    "memory": "It took more memory than the {gib:g} GiB that an answer may take.",
    "processes": "It started more processes than the {processes} that an answer may start.",
    "output": "It printed without end.",
    "disk": "It wrote more than the {mib:g} MiB that an answer may write.",
}
ENDED_ITSELF = "Your code ended the Python process."
NOT_STOPPED = (
    "Too slow here: it could not be stopped after {timeout_s:g} s; the whole run was ended."
)
AGAIN = "{detail}\nIt was tried twice, the second time alone."
HANG, DIED = SYMPTOMS["hang"], SYMPTOMS["died"]
TOO_LONG = f"It has more than the {MOST_TEXT:,} characters that an answer may have."
NO_VALUES = "The check in the notebook saw no values: it was not run, or what it saw was removed."
MACHINE = "the lesson's own cells failed on this machine ({why})"
SLOW_CELLS = "they ran for longer than a cell may. Is it too slow? Try --timeout or --jobs 1"


@dataclass(frozen=True)
class RunGroup:
    """Exercises that run together, and the folder with their bare copy of the course.

    What was observed of right answers comes to `right` in it, which no answer can read.
    """

    keys: tuple[str, ...]
    course: Path

    @property
    def right(self) -> Path:
        """The folder with what was observed of right answers."""
        return self.course / "right"


class Turns:
    """Turns of several graders: `count` run at the same time, or one of them alone."""

    def __init__(self, count: int) -> None:
        self.count, self._free, self._next = count, threading.Semaphore(count), threading.Lock()

    @contextmanager
    def taken(self, *, alone: bool) -> Iterator[None]:
        """Wait for a turn, or until no other grader runs; it ends with the block."""
        count = self.count if alone else 1
        with self._next:  # whoever waits to be alone is next
            for _ in range(count):
                self._free.acquire()
        try:
            yield
        finally:
            self._free.release(count)


@dataclass
class Grader:
    """Grades submissions of one task, one after the other; `close` ends its judge.

    groups     the exercises in groups; several graders share the list (`class_run.proved` fills it)
    timeout_s  seconds that a cell may run
    turns      of all graders: a run that may be the machine's fault is repeated alone
    """

    task: GradingTask
    sandbox: Sandbox
    groups: list[RunGroup]
    timeout_s: float
    turns: Turns
    limits: RunLimits = field(default_factory=RunLimits)
    judge: Judge = field(default_factory=Judge)

    def grade(self, submission: HandedIn, digest: str) -> Graded:
        """Return the verdicts on a submission; one that cannot be read has a problem instead."""
        start_s = time.monotonic()
        graded = Graded(
            student=submission.student,
            path=str(submission.path),
            assignment=self.task.name,
            verdicts=(),
            digest=digest,
            notes=tuple(f"Handed in, too, and not graded: {name}." for name in submission.besides),
        )
        try:
            notebook = submission.notebook(self.task.is_own)
            self.task.demand_own(notebook, submission.path)
            graded = self.grade_notebook(notebook, graded)
        except CourseError as error:
            graded = replace(graded, problem=f"not judged: {error}")
        except Exception as error:  # no file may end the grading of the others
            graded = replace(graded, problem=f"not judged: {type(error).__name__}: {error}")
        return replace(graded, seconds=round(time.monotonic() - start_s, 2))

    def grade_notebook(self, notebook: NotebookNode, graded: Graded) -> Graded:
        """Return the verdicts on the exercises of a notebook."""
        notebook, found = self.task.with_marks(notebook)
        stubs = {key: short_hash(text) for key, text in self.task.stubs.items()}
        built = {"lesson": self.task.name, "stubs": stubs}
        verdicts = {key: first_look(key, notebook, built) for key in self.task.checks}
        cells = exercise_cells(notebook)
        written = {k: cells[k][0].source for k, v in verdicts.items() if v.status == "open"}
        for key in [key for key, text in written.items() if len(text) > MOST_TEXT]:
            del written[key]
            verdicts[key] = Verdict(key=key, status="wrong", detail=TOO_LONG)
        verdicts |= self.verdicts(written, graded.student)
        notes = self.task.check_notes(notebook)
        told = (
            replace(one, note=" ".join(filter(None, [found.get(key), notes.get(key)])))
            for key, one in verdicts.items()
        )
        told = (with_points(one, self.task.assignment) for one in told)
        return replace(graded, verdicts=tuple(told), code=written)

    def verdicts(self, written: Mapping[str, str], student: str) -> dict[str, Verdict]:
        """Return the verdicts on these answers.

        One that seems to have ended, or to have waited too long, is run once more, alone: it may
        have been the machine. A time limit is never a wrong answer.

        Raises: CourseError where the lesson's own cells fail
        """
        found: dict[str, Verdict] = {}
        for group in self.groups:
            own = {key: text for key, text in written.items() if key in group.keys}
            with self.turns.taken(alone=False):
                found |= self.verdicts_in(group, own, student)
            for key in [key for key in own if _may_be_the_machine(found[key])]:
                with self.turns.taken(alone=True):
                    again = self.verdicts_in(group, {key: own[key]}, student)[key]
                twice = AGAIN.format(detail=again.detail)
                found[key] = replace(again, detail=twice) if _is_open(again) else again
        return found

    def verdicts_in(
        self, group: RunGroup, written: Mapping[str, str], student: str
    ) -> dict[str, Verdict]:
        """Return the verdicts on answers of one group.

        An answer that ends the run is left out when those behind it run in another one. Without a
        student, they are the task's own solutions, and what is observed of them is kept.

        Raises: CourseError where the lesson's own cells fail
        """
        found: dict[str, Verdict] = {}
        while left := {key: text for key, text in written.items() if key not in found}:
            found |= self._one_run(group, left, student)
        return found

    def _one_run(
        self, group: RunGroup, written: Mapping[str, str], student: str, *, is_first: bool = True
    ) -> dict[str, Verdict]:
        with (
            self.task.folder_of(student) as folder,
            tempfile.TemporaryDirectory(prefix="grading-") as name,
        ):
            out = Path(name, "out")
            ended = self._run(group, self.task.merged(written), folder, Path(name))
            outcomes = _outcomes(out)
            if is_first and _why(outcomes, ended):
                self._demand_given(group, written, folder)
                return self._one_run(group, written, student, is_first=False)
            if _has_run_nothing(out) or _why(outcomes, ended) == SLOW_CELLS:
                raise CourseError(MACHINE.format(why=_why(outcomes, ended)))
            if not student:
                shutil.copytree(out, group.right, dirs_exist_ok=True)
            seen = {key: self._seen(key, folder, out, group.right, outcomes) for key in written}
        verdicts = {key: one for key, one in seen.items() if one}
        if late := [key for key, one in verdicts.items() if _is_open(one)]:
            behind = list(written)[list(written).index(late[0]) + 1 :]  # an interrupt may spoil it
            return {k: v for k, v in verdicts.items() if k not in behind or v.status == "right"}
        culprit = next((key for key in written if key not in verdicts), None)
        is_known = verdicts and any(one.how in ENDS_RUN for one in outcomes.values())
        if culprit and not is_known:
            verdicts[culprit] = self._ended_by(culprit, ended)
        return verdicts

    def _demand_given(self, group: RunGroup, written: Mapping[str, str], folder: Path) -> None:
        """Run the lesson's own cells without the answers, which could have made them fail.

        Raises: CourseError where they fail
        """
        with tempfile.TemporaryDirectory(prefix="grading-") as name:
            notebook = self.task.merged(written)
            notebook.cells = notebook.cells[:1]
            ended = self._run(group, notebook, folder, Path(name))
            if why := _why(_outcomes(Path(name, "out")), ended):
                raise CourseError(MACHINE.format(why=why))

    def _run(self, group: RunGroup, notebook: NotebookNode, folder: Path, scratch: Path) -> Ended:
        """Run a notebook in the sandbox, which shows it nothing that judges; fill scratch/out."""
        work, out = scratch / "work", scratch / "out"
        out.mkdir()
        work.mkdir(mode=0o755)
        write_notebook(notebook, work / "merged.ipynb")
        if (folder / SETTINGS).exists():
            shutil.copy(folder / SETTINGS, work)
        for part in ("hidden.py", "checks"):
            if (group.course / part).is_dir():
                shutil.copytree(group.course / part, work / part)
            elif (group.course / part).exists():
                shutil.copy(group.course / part, work)
        at = self.sandbox.at
        here = at(work, "/work")
        wall_s = START_S + len(notebook.cells) * (self.timeout_s + STOPPED_S)
        wants_ranks = any(f"check-{key}" in _ids(notebook) for key in self.task.on_ranks)
        later = {} if wants_ranks else {LATER: "1"}
        results = at(out, "/out")
        words = [f"{here}/merged.ipynb", f"{self.timeout_s:g}", results]
        return self.sandbox.run(
            [sys.executable, "-m", "course_tools.grading.inside", *words],
            work=work,
            out=out,
            read_only={group.course / one: Path("/course", one) for one in PACKAGES},
            limits=replace(self.limits, wall_s=wall_s),
            env={
                "PYTHONPATH": at(group.course, "/course"),
                OUT_FOLDER: results,
                "COURSE_ASSIGNMENT": here,
                **later,
            },
        )

    def _seen(
        self, key: str, folder: Path, out: Path, right: Path, outcomes: Mapping[str, Outcome]
    ) -> Verdict | None:
        """Return the verdict on an exercise; None where the run ended before its check did.

        Raises: CourseError where the grading is being stopped
        """
        if self.sandbox.stopped.is_set():
            raise CourseError("the grading was stopped")
        unseen = self._unseen(key, outcomes)
        if not (out / f"{key}.pt").exists():
            return unseen
        is_late = unseen is None or _is_open(unseen)
        verdict = self.judge.verdict(key, folder, out, right)
        if verdict.status == "right" and key in self.task.hidden:
            verdict = Verdict(key=key, status="wrong", detail=NO_VALUES)
            if (out / f"{HIDDEN}{key}.pt").exists():
                verdict = self.judge.verdict(key, folder, out, right, hidden=True)
                if verdict.status != "right":
                    shown = dict.fromkeys(self.task.assignment.parts.get(key, ()), 1.0)
                    parts = shown | {HIDDEN_PART: 0.0}
                    verdict = replace(verdict, detail=_hidden(verdict), parts=parts)
        return unseen if is_late and verdict.status == "wrong" else verdict

    def _unseen(self, key: str, outcomes: Mapping[str, Outcome]) -> Verdict | None:
        """Return the verdict where the check left no values; None where the run ended before."""
        if {f"exercise-{key}", f"check-{key}"}.isdisjoint(outcomes):
            return None
        if f"check-{key}" not in outcomes and outcomes[f"exercise-{key}"].how == "passed":
            return None
        verdict = verdict_of(key, dict(outcomes), self.timeout_s)
        if verdict.status == "right":
            return Verdict(key=key, status="wrong", detail=NO_VALUES)
        return verdict

    def _ended_by(self, key: str, ended: Ended) -> Verdict:
        if ended.how == "time":
            detail = NOT_STOPPED.format(timeout_s=self.timeout_s)
            return Verdict(key=key, status="not judged", detail=detail)
        gib, mib = self.limits.memory_bytes / 2**30, self.limits.disk_bytes / 2**20
        told = ENDED_BY.get(ended.how, ENDED_ITSELF)
        detail = told.format(gib=gib, mib=mib, processes=self.limits.processes)
        return Verdict(key=key, status="wrong", detail=detail)

    def close(self) -> None:
        """End the judge."""
        self.judge.close()


def _ids(notebook: NotebookNode) -> set[str]:
    return {cell.id for cell in notebook.cells}


def _may_be_the_machine(verdict: Verdict) -> bool:
    """Return whether an honest answer may get this verdict on a machine that has too much to do."""
    seems = (ENDED_ITSELF, JUDGE_ENDED, HANG, DIED)
    is_odd = verdict.status == "wrong" and any(text in verdict.detail for text in seems)
    return is_odd or _is_open(verdict)


def _is_open(verdict: Verdict) -> bool:
    return verdict.status == "not judged"


def _hidden(verdict: Verdict) -> str:
    return f"In a case that the notebook does not show: {verdict.detail}"


def _outcomes(out: Path) -> dict[str, Outcome]:
    """Return the outcomes that the run wrote down; what is not one of these is left out."""
    path, need = out / OUTCOMES, "the outcomes of a run"
    try:
        found = parse_json(read_text(path, need, most_bytes=MOST_OUTCOMES), path, need)
        return {
            name: Outcome(**{word: str(text) for word, text in values.items()})
            for name, values in found.items()
        }
    except (CourseError, ValueError, TypeError, AttributeError):
        return {}


def _has_run_nothing(out: Path) -> bool:
    """Return whether the run wrote down that it had started, and nothing after that."""
    path = out / OUTCOMES
    return path.exists() and path.stat().st_size == len("{}")


def _why(outcomes: Mapping[str, Outcome], ended: Ended) -> str:
    """Return why the lesson's own cells failed; empty where they did not."""
    outcome = outcomes.get(GIVEN)
    if outcome is None:
        return f"the run ended before them: {ended.how}, exit code {ended.code}"
    if outcome.how == "timeout":
        return SLOW_CELLS
    why = f"{outcome.name or outcome.how}: {outcome.message[:200]}".rstrip(": ")
    return "" if outcome.how == "passed" else why
