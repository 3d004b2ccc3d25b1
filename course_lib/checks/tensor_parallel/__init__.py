"""The exercises of notebook 07_tensor_parallel: f and g, a split MLP, whole heads, a loss, a price.

Each stands with its check in a file of its own: `pair` (f and g), `mlp`, `heads`, `loss`, `price`.
What one process computes, with which the ranks are compared, is in `whole_mlp` and `whole_logits`.
"""

from course_lib.checks.tensor_parallel.heads import HEADS
from course_lib.checks.tensor_parallel.loss import LOSS
from course_lib.checks.tensor_parallel.mlp import MLP
from course_lib.checks.tensor_parallel.pair import PAIR
from course_lib.checks.tensor_parallel.price import PRICE

EXERCISES = (PAIR, MLP, HEADS, LOSS, PRICE)
