"""Fully sharded data parallel: gather a unit, use it, free it (notebook 10_fsdp).

`fsdp.py` is the method; `units.py` decides what is gathered together; `prefetch.py` knows which
unit comes next; `param_group.py` gathers, frees and reduce-scatters a unit's parameters; `state.py`
saves and loads. `cost.py` predicts memory and a step's timeline, `lab.py` measures them, and
`beside_frameworks.py` runs PyTorch's, Accelerate's and DeepSpeed's FSDP. `explorer.py` draws.
"""

from course_lib.fsdp.fsdp import FSDP
from course_lib.fsdp.state import merge_shards

__all__ = [
    "FSDP",
    "merge_shards",
]
