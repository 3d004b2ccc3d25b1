"""Sizes of the parallel axes (data, tensor, pipeline, context, expert), and the ZeRO stage."""

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
    ep                 ranks over which the experts of a layer are divided; they are ranks of
                       dp, cp and tp, and no further ones
    expert_tp          ranks that split each expert; None: tp

    Raises: MeshError when an axis is no whole number above 0, zero is not 0 to 3, or ep times
            expert_tp does not divide dp * cp * tp
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    ep: int = 1
    expert_tp: int | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "expert_tp"):
            size = getattr(self, name)
            if name == "expert_tp" and size is None:
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(
                    f"Parallelism: need {name} as a whole number above 0; got {size!r}. "
                    f"Try {name}=1."
                )
        if self.zero not in ZERO_STAGES:
            raise MeshError(
                f"Parallelism: need zero as 0, 1, 2 or 3; got {self.zero!r}. Try zero=1."
            )
        if self.dp * self.cp * self.tp % (self.ep * self.expert_tensor):
            raise MeshError(
                f"Parallelism: need ep * expert_tp to divide dp * cp * tp = "
                f"{self.dp * self.cp * self.tp}; got {self.ep} * {self.expert_tensor}. "
                "Try a smaller ep, or expert_tp=1."
            )

    @property
    def world_size(self) -> int:
        """Number of ranks in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def zero_ranks(self) -> int:
        """Number of ranks over which ZeRO shards: all that hold the same parameters."""
        return self.dp * self.cp

    @property
    def expert_tensor(self) -> int:
        """Number of ranks that split one expert."""
        return self.tp if self.expert_tp is None else self.expert_tp

    @property
    def expert_zero_ranks(self) -> int:
        """Number of ranks that hold the same experts, over which ZeRO shards them."""
        return self.dp * self.cp * self.tp // (self.ep * self.expert_tensor)

    def check(self, spec: ModelSpec) -> None:
        """Check that a model can be split that way.

        Heads of keys and values that are fewer than tp are held by several ranks.

        Raises: MeshError when tp does not divide its heads or MLP, or ep its experts, or pp exceeds
                its layers
        """
        split = [("num_heads", spec.num_heads, "tp")]
        experts = spec.experts
        if experts is None or experts.dense_layers:
            split.append(("ffn_hidden", spec.ffn_hidden, "tp"))
        if experts is None and self.ep > 1:
            raise MeshError(
                f"Parallelism: need a model with experts for ep above 1; got ep={self.ep} and "
                f"{spec.name}, which is dense. Try ep=1."
            )
        if experts is not None:
            split.append(("experts.count", experts.count, "ep"))
            split.append(("experts.ffn_hidden", experts.ffn_hidden, "expert_tensor"))
            split.append(("experts.shared_hidden", experts.shared_hidden, "tp"))
        for what, size, axis in split:
            if size % (ranks := getattr(self, axis)):
                axis = axis.replace("tensor", "tp")
                raise MeshError(
                    f"Parallelism: need {what} of {spec.name} divisible by {axis}; got "
                    f"{size} and {ranks}. Try a smaller {axis}."
                )
        if self.tp % spec.kv_heads and spec.kv_heads % self.tp:
            raise MeshError(
                f"Parallelism: need kv_heads of {spec.name} as a divisor or a multiple of tp; got "
                f"{spec.kv_heads} and {self.tp}. Try a smaller tp."
            )
        if self.pp > spec.num_layers:
            raise MeshError(
                f"Parallelism: need pp of at most the {spec.num_layers} layers of {spec.name}; "
                f"got {self.pp}."
            )
