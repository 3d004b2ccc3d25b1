"""The collectives, written by hand from send and recv (notebook 04_collectives).

`collectives.py` names them all; `ring.py`, `tree.py`, `halving.py` and `hierarchical.py` hold the
algorithms; `group.py` has the rank within its group, and messages between two ranks. `messages.py`
lists who sends what to whom in each algorithm and simulates it; `coalesced.py` broadcasts many
tensors in a few messages.
"""

from typing import TYPE_CHECKING

from course_lib.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from course_lib.collectives.collectives import (
        all_gather,
        all_reduce,
        all_to_all,
        broadcast,
        gather,
        reduce,
        reduce_scatter,
        scatter,
    )
    from course_lib.collectives.halving import halving_doubling_all_reduce
    from course_lib.collectives.hierarchical import hierarchical_all_reduce
    from course_lib.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
    from course_lib.collectives.tree import (
        barrier,
        recursive_doubling_all_reduce,
        star_broadcast,
        tree_broadcast,
        tree_reduce,
    )
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "halving_doubling_all_reduce",
    "hierarchical_all_reduce",
    "recursive_doubling_all_reduce",
    "reduce",
    "reduce_scatter",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "scatter",
    "star_broadcast",
    "tree_broadcast",
    "tree_reduce",
]
