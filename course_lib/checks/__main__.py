"""Prove a check: `python -m course_lib.checks ddp-2` sends the right answer and every wrong one.

A lesson's name (`ddp`) means all its exercises; `--table` prints one line an exercise, `--show` the
messages that a learner reads. `--freeze` writes what answers on ranks show of a lesson to its
`seen.json.gz`: so at home, only the learner's answer runs.
"""

import argparse
import contextlib
import gzip
import io
import json
import sys
import time
from collections.abc import Iterator, Sequence

from course_lib.checks.cases import values_of
from course_lib.checks.exercise import (
    CheckFailed,
    Exercise,
    Wrong,
    exercises_of,
    find_exercise,
)
from course_lib.checks.judge import ByExample
from course_lib.checks.right_answer import made_of, seen_file
from course_lib.core import CourseError


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove the exercises that are named; return 0 if every check does what it should."""
    parser = argparse.ArgumentParser(prog="python -m course_lib.checks", description=__doc__)
    parser.add_argument("keys", nargs="+", metavar="KEY", help="ddp-2, or ddp for all of a lesson")
    parser.add_argument("--show", action="store_true", help="print the messages")
    parser.add_argument("--table", action="store_true", help="right answers only, with seconds")
    parser.add_argument("--freeze", action="store_true", help="write a lesson's seen.json.gz")
    options = parser.parse_args(arguments)
    try:
        if options.freeze:
            for lesson in options.keys:
                freeze(lesson)
            return 0
        found = [one for key in options.keys for one in exercises_of(key) or (find_exercise(key),)]
    except CourseError as error:
        print(error)
        return 1
    return int(sum(not _prove(one, options.show, options.table) for one in found) > 0)


def freeze(lesson: str) -> None:
    """Run the answers of a lesson's exercises that are judged by example; keep what they show.

    Raises: CourseError where the lesson has none of these
    """
    kept = [one for one in exercises_of(lesson) if isinstance(one.check, ByExample)]
    if not kept:
        raise CourseError(
            f"--freeze: need a lesson that has exercises on ranks, such as ddp; got {lesson!r}."
        )
    path = seen_file(lesson)
    path.unlink(missing_ok=True)
    with _quiet():
        seen = {one.key: {"of": made_of(one.key), **values_of(one)} for one in kept}
    path.write_bytes(gzip.compress(json.dumps(seen).encode(), mtime=0))


def _prove(exercise: Exercise, show: bool, table: bool) -> bool:
    start_s = time.perf_counter()
    try:
        with _quiet():
            detail = exercise.verdict(exercise.right)
    except (CourseError, NotImplementedError) as error:
        print(f"{exercise.key}: the right answer is rejected: {error}")
        return False
    print(f"{exercise.key}: right in {time.perf_counter() - start_s:.1f} s. {detail}")
    if table:
        return True
    named, planted = sum(_is_named(exercise, one, show) for one in exercise.wrong), exercise.wrong
    count = "all" if named == len(planted) else f"{named} of"
    print(f"{exercise.key}: {count} {len(planted)} planted mistakes are rejected and named.")
    return named == len(planted)


def _is_named(exercise: Exercise, wrong: Wrong, show: bool) -> bool:
    """Send a planted mistake through the check; say so if it is not named."""
    where = f"{exercise.key}, {wrong.name}"
    try:
        with _quiet():
            exercise.verdict(wrong.answer(exercise))
    except CheckFailed as error:
        is_named = error.cause == wrong.cause
        if show or not is_named:
            print(f"{where}{'' if is_named else ' is rejected, but not named'}:\n    {error}")
        return is_named
    except CourseError as error:
        print(f"{where}: {error}")
        return False
    print(f"{where} passes.")
    return False


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Swallow what an answer prints, here and on its ranks."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


if __name__ == "__main__":
    sys.exit(main())
