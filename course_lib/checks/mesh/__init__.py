"""The exercises of notebook 11_mesh: groups, the end of a step, a norm across axes.

Each stands with its check in a file of its own: `groups`, `finish`, `norm`.
"""

from course_lib.checks.mesh.finish import FINISH
from course_lib.checks.mesh.groups import GROUPS
from course_lib.checks.mesh.norm import CLIP

EXERCISES = (GROUPS, FINISH, CLIP)
