"""The exercises of notebook 10_fsdp: a flat unit, its hooks, the order of a step, two precisions.

Each stands with its check in a file of its own: `_unit`, `_hooks`, `_order`, `_mixed` (planted
mistakes in `_mistakes`).
"""

from course_lib.checks.fsdp_hooks import HOOKS
from course_lib.checks.fsdp_mixed import MIXED
from course_lib.checks.fsdp_order import ORDER
from course_lib.checks.fsdp_unit import UNIT

EXERCISES = (UNIT, HOOKS, ORDER, MIXED)
