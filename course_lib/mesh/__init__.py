"""Combine data, tensor and pipeline parallelism (notebook 11_mesh).

`mesh.py` numbers ranks on named axes; `rank_mesh.py` makes one rank's process groups;
`model_part.py` wraps a model in the right order; `clip.py` finishes and clips a gradient that is
spread over the axes. `course_lib.train` trains with them; its `mesh_lab.py` measures what each axis
communicates, which `cost.py` predicts and `pictures.py` draws.
"""

from typing import TYPE_CHECKING

from course_lib.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from course_lib.mesh.clip import clip_grad_norm_across
    from course_lib.mesh.mesh import Mesh, read_mesh
    from course_lib.mesh.rank_mesh import RankMesh
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = ["Mesh", "RankMesh", "clip_grad_norm_across", "read_mesh"]
