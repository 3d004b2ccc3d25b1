"""The pictures of the deck 16_experts, drawn by the functions that the notebook calls."""

from course_lib.core import MODELS
from course_lib.expert_parallel import lab
from course_lib.expert_parallel import pictures as lesson
from course_lib.expert_parallel.explorer import by_ep
from course_lib.expert_parallel.simulation import count_experts, draw_choices

FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)


def memory():
    """Model states in three kinds, over ep."""
    room = 72 * 2**30
    return lesson.memory_picture(MODELS["deepseek-v3"], 512, 1, (1, 8, 16, 32, 64), room)[0]


def dispatch():
    """Copies at home and at their experts."""
    return lesson.dispatch_picture([[0], [2], [1], [0], [3], [0], [0], [1]], 4, 4)[0]


def nodes():
    """Nodes that a token is sent to, with and without a limit."""
    return lesson.nodes_picture()[0]


def layer():
    """Experts, dispatch and combine over the ranks."""
    return by_ep("deepseek-v3", 1.2, sends_once=True, most_nodes="any")


def groups():
    """Who holds which experts."""
    return lesson.groups_picture(4, 2, 8)[0]


def dropped():
    """Dropped copies over the capacity factor."""
    skews = {"balanced": 0.0, "skewed": 1.0}
    choices = {name: draw_choices(1024, 8, 2, skew=skew) for name, skew in skews.items()}
    shares = {
        name: [lab.dropped_by_layer(one, 8, factor) for factor in FACTORS]
        for name, one in choices.items()
    }
    loads = {name: count_experts(one, 8) for name, one in choices.items()}
    return lesson.dropped_picture(loads, shares, FACTORS)[0]


def balance():
    """The fullest rank during training, for each rule."""
    return lesson.loads_picture({rule: lab.train_loads(rule) for rule in lab.RULES}, 4)[0]


def published():
    """Throughput with a learned and with a forced balance."""
    return lesson.published_balance_picture()[0]


def pictures():
    """All pictures by the names the deck calls them."""
    drawn = (memory, dispatch, nodes, layer, groups, dropped, balance, published)
    return {draw.__name__: draw() for draw in drawn}
