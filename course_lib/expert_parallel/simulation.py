"""Tokens that choose experts at random: who sends how much to whom, and to how many nodes.

What the formulas of `cost.py` say on average is counted here for tokens drawn one by one, with
experts that are equally popular, or not. Notebook 16_experts.
"""

import numpy as np

from course_lib.core.errors import CourseError

Choices = np.ndarray  # [tokens, active]: experts of each token, all different


def draw_choices(
    tokens: int,
    experts: int,
    active: int,
    *,
    skew: float = 0.0,
    nodes: int = 1,
    most_nodes: int | None = None,
    seed: int = 0,
) -> Choices:
    """Return the experts that each token chooses: the `active` best of random scores.

    skew        expert e is (e + 1)**-skew times as popular as expert 0; 0: all alike
    most_nodes  first choose so many of the nodes, by the sum of a node's best scores, as
                DeepSeek-V3 does; then choose experts on them only

    Shapes:  -> [tokens, active]
    Raises:  CourseError where nodes do not divide the experts, or the nodes chosen have too few
    Source:  DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2
    """
    most = nodes if most_nodes is None else min(most_nodes, nodes)
    if experts % nodes or most < 1 or active > experts // nodes * most:
        raise CourseError(
            "draw_choices: need experts divisible by nodes, and active of at most the experts on "
            f"most_nodes; got {experts} experts on {nodes} nodes, {active} active, {most_nodes}."
        )
    popularity = -skew * np.log(np.arange(experts) + 1)
    scores = popularity + np.random.default_rng(seed).gumbel(size=(tokens, experts))
    if most < nodes:
        by_node = np.sort(scores.reshape(tokens, nodes, -1), axis=2)
        of_node = by_node[:, :, -max(1, active // most) :].sum(axis=2)
        kept = np.argsort(-of_node, axis=1)[:, :most]
        allowed = np.zeros((tokens, nodes), bool)
        np.put_along_axis(allowed, kept, True, axis=1)
        scores = np.where(np.repeat(allowed, experts // nodes, axis=1), scores, -np.inf)
    return np.argsort(-scores, axis=1)[:, :active]


def count_experts(choices: Choices, experts: int) -> list[int]:
    """Return the copies that each expert is sent."""
    return np.bincount(choices.ravel(), minlength=experts).tolist()


def count_dispatch(choices: Choices, experts: int, ep: int) -> list[list[int]]:
    """Return counts[source][to]: copies that each rank sends to each, if all have equal tokens."""
    ranks = choices // (experts // ep)
    return [np.bincount(own.ravel(), minlength=ep).tolist() for own in np.array_split(ranks, ep)]


def mean_nodes(choices: Choices, experts: int, nodes: int) -> float:
    """Return on how many nodes the experts of a token are, on average."""
    reached = np.zeros((len(choices), nodes), bool)
    np.put_along_axis(reached, choices // (experts // nodes), True, axis=1)
    return float(reached.sum(axis=1).mean())
