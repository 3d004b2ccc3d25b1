"""Checkpoints: sharded, whole or not at all, loaded at any world size (lesson 14_checkpoint).

`saving.py` lets every rank write its shards and publishes the manifest last, at once or in a thread
(`pending.py`); `planning.py` decides who writes what; `loading.py` reads boxes into other shards.
`local_state.py` and `model_state.py` name what a rank has to save; `manifest.py` and `data_file.py`
are the format; `folder.py` finds what is whole; `ownership.py` keeps a second job out; `agree.py`
makes all ranks do the same; `storage.py` is a disk or an fsspec URL; `rng.py` is a rank's random
state. `dcp.py` saves the same state with torch.distributed.checkpoint; `course_lib.hub`
converts. `cost.py` predicts, `lab.py` measures, `pictures.py` and `explorer.py` draw.
"""

from typing import TYPE_CHECKING

from course_lib.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from course_lib.checkpoint.folder import (
        Broken,
        Checkpoint,
        all_checkpoints,
        latest,
        read_tensor,
    )
    from course_lib.checkpoint.loading import load
    from course_lib.checkpoint.pending import PendingSave
    from course_lib.checkpoint.rng import rng_state, set_rng_state
    from course_lib.checkpoint.saving import save, save_async
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "Broken",
    "Checkpoint",
    "PendingSave",
    "all_checkpoints",
    "latest",
    "load",
    "read_tensor",
    "rng_state",
    "save",
    "save_async",
    "set_rng_state",
]
