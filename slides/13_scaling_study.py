"""The pictures of the deck 13_scaling_study, drawn by the functions that the notebook calls."""

from course_lib.scaling_study import pictures as of_study
from course_lib.scaling_study.lab import EXAMPLE_LINKS
from course_lib.scaling_study.results import sample_results


def strong():
    """Published strong scaling of data parallelism, and the law through two of its runs."""
    return of_study.strong_scaling()[0]


def replicas():
    """Throughput of a replica over its TP degree, for three micro-batch sizes."""
    return of_study.replicas_over_tp()[0]


def far_off():
    """Four layouts over nodes; one of them has two runs far below the others."""
    return of_study.far_off()[0]


def matrix():
    """Links between the GPUs of a made-up machine."""
    return of_study.link_matrix(EXAMPLE_LINKS, "An example")[0]


def soon():
    """Batches that grow with the copies."""
    return of_study.convergence(sample_results("convergence"))[0]


def pictures():
    """All pictures by the names the deck calls them."""
    drawn = (strong, replicas, far_off, matrix, soon)
    return {draw.__name__: draw() for draw in drawn}
