"""The exercises of notebook 04_collectives: a tree, a circle, a ring, a mean, a price, letters."""

from course_lib.checks.collectives.circle import CIRCLE
from course_lib.checks.collectives.mean import MEAN
from course_lib.checks.collectives.price_and_letters import LETTERS, PRICE
from course_lib.checks.collectives.ring import GATHER
from course_lib.checks.collectives.tree import TREE

EXERCISES = (TREE, CIRCLE, GATHER, MEAN, PRICE, LETTERS)
