"""The exercises of notebook 02_accumulation: counts, a step, uneven parts, tokens, clipping."""

from course_lib.checks.accumulation.steps import EXERCISES

__all__ = ["EXERCISES"]
