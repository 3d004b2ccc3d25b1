"""The pictures of the deck 13_scaling_study, drawn by the functions that the notebook calls."""

from course_lib.scaling_study import pictures as of_study
from course_lib.scaling_study.explorer import draw_study
from course_lib.scaling_study.lab import EXAMPLE_LINKS
from course_lib.scaling_study.results import sample_results

DEVICE = "a6000"


def a_set(word):
    """The results of the recorded study whose name has this word, and the name."""
    found = sample_results().sets()
    return next((results, name) for name, results in found.items() if word in name)


def efficiency():
    """Measured beside predicted."""
    return of_study.efficiency(*a_set("small"))[0]


def published():
    """Published strong scaling, and the line through two of its runs."""
    return of_study.published_scaling()[0]


def states():
    """Draw the states of each rank, on one rank and on two, for each stage of ZeRO."""
    found, name = a_set("micro-batches")
    return of_study.states([one for one in found if one.experiment.run.ranks <= 2], name)[0]


def losses():
    """All strategies, one curve."""
    return of_study.loss_curves(*a_set("small"))[0]


def paper():
    """Two GPUs over PCIe."""
    return draw_study("study-500m", 2, "PCIe", DEVICE, "efficiency")


def bridges():
    """Four GPUs over several bridges."""
    return draw_study("study-500m", 4, "PCIe, several bridges", DEVICE, "efficiency")


def matrix():
    """Links between the GPUs of a made-up machine."""
    return of_study.link_matrix(EXAMPLE_LINKS, "An example")[0]


def soon():
    """Batches that grow with the copies."""
    return of_study.convergence(sample_results("convergence"))[0]


def pictures():
    """All pictures by the names the deck calls them."""
    drawn = (efficiency, published, states, losses, paper, bridges, matrix, soon)
    return {draw.__name__: draw() for draw in drawn}
