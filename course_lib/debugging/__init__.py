"""Find where two runs differ first, which gradients nobody sums, and which rank is behind."""

from course_lib.debugging.comparing import RunComparison, compare_runs
from course_lib.debugging.gradient_types import gradient_types
from course_lib.debugging.recording import ValueRecording, record_run

__all__ = ["RunComparison", "ValueRecording", "compare_runs", "gradient_types", "record_run"]
