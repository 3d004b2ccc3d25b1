"""Pictures and widgets that belong to no single lesson; every figure is displayed by `show`.

show          `show(figure, alt=...)`: displays a figure with its alt text; read this first
page          the page of every figure: width, title, note, legend, axes
colours       the colors of kinds (forward, communication, ...) and of ranks
timeline      events of ranks over time; lanes places the boxes, labels prints their text
memory        bytes by memory kind, over time or as bars
compare       formula, simulation, measurement and published values on the same axes
paired_bars   pairs of bars: measured and predicted
losses        loss curves
waiting       the wait-for graph of a hang
gpu_links     the link matrix of a machine's GPUs
pictures      the pictures of lesson 00; wires: those of lesson 04
last_run      the records of an exercise's newest run on a cluster; lesson 04's picture of it
predict       `predict` and `reveal`: commit to a number before the result is shown
claim         `claim(sentence, holds)`: a sentence about a measurement, beside its condition
explore       a figure with sliders
stepper       a collective step by step; frames computes the steps, shards draws them
"""

from course_lib.collectives.messages import Message
from course_lib.display.claim import claim
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
    "claim",
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
