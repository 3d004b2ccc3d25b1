"""Gradient accumulation: one large batch from small ones (notebook 02_accumulation).

`accumulation.py` is the method; `worked_graph.py` is the lesson's example with two items and three
parameters; `pictures.py` draws it, the missing division, and times beside published ones.
"""

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
