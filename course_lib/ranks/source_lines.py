"""Source lines: find the learner's own line in a stack of frames.

A collective is called through several layers of PyTorch and of this package; the line that helps is
the one the learner wrote.
"""

import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

COURSE_LIB = str(Path(__file__).resolve().parents[1])
RANKS_PACKAGE = str(Path(__file__).resolve().parent)
PYTHON = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Line:
    """One line of source: file, line number, and function."""

    file: str = ""
    number: int = 0
    function: str = ""

    @property
    def text(self) -> str:
        """Source text of the line; empty where it cannot be read."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        if not self.file:
            return "a line that is not known"
        where = f"cell line {self.number}" if is_cell(self.file) else self._file_line()
        text = f": {self.text}" if self.text else ""
        return f"{where}{text}"

    def _file_line(self) -> str:
        return f"{os.path.basename(self.file)} line {self.number}"


def is_cell(file: str) -> bool:
    """Return whether this file name denotes a notebook cell."""
    return file.startswith("<") or "ipykernel_" in file


@cache
def owner(file: str) -> str:
    """Return the owner of a file: `learner`, `course`, its `tracer`, `torch` or `python`."""
    if f"{os.sep}torch{os.sep}" in file:
        return "torch"
    if file.startswith(COURSE_LIB):
        return "tracer" if file.startswith(RANKS_PACKAGE) else "course"
    frozen = file.startswith("<frozen") or file == "<string>"
    return "python" if frozen or file.startswith(PYTHON) else "learner"


def line_of(frame: FrameType | None) -> Line:
    """Return the learner's innermost line of a stack, or the course's where there is none."""
    fallback = None
    while frame is not None:
        who = owner(frame.f_code.co_filename)
        if who == "learner":
            return _line(frame)
        if who == "course" and fallback is None:
            fallback = frame
        frame = frame.f_back
    return _line(fallback) if fallback else Line()


def caller() -> Line:
    """Return the learner's line that is running now."""
    return line_of(sys._getframe(1))


def lines_of(traceback: TracebackType | None) -> list[Line]:
    """Return the learner's lines of a traceback, outermost first, or the innermost other line."""
    by_owner: dict[str, list[Line]] = {}
    while traceback is not None:
        code, number = traceback.tb_frame.f_code, traceback.tb_lineno
        line = Line(code.co_filename, number, code.co_name)
        by_owner.setdefault(owner(code.co_filename), []).append(line)
        traceback = traceback.tb_next
    if "learner" in by_owner:
        return by_owner["learner"]
    others = by_owner.get("course") or by_owner.get("torch") or by_owner.get("python")
    return [others[-1]] if others else []


def _line(frame: FrameType) -> Line:
    number = frame.f_lineno or 0  # None between two lines
    return Line(frame.f_code.co_filename, number, frame.f_code.co_name)
