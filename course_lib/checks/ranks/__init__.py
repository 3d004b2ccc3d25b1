"""The exercises of notebook 00_ranks: who am I, whose turn is it, a mean, a ring, a report.

Each stands with its planted mistakes in a file of its own: `number`, `turns`, `mean`, `ring` and
`report`.
"""

from course_lib.checks.ranks.mean import MEAN
from course_lib.checks.ranks.number import NUMBER
from course_lib.checks.ranks.report import REPORT
from course_lib.checks.ranks.ring import RING
from course_lib.checks.ranks.turns import TURNS

EXERCISES = (NUMBER, TURNS, MEAN, RING, REPORT)
