"""The exercises of notebook 07_tensor_parallel, from f and g to the pair of sequence parallelism.

Each stands with its check in a file of its own: `pair` (f and g), `mlp`, `heads`, `loss`, `price`,
`sequence`; what several need is in `parts`.
"""

from course_lib.checks.tensor_parallel.heads import HEADS
from course_lib.checks.tensor_parallel.loss import LOSS
from course_lib.checks.tensor_parallel.mlp import MLP
from course_lib.checks.tensor_parallel.pair import PAIR
from course_lib.checks.tensor_parallel.price import PRICE
from course_lib.checks.tensor_parallel.sequence import SEQUENCE

EXERCISES = (PAIR, MLP, HEADS, LOSS, PRICE, SEQUENCE)
