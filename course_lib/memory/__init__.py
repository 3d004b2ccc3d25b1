"""Memory accounting: parameters, gradients, optimizer state, activations (notebook 01_memory).

`formulas.py` predicts, without torch; `layer_bytes.py` lists the tensors that one layer saves for
backward; `saved_tensors.py` measures what autograd saves; `calculator.py` computes whether a
training run fits into a GPU and `explorer.py` draws that; `estimators.py` compares with other
tools.
"""

from course_lib.cost.params import count_params, param_parts, params_on_rank
from course_lib.memory.formulas import activations, layer_coefficients, model_states, step_ledger
from course_lib.memory.layer_bytes import TORCH_CPU

__all__ = [
    "TORCH_CPU",
    "activations",
    "count_params",
    "layer_coefficients",
    "model_states",
    "param_parts",
    "params_on_rank",
    "step_ledger",
]
