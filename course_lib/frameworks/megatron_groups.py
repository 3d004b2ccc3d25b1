"""Megatron-Core's process groups: `parallel_state` is a module, so it keeps those of one engine.

Notebook 11_mesh.
"""

import gc
import weakref
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from course_lib.core.errors import MeshError
from course_lib.ranks.world import rank_device

Made = list[Any]  # process groups; where this rank is not a member, PyTorch's mark of that
_open: "list[tuple[weakref.ref[MegatronGroups], Made]]" = []  # at most one


class MegatronGroups:
    """The process groups of one engine, from here to `close`; every rank makes and closes them.

    state   Megatron-Core's module `parallel_state`, which keeps them

    Groups that were lost, after an error for example, are destroyed when the next are made: then
    all ranks are at the same place.

    Cost:    one new_group for each kind of group, 17 on a rank of a mesh with three axes
    Raises:  MeshError while other groups are open
    """

    def __init__(self, where: str, tp: int, pp: int, model_chunks: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        self.state: Any = parallel_state
        _make_room(where, parallel_state)
        made, new_group = Made(), dist.new_group
        _open.append((weakref.ref(self), made))

        def remembered(*args: Any, **options: Any) -> Any:
            made.append(new_group(*args, **options))
            return made[-1]

        with patch.object(dist, "new_group", remembered):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=model_chunks if model_chunks > 1 else None,
                create_gloo_process_groups=False,
            )
        if rank_device().type == "cuda":
            model_parallel_cuda_manual_seed(0)

    @property
    def is_open(self) -> bool:
        """Whether these groups can still be used."""
        return any(owner() is self for owner, _ in _open)

    def close(self) -> None:
        """Destroy the process groups; a second call does nothing."""
        if self.is_open:
            _destroy(self.state)


def _make_room(where: str, state: Any) -> None:
    """Destroy groups that were lost. Raises: MeshError where groups are in use"""
    gc.collect()  # an engine is part of reference cycles
    if _open and _open[0][0]() is None:
        _destroy(state)
    if _open or state.model_parallel_is_initialized():
        raise MeshError(
            f"{where}: need the only engine of this process, because Megatron-Core keeps the "
            "process groups of one; got a second. Try engine.close() on the first."
        )


def _destroy(state: Any) -> None:
    _, made = _open.pop()
    state.destroy_model_parallel()
    if dist.is_initialized():  # else they ended with the world
        for group in made:
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)
