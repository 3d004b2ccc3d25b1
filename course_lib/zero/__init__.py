"""ZeRO: shard optimizer state, gradients and parameters (notebook 09_zero).

`sharded_optimizer.py` is stage 1 for any model; `zero.py` holds the three stages as engines;
`reducer.py` is the reduce-scatter of stage 2, `gather_hooks.py` the all-gathers of stage 3;
`flat_param.py` and `flat_layout.py` are the flat parameter and where each tensor lies in it;
`offload.py` keeps state on the host. `cost.py` predicts traffic, `lab.py` measures memory and time.
"""

from course_lib.zero.flat_layout import FlatLayout, Piece
from course_lib.zero.sharded_optimizer import ShardedOptimizer
from course_lib.zero.zero import ZeRO1, ZeRO2, ZeRO3

__all__ = [
    "FlatLayout",
    "Piece",
    "ShardedOptimizer",
    "ZeRO1",
    "ZeRO2",
    "ZeRO3",
]
