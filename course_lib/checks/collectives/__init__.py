"""The exercises of notebook 04_collectives: a tree, a circle, all-gather, mean, halves, all-to-all.

Each stands with its planted mistakes in a file of its own; `parts` holds what they share.
"""

from course_lib.checks.collectives.circle import CIRCLE
from course_lib.checks.collectives.gather import GATHER
from course_lib.checks.collectives.halving import HALVING
from course_lib.checks.collectives.letters import LETTERS
from course_lib.checks.collectives.mean import MEAN
from course_lib.checks.collectives.tree import TREE

EXERCISES = (TREE, CIRCLE, GATHER, MEAN, HALVING, LETTERS)
