"""Errors of the course, one sentence each.

It says where it happened, what is needed, what was given, and what to try.
"""


class CourseError(Exception):
    """Base class of the errors that the course raises."""


class MachineError(CourseError):
    """The machine is too slow, or has no room: it says nothing about the code that ran."""


class ShapeError(CourseError, ValueError):
    """A tensor has a shape that the operation cannot take."""


class MeshError(CourseError, ValueError):
    """A process group, a root or a parallelism does not fit the world size."""
