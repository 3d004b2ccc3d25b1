"""The exercises of notebook 13_scaling_study: ranks to a run, a run beside one rank, steps, the
bill, a batch script.

Each stands with its check and its planted mistakes in a file of its own: `_ranks`, `_beside`,
`_steps`, `_bill`, `_script`.
"""

from course_lib.checks.scaling_study_beside import BESIDE
from course_lib.checks.scaling_study_bill import BILL
from course_lib.checks.scaling_study_ranks import RANKS
from course_lib.checks.scaling_study_script import SCRIPT
from course_lib.checks.scaling_study_steps import STEPS

EXERCISES = (RANKS, BESIDE, STEPS, BILL, SCRIPT)
