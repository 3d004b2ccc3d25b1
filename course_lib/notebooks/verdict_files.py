"""Write verdicts to files, one row or one test case per exercise, for an instructor's tools."""

import csv
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

from course_lib.notebooks.grading import GradeReport


def write_csv(reports: Sequence[GradeReport], path: Path) -> None:
    """Write a header and one row per exercise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["notebook", "lesson", "exercise", "status", "detail", "note"])
        for report in reports:
            for verdict in report.verdicts:
                writer.writerow([report.path, report.lesson, *asdict(verdict).values()])


def write_junit(reports: Sequence[GradeReport], path: Path) -> None:
    """Write a test suite per notebook; an exercise that is not right is a failure."""
    suites = ElementTree.Element("testsuites")
    for report in reports:
        failed = sum(verdict.status != "right" for verdict in report.verdicts)
        suite = ElementTree.SubElement(suites, "testsuite", name=report.path)
        suite.attrib |= {"tests": str(len(report.verdicts)), "failures": str(failed)}
        for verdict in report.verdicts:
            case = ElementTree.SubElement(
                suite, "testcase", name=verdict.key, classname=report.lesson
            )
            if verdict.status != "right":
                text = f"{verdict.detail}\n{verdict.note}".strip()
                ElementTree.SubElement(case, "failure", message=verdict.status).text = text
    ElementTree.indent(suites)
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suites).write(path, encoding="utf-8", xml_declaration=True)
