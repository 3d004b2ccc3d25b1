"""The exercises of notebook 10_fsdp: a shard, a unit's hooks, prefetch, hybrid groups, a trace.

Each stands with its check in a file of its own: `param`, `hooks`, `prefetch`, `hybrid`, `trace`.
`parts` tells what an answer keeps alive.
"""

from course_lib.checks.fsdp.hooks import HOOKS
from course_lib.checks.fsdp.hybrid import HYBRID
from course_lib.checks.fsdp.param import PARAM
from course_lib.checks.fsdp.prefetch import PREFETCH
from course_lib.checks.fsdp.trace import TRACE

EXERCISES = (PARAM, HOOKS, PREFETCH, HYBRID, TRACE)
