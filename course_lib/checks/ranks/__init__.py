"""The exercises of notebook 00_ranks: who am I, whose turn is it, a mean, a ring, a report."""

from course_lib.checks.ranks.rank_numbers import EXERCISES

__all__ = ["EXERCISES"]
