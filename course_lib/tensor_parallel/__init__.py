"""Tensor parallelism: matrices split over the ranks of a group (notebook 07_tensor_parallel).

`tensor_parallel.py` splits a whole GPT; `layers.py` holds the split layers, `regions.py` the
conjugate functions f, g, f-bar, g-bar at the boundaries of a parallel region, `overlap.py` the
columns whose boundary is overlapped with their weight gradients, `cross_entropy.py` the loss over a
split vocabulary; `state.py` gathers and shards state dicts; `cost.py` lists what a step
communicates, `lab.py` measures what overlap saves, `pictures.py` and `explorer.py` draw.
"""

from typing import TYPE_CHECKING

from course_lib.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from course_lib.tensor_parallel.cross_entropy import (
        parallel_token_loss,
        vocab_parallel_cross_entropy,
    )
    from course_lib.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        ShardedLayer,
        VocabParallelEmbedding,
        VocabParallelHead,
    )
    from course_lib.tensor_parallel.regions import (
        all_reduce_both,
        copy_to_region,
        gather_columns,
        gather_sequence,
        reduce_from_region,
        scatter_sequence,
        split_columns,
    )
    from course_lib.tensor_parallel.state import (
        finish_gradients,
        full_state_dict,
        gather_tensors,
        load_full_state_dict,
        shard_tensors,
    )
    from course_lib.tensor_parallel.tensor_parallel import ShardedDropout, parallelize
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "ShardedDropout",
    "ShardedLayer",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "all_reduce_both",
    "copy_to_region",
    "finish_gradients",
    "full_state_dict",
    "gather_columns",
    "gather_sequence",
    "gather_tensors",
    "load_full_state_dict",
    "parallel_token_loss",
    "parallelize",
    "reduce_from_region",
    "scatter_sequence",
    "shard_tensors",
    "split_columns",
    "vocab_parallel_cross_entropy",
]
