"""The exercises of notebook 09_zero: pieces of a shard, and what stages 1, 2 and 3 do; clipping.

Each stands with its check in a file of its own: `_pieces`, `_step`, `_grads`, `_linear` (planted
mistakes in `_mistakes`), `_clip`.
"""

from course_lib.checks.zero_clip import CLIP
from course_lib.checks.zero_grads import GRADS
from course_lib.checks.zero_linear import LINEAR
from course_lib.checks.zero_pieces import PIECES
from course_lib.checks.zero_step import STEP

EXERCISES = (PIECES, STEP, GRADS, LINEAR, CLIP)
