"""Fully sharded data parallel: gather a unit, use it, free it (notebook 10_fsdp).

Every parameter is sharded by itself on dim 0, as in PyTorch's `fully_shard` (FSDP2), and a unit's
shards travel in one message; PyTorch's first FSDP (Zhao et al. 2023) and ZeRO-3 in lesson 09 shard
flat parameters instead. Read `whole.py` first: the method in one short file. `fsdp.py` is all of
it; `units.py` decides what is gathered together; `prefetch.py` knows which unit comes next;
`param_group.py` gathers, frees and reduce-scatters a unit's parameters, `kept_grads.py` keeps
gradients inside `no_sync`; `dim0_layout.py` says which rows are whose, `mesh.py` which ranks
communicate, `mixed_precision.py` in which dtypes; `state.py` saves and loads. `moves.py` lists what
a rank does in a step, `cost.py` predicts traffic, memory and timeline from it, and `lab.py`
measures them; `beside_frameworks.py` runs the FSDP of PyTorch, Accelerate and DeepSpeed.
`explorer.py` draws.

The exercises that check a learner's FSDP are in `course_lib/checks/fsdp`: `param.py` (shards of a
parameter), `hooks.py` (a unit), `prefetch.py` and `hybrid.py`.
"""

from typing import TYPE_CHECKING

from course_lib.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from course_lib.fsdp.fsdp import FSDP
    from course_lib.fsdp.mixed_precision import MixedPrecisionPolicy
    from course_lib.fsdp.state import merge_shards
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "FSDP",
    "MixedPrecisionPolicy",
    "merge_shards",
]
