"""Expert parallelism: the experts of a layer divided over ranks (notebook 16_experts).

`exchange.py` sends copies of tokens to their experts and brings the results back, `groups.py` says
which ranks share experts and which hold the same ones, `model.py` divides the experts of a model,
`expert_tensor.py` splits each of them instead; `cost.py` counts bytes, loads and memory,
`simulation.py` draws tokens; `lab.py` measures, `pictures.py` and `explorer.py` draw.
"""

from typing import TYPE_CHECKING

from course_lib.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from course_lib.expert_parallel.exchange import Dispatched, combine, dispatch
    from course_lib.expert_parallel.groups import ExpertGroups, expert_groups
    from course_lib.expert_parallel.model import parallelize_experts
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "Dispatched",
    "ExpertGroups",
    "combine",
    "dispatch",
    "expert_groups",
    "parallelize_experts",
]
