"""The exercises of notebook 07_tensor_parallel: f and g, a split MLP, whole heads, a loss, a price.

Each stands with its check in a file of its own: `_pair` (f and g), `_mlp`, `_heads`, `_loss`,
`_price`. Planted mistakes are in `..._mistakes`, cases and what wrong answers show in `..._parts`.
"""

from course_lib.checks.tensor_parallel_heads import HEADS
from course_lib.checks.tensor_parallel_loss import LOSS
from course_lib.checks.tensor_parallel_mlp import MLP
from course_lib.checks.tensor_parallel_pair import PAIR
from course_lib.checks.tensor_parallel_price import PRICE

EXERCISES = (PAIR, MLP, HEADS, LOSS, PRICE)
