"""The exercises of notebook 11_mesh: groups, the end of a step, a norm across axes, a trace.

Each stands with its check in a file of its own: `groups`, `finish`, `norm`, `misplaced`.
"""

from course_lib.checks.mesh.finish import FINISH
from course_lib.checks.mesh.groups import GROUPS
from course_lib.checks.mesh.misplaced import MISPLACED
from course_lib.checks.mesh.norm import CLIP

EXERCISES = (GROUPS, FINISH, CLIP, MISPLACED)
