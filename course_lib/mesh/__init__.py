"""Combine data, tensor and pipeline parallelism (notebook 11_mesh).

`mesh.py` numbers ranks on named axes; `rank_mesh.py` makes one rank's process groups;
`model_part.py` wraps a model in the right order, and `training.py` trains it; `clip.py` finishes
and clips a gradient that is spread over the axes. `cost.py` predicts what each axis communicates,
`lab.py` measures it, `pictures.py` draws it.
"""

from typing import TYPE_CHECKING

from course_lib.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from course_lib.mesh.clip import clip_grad_norm_across
    from course_lib.mesh.mesh import Mesh, read_mesh
    from course_lib.mesh.rank_mesh import RankMesh
    from course_lib.mesh.training import MeshTrainer
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = ["Mesh", "MeshTrainer", "RankMesh", "clip_grad_norm_across", "read_mesh"]
