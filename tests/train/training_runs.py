"""What the tests of training share: runs that are refused, losses, and whole states that agree."""

import sys

import cloudpickle
import torch

from course_lib.core import CourseError
from course_lib.train.trainer import train

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def refused(rank, configs):
    """What each run is told that cannot be; ranks that raise would have to start again."""
    told = []
    for config in configs:
        try:
            train(rank, config)
        except CourseError as error:
            told.append(str(error))
        else:
            told.append("it was trained")
    return told


def losses(record):
    return [step["loss"] for step in record.steps]


def same_state(whole, other, **tolerance):
    """Are weights and optimizer states equal (to the last bit by default)?"""
    tolerance = {"rtol": 0, "atol": 0} | tolerance
    torch.testing.assert_close(dict(whole["model"]), dict(other["model"]), **tolerance)
    state = whole["optimizer"].get("state", whole["optimizer"])
    wanted = other["optimizer"].get("state", other["optimizer"])
    torch.testing.assert_close(state, wanted, **tolerance)
