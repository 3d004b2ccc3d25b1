"""How many ways each thing is split over the ranks: data, tensors, layers, sequence, ZeRO."""

from dataclasses import dataclass

from course_lib.core.errors import MeshError
from course_lib.core.specs import ModelSpec

ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Parallelism of parallelism; the product of dp, tp, pp and cp is the world size.

    zero               0: every copy whole; 1, 2, 3: optimizer state, gradients, parameters sharded
    sequence_parallel  norms and dropout are split over the tp ranks too

    Raises: MeshError when a degree is no whole number above 0, or zero is not 0 to 3
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp"):
            degree = getattr(self, name)
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise MeshError(
                    f"parallelism: need {name} as a whole number above 0; got {degree!r}. Try {name}=1."
                )
        if self.zero not in ZERO_STAGES:
            raise MeshError(
                f"parallelism: need zero as 0, 1, 2 or 3; got {self.zero!r}. Try zero=1."
            )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def zero_ranks(self) -> int:
        """Ranks that share model states under ZeRO: all that hold the same parameters."""
        return self.dp * self.cp

    def check(self, spec: ModelSpec) -> None:
        """Raises: MeshError when the model cannot be split that way."""
        for what in ("num_heads", "kv_heads", "ffn_hidden"):
            if getattr(spec, what) % self.tp:
                raise MeshError(
                    f"parallelism: need {what} of {spec.name} divisible by tp; got "
                    f"{getattr(spec, what)} and {self.tp}. Try a smaller tp."
                )
        if self.pp > spec.num_layers:
            raise MeshError(
                f"parallelism: need pp of at most the {spec.num_layers} layers of {spec.name}; "
                f"got {self.pp}."
            )
