"""The exercises of notebook 06_ddp: buckets, a hook, a price, accumulation, half bytes, a trace.

Each stands with its planted mistakes in a file of its own: `buckets`, `overlap`, `price`,
`accumulate`, `half` and `trace`. `parts` holds the model with known gradients.
"""

from course_lib.checks.ddp.accumulate import ACCUMULATE
from course_lib.checks.ddp.buckets import BUCKETS
from course_lib.checks.ddp.half import HALF
from course_lib.checks.ddp.overlap import OVERLAP
from course_lib.checks.ddp.price import PRICE
from course_lib.checks.ddp.trace import TRACE

EXERCISES = (BUCKETS, OVERLAP, PRICE, ACCUMULATE, HALF, TRACE)
