"""The exercises of notebook 13_scaling_study: efficiency, limit, steps.

Each stands with its check and its planted mistakes in a file of its own: `efficiency` (of published
runs), `limit` (how far a fixed batch scales), `steps` (a loop that may be timed).
"""

from course_lib.checks.scaling_study.efficiency import EFFICIENCY
from course_lib.checks.scaling_study.limit import LIMIT_OF
from course_lib.checks.scaling_study.steps import STEPS

EXERCISES = (EFFICIENCY, LIMIT_OF, STEPS)
