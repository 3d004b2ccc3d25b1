"""ZeRO: shard optimizer state, gradients and parameters (notebook 09_zero).

Read `whole.py` first: ZeRO-2 in one short file. `zero.py` holds the three stages as engines;
`sharded_optimizer.py` is the sharded step of stage 1, `muon.py` one of whole matrices; `reducer.py`
launches the reduce-scatters of stage 2 and `flat_param.py` holds what they reduce;
`gather_hooks.py` all-gathers and frees parameters for stage 3; `flat_layout.py` says where each
tensor lies in a flat parameter. `clip.py` clips sharded gradients, `state.py` cuts and joins saved
state, `offload.py` keeps state on the host, and `guards.py` refuses code that takes a shard for the
whole. `cost.py` predicts traffic, `lab.py` measures it and memory, `beside_frameworks.py` times our
stages and DeepSpeed's; `pictures.py` and `explorer.py` draw.

The exercises that check a learner's stages 1, 2 and 3 are `step.py`, `grads.py` and `linear.py` in
`course_lib/checks/zero`.
"""

from typing import TYPE_CHECKING

from course_lib.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from course_lib.zero.flat_layout import FlatLayout, Piece
    from course_lib.zero.sharded_optimizer import ShardedOptimizer
    from course_lib.zero.zero import ZeRO1, ZeRO2, ZeRO3
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "FlatLayout",
    "Piece",
    "ShardedOptimizer",
    "ZeRO1",
    "ZeRO2",
    "ZeRO3",
]
