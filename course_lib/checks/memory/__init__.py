"""The exercises of notebook 01_memory: parameters, states, weighing, a layer, what fits, MFU."""

from course_lib.checks.memory.formulas import EXERCISES

__all__ = ["EXERCISES"]
