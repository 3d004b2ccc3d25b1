"""Fully sharded data parallel: gather a unit, use it, free it (notebook 10_fsdp).

A unit is one flat parameter in equal shards, as in PyTorch's first FSDP (Zhao et al. 2023);
PyTorch's `fully_shard` (FSDP2) shards each parameter by itself on dim 0, with the same messages.
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
