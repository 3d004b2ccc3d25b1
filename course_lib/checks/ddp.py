"""The exercises of notebook 06_ddp: buckets, a hook, a price, accumulation, half the bytes.

Each stands with its check in a file of its own: `_buckets`, `_overlap` (planted mistakes in
`_mistakes`), `_price`, `_accumulate`, `_half`.
"""

from course_lib.checks.ddp_accumulate import ACCUMULATE
from course_lib.checks.ddp_buckets import BUCKETS
from course_lib.checks.ddp_half import HALF
from course_lib.checks.ddp_overlap import OVERLAP
from course_lib.checks.ddp_price import PRICE

EXERCISES = (BUCKETS, OVERLAP, PRICE, ACCUMULATE, HALF)
