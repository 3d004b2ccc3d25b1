"""Distributed data parallel with buckets and overlap (notebook 06_ddp).

`ddp.py` is the method; `buckets.py` decides which gradients share a message; `comm_hooks.py`
compresses them; `cost.py` predicts a step's timeline and the best number of buckets, `lab.py`
measures on real ranks, and `pictures.py` draws both.
"""

from typing import TYPE_CHECKING

from course_lib.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from course_lib.ddp.buckets import Bucket, make_buckets
    from course_lib.ddp.comm_hooks import PowerSGD, TopK, bf16_hook
    from course_lib.ddp.ddp import DDP, Mean
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "DDP",
    "Bucket",
    "Mean",
    "PowerSGD",
    "TopK",
    "bf16_hook",
    "make_buckets",
]
