"""Memory accounting: parameters, gradients, optimizer state, activations (notebook 01_memory).

`formulas.py` predicts and imports no torch; `layer_bytes.py` lists what one layer keeps for
backward; `saved_tensors.py` measures it; `calculator.py` answers "will it fit?" and `explorer.py`
draws that; `estimators.py` asks other tools the same question.
"""

from course_lib.cost.params import count_params, param_parts, params_on_rank
from course_lib.memory.formulas import activations, model_states, step_ledger

__all__ = [
    "activations",
    "count_params",
    "model_states",
    "param_parts",
    "params_on_rank",
    "step_ledger",
]
