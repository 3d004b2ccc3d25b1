"""The MLP of a layer: of a dense one, and, narrower, every expert of a layer of experts."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.core.specs import ModelSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


class MLP(nn.Module):
    """MLP of two linear layers around an activation such as GELU, or of SwiGLU's three.

    ffn_hidden, bias   width, and whether there are biases; None: as the spec's dense layers

    Shapes:  [..., hidden] -> the same
    Saves:   x, GELU's input and output [..., ffn_hidden]; SwiGLU: four of them
    """

    def __init__(
        self, spec: ModelSpec, ffn_hidden: int | None = None, bias: bool | None = None
    ) -> None:
        super().__init__()
        width = spec.ffn_hidden if ffn_hidden is None else ffn_hidden
        bias = spec.has_bias("mlp") if bias is None else bias
        self.activation = ACTIVATIONS[spec.mlp_activation]
        self.up = nn.Linear(spec.hidden, width, bias=bias)
        self.gate = nn.Linear(spec.hidden, width, bias=bias) if spec.gated else None
        self.out = nn.Linear(width, spec.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.out(self.activation(self.up(x)))
        return self.out(self.activation(self.gate(x)) * self.up(x))
