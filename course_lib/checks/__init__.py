"""Checks of the exercises, which name the misconception behind a wrong answer.

    exercise         `Exercise`, `Cause`, `CheckFailed`, and `check`, the call in the notebooks
    cases            `Cases`: an answer of plain values, against a table of cases
    judge            `ByExample`: an answer that runs on ranks, held to the right answer's example
    on_ranks         a run on ranks, and the trouble that they may have
    watch            `Watch`: what an answer does on a rank, step by step
    properties       mistakes that any answer of a kind can make
    edits            `Edit`, `Own`: planted wrong answers
    right_answer     the right answer: the solution in the lesson's source
    lesson_source    the source of a lesson as cells, with its solutions
    expect           how a value differs from the right one, in words
    ddp, ...         a package a lesson: its `EXERCISES`, a tuple of `Exercise`

A notebook calls `check("collectives-1", answer)`. docs/authoring.md tells how to write one.
"""

from course_lib.checks.exercise import (
    Cause,
    CheckFailed,
    Exercise,
    NotDone,
    check,
    find_exercise,
)

__all__ = ["Cause", "CheckFailed", "Exercise", "NotDone", "check", "find_exercise"]
