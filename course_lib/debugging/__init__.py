"""Find where two runs differ first, which gradients nobody sums, and which rank is behind."""

from course_lib.debugging.comparing import Comparison, compare_runs
from course_lib.debugging.gradient_types import gradient_types
from course_lib.debugging.recording import Recording, record_run

__all__ = ["Comparison", "Recording", "compare_runs", "gradient_types", "record_run"]
