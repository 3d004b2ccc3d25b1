"""Checks of the exercises, which name the misconception behind a wrong answer.

    exercise         `Exercise`, `Cause`, `CheckFailed`, and `check`, the call in the notebooks
    cases            `Cases`: an answer of plain values, against a table of cases
    on_ranks         `OnRanks`: an answer that runs on ranks, and what was observed there
    judge            `ByExample`: the same, compared with the right answer and with mistakes
    watch            `Watch`: what an answer does on a rank, step by step
    properties       mistakes that any answer of a kind can make
    expectations     `Numbers`, `Calls`, `Demand`, ...: what to expect of that
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
