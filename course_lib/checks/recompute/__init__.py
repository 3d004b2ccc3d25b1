"""The exercises of notebook 03_recompute: recompute, segments, 16-bit steps, the loss scale."""

from course_lib.checks.recompute.recompute import EXERCISES

__all__ = ["EXERCISES"]
