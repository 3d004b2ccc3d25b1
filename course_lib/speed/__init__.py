"""Speed of a step: its FLOP, MFU, and the rooflines of memory and links (notebook 01b_speed).

`course_lib.cost` has the formulas (`flops.py`, `roofline.py`, `hardware.py`); `operations.py`
counts the FLOP and bytes of common operations; `lab.py` measures this processor's roof.
"""

from course_lib.cost.flops import forward_flop, mfu, six_n_d, train_step_flop
from course_lib.cost.roofline import Roof, data_parallel_tokens, fsdp_tokens, roof_of
from course_lib.speed.operations import OPERATIONS, Counted

__all__ = [
    "OPERATIONS",
    "Counted",
    "Roof",
    "data_parallel_tokens",
    "forward_flop",
    "fsdp_tokens",
    "mfu",
    "roof_of",
    "six_n_d",
    "train_step_flop",
]
