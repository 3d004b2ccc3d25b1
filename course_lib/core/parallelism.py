"""Sizes of the parallel axes (data, tensor, pipeline, context), and the ZeRO stage."""

from dataclasses import dataclass

from course_lib.core.errors import MeshError
from course_lib.core.specs import ModelSpec

ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Sizes of the parallel axes; the product of dp, tp, pp and cp is the world size.

    dp, tp, pp, cp     ranks of data, tensor, pipeline and context parallelism
    zero               0: nothing sharded; 1: optimizer state; 2: gradients too; 3: parameters too
    sequence_parallel  activations of norms and dropout are split over the tp ranks too

    Raises: MeshError when an axis is no whole number above 0, or zero is not 0 to 3
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(
                    f"Parallelism: need {name} as a whole number above 0; got {size!r}. "
                    f"Try {name}=1."
                )
        if self.zero not in ZERO_STAGES:
            raise MeshError(
                f"Parallelism: need zero as 0, 1, 2 or 3; got {self.zero!r}. Try zero=1."
            )

    @property
    def world_size(self) -> int:
        """Number of ranks in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def zero_ranks(self) -> int:
        """Number of ranks over which ZeRO shards: all that hold the same parameters."""
        return self.dp * self.cp

    def check(self, spec: ModelSpec) -> None:
        """Check that a model can be split that way.

        Raises: MeshError when tp does not divide its heads or MLP, or pp exceeds its layers
        """
        for what in ("num_heads", "kv_heads", "ffn_hidden"):
            if getattr(spec, what) % self.tp:
                raise MeshError(
                    f"Parallelism: need {what} of {spec.name} divisible by tp; got "
                    f"{getattr(spec, what)} and {self.tp}. Try a smaller tp."
                )
        if self.pp > spec.num_layers:
            raise MeshError(
                f"Parallelism: need pp of at most the {spec.num_layers} layers of {spec.name}; "
                f"got {self.pp}."
            )
