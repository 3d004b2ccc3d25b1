"""The exercises of notebook 02_accumulation: counts, a step, uneven parts, tokens, clipping, noise.

They stand with their planted mistakes in `count`, `step` (also the clipped one) and `uneven` (also
the tokens), and `noise`. `effects` holds what they share.
"""

from course_lib.checks.accumulation.count import COUNT_PARTS
from course_lib.checks.accumulation.noise import NOISE_SCALE
from course_lib.checks.accumulation.step import ACCUMULATE, CLIPPED
from course_lib.checks.accumulation.uneven import TOKENS, UNEVEN

EXERCISES = (COUNT_PARTS, ACCUMULATE, UNEVEN, TOKENS, CLIPPED, NOISE_SCALE)
