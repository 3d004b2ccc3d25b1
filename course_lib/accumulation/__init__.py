"""Gradient accumulation: one large batch from small ones (notebook 02_accumulation).

`accumulation.py` is the method; `worked_graph.py` is the lesson's example with two items and three
parameters. `noise_scale.py` measures the gradient noise scale, and `batch_sizes.py` compares it
with the steps that batches of different sizes take. `pictures.py` draws all of it,
and `explorer.py`, in the page `live.py`, steps through the worked graph.
"""

from typing import TYPE_CHECKING

from course_lib.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from course_lib.accumulation.accumulation import (
        Share,
        accumulate_gradients,
        accumulated_step,
        as_sum,
        by_items,
        by_tokens,
        count_micro_batches,
        split_micro_batches,
    )
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "Share",
    "accumulate_gradients",
    "accumulated_step",
    "as_sum",
    "by_items",
    "by_tokens",
    "count_micro_batches",
    "split_micro_batches",
]
