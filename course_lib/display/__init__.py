"""Pictures and forms: everything a learner sees is drawn here, and leaves through `show`."""

from course_lib.collectives.messages import Message
from course_lib.display.colours import KIND, RANK, rank_colour
from course_lib.display.compare import Voices, compare
from course_lib.display.explore import Explore, explore
from course_lib.display.frames import (
    Cell,
    Frame,
    frames_from_messages,
    own_everything,
    own_one,
    root_everything,
)
from course_lib.display.last_run import last_run, wire_run
from course_lib.display.memory import memory
from course_lib.display.predict import YES_NO, Prediction, predict, reveal
from course_lib.display.show import show
from course_lib.display.stepper import Stepper, stepper
from course_lib.display.timeline import timeline, timelines
from course_lib.display.waiting import waiting

__all__ = [
    "KIND",
    "RANK",
    "YES_NO",
    "Cell",
    "Explore",
    "Frame",
    "Message",
    "Prediction",
    "Stepper",
    "Voices",
    "compare",
    "explore",
    "frames_from_messages",
    "last_run",
    "memory",
    "own_everything",
    "own_one",
    "predict",
    "rank_colour",
    "reveal",
    "root_everything",
    "show",
    "stepper",
    "timeline",
    "timelines",
    "waiting",
    "wire_run",
]
