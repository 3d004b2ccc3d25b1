"""The exercises of notebook 10_fsdp: a flat unit, its hooks, the order of a step, two precisions.

Each stands with its check in a file of its own: `unit`, `hooks`, `order`, `mixed`; the planted
mistakes are beside it, in `..._answers`.
"""

from course_lib.checks.fsdp.hooks import HOOKS
from course_lib.checks.fsdp.mixed import MIXED
from course_lib.checks.fsdp.order import ORDER
from course_lib.checks.fsdp.unit import UNIT

EXERCISES = (UNIT, HOOKS, ORDER, MIXED)
