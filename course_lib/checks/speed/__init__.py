"""The exercises of notebook 01b_speed: FLOP of a step (`flop`), tokens of a link (`link`)."""

from course_lib.checks.speed.flop import FLOP
from course_lib.checks.speed.link import LINK

EXERCISES = (FLOP, LINK)
