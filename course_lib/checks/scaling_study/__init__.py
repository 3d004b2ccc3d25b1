"""The exercises of notebook 13_scaling_study: ranks, limit, steps, bill, asked.

Each stands with its check and its planted mistakes in a file of its own: `ranks` (from ranks to a
run), `limit` (how far a fixed batch scales), `steps` (a loop that may be timed), `bill`, `asked`
(what a batch script asks for).
"""

from course_lib.checks.scaling_study.asked import ASKED_FOR
from course_lib.checks.scaling_study.bill import BILL
from course_lib.checks.scaling_study.limit import LIMIT_OF
from course_lib.checks.scaling_study.ranks import RANKS
from course_lib.checks.scaling_study.steps import STEPS

EXERCISES = (RANKS, LIMIT_OF, STEPS, BILL, ASKED_FOR)
