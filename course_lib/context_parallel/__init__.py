"""Context parallelism: one long sequence split over ranks (notebook 15_context_parallel).

`partial.py` computes attention to a block of keys and merges such parts; `ring.py`, `all_gather.py`
and `ulysses.py` are the three forms of attention over all ranks, `usp.py` two of them together.
`layouts.py` says which tokens a
rank holds, `masks.py` which of them see each other, `inputs.py` checks what a form is given.
`model.py` makes a GPT context-parallel; `cost.py` counts bytes, work and memory, `lab.py` measures
them, `pictures.py` draws.
"""

from typing import TYPE_CHECKING

from course_lib.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from course_lib.context_parallel.all_gather import all_gather_attention
    from course_lib.context_parallel.layouts import positions, shard, shard_batch, unshard
    from course_lib.context_parallel.model import (
        context_loss,
        parallelize_context,
        set_documents,
    )
    from course_lib.context_parallel.partial import attend_block, block_gradients, merge
    from course_lib.context_parallel.ring import ring_attention
    from course_lib.context_parallel.ulysses import ulysses_attention
    from course_lib.context_parallel.usp import usp_attention
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "all_gather_attention",
    "attend_block",
    "block_gradients",
    "context_loss",
    "merge",
    "parallelize_context",
    "positions",
    "ring_attention",
    "set_documents",
    "shard",
    "shard_batch",
    "ulysses_attention",
    "unshard",
    "usp_attention",
]
