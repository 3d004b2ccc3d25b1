"""The exercises of notebook 09_zero: pieces of a shard, and what stages 1, 2 and 3 do; clipping.

Each stands with its planted mistakes in a file of its own: `pieces`, `step`, `grads`, `linear` and
`clip`. `parts` holds what they share.
"""

from course_lib.checks.zero.clip import CLIP
from course_lib.checks.zero.grads import GRADS
from course_lib.checks.zero.linear import LINEAR
from course_lib.checks.zero.pieces import PIECES
from course_lib.checks.zero.step import STEP

EXERCISES = (PIECES, STEP, GRADS, LINEAR, CLIP)
