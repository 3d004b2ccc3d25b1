"""The exercises of notebook 12_planner: fit, what stays exposed, prune, a budget, choose.

Each stands with its check in a file of its own: `states`, `exposed`, `prune`, `budget`, `choose`.
"""

from course_lib.checks.planner.budget import BUDGET
from course_lib.checks.planner.choose import CHOOSE
from course_lib.checks.planner.exposed import EXPOSED
from course_lib.checks.planner.prune import PRUNE
from course_lib.checks.planner.states import STATES

EXERCISES = (STATES, EXPOSED, PRUNE, BUDGET, CHOOSE)
