"""The exercises of notebook 13_scaling_study: ranks, one rank beside, steps, bill, script.

Each stands with its check and its planted mistakes in a file of its own: `ranks`, `beside`,
`steps`, `bill`, `script`.
"""

from course_lib.checks.scaling_study.beside import BESIDE
from course_lib.checks.scaling_study.bill import BILL
from course_lib.checks.scaling_study.ranks import RANKS
from course_lib.checks.scaling_study.script import SCRIPT
from course_lib.checks.scaling_study.steps import STEPS

EXERCISES = (RANKS, BESIDE, STEPS, BILL, SCRIPT)
