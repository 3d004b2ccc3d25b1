"""Verdicts for other programs: a JUnit file for an instructor's tools, JSON for an assistant."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from nbformat import NotebookNode

from course_lib.checks.exercise import cause_in, find_exercise
from course_lib.checks.right_answer import at_work_in
from course_lib.core import CourseError
from course_lib.core.files import write_result
from course_lib.core.plain_text import printable
from course_lib.workbooks.check_notebook import GradeReport
from course_lib.workbooks.lessons import Lesson, key_of


def write_junit(reports: Sequence[GradeReport], path: Path) -> None:
    """Write a test suite per notebook; an exercise that is not right is a failure.

    Raises: CourseError where that cannot be written
    """
    suites = ElementTree.Element("testsuites")
    for report in reports:
        failed = sum(verdict.status != "right" for verdict in report.verdicts)
        suite = ElementTree.SubElement(suites, "testsuite", name=printable(report.path))
        suite.attrib |= {"tests": str(len(report.verdicts)), "failures": str(failed)}
        for verdict in report.verdicts:
            case = ElementTree.SubElement(
                suite, "testcase", name=printable(verdict.key), classname=report.lesson
            )
            if verdict.status != "right":
                text = printable(f"{verdict.detail}\n{verdict.note}").strip()
                ElementTree.SubElement(case, "failure", message=verdict.status).text = text
    ElementTree.indent(suites)
    text = ElementTree.tostring(suites, encoding="unicode")
    write_result(path, f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n')


def verdicts_json(report: GradeReport, notebook: NotebookNode, lesson: Lesson) -> str:
    """Return the verdicts as JSON; each with its section, and the cause that its check named.

    A cause is the sentence of a misconception, and a key that stays the same as long as that does;
    None where the check named none.
    """
    told = asdict(report)
    with at_work_in(lesson.folder):
        for one in told["verdicts"]:
            one["section"] = section_of(one["key"], notebook)
            one["cause"] = _cause(one["key"], one["detail"]) if one["status"] == "wrong" else None
    return json.dumps(told, indent=1)


def section_of(key: str, notebook: NotebookNode) -> str:
    """Return the heading of the section that an exercise is in; empty where it has none."""
    heading = ""
    for cell in notebook.cells:
        if key_of(cell) == key:
            return heading
        if cell.cell_type == "markdown":
            heads = [line for line in cell.source.splitlines() if line.startswith("## ")]
            heading = heads[-1].removeprefix("## ").strip() if heads else heading
    return ""


def _cause(key: str, detail: str) -> dict[str, Any] | None:
    with suppress(CourseError):
        find_exercise(key).causes()  # imports the checks, whose causes are then known
    cause = cause_in(detail)
    return {"key": cause.key, "sentence": cause.sentence} if cause else None
