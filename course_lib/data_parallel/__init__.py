"""Data parallelism: a replica and a part of the batch per rank (notebook 05_data_parallel).

`naive_ddp.py` is the method, in five steps; `sampler.py` gives each rank its items;
`thread_parallel.py` is the older way, one process with a thread per replica;
`parameter_server.py` and `local_sgd.py` (local SGD, DiLoCo) wait less and accept stale or different
weights; `cost.py` predicts the staleness, `lab.py` measures threads beside processes, `pictures.py`
draws. `gradients.py` is what NaiveDDP, DDP, ZeRO and FSDP share; `composition.py` refuses
wrappers that do not fit together, and `guarded.py` code that takes a part of a gradient for all.
"""

from typing import TYPE_CHECKING

from course_lib.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from course_lib.data_parallel.local_sgd import DiLoCo, LocalSGD, outer_step
    from course_lib.data_parallel.naive_ddp import (
        NaiveDDP,
        broadcast_state,
        fingerprint,
        weighted_loss,
    )
    from course_lib.data_parallel.parameter_server import ParameterServer, Update, loss_at, smoothed
    from course_lib.data_parallel.sampler import RankSampler
    from course_lib.data_parallel.thread_parallel import DataParallel, replica_of
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "DataParallel",
    "DiLoCo",
    "LocalSGD",
    "NaiveDDP",
    "ParameterServer",
    "RankSampler",
    "Update",
    "broadcast_state",
    "fingerprint",
    "loss_at",
    "outer_step",
    "replica_of",
    "smoothed",
    "weighted_loss",
]
