"""The exercises of notebook 08_pipeline: orders, a clock, an engine, a cut, a tied weight.

Each stands with its planted mistakes in a file of its own: `order`, `times`, `engine`, `balance`,
`tied`, `interleaved`, and `puzzle`, for which `scores` prints a score. `parts` reads schedules.
"""

from course_lib.checks.pipeline.balance import BALANCE
from course_lib.checks.pipeline.engine import ENGINE
from course_lib.checks.pipeline.interleaved import INTERLEAVED
from course_lib.checks.pipeline.order import ORDER
from course_lib.checks.pipeline.puzzle import PUZZLE
from course_lib.checks.pipeline.tied import TIED
from course_lib.checks.pipeline.times import TIMES

EXERCISES = (ORDER, TIMES, ENGINE, BALANCE, TIED, INTERLEAVED, PUZZLE)
