"""The exercises of notebook 08_pipeline: an order, a clock, an engine, a cut, a tied weight.

Each stands with its check in a file of its own: `_order`, `_times`, `_engine` (planted mistakes in
`_engine_mistakes`, what it runs in `_parts`), `_tied`, `_balance`.
"""

from course_lib.checks.pipeline_balance import BALANCE
from course_lib.checks.pipeline_engine import ENGINE
from course_lib.checks.pipeline_order import ORDER
from course_lib.checks.pipeline_tied import TIED
from course_lib.checks.pipeline_times import TIMES

EXERCISES = (ORDER, TIMES, ENGINE, BALANCE, TIED)
