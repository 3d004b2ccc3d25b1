"""The exercises of 03_recompute: recompute, segments, 16-bit steps, the loss scale, blocks.

They stand with their planted mistakes in `redo`, `segments`, `half_step`, `scale` and `blocks`.
"""

from course_lib.checks.recompute.blocks import IN_BLOCKS
from course_lib.checks.recompute.half_step import HALF_STEP
from course_lib.checks.recompute.redo import REDO
from course_lib.checks.recompute.scale import NEXT_SCALE
from course_lib.checks.recompute.segments import BEST_SEGMENT, SEGMENTS

EXERCISES = (REDO, BEST_SEGMENT, SEGMENTS, HALF_STEP, NEXT_SCALE, IN_BLOCKS)
