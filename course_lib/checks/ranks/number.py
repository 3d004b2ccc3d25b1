"""Exercise 1 of 00_ranks: the rank from the node and the local rank."""

from collections.abc import Sequence
from random import Random

from course_lib.checks.cases import A_FLOAT, Case, Cases, whole
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise

WORLDS = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1), (3, 4), (3, 6), (5, 8))
RULE = "node * ranks_per_node + local_rank"


def _cases(worlds: Sequence[tuple[int, int]] = WORLDS) -> list[Case]:
    return [
        (
            f"node {node}, local_rank {local_rank}, ranks_per_node {size}",
            (node, local_rank, size),
        )
        for num_nodes, size in worlds
        for node in range(num_nodes)
        for local_rank in range(size)
    ]


def _drawn(random: Random) -> list[Case]:
    return _cases([(random.randint(2, 4), random.randint(3, 9))])


NUMBER = Exercise(
    key="ranks-1",
    title="global rank from node and local rank",
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        show=whole,
        look="Count the ranks on the nodes before yours, then those before you on yours.",
        success="Each rank has a number of its own, on 1 to 5 nodes.",
    ),
    wrong=(
        Edit(
            RULE,
            "local_rank",
            Cause(
                "That is the local rank: it starts again at 0 on every node, so two ranks would "
                "share it."
            ),
        ),
        Edit(
            RULE,
            "node + local_rank",
            Cause("Each node before yours holds ranks_per_node ranks; you count it as one."),
        ),
        Edit(
            RULE,
            "local_rank * ranks_per_node + node",
            Cause("Node and local rank are swapped: the first node is filled before the second."),
        ),
        Edit(
            RULE,
            f"{RULE} + 1",
            Cause("Ranks count from 0: the first rank of the first node is rank 0."),
        ),
        Edit(
            RULE,
            "(node - 1) * ranks_per_node + local_rank",
            Cause("Nodes count from 0: there are `node` nodes before yours, not `node - 1`."),
        ),
        Edit(RULE, f"{RULE} / 1", A_FLOAT),
        Edit(
            RULE,
            RULE.replace("ranks_per_node", "4"),
            Cause("A node need not have 4 ranks: use ranks_per_node."),
        ),
        Edit(
            RULE,
            RULE.replace("+", "|"),
            Cause("`|` joins bits, which is the sum only where no bit is set in both: use `+`."),
        ),
    ),
)
