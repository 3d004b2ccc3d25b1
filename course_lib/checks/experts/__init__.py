"""The exercises of notebook 16_experts, from a router's gradient to a choice of ep and tp.

Each stands with its check in a file of its own: `router`, `dispatch`, `gradients`, `balance` and
`choice`.
"""

from course_lib.checks.experts.balance import BALANCE
from course_lib.checks.experts.choice import CHOICE
from course_lib.checks.experts.dispatch import DISPATCH
from course_lib.checks.experts.gradients import GRADIENTS
from course_lib.checks.experts.router import ROUTER

EXERCISES = (ROUTER, DISPATCH, GRADIENTS, BALANCE, CHOICE)
