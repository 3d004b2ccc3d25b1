"""Distributed data parallel with buckets and overlap (notebook 06_ddp).

`ddp.py` is the method; `buckets.py` decides which gradients share a message; `comm_hooks.py`
compresses them; `cost.py` predicts a step's timeline and the best number of buckets, `lab.py`
measures on real ranks, and `pictures.py` draws both.
"""

from course_lib.ddp.buckets import Bucket, make_buckets
from course_lib.ddp.comm_hooks import PowerSGD, TopK, bf16_hook
from course_lib.ddp.ddp import DDP, Mean

__all__ = [
    "DDP",
    "Bucket",
    "Mean",
    "PowerSGD",
    "TopK",
    "bf16_hook",
    "make_buckets",
]
