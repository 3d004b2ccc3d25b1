"""Write verdicts to a JUnit file, one test case per exercise, for an instructor's tools."""

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from course_lib.core.files import write_result
from course_lib.core.plain_text import printable
from course_lib.workbooks.check_notebook import GradeReport


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
