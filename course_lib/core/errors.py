"""Errors of the course: one clear sentence each.

Where it happened, what is needed, what was given, what to try.
"""


class CourseError(Exception):
    """Base of the errors that the course raises by itself."""


class ShapeError(CourseError, ValueError):
    """A tensor has a size that the operation cannot take."""


class MeshError(CourseError, ValueError):
    """A group, a root or a world size does not fit the ranks there are."""
